# SPDX-License-Identifier: Apache-2.0
"""Which names of a state dict fit a module, and which buffers the module may fill in itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import flash_export
from flash_export.errors import UsageError
from flash_export.fit_weights import fill

PATH = Path("w.pt")


class Masked(torch.nn.Module):
    """Attention with a mask of its own, as GPTs of many repositories have it, and ``extra`` buffers."""

    def __init__(self, **extra: torch.Tensor) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)))
        for name, tensor in extra.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        length = x.shape[1]
        scores = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(self.mask[:length, :length] == 0, -torch.inf)
        return torch.softmax(scores, -1) @ v


def trained() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return Masked().state_dict()


def filled(weights: dict[str, torch.Tensor], build: type[Masked] = Masked) -> tuple[dict, tuple[str, ...]]:
    module = build()
    notes = fill(module, weights, PATH, build)
    return module.state_dict(), notes


@pytest.mark.parametrize("prefix", ["net.", "model.", "a.b.", "module.net.", "net._orig_mod.", "_orig_mod.model.", ""])
def test_a_prefix_that_every_name_has_is_taken_off(prefix: str) -> None:
    weights = trained()
    state, notes = filled({prefix + name: tensor for name, tensor in weights.items()})
    assert notes == ()
    for name, tensor in weights.items():
        assert torch.equal(state[name], tensor)


def test_a_prefix_that_does_not_help_is_named() -> None:
    weights = {f"net.{name}": tensor for name, tensor in trained().items()} | {"net.head": torch.ones(2)}
    with pytest.raises(UsageError) as error:
        filled(weights)
    assert "3 missing (mask, qkv.bias, qkv.weight)" in error.value.got
    assert error.value.got.endswith("every name has the prefix net.")
    with pytest.raises(UsageError) as error:
        filled(weights | {"loss": torch.ones(2)})
    assert "prefix" not in error.value.got


@pytest.mark.parametrize("prefix", ["", "net."])
def test_a_mask_that_the_file_lacks_is_the_models_own(prefix: str) -> None:
    weights = {prefix + name: tensor for name, tensor in trained().items() if name != "mask"}
    state, notes = filled(weights)
    assert notes == ("w.pt lacks the buffers mask: they hold what the model gives them itself",)
    assert torch.equal(state["mask"], torch.tril(torch.ones(16, 16)))
    assert torch.equal(state["qkv.weight"], trained()["qkv.weight"])


LEARNED = {
    "a running mean": lambda: torch.zeros(8),
    "a running variance": lambda: torch.ones(8),
    "a count": lambda: torch.tensor(0),
    "a codebook": lambda: torch.randn(3, 8),
}


@pytest.mark.parametrize("what", LEARNED)
def test_a_buffer_that_training_fills_in_has_to_be_in_the_file(what: str) -> None:
    with pytest.raises(UsageError, match="not this model's") as error:
        filled(trained(), lambda: Masked(extra=LEARNED[what]()))  # type: ignore[arg-type]
    assert "1 missing (extra)" in error.value.got


def with_table() -> Masked:
    """A parameter whose first value is computed, as a mask is."""
    module = Masked()
    module.table = torch.nn.Parameter(torch.arange(5.0))
    return module


@pytest.mark.parametrize("name", ["qkv.bias", "table"])
def test_a_parameter_has_to_be_in_the_file(name: str) -> None:
    weights = with_table().state_dict()
    del weights[name]
    with pytest.raises(UsageError, match="not this model's") as error:
        filled(weights, with_table)  # type: ignore[arg-type]
    assert f"1 missing ({name})" in error.value.got


def test_a_model_that_is_built_once_gives_no_buffers() -> None:
    module = Masked()
    weights = {name: tensor for name, tensor in trained().items() if name != "mask"}
    with pytest.raises(UsageError, match="not this model's"):
        fill(module, weights, PATH, lambda: module)


def test_a_program_gives_the_callable_and_hears_of_the_buffers(tmp_path: Path) -> None:
    torch.save({f"net.{name}": t for name, t in trained().items() if name != "mask"}, tmp_path / "w.pt")
    inputs, dims = {"x": torch.randn(2, 7, 8)}, {"x": {1: "seq=1..16"}}
    result = flash_export.export(tmp_path / "w.pt", inputs, dynamic_shapes=dims, model=Masked)
    assert len(result.fused) == 1
    assert [w for w in result.warnings if "lacks the buffers mask" in w]


@pytest.mark.parametrize(
    ("model", "got"), [(3, "a int"), (Masked(), "built already"), (lambda size: None, "missing a required argument")]
)
def test_what_builds_no_model_is_named(model: object, got: str, tmp_path: Path) -> None:
    torch.save(trained(), tmp_path / "w.pt")
    with pytest.raises(UsageError, match="cannot be built") as error:
        flash_export.export(tmp_path / "w.pt", {"x": torch.randn(2, 7, 8)}, model=model)  # type: ignore[arg-type]
    assert got in error.value.got
