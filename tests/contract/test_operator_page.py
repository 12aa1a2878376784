# SPDX-License-Identifier: Apache-2.0
"""docs/op.md, plugin/op.h and flash_export/op.py say the same; what differs is named."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

from contract import emulated_library
from contract.reference import visible_keys
from flash_export import op


@pytest.fixture(scope="module")
def page(repo_root: Path) -> str:
    """docs/op.md."""
    return (repo_root / "docs" / "op.md").read_text()


@pytest.fixture(scope="module")
def header(repo_root: Path) -> str:
    """plugin/op.h without comments and line continuations."""
    text = (repo_root / "plugin" / "op.h").read_text()
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S).replace("\\\n", " ")


def rows_of(page: str, section: str) -> list[list[str]]:
    """The cells of the first table of a section, without its head; code marks removed."""
    body = page.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]


def macro(header: str, name: str) -> list[list[str]]:
    """The rows X(...) of one X-macro of op.h."""
    body = re.search(rf"#define {name}\(X\)(.*)", header)
    assert body, f"plugin/op.h has no {name}"
    return [[cell.strip() for cell in row.split(",")] for row in re.findall(r"\bX\(([^)]*)\)", body[1])]


def test_names_and_arities_agree(page: str, header: str) -> None:
    in_python = {name: (list(o.inputs), list(o.outputs)) for name, o in op.ATTENTION_OPERATORS.items()}
    in_page = {r[0]: (r[1].split(", "), r[2].split(", ")) for r in rows_of(page, "Names")}
    assert in_page == in_python, "docs/op.md, section Names, against ATTENTION_OPERATORS of op.py"
    counts = {name: (len(inputs), len(outputs)) for name, (inputs, outputs) in in_python.items()}
    in_header = {r[0]: (int(r[1]), int(r[2])) for r in macro(header, "FLASH_ATTENTION_OPERATORS")}
    assert in_header == counts, "FLASH_ATTENTION_OPERATORS of plugin/op.h against ATTENTION_OPERATORS of op.py"


def test_the_cache_forms_agree(page: str, header: str) -> None:
    tables = rows_of(page, "The cache forms")
    plain, paged = tables[:2]
    inputs, outputs = plain[1].split(", "), plain[2].split(", ")
    assert paged[1:] == ["the same, then page_table", "the same"]
    in_page = {plain[0]: (inputs, outputs), paged[0]: ([*inputs, "page_table"], outputs)}
    in_python = {name: (list(o.inputs), list(o.outputs)) for name, o in op.CACHE_OPERATORS.items()}
    assert in_page == in_python, "docs/op.md, section The cache forms, against CACHE_OPERATORS of op.py"
    counts = {name: (len(i), len(o)) for name, (i, o) in in_python.items()}
    in_header = {r[0]: (int(r[1]), int(r[2])) for r in macro(header, "FLASH_ATTENTION_CACHE_OPERATORS")}
    assert in_header == counts, "FLASH_ATTENTION_CACHE_OPERATORS of plugin/op.h against CACHE_OPERATORS of op.py"
    described = {name for row in tables for name in row[0].split(", ")}
    of_their_own = {name for i, o in in_python.values() for name in [*i, *o]} - set(op.FLASH_ATTENTION_EX.inputs)
    assert of_their_own - set(op.FLASH_ATTENTION_EX.outputs) <= described


def test_int_attributes_and_their_ranges_agree(page: str, header: str) -> None:
    in_page = {r[0]: (int(r[2]), int(r[3])) for r in rows_of(page, "Attributes") if r[1] == "INT"}
    assert in_page == op.INT_ATTRIBUTES, "docs/op.md, section Attributes, against INT_ATTRIBUTES of op.py"
    in_header = {r[0]: (int(r[1]), int(r[2])) for r in macro(header, "FLASH_ATTENTION_INT_ATTRIBUTES")}
    assert in_header == op.INT_ATTRIBUTES, "FLASH_ATTENTION_INT_ATTRIBUTES of plugin/op.h against op.py"


def test_float_attributes_and_their_ranges_agree(page: str, header: str) -> None:
    in_page = {r[0]: (float(r[2]), float(r[3])) for r in rows_of(page, "Attributes") if r[1] == "FLOAT"}
    assert in_page == op.FLOAT_ATTRIBUTES, "docs/op.md, section Attributes, against FLOAT_ATTRIBUTES of op.py"
    rows = macro(header, "FLASH_ATTENTION_FLOAT_ATTRIBUTES")
    in_header = {r[0]: (float(r[1].rstrip("f")), float(r[2].rstrip("f"))) for r in rows}
    assert in_header == op.FLOAT_ATTRIBUTES, "FLASH_ATTENTION_FLOAT_ATTRIBUTES of plugin/op.h against op.py"


def test_namespace_and_version_agree(page: str, header: str) -> None:
    assert f'kNamespace = "{op.DOMAIN}"' in header
    assert f'kVersion = "{op.VERSION}"' in header
    assert f"Domain and plugin namespace `{op.DOMAIN}`, version `{op.VERSION}`" in page
    for name, value in op.STRING_ATTRIBUTES.items():
        assert f"`{name}` = `{value}`" in page
    assert [r[0] for r in rows_of(page, "Versions")] == [str(v) for v in range(1, op.VERSION + 1)]


def test_the_page_describes_every_tensor(page: str) -> None:
    described = [r[0] for r in rows_of(page, "Inputs and outputs")]
    named = {name for o in op.ATTENTION_OPERATORS.values() for name in o.inputs + o.outputs}
    assert sorted(described) == sorted(named)
    side_inputs = [r[0] for r in rows_of(page, "Side inputs and their neutral constants")]
    assert side_inputs == list(op.FLASH_ATTENTION_EX.inputs[3:])


def test_the_cache_forms_have_the_kernels_pages(page: str, repo_root: Path) -> None:
    geometry = (repo_root / "plugin" / "kernels" / "geometry.h").read_text()
    smallest, largest = (int(n) for n in re.findall(r"k(?:Smallest|Largest)Page = (\d+);", geometry))
    sizes = [smallest << i for i in range(10) if smallest << i <= largest]
    assert "`T` is " + ", ".join(map(str, sizes[:-1])) + f" or {sizes[-1]}." in page


def test_the_drawn_masks_are_the_references(page: str) -> None:
    drawn = re.findall(r"^\| (top-left|bottom-right|window) \|.*\n\|[-|]*\n((?:\| q.*\n)+)", page, flags=re.M)
    assert len(drawn) == 5
    for kind, rows in drawn:
        mask = np.array([[cell.strip() == "■" for cell in row.strip("|").split("|")[1:]] for row in rows.splitlines()])
        options = {"top-left": {"causal": 1}, "bottom-right": {"causal": 1, "diagonal": 1}}
        window = {"diagonal": 1, "window_left": 1, "window_right": 0}
        seqlen_q, seqlen_kv = mask.shape
        lengths = np.array([seqlen_kv])
        expected = visible_keys(seqlen_q, seqlen_kv, lengths, **options.get(kind, window))[0, 0]
        np.testing.assert_array_equal(mask, expected, err_msg=f"{kind}, Sq {seqlen_q}, Skv {seqlen_kv}")


def test_the_ctypes_struct_mirrors_the_kernels_header(repo_root: Path) -> None:
    text = (repo_root / "plugin" / "kernels" / "flash_attention.h").read_text()
    for struct in (emulated_library.FlashTensor, emulated_library.FlashAttentionArgs, emulated_library.FlashAppendArgs):
        body = re.search(rf"struct {struct.__name__} {{(.*?)\n}};", text, flags=re.S)
        assert body
        code = re.sub(r"//[^\n]*", "", body[1])
        declared = [
            (name, _ctype(kind, count))
            for kind, names in re.findall(r"([\w ]+?[ *]+)((?:\w+(?:\[\d+\])?(?:, )?)+);", code)
            for name, count in re.findall(r"(\w+)(?:\[(\d+)\])?", names)
        ]
        assert declared == list(struct._fields_), struct.__name__


def _ctype(kind: str, count: str) -> type:
    """The ctypes type of a C member."""
    if "*" in kind:
        return ctypes.c_void_p
    names = {
        "int32_t": ctypes.c_int32,
        "int64_t": ctypes.c_int64,
        "float": ctypes.c_float,
        "FlashTensor": emulated_library.FlashTensor,
    }
    single = names[kind.strip()]
    return single * int(count) if count else single
