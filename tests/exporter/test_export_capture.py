# SPDX-License-Identifier: Apache-2.0
"""How PyTorch's refusals are read, and how tensors travel to NumPy and back."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from flash_export import export_capture
from flash_export.errors import UnsupportedModel, UsageError
from flash_export.load import Argument, Loaded, SourceKind
from flash_export.options import Dim

RANGES: dict[str, tuple[int, int | None]] = {"batch": (1, None), "seq": (1, 600)}


def suggestion(*lines: str) -> str:
    return (
        "Constraints violated (seq)!\n  - reasons\nSuggested fixes:\n  "
        + "\n  ".join(lines)
        + "\n\nThe error above ..."
    )


@pytest.mark.parametrize(
    ("lines", "narrowed"),
    [
        (["seq = Dim('seq', max=512)"], {"seq": (1, 512)}),
        (["seq = Dim('seq', min=3, max=512)"], {"seq": (3, 512)}),
        (["batch = Dim('batch', min=2)", "seq = Dim('seq', max=512)"], {"batch": (2, None), "seq": (1, 512)}),
        (["seq = Dim('seq', max=900)"], None),
        (["seq = 7"], None),
        (["seq = 8*_seq"], None),
        (["_other = Dim('_other', max=512)"], None),
        (["seq = Dim('seq', max=512)", "batch = 2"], None),
    ],
)
def test_only_a_narrower_range_is_taken_up(lines: list[str], narrowed: dict | None) -> None:
    assert export_capture._narrowed(suggestion(*lines), RANGES) == narrowed


def guard(*pairs: tuple[str, int]) -> str:
    """As torch 2.13 says it of a table that is sliced to the length."""
    reasons = "".join(
        f"  - Not all values of {n} = L['x'].size()[1] in the specified range {n} <= 600 satisfy the generated guard "
        f"L['x'].size()[1] != {size}.\n"
        for n, size in pairs
    )
    return f"Constraints violated (seq)! For more information, run with ...\n{reasons}\nThe error above ..."


@pytest.mark.parametrize(
    ("message", "narrowed"),
    [
        (guard(("seq", 600)), {"seq": (1, 599)}),
        (guard(("seq", 1)), {"seq": (2, 600)}),
        (guard(("seq", 600), ("seq", 599)), {"seq": (1, 598)}),
        (guard(("batch", 1), ("seq", 600)), {"batch": (2, None), "seq": (1, 599)}),
        (guard(("seq", 512)), None),
        (guard(("other", 512)), None),
        (guard(("seq", 600)).replace("\n\n", "\n  - Not all values of batch ...\n\n"), None),
    ],
)
def test_a_size_at_an_end_of_a_range_may_be_left_out(message: str, narrowed: dict | None) -> None:
    assert export_capture._narrowed(message, RANGES) == narrowed


FILE = Loaded(Path("weights.pt"), "state_dict")


def test_a_size_inside_a_range_is_named_with_the_ranges_that_work() -> None:
    error = export_capture._uncapturable(RuntimeError(guard(("seq", 512))), RANGES, FILE)
    assert "seq = 512" in error.got
    assert "seq=1..511 or seq=513..600" in error.do


@pytest.mark.parametrize(
    ("limits", "size", "advice"),
    [
        ((1, 48), 48, "give seq=1..47 in --input"),
        ((48, 50), 48, "give seq=49..50 in --input"),
        ((48, 48), 48, "give a number in the place of seq in --input"),
        ((1, None), 48, "give seq=1..47 or seq=49.. in --input"),
    ],
)
def test_no_empty_range_is_advised(limits: tuple[int, int | None], size: int, advice: str) -> None:
    error = export_capture._uncapturable(RuntimeError(guard(("seq", size))), {"seq": limits}, FILE)
    assert error.do.startswith(advice)


class Sliced(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("visible", torch.tril(torch.ones(1, 12, 12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(1, 2)
        hidden = self.visible[:, : x.shape[1], : x.shape[1]] == 0
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ x


def test_the_length_of_a_sliced_table_is_left_out_and_told_apart_from_a_narrower_range(tmp_path: Path) -> None:
    sizes = {0: Dim("batch"), 1: Dim("seq", 1, 12)}
    loaded = Loaded(tmp_path, "module", Sliced().eval(), arguments=(Argument("x", torch.randn(2, 7, 8), sizes),))
    captured = export_capture.capture(loaded, export_capture.call_of(loaded))
    assert captured.ranges["seq"] == (1, 11)
    assert (captured.notes, captured.left_out) == ([], {"seq": [12]})


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerDecoderLayer(24, 3, 40, batch_first=True)
        self.layers = torch.nn.TransformerDecoder(layer, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, x, tgt_mask=mask)


def loaded_on(module: torch.nn.Module, folder: Path, name: str = "x") -> Loaded:
    arguments = (Argument(name, torch.randn(2, 7, 24), {0: Dim("batch"), 1: Dim("seq")}),)
    return Loaded(folder, "module", module.eval(), arguments=arguments)


def test_a_transformers_look_into_its_mask_does_not_end_the_export(tmp_path: Path) -> None:
    loaded = loaded_on(Decoder(), tmp_path)
    program = export_capture.capture(loaded, export_capture.call_of(loaded)).program
    x = torch.randn(3, 11, 24)
    torch.testing.assert_close(program.module()(x=x), loaded.module(x))


class Decides(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if (x.sum() > 0).item() else x


def test_pytorchs_dump_of_the_graph_does_not_hide_the_reason(tmp_path: Path, capfd) -> None:
    loaded = loaded_on(Decides(), tmp_path)
    with pytest.raises(UnsupportedModel, match="decides by the values"):
        export_capture.capture(loaded, export_capture.call_of(loaded))
    assert "torch.ops.aten" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "kind", "advice"),
    [
        (torch.float16, "state_dict", "--input input:float16:..."),
        (torch.float16, "module", "cast the example"),
        (torch.float32, "state_dict", "check names, types and sizes of --input"),
        (torch.float32, "module", "check names, types and sizes of example_inputs"),
        (torch.float32, "hugging_face", "--input NAME:TYPE:DIMS once for every input"),
    ],
)
def test_an_input_of_another_float_type_than_the_weights_is_named(
    dtype: torch.dtype, kind: SourceKind, advice: str, tmp_path: Path
) -> None:
    loaded = loaded_on(torch.nn.Linear(24 if dtype == torch.float16 else 5, 3).to(dtype), tmp_path, "input")
    call = export_capture.call_of(dataclasses.replace(loaded, source_kind=kind))
    with pytest.raises(UsageError, match="fails on the inputs") as error:
        call.run(call.tensors)
    assert advice in error.value.do
    assert ("dtype" if dtype == torch.float16 else "shapes") in error.value.got


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (torch.ones(1), ["output"]),
        ((torch.ones(1), None, [torch.ones(1)]), ["output_0", "output_2_0"]),
        ({"a": torch.ones(1), "b": (torch.ones(1),)}, ["a", "b_0"]),
        (collections.OrderedDict({"a b": torch.ones(1), "n": 3}), ["a_b"]),
    ],
)
def test_outputs_are_named_after_their_keys(outputs: object, names: list[str]) -> None:
    assert export_capture.output_names(outputs) == names
    assert len(export_capture.tensors_in(outputs)) == len(names)


def test_eager_pytorch_runs_in_float64_too_and_leaves_the_module_as_it_was() -> None:
    module = torch.nn.Linear(3, 5)
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    (wide,) = (
        export_capture.Call(module, *pytree.tree_flatten(((torch.zeros(2, 3),), {})))
        .reference(["x"])
        .in_float64({"x": x})
    )
    weight, bias = (tensor.detach().double().numpy() for tensor in (module.weight, module.bias))
    np.testing.assert_allclose(wide, x.astype(np.float64) @ weight.T + bias, rtol=1e-14)
    assert module.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)])
def test_a_tensor_comes_back_from_numpy_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    back = export_capture.from_numpy(export_capture.to_numpy(tensor))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_a_transposed_array_goes_to_pytorch_as_it_reads() -> None:
    array = np.arange(6.0).reshape(2, 3).T
    assert export_capture.from_numpy(array).tolist() == array.tolist()


UNPROVEN = """Constraints violated (seq)! For more information, run with TORCH_LOGS="+dynamic".
  - Not all values of seq = L['x'].size()[1] in the specified range satisfy the generated guard \
(L['x'].size()[1]*min(32, 32*L['x'].size()[1])) == (32*L['x'].size()[1]).
"""


def test_a_condition_that_pytorch_cannot_prove_is_left_for_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a mixture of experts: true for every length, in terms that PyTorch does not compute with."""
    export = torch.export.export
    asked: list[bool] = []

    def proves_nothing(*args: Any, **named: Any) -> torch.export.ExportedProgram:
        asked.append(named["prefer_deferred_runtime_asserts_over_guards"])
        if not asked[-1]:
            raise torch._dynamo.exc.UserError(torch._dynamo.exc.UserErrorType.CONSTRAINT_VIOLATION, UNPROVEN)
        return export(*args, **named)

    monkeypatch.setattr(torch.export, "export", proves_nothing)
    argument = Argument("input", torch.ones(2, 5), {1: Dim("seq", 1, 64)})
    loaded = Loaded(tmp_path, "module", torch.nn.ReLU(), arguments=(argument,))
    assert export_capture.capture(loaded, export_capture.call_of(loaded)).ranges == {"seq": (1, 64)}
    assert asked == [False, True]


class Caught(torch.nn.Module):
    """(x + mask) * gain, of which forward names x alone."""

    def forward(self, x: torch.Tensor, **rest: torch.Tensor) -> torch.Tensor:
        return (x + rest["mask"][:, :, None]) * rest["gain"]


@pytest.mark.parametrize("order", [("x", "mask", "gain"), ("gain", "mask", "x")])
@pytest.mark.parametrize("own", [False, True])
def test_inputs_that_forward_catches_in_kwargs_may_be_dynamic(order: tuple[str, ...], own: bool) -> None:
    module = Caught().eval()
    if own:  # as libraries do that hang something around a model
        module.forward = module.forward
    tensors = {"x": torch.randn(2, 5, 3), "mask": torch.randn(2, 5), "gain": torch.randn(2, 5, 3)}
    dims = {0: Dim("batch"), 1: Dim("seq")}
    arguments = tuple(Argument(name, tensors[name], dims) for name in order)
    loaded = Loaded(Path("m"), "module", module, arguments=arguments)
    program = export_capture.capture(loaded, export_capture.call_of(loaded)).program
    assert [spec.arg.name for spec in program.graph_signature.input_specs] == list(order)
    other = {"x": torch.randn(3, 4, 3), "mask": torch.randn(3, 4), "gain": torch.randn(3, 4, 3)}
    torch.testing.assert_close(program.module()(**{name: other[name] for name in order}), module(**other))
    assert ("forward" in vars(module)) == own
