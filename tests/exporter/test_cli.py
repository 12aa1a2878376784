# SPDX-License-Identifier: Apache-2.0
"""Every way ``flash-export`` can end has its exit code, and a failed run leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from exporter import small_models

from flash_export import command
from flash_export.cli import app


def run(*arguments: object) -> int:
    return command.run(app, [str(a) for a in arguments])


@pytest.fixture
def attention(tmp_path: Path) -> Path:
    return small_models.write(small_models.ATTENTION, tmp_path / "in.onnx")


@pytest.fixture
def one_refused(tmp_path: Path) -> Path:
    return small_models.write(small_models.TWO_ATTENTIONS_ONE_REFUSED, tmp_path / "two.onnx")


def test_anybodys_onnx_is_fused_without_further_flags(attention: Path, tmp_path: Path) -> None:
    assert run(attention) == 0
    fused = onnx.load(tmp_path / "in.flash.onnx")
    assert [n.op_type for n in fused.graph.node] == ["FlashAttention"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["schema"] == 1
    assert report["fused"] == 1
    assert report["refused"] == 0
    assert report["check"]["passed"] is True
    assert report["output"] == str(tmp_path / "in.flash.onnx")
    assert Path(report["unfused"]) == attention
    site = report["sites"][0]
    assert site["status"] == "fused"
    assert site["scale"] == pytest.approx(0.25)
    assert (site["q_heads"], site["head_dim"], site["causal"]) == (3, 16, "none")
    assert set(report["seconds"]) >= {"load", "export", "find", "rewrite", "check"}


def test_the_report_goes_where_it_is_asked_to(attention: Path, tmp_path: Path) -> None:
    assert run(attention, "-o", tmp_path / "out.onnx", "--report", tmp_path / "reports") == 0
    assert (tmp_path / "reports" / "report.json").is_file()
    assert not (tmp_path / "report.json").exists()


def test_a_dry_run_shows_the_table_and_writes_nothing(attention: Path, tmp_path: Path, capsys) -> None:
    before = sorted(tmp_path.iterdir())
    assert run(attention, "--dry-run") == 0
    assert sorted(tmp_path.iterdir()) == before
    assert "1 fused, 0 refused" in capsys.readouterr().out


def test_a_second_run_on_its_own_output_changes_nothing(attention: Path, tmp_path: Path) -> None:
    assert run(attention) == 0
    assert run(tmp_path / "in.flash.onnx", "-o", tmp_path / "again.onnx", "--require-all") == 0
    assert json.loads((tmp_path / "report.json").read_text())["fused"] == 1
    first, second = (onnx.load(tmp_path / name).graph for name in ("in.flash.onnx", "again.onnx"))
    assert [n.op_type for n in first.node] == [n.op_type for n in second.node]


BIASED = (
    small_models.ATTENTION.replace("float[B, 3, T, 16] v)", "float[B, 3, T, 16] v, float[B, 1, S, T] bias)")
    .replace("Softmax <axis = -1> (scaled)", "Softmax <axis = -1> (biased)")
    .replace("  probs =", "  biased = Add (scaled, bias)\n  probs =")
)


@pytest.mark.parametrize("flags", [[], ["--dry-run"], ["--require-all"], ["--no-check"]])
def test_a_model_that_is_fused_already_is_said_to_be_and_nothing_is_written(
    flags: list[str], tmp_path: Path, capsys
) -> None:
    assert run(small_models.write(BIASED, tmp_path / "in.onnx")) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert run(tmp_path / "in.flash.onnx", *flags) == 0
    captured = capsys.readouterr()
    said = captured.out
    assert "warning" not in captured.err  # of the mask either: this file has nothing more to give
    assert "1 fused (1 of them already), 0 refused" in said
    assert "already fused: nothing to do" in said
    assert "bias [B,1,S,T]" in said
    assert not any(word in said for word in ("proven", "unfused", "report"))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("asked", ["-o", "--report"])
def test_a_copy_of_a_fused_model_is_not_called_proven_and_its_source_not_unfused(
    attention: Path, tmp_path: Path, capsys, asked: str
) -> None:
    assert run(attention) == 0
    capsys.readouterr()
    place = tmp_path / ("again.onnx" if asked == "-o" else "reports")
    assert run(tmp_path / "in.flash.onnx", asked, place) == 0
    said = capsys.readouterr().out
    assert "changed  nothing" in said
    assert "proven " not in said
    assert "unfused " not in said
    assert f"source   {tmp_path / 'in.flash.onnx'}" in said
    report = json.loads(((tmp_path if asked == "-o" else place) / "report.json").read_text())
    assert (report["fused"], report["unfused"]) == (1, None)
    copy = onnx.load(report["output"])
    assert copy.graph == onnx.load(tmp_path / "in.flash.onnx").graph


def test_what_is_new_in_a_model_that_is_fused_in_part_is_fused_and_proven(tmp_path: Path, capsys) -> None:
    model = onnx.parser.parse_model(small_models.TWO_ATTENTIONS_ONE_REFUSED)
    del model.graph.output[2]  # the probabilities, which are what stands in the way of the second
    onnx.save(model, tmp_path / "two.onnx")
    assert run(tmp_path / "two.onnx", "--skip", "probs") == 0
    capsys.readouterr()
    assert run(tmp_path / "two.flash.onnx", "-o", tmp_path / "both.onnx", "--require-all") == 0
    said = capsys.readouterr().out
    assert "2 fused (1 of them already), 0 refused" in said
    assert "proven " in said
    assert "(the source itself; 1 of its attentions fused already)" in said
    nodes = [n.op_type for n in onnx.load(tmp_path / "both.onnx").graph.node]
    assert (nodes.count("FlashAttention"), nodes.count("Softmax")) == (2, 0)


def test_a_refusal_is_a_warning_with_its_reason(one_refused: Path, tmp_path: Path, capsys) -> None:
    assert run(one_refused) == 0
    said = capsys.readouterr()
    assert "probabilities_used" in " ".join(said.out.split())
    assert "warning:" in said.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["fused"], report["refused"]) == (1, 1)
    refused = next(s for s in report["sites"] if s["status"] == "refused")
    assert set(refused["reason"]) == {"code", "text", "node", "action"}


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("opset", [11, 12, 13, 14, 15, 18, 21])
def test_an_attention_of_every_opset_is_fused_and_proven(opset: int, kind: str, tmp_path: Path) -> None:
    text = small_models.ATTENTION.replace('"" : 18', f'"" : {opset}')
    if kind == "float16":
        text = text.replace("float[", "float16[").replace("float scale = {0.25}", "float16 scale = {13312}")
    model = small_models.write(text, tmp_path / "in.onnx")
    assert run(model, "--require-all") == 0
    checked = json.loads((tmp_path / "report.json").read_text())["check"]
    assert {r["reference"] for r in checked["runs"]} == {"float64"}


def test_a_model_that_no_runtime_opens_cannot_be_proven_and_is_no_bug_of_ours(tmp_path: Path, capsys) -> None:
    text = small_models.ATTENTION.replace('"" : 18]', '"" : 18, "my.ops" : 1]')
    text = text.replace("out = MatMul (probs, v)", "context = MatMul (probs, v)\n  out = my.ops.Foo (context)")
    onnx.save(onnx.parser.parse_model(text), tmp_path / "custom.onnx")
    assert run(tmp_path / "custom.onnx") == 4
    said = capsys.readouterr().err
    assert "the unfused model itself does not run here" in said
    assert "my.ops" in said
    assert "--no-check" in said
    assert not (tmp_path / "custom.flash.onnx").exists()
    assert run(tmp_path / "custom.onnx", "--no-check") == 0


ONE_KEY = np.ones((1, 3, 1, 16), np.float32)


def test_an_attention_that_the_inputs_cannot_prove_is_left_alone_with_its_reason(
    attention: Path, tmp_path: Path, capsys
) -> None:
    """One key: softmax is 1 whatever the scale."""
    np.savez(tmp_path / "one_key.npz", q=np.ones((1, 3, 5, 16), np.float32), k=ONE_KEY, v=ONE_KEY)
    assert run(attention, "--values", tmp_path / "one_key.npz") == 0
    said = capsys.readouterr()
    assert "1 attention(s) could not be proven" in said.err
    assert "not_proven" in said.out
    (site,) = json.loads((tmp_path / "report.json").read_text())["sites"]
    assert (site["status"], site["reason"]["code"]) == ("refused", "not_proven")
    assert "--values" in site["reason"]["action"]
    assert [n.op_type for n in onnx.load(tmp_path / "in.flash.onnx").graph.node].count("Softmax") == 1


def test_an_unproven_attention_fails_under_require_all_and_is_written_under_no_check(
    attention: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "one_key.npz", q=np.ones((1, 3, 5, 16), np.float32), k=ONE_KEY, v=ONE_KEY)
    assert run(attention, "--values", tmp_path / "one_key.npz", "--require-all") == 4
    assert not (tmp_path / "in.flash.onnx").exists()
    assert run(attention, "--no-check") == 0
    assert [n.op_type for n in onnx.load(tmp_path / "in.flash.onnx").graph.node] == ["FlashAttention"]


def test_require_all_fails_on_a_refusal_and_writes_nothing(one_refused: Path, tmp_path: Path) -> None:
    assert run(one_refused, "--require-all") == 4
    assert not (tmp_path / "two.flash.onnx").exists()


def test_a_skipped_site_stays_as_it_was(attention: Path, tmp_path: Path) -> None:
    assert run(attention) == 0
    name = json.loads((tmp_path / "report.json").read_text())["sites"][0]["name"]
    assert run(attention, "-o", tmp_path / "kept.onnx", "--skip", name) == 0
    kinds = [n.op_type for n in onnx.load(tmp_path / "kept.onnx").graph.node]
    assert "Softmax" in kinds
    assert "FlashAttention" not in kinds


def test_a_skip_that_names_nothing_lists_the_sites(attention: Path, capsys) -> None:
    assert run(attention, "--skip", "nowhere") == 2
    assert "--dry-run" in capsys.readouterr().err


def test_a_model_without_attention_is_4_and_0_when_allowed(tmp_path: Path) -> None:
    model = small_models.write(small_models.CLASSIFIER, tmp_path / "classifier.onnx")
    assert run(model) == 4
    assert not (tmp_path / "classifier.flash.onnx").exists()
    assert run(model, "--allow-none") == 0
    assert (tmp_path / "classifier.flash.onnx").is_file()


def test_no_fallback_leaves_the_function_bodies_out(attention: Path, tmp_path: Path) -> None:
    assert run(attention, "-o", tmp_path / "with.onnx") == 0
    assert run(attention, "-o", tmp_path / "without.onnx", "--no-fallback") == 0
    assert len(onnx.load(tmp_path / "with.onnx").functions) == 1
    assert len(onnx.load(tmp_path / "without.onnx").functions) == 0


def test_no_check_says_that_nothing_was_proven(attention: Path, tmp_path: Path, capsys) -> None:
    assert run(attention, "--no-check") == 0
    assert "not proven" in capsys.readouterr().err
    assert json.loads((tmp_path / "report.json").read_text())["check"] is None


def test_the_users_own_values_are_what_is_compared(attention: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"q": (1, 3, 5, 16), "k": (1, 3, 7, 16), "v": (1, 3, 7, 16)}
    np.savez(tmp_path / "v.npz", **{n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()})
    assert run(attention, "--values", tmp_path / "v.npz") == 0
    np.savez(tmp_path / "wrong.npz", q=np.zeros((1, 3, 5, 16), np.float32))
    assert run(attention, "--values", tmp_path / "wrong.npz") == 2


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_silences_the_steps_and_not_the_result(attention: Path, quiet: bool, capsys) -> None:
    assert run(attention, *(["--quiet"] if quiet else [])) == 0
    said = capsys.readouterr()
    assert "fused" in said.out
    assert ("rewrite" in said.err) is not quiet


def _state_dict(path: Path) -> Path:
    torch.save({"weight": torch.zeros(2, 2)}, path)
    return path


def _truncated_zip(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 4096)
    path.write_bytes(path.read_bytes()[:1000])
    return path


def _text(path: Path) -> Path:
    path.write_text("this is no model\n")
    return path


def _empty(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ((), ["1/6 load", "2/6 export", "3/6 find", "4/6 rewrite", "5/6 check", "6/6 save"]),
        (("--no-check",), ["1/5 load", "2/5 export", "3/5 find", "4/5 rewrite", "5/5 save"]),
        (("--dry-run",), ["1/3 load", "2/3 export", "3/3 find"]),
    ],
    ids=["all", "no check", "dry run"],
)
def test_each_step_is_counted_of_those_that_the_run_has(
    flags: tuple[str, ...], steps: list[str], attention: Path, capsys
) -> None:
    assert run(attention, *flags) == 0
    lines = [line.split() for line in capsys.readouterr().err.splitlines() if "/" in line.split()[0]]
    assert [" ".join(words[:2]) for words in lines] == steps


@pytest.mark.parametrize("make", [lambda path: path, _empty, _text, _truncated_zip, _state_dict])
def test_an_unreadable_source_is_usage(make, tmp_path: Path, capsys) -> None:
    assert run(make(tmp_path / "model.pt")) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert all(part in said for part in ("where", "got", "need", "do"))
    assert not list(tmp_path.glob("*.onnx"))


def test_an_output_whose_parent_is_a_file_is_usage(attention: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run(attention, "-o", tmp_path / "file" / "out.onnx") == 2


def test_an_output_over_the_source_is_usage(attention: Path) -> None:
    before = attention.read_bytes()
    assert run(attention, "-o", attention) == 2
    assert attention.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "lost"),
    [
        (["-o", "w.data"], "w.data"),
        (["-o", "deeper/../w.data"], "w.data"),
        (["-o", "values.npz", "--values", "values.npz"], "values.npz"),
        (["-o", "new.onnx", "--report", "reports"], "reports/report.json"),
        (["-o", "new.onnx", "--report", "reports"], "reports/report.html"),
    ],
)
def test_no_output_replaces_a_file_that_is_read(
    attention: Path, tmp_path: Path, monkeypatch, capsys, arguments: list[str], lost: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("deeper", "reports"):
        Path(folder).mkdir()
    model = onnx.load(attention)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(2000, np.float32), "unused"))
    onnx.save_model(model, attention, save_as_external_data=True, location="w.data", size_threshold=1000)
    np.savez("values.npz", **{v.name: np.ones((1, 4, 3, 8), np.float32) for v in model.graph.input})
    if lost.startswith("reports"):
        Path("w.data").rename(lost)
        model = onnx.load(attention, load_external_data=False)
        model.graph.initializer[-1].external_data[0].value = lost
        attention.write_bytes(model.SerializeToString())
    before = Path(lost).read_bytes()
    assert run(attention, *arguments) == 2
    assert f"where {arguments[1] if lost[0] != 'r' else lost}" in capsys.readouterr().err
    assert Path(lost).read_bytes() == before


@pytest.mark.parametrize("name", ["out.onnx", "report.json", "report.html"])
def test_nothing_is_renamed_over_a_pipe_or_device(attention: Path, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert run(attention, "-o", tmp_path / "out.onnx") == 2
    assert (tmp_path / name).is_fifo()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--input", "x:float99:2"],
        ["--input", "x"],
        ["--dtype", "int8"],
        ["--no-such-flag"],
        ["--opset", "eighteen"],
        [],
    ],
)
def test_a_wrong_flag_is_usage(attention: Path, arguments: list[str]) -> None:
    assert run(*([attention, *arguments] if arguments else [])) == 2


def test_an_error_of_our_own_asks_for_a_report(attention: Path, monkeypatch, capsys) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AssertionError("seeded")

    monkeypatch.setattr("flash_export.pipeline.find", broken)
    assert run(attention) == 70
    assert "please report" in capsys.readouterr().err


def test_an_interrupt_is_no_crash(attention: Path, tmp_path: Path, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flash_export.pipeline.rewrite", interrupted)
    assert run(attention) == 130
    assert not (tmp_path / "in.flash.onnx").exists()


def test_help_teaches_by_example(capsys) -> None:
    assert run("--help") == 0
    said = capsys.readouterr().out
    for flag in ("--model", "--input", "--require-all", "--trust-pickle", "--values", "--no-fallback"):
        assert flag in said
    assert "flash-export model.pt2" in said
    assert "130 interrupted" in " ".join(said.split())
    assert "<bool>" not in said


def test_the_end_says_what_was_proven_and_where_the_files_are(attention: Path, tmp_path: Path, capsys) -> None:
    assert run(attention, "-o", tmp_path / "out.onnx") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.strip().splitlines()[-4:])
    assert list(lines) == ["proven", "fused", "unfused", "report"]
    assert "allowed" in lines["proven"]
    assert lines["fused"] == str(tmp_path / "out.onnx")
    assert lines["unfused"].startswith(str(attention))
    assert "the source itself" in lines["unfused"]


def test_a_model_of_which_nothing_was_fused_is_said_to_be_unchanged(attention: Path, tmp_path: Path, capsys) -> None:
    assert run(attention, "--dry-run") == 0
    assert run(attention, "-o", tmp_path / "out.onnx", "--skip", "probs") == 0
    said = capsys.readouterr()
    assert "no attention was fused" in said.out
    assert "proven " not in said.out


def test_a_reason_that_many_sites_share_is_told_once(tmp_path: Path, capsys) -> None:
    model = small_models.write(small_models.TWO_ATTENTIONS_ONE_REFUSED, tmp_path / "two.onnx")
    assert run(model, "--skip", "probs") == 0
    out = capsys.readouterr().out
    assert out.count("left alone by --skip") == 1
    assert "skipped (1 x)" in out


def test_a_bias_of_queries_by_keys_is_warned_of(tmp_path: Path, capsys) -> None:
    assert run(small_models.write(BIASED, tmp_path / "biased.onnx")) == 0
    assert "S x S" in capsys.readouterr().err


def test_names_in_a_file_do_not_steer_the_terminal(tmp_path: Path, capsys) -> None:
    model = onnx.parser.parse_model(small_models.TWO_ATTENTIONS_ONE_REFUSED)
    for node in model.graph.node:
        node.name = f"a\x1b[2J\x07\nb[red]{node.output[0]}"
    onnx.save(model, tmp_path / "steers.onnx")
    assert run(tmp_path / "steers.onnx") == 0
    assert run(tmp_path / "steers.onnx", "--require-all") == 4
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert not {"\x1b", "\x07"} & set(text)
        assert "\\x1b[2J" in text
    assert "b[red]" in said.out


BFLOAT16_WHERE = """<ir_version: 8, opset_import: ["" : 13]>
g (bfloat16[b, 4, s, 16] q, bfloat16[b, 4, t, 16] k, bfloat16[b, 4, t, 16] v, bool[b, 1, 1, t] m)
  => (bfloat16[b, 4, s, 16] y) {
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  scores = MatMul (q, kt)
  zero = Constant <value = float {0.0}> ()
  lowest = Log (zero)
  hidden = Cast <to = 16> (lowest)
  masked = Where (m, scores, hidden)
  probs = Softmax <axis = -1> (masked)
  y = MatMul (probs, v)
}"""


def test_what_a_library_finds_odd_in_a_file_is_not_printed_with_its_stack(tmp_path: Path) -> None:
    """At opset 13 Where takes no bfloat16; onnx's shape inference says so with a traceback, and exporters write it."""
    onnx.save(onnx.parser.parse_model(BFLOAT16_WHERE), tmp_path / "old.onnx")
    command = [sys.executable, "-m", "flash_export", str(tmp_path / "old.onnx"), "--require-all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "proven" in done.stdout


def test_a_language_model_of_transformers_behind_model_keeps_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default such a model returns its cache, which is no tensor."""
    (tmp_path / "tiny_gpt2.py").write_text(
        "from transformers import GPT2Config, GPT2Model\n\n\n"
        "def build():\n    return GPT2Model(GPT2Config(n_embd=24, n_layer=1, n_head=3, vocab_size=71))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import tiny_gpt2  # type: ignore[import-not-found]

    torch.save(tiny_gpt2.build().state_dict(), tmp_path / "w.pt")
    specs = [f"--input={name}:int64:batch,seq=1..64" for name in ("input_ids", "attention_mask")]
    assert run(tmp_path / "w.pt", "--model", "tiny_gpt2:build", *specs, "--require-all") == 0
    (site,) = json.loads((tmp_path / "report.json").read_text())["sites"]
    assert (site["causal"], site["bias"]) == ("top_left", ["batch", 1, 1, "seq"])
