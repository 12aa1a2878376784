# SPDX-License-Identifier: Apache-2.0
"""A state dict becomes the model it belongs to, and whatever does not fit is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from exporter.test_cli import run
from exporter.torch_models import MODEL_SOURCE, Block

from flash_export.errors import UnsafeInput, UsageError
from flash_export.inputs import parse_inputs
from flash_export.load import load
from flash_export.options import Options

INPUT = parse_inputs(["x:float32:batch,seq,24"])


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Weights of ``user_model:Block``, whose file lies in the working folder."""
    (tmp_path / "user_model.py").write_text(MODEL_SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "user_model", raising=False)
    torch.manual_seed(3)
    return Block().state_dict()


def options(source: str, **more: object) -> Options:
    return Options(source=Path(source), model="user_model:build", inputs=INPUT, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors", "nested"])
def test_a_state_dict_fills_the_model_that_the_user_names(
    weights: dict[str, torch.Tensor], form: str, name: str
) -> None:
    match form:
        case "zip":
            torch.save(weights, name)
        case "legacy":
            torch.save(weights, name, _use_new_zipfile_serialization=False)
        case "safetensors":
            safetensors.torch.save_file(weights, name)
        case "nested":
            torch.save({"epoch": 3, "state_dict": weights}, name)
    loaded = load(options(name))
    assert loaded.source_kind == "state_dict"
    assert loaded.module is not None
    assert not loaded.module.training
    torch.testing.assert_close(loaded.module.state_dict()["qkv.weight"], weights["qkv.weight"], rtol=0, atol=0)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_prefixes_of_compile_and_data_parallel_are_stripped(weights: dict[str, torch.Tensor], prefix: str) -> None:
    torch.save({prefix + name: tensor for name, tensor in weights.items()}, "w.pt")
    assert load(options("w.pt")).module is not None


def test_a_prefix_on_some_names_only_is_part_of_the_name(weights: dict[str, torch.Tensor]) -> None:
    torch.save({"module.qkv.weight": weights["qkv.weight"], "qkv.bias": weights["qkv.bias"]}, "w.pt")
    with pytest.raises(UsageError) as error:
        load(options("w.pt"))
    assert "1 missing (qkv.weight) and 1 unexpected (module.qkv.weight)" in error.value.got


def test_a_weight_of_another_shape_is_named(weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights | {"qkv.weight": torch.zeros(72, 23)}, "w.pt")
    with pytest.raises(UsageError) as error:
        load(options("w.pt"))
    assert "qkv.weight" in error.value.where
    assert (error.value.got, error.value.need) == ("[72, 23]", "[72, 24]")


def test_dtype_casts_the_model(weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, "w.pt")
    module = load(options("w.pt", dtype="bf16")).module
    assert module is not None
    assert module.state_dict()["qkv.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "asked", "note"),
    [
        (
            torch.float16,
            None,
            "weights are float16 and --model builds a module in float32, as exported; --dtype fp16",
        ),
        (torch.bfloat16, None, "--dtype bf16 keeps that"),
        (torch.float16, "fp32", ""),
        (torch.float32, None, ""),
    ],
)
def test_weights_of_another_type_than_the_module_are_told(
    weights: dict[str, torch.Tensor], dtype: torch.dtype, asked: str | None, note: str
) -> None:
    torch.save({name: weight.to(dtype) for name, weight in weights.items()}, "w.pt")
    notes = load(options("w.pt", dtype=asked)).notes
    assert any(note in told for told in notes) if note else not notes


def test_a_state_dict_without_a_model_says_how_to_name_one(weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, "w.pt")
    with pytest.raises(UsageError) as error:
        load(Options(source=Path("w.pt")))
    assert "2 tensors, qkv.weight, qkv.bias" in error.value.got
    assert "--model PKG.MOD:CALLABLE" in error.value.do


@pytest.mark.parametrize(
    ("model", "got"),
    [
        ("user_model", "'user_model'"),
        ("user_model:a b", "'user_model:a b'"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("user_model:no_such_name", "no 'no_such_name'"),
        ("user_model:needs_size", "missing a required argument: 'size'"),
        ("user_model:not_a_module", "a int"),
    ],
)
def test_a_model_that_cannot_be_built_says_why(weights: dict[str, torch.Tensor], model: str, got: str) -> None:
    torch.save(weights, "w.pt")
    with pytest.raises(UsageError) as error:
        load(Options(source=Path("w.pt"), model=model, inputs=INPUT))
    assert error.value.where == f"--model {model}"
    assert got in error.value.got


@pytest.mark.parametrize(
    ("at_import", "in_build", "got"),
    [
        ("", "raise RuntimeError('no table')", "RuntimeError: no table, raised at "),
        ("", "import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyError('lost')", "", "KeyError: 'lost', raised at "),
        ("1 +", "", "SyntaxError: invalid syntax"),
        ("import no_such_package", "", "ModuleNotFoundError: No module named 'no_such_package', raised at "),
    ],
)
def test_whatever_the_users_own_code_raises_is_told_with_its_line(
    weights: dict[str, torch.Tensor], at_import: str, in_build: str, got: str
) -> None:
    torch.save(weights, "w.pt")
    Path("user_model.py").write_text(f"{at_import}\ndef build():\n    {in_build or 'pass'}\n")
    with pytest.raises(UsageError, match="cannot be built") as error:
        load(options("w.pt"))
    assert error.value.got.startswith(got)
    if "raised at" in got:
        assert f"user_model.py:{3 if in_build else 1}" in error.value.got


def test_a_class_that_takes_no_arguments_is_a_model(weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, "w.pt")
    assert load(Options(source=Path("w.pt"), model="user_model:Block", inputs=INPUT)).module is not None


def test_a_file_that_holds_other_things_than_weights_is_named(weights: dict[str, torch.Tensor]) -> None:
    torch.save([torch.ones(3)], "w.pt")
    with pytest.raises(UsageError) as error:
        load(options("w.pt"))
    assert error.value.got == "a list"


def test_a_whole_module_is_refused_and_loads_only_when_trusted(weights: dict[str, torch.Tensor]) -> None:
    torch.save(Block(), "w.pt")
    for model in (None, "user_model:build"):
        with pytest.raises(UnsafeInput) as error:
            load(Options(source=Path("w.pt"), model=model, inputs=INPUT))
        assert "torch_models.Block" in error.value.got
        assert "--trust-pickle" in error.value.do
    loaded = load(Options(source=Path("w.pt"), inputs=INPUT, trust_pickle=True))
    assert loaded.source_kind == "pickled_module"


def test_a_trusted_pickle_that_is_no_module_is_named(weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, "w.pt")
    with pytest.raises(UsageError, match="holds no module"):
        load(Options(source=Path("w.pt"), trust_pickle=True))


def test_a_corrupt_safetensors_file_is_a_usage_error(weights: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file(weights, "w.safetensors")
    content = Path("w.safetensors").read_bytes()
    Path("w.safetensors").write_bytes(content[:-100])
    with pytest.raises(UsageError, match="safetensors"):
        load(options("w.safetensors"))


def test_weights_under_another_key_are_told_with_the_keys_looked_into_and_the_line_that_helps(
    weights: dict[str, torch.Tensor],
) -> None:
    torch.save({"epoch": 3, "weights": weights}, "ckpt.pt")
    with pytest.raises(UsageError) as caught:
        load(options("ckpt.pt"))
    error = caught.value
    for key in ("'state_dict'", "'model_state_dict'", "'model'"):
        assert key in error.need
    line, _, _ = error.do.partition(": ")
    assert line == "torch.save(torch.load('ckpt.pt')['weights'], path)"
    exec(line, {"torch": torch, "path": "fixed.pt"})
    assert load(options("fixed.pt")).source_kind == "state_dict"


def test_dtype_casts_what_trust_pickle_opens_as_help_and_readme_say(
    weights: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str], repo_root: Path
) -> None:
    torch.save(Block(), "w.pt")
    module = load(Options(source=Path("w.pt"), inputs=INPUT, trust_pickle=True, dtype="bf16")).module
    assert module is not None
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert run("--help") == 0
    assert "what --trust-pickle opens" in " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    assert "or what `--trust-pickle` opens first" in " ".join((repo_root / "README.md").read_text().split())
