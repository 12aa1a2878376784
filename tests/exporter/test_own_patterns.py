# SPDX-License-Identifier: Apache-2.0
"""``--pattern PKG.MOD``: a reader of the user's own operator, from the command; never believed, never implied."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from exporter.own_modules import forgotten
from exporter.test_cli import run

from flash_export import own_patterns
from flash_export.bands import Band
from flash_export.errors import UsageError
from flash_export.patterns import PATTERNS
from flash_export.patterns.operator import Operator


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder of its own, after which nothing is known of what was imported from it."""
    monkeypatch.chdir(tmp_path)
    with forgotten():
        yield


def _sample(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model of the sample, in the working folder, and its pattern as a module of a package there."""
    folder = repo_root / "samples" / "05_own_pattern"
    monkeypatch.syspath_prepend(str(folder))
    import own_pattern  # type: ignore[import-not-found]

    Path("mine").mkdir()
    Path("mine/__init__.py").touch()
    Path("mine/tempered.py").write_text((folder / "tempered_attention.py").read_text())
    written: Path = own_pattern.write_model(Path("model.onnx"))
    return written


def test_the_command_fuses_with_it_and_not_without(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _sample(repo_root, monkeypatch)
    command = [sys.executable, "-m", "flash_export", str(model), "--require-all"]
    without = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert without.returncode == 4
    with_it = [*command, "--pattern", "mine.tempered"]
    done = subprocess.run(with_it, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("report.json").read_text())["fused"] == 1


def test_one_that_reads_wrongly_is_caught(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _sample(repo_root, monkeypatch)
    text = Path("mine/tempered.py").read_text()
    Path("mine/wrong.py").write_text(text.replace('float_of(anchor, "temperature", 1.0)', "1.0"))
    assert run(model, "--pattern", "mine.wrong") == 1
    assert not Path("model.flash.onnx").exists()


@pytest.mark.parametrize(
    ("name", "text", "got"),
    [
        ("my-pattern", None, "'my-pattern'"),
        ("mine.py:read", None, "'mine.py:read'"),
        ("nowhere", None, "No module named 'nowhere'"),
        ("breaks", "raise SystemExit(3)", "SystemExit"),
        ("idle", "def read(anchor, region): ...", "registers nothing"),
        ("odd", "from flash_export.patterns import PATTERNS\nPATTERNS['acme', 'A'] = 3", "PATTERNS[('acme', 'A')] = 3"),
        ("alone", "from flash_export.patterns import PATTERNS\nPATTERNS['A'] = print", "PATTERNS['A']"),
    ],
)
def test_what_is_no_pattern_is_usage_with_five_parts(name: str, text: str | None, got: str) -> None:
    if text is not None:
        Path(f"{name}.py").write_text(text)
    before = dict(PATTERNS)
    with pytest.raises(UsageError) as caught:
        own_patterns.register([name])
    error = caught.value
    assert error.where == f"--pattern {name}"
    assert got in error.got
    assert error.need
    assert error.do
    assert before == PATTERNS


@pytest.mark.parametrize("name", ["os", "json", "builtins", "onnx_ir", "flash_export.patterns", "flash_export.cli"])
def test_a_module_that_is_loaded_already_and_reads_nothing_is_refused(name: str) -> None:
    importlib.import_module(name)
    loaded = set(sys.modules)
    with pytest.raises(UsageError) as caught:
        own_patterns.register([name])
    assert "registers nothing, " in caught.value.got
    assert loaded <= set(sys.modules)


_TAKE = "from flash_export.patterns import PATTERNS\n"


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("PATTERNS['acme', 'A'] = print\nraise RuntimeError('later')", "RuntimeError: later"),
        ("PATTERNS['acme', 'A'] = print\nPATTERNS['acme', 'B'] = 3", "PATTERNS[('acme', 'B')] = 3"),
        ("", "registers nothing"),
        ("PATTERNS.clear()\nPATTERNS['acme', 'A'] = print", "readers out"),
        ("del PATTERNS['', 'Softmax']\nPATTERNS['acme', 'A'] = print", "1 readers out, e.g. of ('', 'Softmax')"),
    ],
)
def test_one_that_is_refused_leaves_nothing_and_is_refused_again(text: str, got: str) -> None:
    Path("pkg").mkdir()
    Path("pkg/__init__.py").touch()
    Path("pkg/bad.py").write_text(_TAKE + text)
    before = list(PATTERNS.items())
    for _ in range(2):
        with pytest.raises(UsageError) as caught:
            own_patterns.register(["pkg.bad"])
        assert got in caught.value.got
        assert list(PATTERNS.items()) == before


def test_one_that_is_mended_is_read_anew_with_its_package() -> None:
    Path("pkg").mkdir()
    Path("pkg/__init__.py").write_text(_TAKE + "PATTERNS['acme', 'Outer'] = print")
    Path("pkg/bad.py").write_text("raise RuntimeError")
    with pytest.raises(UsageError):
        own_patterns.register(["pkg.bad"])
    Path("pkg/bad.py").write_text(_TAKE + "PATTERNS['acme', 'Inner'] = print")
    own_patterns.register(["pkg.bad"])
    assert {("acme", "Outer"), ("acme", "Inner")} <= PATTERNS.keys()


def test_an_interrupt_leaves_nothing() -> None:
    Path("slow.py").write_text(_TAKE + "PATTERNS['acme', 'A'] = print\nraise KeyboardInterrupt")
    before = dict(PATTERNS)
    with pytest.raises(KeyboardInterrupt):
        own_patterns.register(["slow"])
    assert before == PATTERNS


@pytest.mark.parametrize("reader", ["read", "functools.partial(read)", "Read()", "Read().__call__"])
def test_what_a_program_imported_itself_is_known_by_its_readers(reader: str) -> None:
    Path("own").mkdir()
    Path("own/__init__.py").write_text("from own import readers")
    Path("own/readers.py").write_text(
        f"import functools\n{_TAKE}def read(anchor, region): ...\nclass Read:\n"
        f"    def __call__(self, anchor, region): ...\nPATTERNS['acme', 'A'] = {reader}"
    )
    sys.path.insert(0, str(Path.cwd()))
    importlib.import_module("own")
    own_patterns.register(["own", "own.readers"])


def test_several_are_taken_and_one_may_be_known_already() -> None:
    for name in ("one", "two"):
        Path(f"{name}.py").write_text(f"from flash_export.patterns import PATTERNS\nPATTERNS['acme', '{name}'] = print")
    own_patterns.register(["one", "two"])
    own_patterns.register(["two"])
    assert {("acme", "one"), ("acme", "two")} <= PATTERNS.keys()


PADDED = """<ir_version: 9, opset_import: ["" : 18, "acme" : 1]>
main (float[2, 3, S, 8] q, float[2, 3, 7, 8] k, float[2, 3, 7, 8] v, int64[2] hidden) => (float[2, 3, S, 8] out) {
    out = acme.Padded (q, k, v, hidden)
}
<domain: "acme", opset_import: ["" : 18]>
Padded (q, k, v, hidden) => (out) {
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    products = MatMul (q, kt)
    scale = Constant <value_float = 0.35355339> ()
    scores = Mul (products, scale)
    axes = Constant <value_ints = [1, 2, 3]> ()
    counts = Unsqueeze (hidden, axes)
    keys = Constant <value_ints = [0, 1, 2, 3, 4, 5, 6]> ()
    gone = Less (keys, counts)
    zero = Constant <value_float = 0.0> ()
    low = Log (zero)
    masked = Where (gone, low, scores)
    probs = Softmax <axis = -1> (masked)
    out = MatMul (probs, v)
}"""


def test_the_page_s_pattern_with_a_mask_that_it_drafts_is_fused(repo_root: Path) -> None:
    """The lines of docs/api.md as they stand there, around a whole reader."""
    page = (repo_root / "docs" / "api.md").read_text()
    lines = page[page.index("drafts, hidden = region.drafts") :].partition("```")[0].splitlines()
    body = "\n".join(f"    {line}" for line in lines)
    Path("padded.py").write_text(
        "import numpy\n"
        "from flash_export.patterns import PATTERNS\n"
        "from flash_export.patterns.operator import Operator, attention_of\n\n\n"
        "def read(anchor, region):\n"
        "    query, key, value = anchor.inputs[:3]\n"
        "    heads, length = (region.shapes.shape(key)[axis].static for axis in (1, 2))\n"
        f"{body}\n"
        "    return attention_of(anchor, operator, region)\n\n\n"
        "PATTERNS['acme', 'Padded'] = read\n"
    )
    Path("m.onnx").write_bytes(onnx.parser.parse_model(PADDED).SerializeToString())
    draw = np.random.default_rng(0).standard_normal
    arrays = {name: draw((2, 3, n, 8)).astype(np.float32) for name, n in {"q": 5, "k": 7, "v": 7}.items()}
    np.savez("v.npz", **arrays, hidden=np.array([0, 3]))
    assert run("m.onnx", "--pattern", "padded", "--require-all", "--values", "v.npz") == 0
    (site,) = json.loads(Path("report.json").read_text())["sites"]
    assert (site["name"], site["operator"], site["bias"]) == ("out", "FlashAttentionEx", [2, 1, 1, 7])


def test_the_page_lists_every_field(repo_root: Path) -> None:
    page = (repo_root / "docs" / "api.md").read_text()
    section = page.partition("## Patterns of your own")[2].partition("\n## ")[0]
    for field in (*dataclasses.fields(Operator), *dataclasses.fields(Band)):
        assert f"`{field.name}`" in section or f"{field.name}" in section.partition("`Band(")[2].partition(")")[0]
