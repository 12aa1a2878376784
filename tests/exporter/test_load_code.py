# SPDX-License-Identifier: Apache-2.0
"""TorchScript and torch.package open under ``--trust-pickle`` alone, and export to what PyTorch gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from exporter.torch_models import MODEL_SOURCE, assert_as_good_as_eager, in_float64, standard_normal

from flash_export import pipeline
from flash_export.errors import UnsafeInput, UnsupportedModel, UsageError, UserError
from flash_export.inputs import parse_inputs
from flash_export.load import load
from flash_export.options import Options
from flash_export.talk import Talk

INPUT = "x:float32:batch,seq=1..64,24"


class Viewed(torch.nn.Module):
    """Self-attention over [batch, seq, 24] with 3 heads, in operators that PyTorch's older exporter takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(24, 72)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], 3, 8)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return attended.transpose(1, 2).reshape(x.shape)


def traced(path: Path) -> torch.nn.Module:
    module = Viewed().eval()
    torch.jit.save(torch.jit.trace(module, torch.randn(2, 7, 24)), path)
    return module


def packaged(path: Path, *objects: object) -> Path:
    with torch.package.PackageExporter(path) as package:
        package.intern("my_attention")
        package.extern("torch.**")
        for i, thing in enumerate(objects):
            package.save_pickle("models.small", f"model{i}.pkl", thing)
    return path


def options(path: Path, *inputs: str, **flags: object) -> Options:
    return Options(source=path, inputs=parse_inputs(inputs or [INPUT]), trust_pickle=True, **flags)  # type: ignore[arg-type]


def test_both_are_refused_unless_trusted_and_the_way_in_is_named(tmp_path: Path) -> None:
    traced(tmp_path / "script.pt")
    packaged(tmp_path / "package.pt", {"a": torch.ones(3)})
    for name in ("script.pt", "package.pt"):
        with pytest.raises(UnsafeInput) as error:
            load(Options(source=tmp_path / name, inputs=parse_inputs([INPUT])))
        assert "--trust-pickle" in error.value.do


def test_a_traced_module_is_fused_at_every_length(tmp_path: Path) -> None:
    module = traced(tmp_path / "script.pt")
    done = pipeline.run(options(tmp_path / "script.pt", output=tmp_path / "out.onnx"), Talk(silent=True))
    assert [site.status for site in done.sites] == ["fused"]
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])
    inputs = {"x": standard_normal(3, 11, 24)}
    eager = [module(torch.from_numpy(inputs["x"])).numpy(force=True)]
    assert_as_good_as_eager(session.run(None, inputs), eager, in_float64(module, inputs))
    assert [str(d) for d in ir.load(tmp_path / "out.onnx").graph.inputs[0].shape or ()] == ["batch", "seq", "24"]


def test_a_length_that_tracing_baked_in_is_named(tmp_path: Path) -> None:
    class Baked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(int(x.shape[0]), 24, int(x.shape[1])).transpose(1, 2)

    module = Baked()
    script = torch.jit.trace(module, torch.randn(2, 7, 24), check_trace=False)
    torch.jit.save(script, tmp_path / "script.pt")
    with pytest.raises(UnsupportedModel, match="only works at") as error:
        pipeline.run(options(tmp_path / "script.pt", allow_none=True, output=tmp_path / "out.onnx"), Talk(silent=True))
    assert (error.value.where, "--input" in error.value.do) == ("dimension batch, tried at 4", True)


@pytest.mark.parametrize("inputs", [["y:float32:2,7,24"], [INPUT, "y:float32:2"]])
def test_inputs_that_the_script_does_not_take_are_named(tmp_path: Path, inputs: list[str]) -> None:
    traced(tmp_path / "script.pt")
    with pytest.raises(UsageError, match="not those of the TorchScript module") as error:
        load(options(tmp_path / "script.pt", *inputs))
    assert error.value.need == "forward takes x"


def test_an_opset_past_the_end_of_torchscripts_exporter_is_a_usage_error(tmp_path: Path) -> None:
    traced(tmp_path / "script.pt")
    with pytest.raises(UsageError, match="this opset"):
        pipeline.run(options(tmp_path / "script.pt", opset=23, output=tmp_path / "out.onnx"), Talk(silent=True))


def test_a_packaged_module_is_opened_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_attention.py").write_text(MODEL_SOURCE)
    make = (
        "import torch, my_attention\n"
        "with torch.package.PackageExporter('package.pt') as package:\n"
        "    package.intern('my_attention'); package.extern('torch.**')\n"
        "    package.save_pickle('models.small', 'model.pkl', my_attention.build())\n"
    )
    subprocess.run([sys.executable, "-c", make], cwd=tmp_path, check=True, timeout=120)
    loaded = load(options(tmp_path / "package.pt"))
    assert (loaded.source_kind, type(loaded.module).__name__) == ("torch_package", "Block")
    assert "my_attention" not in sys.modules


@pytest.mark.parametrize(
    ("objects", "text"), [((), "which module"), ((1, 2), "which module"), (({"a": 1},), "holds no module")]
)
def test_a_package_without_one_module_says_what_is_in_it(
    tmp_path: Path, objects: tuple[object, ...], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        load(options(packaged(tmp_path / "package.pt", *objects)))


def test_a_script_that_pytorch_does_not_load_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced(tmp_path / "script.pt")

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("Unknown builtin op: my::attention")

    monkeypatch.setattr(torch.jit, "load", fails)
    with pytest.raises(UsageError, match="cannot be loaded") as error:
        load(options(tmp_path / "script.pt"))
    assert "my::attention" in error.value.got


@pytest.mark.parametrize("length", [7, 12])
def test_a_length_that_the_trace_has_put_into_a_mask_is_named(tmp_path: Path, length: int) -> None:
    """The example's own length is 7 and fails in the module itself, or is right there and wrong elsewhere."""

    class Masked(Viewed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = torch.from_numpy(np.tri(x.shape[1], dtype=bool))
            return torch.softmax((x @ x.transpose(1, 2)).masked_fill(~seen, -torch.inf), -1) @ x

    torch.jit.save(torch.jit.trace(Masked().eval(), torch.randn(2, length, 24)), tmp_path / "script.pt")
    with pytest.raises(UnsupportedModel, match=f"only works at seq = {length}") as error:
        pipeline.run(options(tmp_path / "script.pt", output=tmp_path / "out.onnx"), Talk(silent=True))
    assert "The size of tensor a" in error.value.got
    assert "Traceback" not in error.value.got
    fixed = options(tmp_path / "script.pt", f"x:float32:batch,{length},24", output=tmp_path / "out.onnx")
    assert [site.status for site in pipeline.run(fixed, Talk(silent=True)).sites] == ["fused"]


def test_an_input_that_a_traced_module_does_not_take_at_any_length_is_told_in_its_last_words(tmp_path: Path) -> None:
    traced(tmp_path / "script.pt")
    with pytest.raises(UsageError, match="fails on the inputs described") as error:
        pipeline.run(options(tmp_path / "script.pt", "x:float32:batch,seq,23"), Talk(silent=True))
    assert error.value.got.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied (")


class Grouped(torch.nn.Module):
    """An attention that PyTorch's older exporter does not take."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = x.view(2, 7, 3, 8).transpose(1, 2), x[..., :8].view(2, 7, 1, 8).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)


def test_what_cannot_be_translated_is_refused_without_its_whole_graph(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.jit.save(torch.jit.trace(Grouped().eval(), torch.randn(2, 7, 24)), tmp_path / "m.pt")
    with pytest.raises(UnsupportedModel, match="cannot translate this TorchScript"):
        pipeline.run(options(tmp_path / "m.pt", "x:float32:2,7,24"), Talk(quiet=True))
    assert capfd.readouterr().out == ""


@pytest.mark.filterwarnings("ignore")
def test_torchscript_exports_what_the_page_says_and_fails_where_it_says(tmp_path: Path, repo_root: Path) -> None:
    """The legacy exporter's words are in docs/coverage.md."""
    page = " ".join((repo_root / "docs" / "coverage.md").read_text().partition("## TorchScript")[2].split())

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(24, 3, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    for name, module in {"norm": torch.nn.RMSNorm(24), "attention": Attention()}.items():
        path = tmp_path / f"{name}.pt"
        torch.jit.trace(module.eval(), torch.randn(2, 7, 24), check_trace=False).save(path)
        (argument,) = torch.jit.load(path).forward.schema.arguments[1:]
        inputs = parse_inputs([f"{argument.name}:float32:batch,7,24"])
        options = Options(source=path, inputs=inputs, trust_pickle=True, allow_none=True, quiet=True)
        with pytest.raises(UserError) as caught:
            pipeline.run(options)
        assert caught.value.got.removeprefix("Unsupported: ").rstrip(".") in page
