# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from flash_export import accept, check_model, model_noise
from flash_export.accept import Noise
from flash_export.check_model import Expected, ModelRun
from flash_export.runtime import CannotRun
from flash_export.trials import Trial

TEXT = """<ir_version: 9, opset_import: ["": 18]> g (float[n] x) => (float[n] y) { s = Exp (x) y = Log (s) }"""


def run(error: float) -> ModelRun:
    """One whose output is off by ``error`` where 1 is tolerated."""
    verdict = accept.Verdict("" if error <= 1 else "too far", error, 1.0, 0.0, None, 0, 9)
    return ModelRun("y", "t", "unfused", verdict, "float64")


@pytest.mark.parametrize(("errors", "again"), [([0.5, 1.0], False), ([0.5, 1.5], True), ([1.5, 100.0], False)])
def test_noise_is_measured_again_where_an_output_is_a_little_beyond_it(errors: list[float], again: bool) -> None:
    expected = Expected(noise=[Noise(1e-6, 3e-7)], measure_more=lambda: [Noise(2e-6, 1e-7)])
    assert expected.settle_noise([run(error) for error in errors]) == again
    assert expected.noise == [Noise(2e-6, 3e-7) if again else Noise(1e-6, 3e-7)]
    if again:
        assert not expected.settle_noise([run(1.5)]), "once and no more"


@pytest.mark.parametrize(("error", "again"), [(3.0, True), (np.inf, False)])
def test_an_integer_that_rounding_turns_over_is_measured_again_and_another_shape_is_not(
    error: float, again: bool
) -> None:
    expected = Expected(noise=[Noise(0.0, 0.0)], measure_more=lambda: [Noise(0.1, 0.1)])
    turned = accept.Verdict("1 of 9 integers differ", error, 0.0, 0.0, None, 0, 9)
    assert expected.settle_noise([ModelRun("y", "t", "unfused", turned, "float64")]) == again


def test_a_small_model_is_measured_beforehand_and_has_nothing_to_measure_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ir.from_onnx_text(TEXT)
    trial = Trial("one", {"x": np.random.default_rng(0).standard_normal(5).astype(np.float32)})
    assert check_model.run_unfused(model, [[trial]], [], [], tmp_path).measure_more is None
    monkeypatch.setattr(check_model, "SMALL_MODEL_BYTES", -1)
    large = check_model.run_unfused(model, [[trial]], [], [], tmp_path)
    assert large.measure_more is not None
    (once,), (more,) = large.noise, large.measure_more()
    assert 0 < more.maximum < 1e-5
    assert more != once


class Router:
    """Fails on every second run, as a model does whose Split no longer fits what a router chose."""

    def __init__(self, shapes: list[int]) -> None:
        self._shapes, self._runs = shapes, 0

    def run(self, feeds: object, outputs: Sequence[str] | None = None) -> list[np.ndarray]:
        self._runs += 1
        if self._runs % 2 == 0:
            raise CannotRun("Split does not fit")
        return [np.full(self._shapes[self._runs % len(self._shapes)], 1 + 1e-6 * self._runs)]


def test_a_model_that_fails_on_numbers_a_hair_off_is_measured_by_the_others() -> None:
    trial = Trial("one", {"x": np.ones(5, np.float32)})
    steady, router = Router([5]), Router([5])
    steady._runs = -1000
    found = model_noise.measure(router, steady, trial, ["y"], ["x"], range(4))  # type: ignore[arg-type]
    assert 0 < len(found) < 4
    assert not model_noise.measure(Router([4, 4]), Router([5]), trial, ["y"], ["x"], range(1))  # type: ignore[arg-type]


def test_nothing_is_added_where_no_nudge_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_noise, "measure", lambda *_: [])
    trial = Trial("one", {"x": np.ones(5, np.float32)})
    assert model_noise.measure_more(ir.from_onnx_text(TEXT), [trial], ["x"], tmp_path) == [Noise(0.0, 0.0)]
