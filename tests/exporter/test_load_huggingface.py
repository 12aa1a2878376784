# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder loads from local safetensors alone, gets the usual inputs, and exports to what eager gives."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import safetensors.torch
import torch
import transformers
from exporter.torch_models import assert_as_good_as_eager, in_float64

from flash_export.errors import UnsafeInput, UnsupportedModel, UsageError
from flash_export.export import export
from flash_export.inputs import parse_inputs
from flash_export.load import load
from flash_export.options import Options

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 24, "intermediate_size": 40}
TEXT = SMALL | {
    "vocab_size": 71,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PAGES = TEXT | {"max_2d_position_embeddings": 48, "coordinate_size": 4, "shape_size": 4, "visual_embed": False}
GROUPED = TEXT | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}
T5 = {"num_layers": 1, "num_heads": 3, "d_model": 24, "d_kv": 8, "d_ff": 40, "vocab_size": 71}
BART = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
BART |= {"d_model": 24, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "vocab_size": 71, "max_position_embeddings": 48}


def save_folder(folder: Path, name: str, settings: dict[str, Any]) -> Path:
    """A small model with random weights, as ``save_pretrained`` writes it."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    cls(cls.config_class(**settings)).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("bert"), "BertModel", TEXT)


def draw(value: ir.Value, sizes: dict[str, int], generator: np.random.Generator) -> np.ndarray:
    """Numbers for one graph input; an attention mask with padding on the right of its first row."""
    shape = [d if isinstance(d, int) else sizes[str(d.value)] for d in value.shape or ()]
    if value.name == "pixel_values":
        return generator.standard_normal(shape).astype(np.float32)
    if value.name == "attention_mask":
        mask = np.ones(shape, np.int64)
        mask[0, (shape[1] + 1) // 2 :] = 0
        return mask
    if value.name == "bbox":  # left, top, right, bottom
        corners = generator.integers(0, 48, shape)
        return np.concatenate([corners.reshape(*shape[:2], 2, 2).min(2), corners.reshape(*shape[:2], 2, 2).max(2)], -1)
    return generator.integers(0, 2 if value.name == "token_type_ids" else 71, shape)


@pytest.mark.parametrize(
    ("name", "settings", "softmaxes", "dims"),
    [
        ("BertModel", TEXT, 2, {"batch": (1, 2**31 - 1), "seq": (1, 48)}),
        ("RobertaModel", TEXT | {"pad_token_id": 1}, 2, {"batch": (1, 2**31 - 1), "seq": (1, 46)}),
        ("LlamaForCausalLM", GROUPED, 2, {"batch": (1, 2**31 - 1), "seq": (1, 48)}),
        ("MistralModel", GROUPED | {"sliding_window": 4}, 2, {"batch": (1, 2**31 - 1), "seq": (1, 48)}),
        # A window that leaves no row without a key: Gemma's float64 fill is -inf to its float32 softmax.
        ("Gemma2Model", GROUPED | {"sliding_window": 16}, 2, {"batch": (1, 2**31 - 1), "seq": (1, 48)}),
        ("LayoutLMv3Model", PAGES, 2, {"batch": (1, 2**31 - 1), "seq": (1, 47)}),
        ("ViTModel", SMALL | {"image_size": 24, "patch_size": 8}, 2, {"batch": (1, 2**31 - 1)}),
        (
            "T5Model",
            T5,
            3,
            {"batch": (1, 2**31 - 1), "seq": (1, 2**31 - 1), "decoder_seq": (1, 2**31 - 1)},
        ),
        # Two attentions with sinks, two routers; the experts are chosen without branching on data.
        ("GptOssModel", GROUPED | MOE, 4, {"batch": (1, 2**31 - 1), "seq": (1, 48)}),
        ("BartModel", BART, 3, {"batch": (1, 2**31 - 1), "seq": (1, 48), "decoder_seq": (1, 48)}),
    ],
)
def test_an_architecture_exports_with_its_usual_inputs(
    tmp_path: Path, name: str, settings: dict[str, Any], softmaxes: int, dims: dict[str, tuple[int, int]]
) -> None:
    options = Options(source=save_folder(tmp_path / "model", name, settings))
    loaded = load(options)
    exported = export(loaded, options, tmp_path)
    assert loaded.module is not None
    assert exported.source_kind == "hugging_face"
    assert exported.dims == dims
    assert exported.reference is not None
    graph = ir.load(exported.path).graph
    assert Counter(node.op_type for node in graph)["Softmax"] == softmaxes
    session = onnxruntime.InferenceSession(exported.path, providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(0)
    for sizes in ({"batch": 3, "seq": 9, "decoder_seq": 5}, {"batch": 1, "seq": 1, "decoder_seq": 1}):
        inputs = {str(v.name): draw(v, sizes, generator) for v in graph.inputs}
        reference = in_float64(loaded.module, inputs)
        assert_as_good_as_eager(session.run(None, inputs), exported.reference(inputs), reference)


def test_a_padding_mask_stays_one_row_a_batch(bert: Path, tmp_path: Path) -> None:
    """[B, 1, 1, S]: nothing of the size S x S is built for it."""
    graph = ir.load(export(load(Options(source=bert)), Options(source=bert), tmp_path).path).graph
    masks = [n for n in graph if n.op_type == "Where" and "IsNaN" not in {p.op_type for p in n.predecessors()}]
    assert [[str(d) for d in n.outputs[0].shape or ()] for n in masks] == [["batch", "1", "1", "seq"]]


def test_the_weights_are_the_folders(bert: Path) -> None:
    module = load(Options(source=bert)).module
    saved = transformers.BertModel.from_pretrained(bert).state_dict()
    assert module is not None
    assert all(torch.equal(tensor, saved[name]) for name, tensor in module.state_dict().items())


def test_weights_in_several_files_are_put_together(bert: Path, tmp_path: Path) -> None:
    whole = transformers.BertModel.from_pretrained(bert)
    whole.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    module = load(Options(source=tmp_path)).module
    assert module is not None
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in module.state_dict().items())


def test_a_missing_shard_is_a_usage_error(bert: Path, tmp_path: Path) -> None:
    transformers.BertModel.from_pretrained(bert).save_pretrained(tmp_path, max_shard_size="8KB")
    next(tmp_path.glob("model-*-of-*.safetensors")).unlink()
    with pytest.raises(UsageError, match="cannot be loaded"):
        load(Options(source=tmp_path))


def test_dtype_casts_weights_and_pixels(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, "ViTModel", SMALL | {"image_size": 24, "patch_size": 8})
    loaded = load(Options(source=folder, dtype="fp16"))
    assert loaded.module is not None
    assert next(loaded.module.parameters()).dtype == loaded.arguments[0].tensor.dtype == torch.float16


def test_input_replaces_the_usual_inputs(bert: Path) -> None:
    options = Options(source=bert, inputs=parse_inputs(["attention_mask:int64:2,9", "input_ids:int64:2,9"]))
    loaded = load(options)
    assert [a.name for a in loaded.arguments] == ["input_ids", "attention_mask"]
    assert all(not a.dims for a in loaded.arguments)


def test_an_unknown_input_is_named(bert: Path) -> None:
    with pytest.raises(UsageError, match="unknown: nobody"):
        load(Options(source=bert, inputs=parse_inputs(["nobody:int64:2,9"])))


def test_a_model_flag_does_not_go_with_a_folder(bert: Path) -> None:
    with pytest.raises(UsageError, match="--model does not go"):
        load(Options(source=bert, model="a.b:c"))


def edit_config(source: Path, target: Path, **changes: object) -> Path:
    """A copy of a folder with some of its config changed."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_the_attention_is_ours_whatever_the_config_asks_for(bert: Path, tmp_path: Path) -> None:
    """A kernel from a hub would be downloaded and run."""
    folder = edit_config(bert, tmp_path / "m", _attn_implementation="evil/kernels", attn_implementation="evil/kernels")
    module: Any = load(Options(source=folder)).module
    assert module.config._attn_implementation == "exported_attention"


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"model_type": "no_such_type"}, UnsupportedModel, "not part of transformers"),
        ({"model_type": "no_such_type", "auto_map": {"AutoModel": "evil.Model"}}, UnsafeInput, "not part of"),
        ({"architectures": ["pipeline"]}, UnsupportedModel, "architecture"),
        ({"architectures": ["__loader__"]}, UnsupportedModel, "architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "quantised"),
        ({"hidden_size": 36}, UsageError, "cannot be loaded"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(
    bert: Path, tmp_path: Path, changes: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        load(Options(source=edit_config(bert, tmp_path / "m", **changes)))


def test_an_adapter_is_refused(bert: Path, tmp_path: Path) -> None:
    folder = edit_config(bert, tmp_path / "m")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    with pytest.raises(UnsupportedModel, match="adapter"):
        load(Options(source=folder))


def test_python_code_in_the_folder_of_a_known_model_is_left_alone(bert: Path, tmp_path: Path) -> None:
    folder = edit_config(bert, tmp_path / "m", auto_map={"AutoModel": "evil.Model"})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    assert type(load(Options(source=folder)).module).__name__ == "BertModel"
    assert not (tmp_path / "marker").exists()


def test_a_config_that_names_no_architecture_gives_the_base_model(bert: Path, tmp_path: Path) -> None:
    folder = edit_config(bert, tmp_path / "m", architectures=None)
    assert type(load(Options(source=folder)).module).__name__ == "BertModel"


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 10_000])
def test_a_config_that_is_no_config_is_a_usage_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError):
        load(Options(source=tmp_path))


def test_a_folder_without_weights_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError) as error:
        load(Options(source=tmp_path))
    assert error.value.got == "no weights at all"


def test_a_weight_that_is_missing_is_named_and_never_made_up(bert: Path, tmp_path: Path) -> None:
    folder = edit_config(bert, tmp_path / "m")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError) as error:
        load(Options(source=folder))
    assert error.value.got == "1 missing, encoder.layer.1.output.dense.weight"


def test_truncated_weights_are_a_usage_error(bert: Path, tmp_path: Path) -> None:
    folder = edit_config(bert, tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UsageError, match="cannot be loaded"):
        load(Options(source=folder))


def test_a_model_of_text_and_an_image_in_one_config_is_given_both(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", "ViltModel", TEXT | {"image_size": 16, "patch_size": 8})
    given = {argument.name: list(argument.tensor.shape) for argument in load(Options(source=folder)).arguments}
    assert given["pixel_values"][1:] == [3, 16, 16]
    assert {"input_ids", "attention_mask"} < given.keys()


def test_a_model_of_speech_without_a_number_of_mel_bins_is_told_as_one_of_unknown_inputs(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 32, "conv_channels": 16}
    folder = save_folder(tmp_path / "model", "Speech2TextModel", sizes | heads)
    with pytest.raises(UsageError, match=r"inputs of this model are not known(.|\n)*--input input_features"):
        load(Options(source=folder))
