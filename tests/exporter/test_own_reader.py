# SPDX-License-Identifier: Apache-2.0
"""A reader of the user's own that fails is told of as such, with five parts; one of ours that fails is our bug."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from exporter.own_modules import forgotten
from exporter.test_cli import run

from flash_export.bands import Band
from flash_export.canonical import Attention, NoAnchor, NotAttention, Refused
from flash_export.errors import EXIT_INTERNAL, UnsupportedModel, UsageError
from flash_export.find import find
from flash_export.patterns import PATTERNS
from flash_export.patterns.operator import Operator, attention_of
from flash_export.region import Region
from flash_export.rewrite import rewrite
from flash_export.sites import Site

MODEL = """<ir_version: 9, opset_import: ["" : 18, "acme" : 1]>
main (float[2, 3, S, 8] q, float[2, 3, T, 8] k, float[2, 3, T, 8] v) => (float[2, 3, S, 8] out) {
    [the_node] out = acme.Plain (q, k, v)
}
<domain: "acme", opset_import: ["" : 18]>
Plain (q, k, v) => (out) {
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    products = MatMul (q, kt)
    scale = Constant <value_float = 0.35355339> ()
    scores = Mul (products, scale)
    probs = Softmax <axis = -1> (scores)
    out = MatMul (probs, v)
}"""
PLAIN = ("acme", "Plain")


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder of its own, and no reader or module that stays."""
    monkeypatch.chdir(tmp_path)
    with forgotten():
        yield


def _model() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(MODEL)
    proto.graph.node[0].name = "the_node"
    return proto


def _sites(reader: Callable[[ir.Node, Region], Attention]) -> list[Site]:
    PATTERNS[PLAIN] = reader
    model = ir.from_proto(_model())
    sites = find(model)
    rewrite(model, sites)
    onnx.checker.check_model(ir.to_proto(model))
    return sites


def _operator(anchor: ir.Node) -> Operator:
    query, key, value = anchor.inputs
    assert query is not None and key is not None and value is not None  # noqa: PT018 - the schema has no optional input
    return Operator(query, key, value, 3, 3)


def _read(anchor: ir.Node, region: Region) -> Attention:
    return attention_of(anchor, _operator(anchor), region)


BROKEN = {
    "raises": ("def read(anchor, region):\n    return 1 / 0", "ZeroDivisionError: division by zero, raised at "),
    "ends": ("def read(anchor, region):\n    raise SystemExit(0)", "SystemExit: 0, raised at "),
    "asserts": ("def read(anchor, region):\n    assert anchor is None", "AssertionError: , raised at "),
    "recurs": ("def read(anchor, region):\n    return read(anchor, region)", "RecursionError: maximum"),
    "nothing": ("def read(anchor, region):\n    pass", "None, a NoneType"),
    "text": ("def read(anchor, region):\n    return 'x'", "'x', a str"),
    "one argument": ("def read(anchor):\n    pass", "TypeError: read() takes 1 positional argument"),
    "no function": ("class read:\n    def __init__(self, anchor): ...", "TypeError: "),
    "a reason that is none": (
        "from flash_export.canonical import Refused\n"
        "def read(anchor, region):\n    raise Refused(1, None, anchor, 'x')",
        "Refused(1, None, 'the_node', 'x')",
    ),
    "ours, misused": (
        "from flash_export.patterns.operator import attention_of\n"
        "def read(anchor, region):\n    return attention_of(anchor, None, region)",
        "AttributeError: 'NoneType' object has no attribute 'query', raised at ",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_reader_that_breaks_ends_the_command_as_usage_and_is_named(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, got = BROKEN[name]
    Path("broken.py").write_text(
        f"from flash_export.patterns import PATTERNS\n{text}\nPATTERNS['acme', 'Plain'] = read\n"
    )
    onnx.save(_model(), "m.onnx")
    assert run("m.onnx", "--pattern", "broken") == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert f"  got   {got}" in told
    where = next(line for line in told.splitlines() if line.startswith("  where "))
    assert "broken.read" in where
    assert "node the_node (acme::Plain)" in where
    if "raised at" in got:
        assert f"raised at {Path.cwd() / 'broken.py'}:" in told
    assert not Path("m.flash.onnx").exists()


def _mistake(reader: Callable[[ir.Node, Region], Attention]) -> UsageError | None:
    """What is said of the reader; None where the node is fused or refused."""
    try:
        sites = _sites(reader)
    except UsageError as error:
        return error
    assert len(sites) == 1
    return None


class Odd:
    """What no field takes."""

    def __repr__(self) -> str:
        return "Odd"


JUNK = (None, "x", -1, 0.5, [], (), [None], [3], (("a", "b"),), [("a", "b")], {}, Odd(), Band(0.5, "b", False, True))  # type: ignore[arg-type]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Attention)])
def test_a_field_that_is_filled_wrongly_is_never_our_bug(field: str, junk: object) -> None:
    def read(anchor: ir.Node, region: Region) -> Attention:
        attention = _read(anchor, region)
        setattr(attention, field, junk)
        return attention

    error = _mistake(read)
    if error is not None:
        assert f"{__name__}.test_a_field" in error.where
        assert field in error.got or "cannot be planned" in error.what


@pytest.mark.parametrize("junk", JUNK, ids=repr)
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Operator)])
def test_a_part_that_is_filled_wrongly_is_never_our_bug(field: str, junk: object) -> None:
    def read(anchor: ir.Node, region: Region) -> Attention:
        return attention_of(anchor, dataclasses.replace(_operator(anchor), **{field: junk}), region)  # type: ignore[arg-type]

    error = _mistake(read)
    assert error is None or f"{__name__}.test_a_part" in error.where


@pytest.mark.parametrize("scale", [1, np.float32(0.5), np.float64(0.5), True])
def test_a_number_may_be_of_any_type(scale: float) -> None:
    def read(anchor: ir.Node, region: Region) -> Attention:
        return attention_of(anchor, dataclasses.replace(_operator(anchor), scale=scale, softcap=scale), region)

    (site,) = _sites(read)
    assert site.attributes is not None
    assert (site.attributes.scale, site.attributes.softcap) == (float(scale), float(scale))


@pytest.mark.parametrize("reader", [_read, functools.partial(_read)])
def test_one_that_is_right_is_fused(reader: Callable[[ir.Node, Region], Attention]) -> None:
    assert [site.status for site in _sites(reader)] == ["fused"]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (Refused("own_code", "a text", None, "do that"), ["refused"]),
        (NotAttention(), ["not_attention"]),
        (NoAnchor(), []),
    ],
)
def test_what_a_reader_may_raise_is_what_becomes_of_the_node(raised: Exception, expected: list[str]) -> None:
    def read(anchor: ir.Node, region: Region) -> Attention:
        raise raised

    assert [site.status for site in _sites(read)] == expected


@pytest.mark.parametrize("raised", [UnsupportedModel("w", where="", got="", need="", do=""), KeyboardInterrupt()])
def test_an_error_of_five_parts_and_an_interrupt_come_through(raised: BaseException) -> None:
    def read(anchor: ir.Node, region: Region) -> Attention:
        raise raised

    with pytest.raises(type(raised)):
        _sites(read)


def test_a_reader_of_ours_that_fails_is_our_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(anchor: ir.Node, region: Region) -> Attention:
        raise ZeroDivisionError

    monkeypatch.setattr(read, "__module__", "flash_export.patterns.softmax")
    monkeypatch.setitem(PATTERNS, PLAIN, read)
    onnx.save(_model(), "m.onnx")
    assert run("m.onnx") == EXIT_INTERNAL
    assert "ZeroDivisionError" in capsys.readouterr().err
