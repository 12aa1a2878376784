# SPDX-License-Identifier: Apache-2.0
"""``flash_export.export`` and ``flash_export.rewrite`` do what the command does, for modules and models in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from exporter import small_models
from exporter.torch_models import Attention, Block, assert_as_good_as_eager, in_float64, save_program, standard_normal

import flash_export
import flash_export.export  # a step of the same name must not hide the function
from flash_export.errors import NumbersDiffer, UnsupportedModel, UsageError


def run(model: ir.Model, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    proto = ir.to_proto(model)
    return onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, inputs)


def block() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def test_a_module_in_memory_is_fused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module = block()
    result = flash_export.export(module, torch.randn(2, 7, 24), dynamic_shapes=[{0: "batch", 1: "seq=1..64"}])
    assert len(result.fused) == 1
    assert (result.refused, result.saved) == ((), None)
    assert result.report["check"] is not None
    assert (list(tmp_path.iterdir()), *capfd.readouterr()) == ([], "", "")
    inputs = {"x": standard_normal(3, 11, 24)}
    eager = [module(torch.from_numpy(inputs["x"])).numpy(force=True)]
    assert_as_good_as_eager(run(result.model, inputs), eager, in_float64(module, inputs))


@pytest.mark.parametrize(
    "dims",
    [
        {"x": (torch.export.Dim("batch"), torch.export.Dim("seq", min=1, max=64), None)},
        {"x": {0: "batch", -2: "seq=1..64"}},
    ],
)
def test_dims_are_written_as_in_torch_or_as_on_the_command_line(dims: dict[str, object]) -> None:
    result = flash_export.export(block(), {"x": torch.randn(1, 7, 24)}, dynamic_shapes=dims, check=False)
    shape = result.model.graph.inputs[0].shape
    assert shape is not None
    assert [str(d) for d in shape] == ["batch", "seq", "24"]
    assert result.warnings == ("--no-check: the numbers of this file are not proven",)


def test_output_publishes_what_the_command_publishes(tmp_path: Path) -> None:
    result = flash_export.export(block(), torch.randn(2, 7, 24), output=tmp_path / "block.onnx")
    assert result.saved is not None
    assert {p.name for p in tmp_path.iterdir()} >= {"block.onnx", "block.unfused.onnx", "report.json"}
    assert result.saved.output == tmp_path / "block.onnx"


def test_a_program_and_a_path_are_sources_too(tmp_path: Path) -> None:
    program = save_program(tmp_path / "block.pt2")
    assert len(flash_export.export(program, check=False).fused) == 1
    assert len(flash_export.export(tmp_path / "block.pt2", check=False).fused) == 1


def test_a_model_in_memory_is_rewritten_and_left_as_it_was(tmp_path: Path) -> None:
    path = small_models.write(small_models.ATTENTION, tmp_path / "in.onnx")
    proto = onnx.load(path)
    before = proto.SerializeToString()
    for model in (proto, ir.from_proto(proto), path):
        result = flash_export.rewrite(model)
        assert len(result.fused) == 1
        assert "Softmax" not in {node.op_type for node in result.model.graph}
    assert proto.SerializeToString() == before


def test_the_twin_of_a_model_in_memory_is_kept_beside_the_output(tmp_path: Path) -> None:
    path = small_models.write(small_models.ATTENTION, tmp_path / "in.onnx")
    saved = flash_export.rewrite(onnx.load(path), output=tmp_path / "out.onnx").saved
    assert saved is not None
    assert saved.unfused == tmp_path / "out.unfused.onnx"
    assert saved.unfused.exists()


def test_a_result_is_printed_without_its_graph_and_its_runs() -> None:
    result = flash_export.export(block(), torch.ones(2, 7, 24))
    printed = repr(result)
    assert "fused" in printed
    assert "graph(" not in printed
    assert "'runs'" not in printed


def test_refusals_are_data(tmp_path: Path) -> None:
    path = small_models.write(small_models.TWO_ATTENTIONS_ONE_REFUSED, tmp_path / "in.onnx")
    result = flash_export.rewrite(path)
    assert [site.reason.code for site in result.refused if site.reason] == ["probabilities_used"]
    with pytest.raises(UnsupportedModel):
        flash_export.rewrite(path, require_all=True)


def test_a_wrong_rewrite_returns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_export import pipeline

    honest = pipeline.rewrite

    def wrong(model: ir.Model, sites: list, **settings: bool) -> int:
        count = honest(model, sites, **settings)
        for node in model.graph:
            if "scale" in node.attributes:
                node.attributes["scale"] = ir.AttrFloat32("scale", 0.2525)
        return count

    monkeypatch.setattr(pipeline, "rewrite", wrong)
    with pytest.raises(NumbersDiffer):
        flash_export.rewrite(small_models.write(small_models.ATTENTION, tmp_path / "in.onnx"))


@pytest.mark.parametrize(
    ("inputs", "dims", "text"),
    [
        (None, None, "needs example inputs"),
        ({"y": torch.ones(1)}, None, "do not fit forward"),
        ((torch.ones(2, 7, 24), 3.0), None, "input mask is no tensor"),
        (torch.ones(2, 7, 24), {"z": {0: "batch"}}, "is of no input"),
        (torch.ones(2, 7, 24), [{5: "batch"}], "dynamic shape of x cannot be read"),
        (torch.ones(2, 7, 24), [{0: torch.export.Dim.DYNAMIC}], "axis 0 of x has a dimension without a name"),
        (torch.ones(2, 7, 24), "batch", "dynamic shapes cannot be read"),
        (torch.ones(2, 7, 24), {"x": {1: "seq len"}}, "'seq len', of the input x"),
    ],
)
def test_inputs_that_do_not_fit_are_named(inputs: object, dims: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        flash_export.export(block(), inputs, dynamic_shapes=dims)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"kv_cache": True}, "kv_cache needs a Hugging Face folder"),
        ({"values": {"x": torch.ones(2, 7, 24).numpy()}}, "values is no path"),
        ({"output": 3}, "output is no path"),
        ({"report": True}, "report is no path"),
    ],
)
def test_a_flag_that_cannot_hold_is_never_passed_over(flags: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        flash_export.export(block(), torch.ones(2, 7, 24), **flags)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=text):
        flash_export.export(torch.export.export(block(), (torch.ones(2, 7, 24),)), **flags)  # type: ignore[arg-type]


class Padded(torch.nn.Module):
    """Adds padding to hidden states: both have one length."""

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * pad[:, :, None], -1)


X, PAD = torch.ones(2, 16, 8), torch.ones(2, 16)


@pytest.mark.parametrize(
    ("inputs", "dims", "got", "do"),
    [
        (None, None, "none", 'export(module, {"x": x, "pad": pad}'),
        ({"x": X, "padd": PAD}, None, "'padd', which forward does not take; no 'pad'", '"pad": pad'),
        ({"x": X}, None, "no 'pad'", '"pad": pad'),
        ({"x": X, "pad": PAD.numpy()}, None, "a NumPy array", "torch.from_numpy(pad)"),
        ((X, PAD), {"x": {1: torch.export.Dim.AUTO}}, "AUTO", '{"x": {1: "seq"}}'),
        ((X, PAD), {"y": {1: "seq"}}, "'y'", "name an input"),
        ((X, PAD), {"x": {1: "seq=1-5"}}, "'1-5'", '"NAME=LOW..HIGH"'),
        ((X, PAD), {"x": {1: 4 * torch.export.Dim("n")}}, "4*n", "torch.export.export(module"),
        ((X, PAD), {"x": {7: "seq"}}, "{7: 'seq'}", '1: "seq=1..512"'),
        ((X, PAD), {"x": {1: "seq"}}, "seq = 16", "axis 1 of x (seq) and axis 1 of pad (the number 16)"),
        ((X, PAD), {"x": {1: "seq"}, "pad": {1: "len"}}, "", "give both the name"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_in_the_words_of_the_call(
    inputs: object, dims: object, got: str, do: str
) -> None:
    with pytest.raises((UsageError, UnsupportedModel)) as error:
        flash_export.export(Padded().eval(), inputs, dynamic_shapes=dims)  # type: ignore[arg-type]
    assert got in error.value.got
    assert do in error.value.do
    assert "--input" not in str(error.value)


class Positions(torch.nn.Module):
    """Adds a table of 32 positions, so that PyTorch suggests a narrower range as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Buffer(torch.ones(32, 8))

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x + self.table[: x.shape[1]]) * pad[:, :, None], -1)


def test_two_names_for_one_size_are_told_beside_a_range_that_is_too_wide() -> None:
    with pytest.raises(UnsupportedModel) as error:
        flash_export.export(
            Positions().eval(), {"x": X, "pad": PAD}, dynamic_shapes={"x": {1: "seq"}, "pad": {1: "len"}}
        )
    assert "Dim(" not in error.value.got
    assert "give both the name" in error.value.do


def test_a_dimension_that_stands_alone_is_left_out_of_dynamic_shapes() -> None:
    class Sixteen(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1, 16, 8).softmax(-1) + torch.zeros(x.shape[0], 16, 8)

    with pytest.raises(UnsupportedModel, match="cannot be dynamic") as error:
        flash_export.export(Sixteen().eval(), torch.ones(2, 16, 8), dynamic_shapes=[{1: "seq"}])
    assert error.value.do.startswith("leave seq out of dynamic_shapes")


class Hidden(torch.nn.Module):
    """Causal self-attention with padding, hidden by ``fill``."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill
        self.register_buffer("visible", torch.tril(torch.ones(64, 64, dtype=torch.bool)))

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        q = x.view(x.shape[0], x.shape[1], 4, 8).transpose(1, 2)
        scores = q @ q.transpose(-1, -2) / 8**0.5
        scores = scores.masked_fill(~self.visible[: x.shape[1], : x.shape[1]], self.fill)
        scores = scores.masked_fill(pad[:, None, None] == 0, self.fill)
        return (torch.softmax(scores, -1) @ q).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("fill", [-1e9, float("-inf")])
def test_a_bias_of_queries_by_keys_is_warned_of_with_what_makes_it_smaller(fill: float) -> None:
    """And what the warning says to do is true of this model."""
    inputs = {"x": torch.randn(2, 7, 32), "pad": torch.ones(2, 7, dtype=torch.int64)}
    dims = {"x": {0: "batch", 1: "seq=1..64"}, "pad": {0: "batch", 1: "seq"}}
    result = flash_export.export(Hidden(fill).eval(), inputs, dynamic_shapes=dims)
    (site,) = result.fused
    if fill == -1e9:
        assert site.bias_shape == ["batch", 1, "seq", "seq"]
        (warning,) = result.warnings
        assert "do: where it only hides positions, hide them with -inf" in warning
    else:
        assert site.bias_shape == ["batch", 1, 1, "seq"]
        assert site.attributes is not None
        assert site.attributes.causal
        (warning,) = result.warnings  # of rows of padding, where this model has no guard
        assert warning.startswith("the unfused model is NaN in ")


def test_a_module_in_training_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="training mode"):
        flash_export.export(Block(), torch.randn(2, 7, 24))


class AlwaysDrops(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = torch.nn.functional.dropout(torch.softmax(x @ x.mT * 0.25, -1), 0.3, True)
        return probabilities @ x


def test_a_module_that_is_random_is_told_as_such_and_not_as_a_wrong_export() -> None:
    with pytest.raises(UnsupportedModel, match="other numbers each time") as error:
        flash_export.export(AlwaysDrops().eval(), {"x": torch.randn(2, 7, 16)})
    assert "training=self.training" in error.value.do


def test_a_source_of_no_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="no kind known"):
        flash_export.export(3, torch.randn(2))  # type: ignore[arg-type]


def test_keyword_inputs_keep_forwards_order() -> None:
    shape = (2, 3, 7, 8)
    inputs = {name: torch.randn(shape) for name in ("v", "q", "k")}
    result = flash_export.export(Attention().eval(), inputs, check=False)
    assert [value.name for value in result.model.graph.inputs] == ["q", "k", "v"]


def test_a_transformers_model_is_exported_with_our_attention_and_left_as_it_was() -> None:
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=1, num_attention_heads=3, hidden_size=24, intermediate_size=40, vocab_size=71
    )
    model = transformers.BertModel(config).eval()
    before = (model.config._attn_implementation, model.config.use_cache)
    ids = torch.randint(0, 71, (2, 7))
    shapes = {name: {0: "batch", 1: "seq=1..512"} for name in ("input_ids", "attention_mask")}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    result = flash_export.export(model, inputs, dynamic_shapes=shapes, check=False)
    assert [site.bias_shape for site in result.fused] == [["batch", 1, 1, "seq"]]
    assert (model.config._attn_implementation, model.config.use_cache) == before


ODD = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 40, "vocab_size": 71}


class Last(torch.nn.Module):
    """A user's own module around a model of transformers, which stays as the user built it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids).last_hidden_state[:, -1]


def experts() -> torch.nn.Module:
    """Without ``batched_mm`` its experts choose by data, or have no form in ONNX."""
    import transformers

    few = {"num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2}
    return transformers.MixtralModel(transformers.MixtralConfig(**ODD, **few))


def without_cache() -> torch.nn.Module:
    """Its config knows no cache."""
    import transformers

    return transformers.AlbertModel(transformers.AlbertConfig(**ODD, embedding_size=16))


@pytest.mark.parametrize("build", [experts, without_cache, lambda: Last(experts())])
def test_each_model_of_transformers_is_told_to_compute_what_can_be_exported(
    build: Callable[[], torch.nn.Module],
) -> None:
    torch.manual_seed(0)
    model = build().eval()
    configs = [part.config for part in model.modules() if hasattr(part, "config")]
    before = [dict(vars(config)) for config in configs]
    ids = torch.randint(0, 71, (2, 7))
    result = flash_export.export(model, {"input_ids": ids}, dynamic_shapes={"input_ids": {0: "batch", 1: "seq=1..64"}})
    assert len(result.fused) == 1
    assert result.refused == ()
    assert [dict(vars(config)) for config in configs] == before


def test_importing_the_package_imports_no_heavy_library() -> None:
    code = "import sys, flash_export; sys.exit(any(m in sys.modules for m in ('torch', 'onnx', 'onnxruntime')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_package_keeps_its_functions_whatever_is_imported() -> None:
    code = (
        "import flash_export.rewrite, flash_export.export, flash_export as f; from flash_export.export import write;"
        "assert callable(f.export) and callable(f.rewrite) and f.Result; f.no_such_name"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "has no attribute 'no_such_name'" in found.stderr


def test_the_file_that_a_model_in_memory_maps_its_weights_from_is_not_replaced(tmp_path: Path) -> None:
    small_models.write(small_models.ATTENTION, tmp_path / "in.onnx")
    model = ir.load(tmp_path / "in.onnx")
    model.graph.register_initializer(ir.Value(name="unused", const_value=ir.tensor(np.ones(2000, np.float32))))
    ir.save(model, tmp_path / "outside.onnx", external_data="w.onnx")
    before = (tmp_path / "w.onnx").read_bytes()
    assert len(flash_export.rewrite(ir.load(tmp_path / "outside.onnx"), check=False).fused) == 1
    with pytest.raises(UsageError, match="would replace"):
        flash_export.rewrite(ir.load(tmp_path / "outside.onnx"), output=tmp_path / "w.onnx")
    assert (tmp_path / "w.onnx").read_bytes() == before


def test_a_program_in_memory_keeps_the_names_of_its_dimensions_and_a_saved_one_has_none(tmp_path: Path) -> None:
    program = save_program(tmp_path / "block.pt2")
    shapes = [
        flash_export.export(source, check=False).model.graph.inputs[0].shape
        for source in (program, tmp_path / "block.pt2")
    ]
    assert [[str(d) for d in shape] for shape in shapes if shape] == [
        ["batch", "seq", "24"],
        ["x_dim0", "x_dim1", "24"],
    ]


SAME = {
    "positions": lambda x: [x, x, x],
    "names": lambda x: {"q": x, "k": x, "v": x},
    "views": lambda x: [x, x.view(x.shape), x[:]],
}


@pytest.mark.parametrize("how", SAME)
def test_one_tensor_for_several_inputs_is_an_example_for_each(how: str) -> None:
    x = torch.randn(2, 3, 7, 8)
    module = Attention().eval()
    result = flash_export.export(module, SAME[how](x), dynamic_shapes=[{2: "seq=1..64"}] * 3)
    inputs = {name: standard_normal(2, 3, 11, 8, seed=seed) for seed, name in enumerate("qkv")}
    eager = [module(*map(torch.from_numpy, inputs.values())).numpy()]
    assert_as_good_as_eager(run(result.model, inputs), eager, in_float64(module, inputs))


@pytest.mark.parametrize("saved", [False, True], ids=["in memory", "saved"])
def test_a_program_that_has_one_tensor_for_several_inputs_is_warned_of(saved: bool, tmp_path: Path) -> None:
    x, y = torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    program = torch.export.export(Attention().eval(), (x, y, y), strict=False)
    torch.export.save(program, tmp_path / "m.pt2")
    (warning,) = flash_export.export(tmp_path / "m.pt2" if saved else program).warnings
    assert "one tensor for k, v, so it reads only v" in warning
    assert flash_export.export(torch.export.export(Attention().eval(), (x, y, y.clone()), strict=False)).warnings == ()


def test_skip_takes_one_name_or_several(tmp_path: Path) -> None:
    path = small_models.write(small_models.ATTENTION, tmp_path / "in.onnx")
    (site,) = flash_export.rewrite(path).fused
    for skip in (site.name, [site.name]):
        (left,) = flash_export.rewrite(path, skip=skip, check=False).refused
        assert left.reason is not None
        assert left.reason.code == "skipped"


@pytest.mark.parametrize(
    ("dims", "text", "got"),
    [
        ({"q": {2: "s=1..4"}}, "the example's s is outside its range", "axis 2 of q is 7"),
        ({"q": {2: "s=9..12"}}, "the example's s is outside its range", "axis 2 of q is 7"),
        ({"q": {2: 9}}, "not of the size that is asked for", "axis 2 of q is 7"),
        ({"q": {2: "s=9..9"}}, "not of the size that is asked for", "axis 2 of q is 7"),
        ({"q": {2: "s"}, "k": {2: "s"}}, "the dimension s has two sizes", "axis 2 of q is 7 and axis 2 of k is 9"),
    ],
)
def test_an_example_that_its_dimensions_do_not_allow_is_told_with_both(dims: dict, text: str, got: str) -> None:
    inputs = {name: torch.randn(2, 3, size, 8) for name, size in (("q", 7), ("k", 9), ("v", 9))}
    with pytest.raises(UsageError, match=text) as error:
        flash_export.export(Attention().eval(), inputs, dynamic_shapes=dims)
    assert error.value.got == got
    assert len(flash_export.export(Attention().eval(), inputs, dynamic_shapes={"q": {2: "s=7..9"}}).fused) == 1


def test_the_memory_in_the_report_ends_at_the_range_of_the_module() -> None:
    result = flash_export.export(block(), torch.randn(2, 7, 24), dynamic_shapes=[{1: "seq=1..63"}], check=False)
    example = result.report["example"]
    assert isinstance(example, dict)
    assert example["memory"]["lengths"] == [7, 15, 31, 63]
