# SPDX-License-Identifier: Apache-2.0
"""``flash-trt bench`` times what it says it times, on the same inputs, and draws it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from python.attention_models import fused, unfused

from flash_export.errors import EXIT_OK, EXIT_USAGE
from flash_export.talk import Talk
from flash_trt import bench as bench_module
from flash_trt import bench_plot, ort
from flash_trt.bench import BenchOptions, Setting, Timing, bench

Command = Callable[..., int]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx")


def test_every_implementation_is_timed_at_every_setting(
    tmp_path: Path, flash_trt: Command, pair: tuple[Path, Path]
) -> None:
    written, plot = tmp_path / "deep" / "bench.json", tmp_path / "bench.svg"
    flags = ("--at", "batch=1,seq=37", "--at", "seq=70", "--seconds", 0, "--json", written, "--plot", plot)
    assert flash_trt("bench", *pair, *flags) == EXIT_OK
    figures = json.loads(written.read_text())
    assert [setting["sizes"] for setting in figures["settings"]] == [
        {"batch": 1, "seq": 37},
        {"batch": 1, "seq": 70},
    ]
    for setting in figures["settings"]:
        ways = [(Path(t["model"]).name, t["implementation"].partition(", ")[2]) for t in setting["timings"]]
        assert ways == [
            ("f.onnx", ort.LIBRARY),
            ("f.onnx", ort.BODIES),
            ("u.onnx", "no FlashAttention node in the model"),
        ]
        for timing in setting["timings"]:
            assert timing["runs"] >= 5
            assert 0 < timing["p10_ms"] <= timing["p50_ms"] <= timing["p90_ms"] <= timing["p99_ms"]
        assert setting["timings"][-1]["speedup"] == 1
    drawn = ElementTree.parse(plot).getroot()
    bars = [element for element in drawn.iter() if element.tag.endswith("rect")]
    assert len(bars) == 6


def test_a_speedup_is_the_median_of_the_rounds_ratios_and_throughput_that_of_the_median() -> None:
    # The ratio of the medians would be 1.5, of runs that belong to different rounds.
    fast, slow = Timing(Path("f"), "x", (0.01, 0.02, 0.03)), Timing(Path("u"), "x", (0.02, 0.06, 0.03))
    setting = Setting({"batch": 4}, 4, (fast, slow))
    assert setting.speedup(fast) == pytest.approx(2)
    assert setting.speedup(slow) == 1
    assert setting.per_second(fast) == pytest.approx(200)


def _setting(*rounds: tuple[float, ...]) -> Setting:
    return Setting({}, 1, tuple(Timing(Path(f"m{i}"), "x", seconds) for i, seconds in enumerate(rounds)))


def test_a_speedup_is_told_only_where_the_rounds_agree_on_it() -> None:
    base = tuple(1.0 + 0.5 * (i % 3) for i in range(40))  # the machine's own ups and downs, which both have
    steady, noisy = tuple(0.8 * b for b in base), tuple(b * (0.7 if i % 2 else 1.2) for i, b in enumerate(base))
    setting = _setting(steady, noisy, base)
    told = [setting.is_told(timing) for timing in setting.timings]
    assert told == [True, False, False]
    assert setting.speedup_range(setting.timings[0]) == pytest.approx((1.25, 1.25))
    low, high = setting.speedup_range(setting.timings[1])
    assert (low, high) == pytest.approx((1 / 1.2, 1 / 0.7))


@pytest.mark.parametrize("seed", range(20))
def test_a_speedup_lies_in_its_own_range(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fast, base = (tuple(rng.lognormal(0, 1.5, size=5 + seed)) for _ in range(2))
    setting = _setting(fast, base)
    low, high = setting.speedup_range(setting.timings[0])
    assert low <= setting.speedup(setting.timings[0]) <= high


def test_few_rounds_tell_little() -> None:
    setting = _setting((1.0, 1.0, 1.0, 1.0, 2.1), (2.0, 2.0, 2.0, 2.0, 2.0))
    assert not setting.is_told(setting.timings[0])


def test_what_is_too_noisy_is_warned_of_and_marked(
    flash_trt: Command, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = iter([1.0, 2.0] * 400)
    monkeypatch.setattr(bench_module, "_timed_session", lambda _: lambda _: next(rounds))
    # Three contenders take turns at 1 and 2 seconds, so that each is as often the faster one.
    assert flash_trt("bench", *pair, "--at", "seq=7", "--seconds", 0) == EXIT_OK
    told = capsys.readouterr()
    assert "too noisy to tell f.onnx" in told.err
    assert "not told: " in told.out


def test_a_longer_sequence_takes_longer(pair: tuple[Path, Path]) -> None:
    options = BenchOptions(pair[1:], ("batch=1,seq=16", "batch=8,seq=700"), seconds=0.1)
    short, long = bench(options, Talk(quiet=True))
    assert long.timings[0].median_ms > 3 * short.timings[0].median_ms


@pytest.mark.parametrize(
    "at",
    [
        "batch",
        "batch=-1",
        "batch=x",
        "depth=3",
        "batch=1;seq=2",
        "batch=" + "9" * 5000,
        "batch=²",
        "seq=1,batch=2,seq=3",
    ],
    ids=lambda at: at[:20],
)
def test_a_setting_that_cannot_be_read_names_the_dims(
    flash_trt: Command, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], at: str
) -> None:
    assert flash_trt("bench", *pair, "--at", at) == EXIT_USAGE
    assert "DIM=SIZE,... once for each of batch, seq" in capsys.readouterr().err


def test_engines_alone_are_refused_since_no_inputs_can_be_drawn(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.engine").write_bytes(b"ptrt and more")
    assert flash_trt("bench", tmp_path / "m.engine") == EXIT_USAGE
    assert "one ONNX file among the models" in capsys.readouterr().err


def test_a_missing_engine_is_told_to_be_missing(
    flash_trt: Command, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("bench", tmp_path / "m.engine", *pair) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("error: there is no such file")


def test_the_plot_scales_each_group_to_its_longest_and_escapes_names() -> None:
    groups = [
        bench_plot.Group("a & b", [bench_plot.Bar("<x>", 1, 2, 4), bench_plot.Bar("y", 1, 4, 4)]),
        bench_plot.Group("c", [bench_plot.Bar("z", 100, 100, 100)]),
        bench_plot.Group("nothing", []),
    ]
    drawn = ElementTree.fromstring(bench_plot.draw(groups))
    widths = [float(element.attrib["width"]) for element in drawn.iter() if element.tag.endswith("rect")]
    assert widths[1] == 2 * widths[0] == widths[2]
    assert {"a & b", "<x>"} <= {element.text for element in drawn.iter()}


def test_models_with_other_inputs_are_refused_before_anything_runs(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    other = onnx.load(unfused(tmp_path / "u.onnx"))
    other.graph.input[0].name = "state"
    for node in other.graph.node:
        node.input[:] = ["state" if name == "query" else name for name in node.input]
    onnx.save(other, tmp_path / "u.onnx")
    assert flash_trt("bench", fused(tmp_path / "f.onnx"), tmp_path / "u.onnx", "--seconds", 0) == EXIT_USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert "only in the first: ['query']; only in the second: ['state']" in said


@pytest.mark.parametrize("name", ["b.png", "b"])
def test_a_plot_is_called_an_svg(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    plot = tmp_path / name
    assert flash_trt("bench", fused(tmp_path / "f.onnx"), "--seconds", 0, "--plot", plot) == EXIT_USAGE
    assert "b.svg" in capsys.readouterr().err
    assert not plot.exists()


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e30", "-inf"])
def test_seconds_that_nobody_waits_for_are_refused(
    tmp_path: Path, flash_trt: Callable[..., int], capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    model = fused(tmp_path / "f.onnx")
    assert flash_trt("bench", model, f"--seconds={seconds}", "--json", tmp_path / "b.json") == EXIT_USAGE
    assert "--seconds" in capsys.readouterr().err
    assert not (tmp_path / "b.json").exists()
