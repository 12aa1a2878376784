# SPDX-License-Identifier: Apache-2.0
"""Each kind of source becomes an unfused ONNX file that equals eager PyTorch and says what its inputs may be."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from exporter.test_load import small_onnx
from exporter.torch_models import (
    MODEL_SOURCE,
    Block,
    assert_as_good_as_eager,
    in_float64,
    save_program,
    standard_normal,
)

from flash_export.errors import UnsupportedModel, UsageError
from flash_export.example_call import opened
from flash_export.export import Exported, export, quiet, write
from flash_export.inputs import parse_inputs
from flash_export.load import Loaded, load
from flash_export.options import Options


def export_module(module: torch.nn.Module, folder: Path, *inputs: str, opset: int | None = None) -> Exported:
    """Exports a module as ``load`` would hand it over."""
    from flash_export.example import arguments_for

    options = Options(source=folder / "w.pt", inputs=parse_inputs(inputs), opset=opset)
    module = module.eval().requires_grad_(False)
    loaded = Loaded(options.source, "state_dict", module, arguments=arguments_for(module, options))
    return export(loaded, options, folder)


def run(exported: Exported, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(exported.path, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def assert_equal_to_eager(exported: Exported, inputs: dict[str, np.ndarray], module: torch.nn.Module) -> None:
    assert exported.reference is not None
    assert_as_good_as_eager(run(exported, inputs), exported.reference(inputs), in_float64(module, inputs))


def test_an_exported_program_needs_no_flags(tmp_path: Path) -> None:
    module = Block()
    module.load_state_dict(save_program(tmp_path / "a.pt2").state_dict)
    options = Options(source=tmp_path / "a.pt2")
    exported = export(load(options), options, tmp_path)
    assert exported.source_kind == "exported_program"
    assert exported.dims == {"x_dim0": (1, 2**31 - 1), "x_dim1": (1, 64)}
    assert list(exported.example) == ["x"]
    for batch, seq in ((1, 1), (3, 13), (2, 64)):
        assert_equal_to_eager(exported, {"x": standard_normal(batch, seq, 24)}, module)


def test_a_multiple_of_a_dimension_stays_one_and_the_dimension_has_the_range(tmp_path: Path) -> None:
    module = Block()
    blocks = torch.export.Dim("blocks", min=2, max=30)
    dims = {0: torch.export.Dim("batch"), 1: 4 * blocks + 1}
    program = torch.export.export(module, (torch.randn(2, 9, 24),), dynamic_shapes=(dims,))
    torch.export.save(program, tmp_path / "a.pt2")
    named = ((opened(program, None, None, Options(source=Path())), "blocks"), (None, "x_dim1_unit"))
    for number, (loaded, name) in enumerate(named):
        (folder := tmp_path / str(number)).mkdir()
        options = Options(source=tmp_path / "a.pt2")
        exported = export(loaded or load(options), options, folder)
        assert exported.dims[name] == (2, 30)
        assert len(exported.dims) == 2
        shape = ir.load(exported.path).graph.inputs[0].shape
        assert shape is not None
        assert str(shape[1]) == f"4*{name} + 1"
        for batch, seq in ((1, 13), (3, 41), (2, 121)):
            assert_equal_to_eager(exported, {"x": standard_normal(batch, seq, 24)}, module)


def test_a_state_dict_exports_with_the_inputs_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_net.py").write_text(MODEL_SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = Block()
    torch.save(module.state_dict(), "w.pt")
    inputs = parse_inputs(["x:float32:batch,seq=1..32,24"])
    options = Options(source=Path("w.pt"), model="user_net:build", inputs=inputs)
    exported = export(load(options), options, tmp_path)
    assert exported.dims == {"batch": (1, 2**31 - 1), "seq": (1, 32)}
    shape = ir.load(exported.path).graph.inputs[0].shape
    assert [str(d) for d in shape or ()] == ["batch", "seq", "24"]
    for batch, seq in ((1, 1), (3, 13), (5, 32)):
        assert_equal_to_eager(exported, {"x": standard_normal(batch, seq, 24)}, module)


def test_an_onnx_file_is_its_own_export(tmp_path: Path) -> None:
    options = Options(source=small_onnx(tmp_path / "a.onnx"))
    exported = export(load(options), options, tmp_path / "nowhere")
    assert exported == Exported(options.source, None, {}, {"n": (1, 2**31 - 1)}, "onnx")


def test_a_new_file_runs_in_old_runtimes(tmp_path: Path) -> None:
    model = onnx.load(export_module(Block(), tmp_path, "x:float32:2,7,24").path)
    assert (model.ir_version, [(o.domain, o.version) for o in model.opset_import]) == (9, [("", 18)])
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize(("opset", "ir_version"), [(20, 9), (21, 10), (24, 11)])
def test_opset_is_as_asked(tmp_path: Path, opset: int, ir_version: int) -> None:
    module = Block()
    exported = export_module(module, tmp_path, "x:float32:batch,seq,24", opset=opset)
    model = ir.load(exported.path)
    assert (model.opset_imports[""], model.ir_version >= ir_version) == (opset, True)
    assert_equal_to_eager(exported, {"x": standard_normal(3, 5, 24)}, module)


@pytest.mark.parametrize("opset", [11, 17, 25])
def test_an_opset_outside_the_range_is_a_usage_error(tmp_path: Path, opset: int) -> None:
    with pytest.raises(UsageError, match="opset"):
        export_module(Block(), tmp_path, "x:float32:2,7,24", opset=opset)


class Tower(torch.nn.Module):
    """Two layers under names of their own, a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first = self.layers[0](x)
        return {"first": first, "x": self.layers[1](first), "same": x}


def test_nodes_and_outputs_bear_the_modules_names(tmp_path: Path) -> None:
    module = Tower()
    exported = export_module(module, tmp_path, "x:float32:batch,7,24")
    graph = ir.load(exported.path).graph
    assert [v.name for v in graph.outputs] == ["first", "x_", "same"]
    assert {"/layers.0/Softmax", "/layers.1/Softmax"} <= {node.name for node in graph}
    assert_equal_to_eager(exported, {"x": standard_normal(3, 7, 24)}, module)


def test_nothing_of_this_machine_is_in_the_file(tmp_path: Path) -> None:
    content = export_module(Tower(), tmp_path, "x:float32:batch,7,24").path.read_bytes()
    assert str(Path(__file__).parent).encode() not in content
    assert b"site-packages" not in content
    assert str(tmp_path).encode() not in content


class Positions(torch.nn.Module):
    """A table of 40 positions: the length may be 1 to 40."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(1, 40, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[:, : x.shape[1]]


def test_a_range_is_taken_from_the_model_where_the_user_gives_none(tmp_path: Path) -> None:
    module = Positions()
    exported = export_module(module, tmp_path, "x:float32:batch,seq,24")
    assert exported.dims["seq"] == (1, 40)
    assert exported.notes == []
    assert_equal_to_eager(exported, {"x": standard_normal(1, 40, 24)}, module)


def test_a_range_that_the_model_narrows_is_said(tmp_path: Path) -> None:
    exported = export_module(Positions(), tmp_path, "x:float32:batch,seq=1..64,24")
    assert exported.dims["seq"] == (1, 40)
    assert exported.notes == ["seq: 1..64 narrowed to 1..40 by the model"]


class Sliced(torch.nn.Module):
    def __init__(self, at_the_end: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(40, 24))
        self.at_the_end = at_the_end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table[: x.shape[1]]
        return x + (rows * self.at_the_end if rows.shape[0] == 40 else rows)


@pytest.mark.parametrize("given", ["seq=1..40", "seq"])
def test_the_length_of_a_table_is_taken_back_where_the_file_is_right_there(given: str, tmp_path: Path) -> None:
    module = Sliced()
    exported = export_module(module, tmp_path, f"x:float32:batch,{given},24")
    assert exported.dims["seq"] == (1, 40)
    assert exported.notes == []
    assert_equal_to_eager(exported, {"x": standard_normal(1, 40, 24)}, module)


@pytest.mark.parametrize("given", ["seq=1..40", "seq"])
def test_a_length_at_which_forward_does_something_else_stays_out_and_is_told(given: str, tmp_path: Path) -> None:
    exported = export_module(Sliced(at_the_end=3.0), tmp_path, f"x:float32:batch,{given},24")
    assert exported.dims["seq"] == (1, 39)
    (note,) = exported.notes
    assert note.startswith("seq = 40: forward takes another way there")
    assert "right for seq from 1 to 39 alone" in note


class BakedLength(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 7, 24)[:, :3] if x.shape[1] == 7 else x


class DataDependent(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class NoOnnx(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.airy_ai(x)


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (BakedLength(), "the dimension seq cannot be dynamic in this model"),
        (DataDependent(), "forward decides by the values of a tensor, which a graph cannot follow"),
        (NoOnnx(), "PyTorch cannot translate this model to ONNX"),
    ],
    ids=["baked", "data-dependent", "no-onnx"],
)
def test_a_model_that_cannot_be_exported_says_why(tmp_path: Path, module: torch.nn.Module, what: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        export_module(module, tmp_path, "x:float32:batch,seq,24")
    assert error.value.what == what
    assert not list(tmp_path.iterdir())


def test_the_place_in_the_users_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as error:
        export_module(DataDependent(), tmp_path, "x:float32:batch,seq,24")
    assert Path(__file__).name in error.value.where


def test_an_operator_without_onnx_form_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as error:
        export_module(NoOnnx(), tmp_path, "x:float32:2,3,24")
    assert "special_airy_ai" in error.value.got


def test_inputs_that_forward_cannot_take_are_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        export_module(Block(), tmp_path, "x:float32:batch,seq,23")
    assert "[[2, 7, 23]]" in error.value.got


class Odd(torch.nn.Module):
    """An input that is not used, a scalar, and outputs that are an input, a constant and each other."""

    def forward(self, x: torch.Tensor, unused: torch.Tensor, factor: torch.Tensor) -> tuple:
        y = x * factor
        return y, [y, x], torch.ones(3), None


def test_odd_inputs_and_outputs_keep_their_places(tmp_path: Path) -> None:
    module = Odd()
    exported = export_module(module, tmp_path, "x:float32:n,3", "unused:int64:n", "factor:float32:")
    assert list(exported.example) == ["x", "unused", "factor"]
    inputs = {"x": standard_normal(5, 3), "unused": np.zeros(5, np.int64), "factor": np.array(2.0, np.float32)}
    assert len(run(exported, inputs)) == 4
    assert_equal_to_eager(exported, inputs, module)


class Count(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple:
        return x + 1, x.shape[1]


def test_an_output_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="number of outputs"):
        export_module(Count(), tmp_path, "x:float32:2,n")


class Mha(torch.nn.Module):
    def __init__(self, **arguments: bool) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(24, 3, **arguments)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]


@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention_exports_with_its_padding_mask(tmp_path: Path, batch_first: bool) -> None:
    shape = "batch,seq,24" if batch_first else "seq,batch,24"
    module = Mha(batch_first=batch_first)
    exported = export_module(module, tmp_path, f"x:float32:{shape}", "padding:bool:batch,seq")
    padding = np.zeros((3, 9), bool)
    padding[1, 5:] = True
    x = standard_normal(*((3, 9, 24) if batch_first else (9, 3, 24)))
    assert_equal_to_eager(exported, {"x": x, "padding": padding}, module)


def test_a_transformer_encoder_exports_without_the_fused_fast_path(tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(24, 3, 40, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2)
    exported = export_module(module, tmp_path, "src:float32:batch,seq,24")
    assert_equal_to_eager(exported, {"src": standard_normal(3, 5, 24)}, module)


def test_bfloat16_goes_through_the_reference(tmp_path: Path) -> None:
    exported = export_module(Block().to(torch.bfloat16), tmp_path, "x:bfloat16:batch,7,24")
    assert exported.example["x"].dtype == ml_dtypes.bfloat16
    assert exported.reference is not None
    (output,) = exported.reference(exported.example)
    assert (output.dtype, output.shape) == (ml_dtypes.bfloat16, (2, 7, 24))


def test_big_weights_go_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[export.__module__], "INLINE_LIMIT_BYTES", 1000)
    module = Block()
    exported = export_module(module, tmp_path, "x:float32:2,7,24")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["unfused.onnx", "unfused.onnx.data"]
    assert_equal_to_eager(exported, exported.example, module)


def test_quiet_restores_what_it_found() -> None:
    import logging

    before = logging.root.manager.disable
    with quiet():
        assert logging.root.manager.disable == logging.CRITICAL
    assert logging.root.manager.disable == before


def test_write_keeps_a_small_model_in_one_file(tmp_path: Path) -> None:
    write(ir.load(small_onnx(tmp_path / "a.onnx")), tmp_path / "b.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]
