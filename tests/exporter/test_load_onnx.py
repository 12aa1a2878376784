# SPDX-License-Identifier: Apache-2.0
"""An honest ONNX file passes, external data included; a broken one is a usage error before any weight is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest
from security.attacks.graphs import model_with

from flash_export.errors import UnsafeInput, UsageError
from flash_export.load import load
from flash_export.load_onnx import Limits, verify
from flash_export.options import Options


def test_external_data_inside_the_folder_passes(tmp_path: Path) -> None:
    model_with(tmp_path / "a.onnx", location="w.data", offset="0", length="16")
    assert load(Options(source=tmp_path / "a.onnx")).source_kind == "onnx"


def test_external_data_in_a_folder_below_passes(tmp_path: Path) -> None:
    model_with(tmp_path / "a.onnx", location="data/w.data")
    (tmp_path / "data").mkdir()
    (tmp_path / "w.data").rename(tmp_path / "data" / "w.data")
    verify(tmp_path / "a.onnx")


def test_a_model_in_a_folder_that_is_a_link_passes(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    model_with(tmp_path / "link" / "a.onnx", location="w.data")
    verify(tmp_path / "link" / "a.onnx")


@pytest.mark.parametrize(
    ("entries", "got"),
    [
        ({"location": "missing.data"}, "No such file"),
        ({"location": "w.data", "offset": "8", "length": "16"}, "bytes 8 to 24 of 16"),
        ({"location": "w.data", "offset": "4096"}, "of 16"),
        ({"location": "w.data", "length": "12"}, "12 bytes of external data"),
        ({"location": "w.data", "length": "17"}, "bytes 0 to 17 of 16"),
        ({"location": "w.data", "offset": "4"}, "12 bytes of external data"),
    ],
)
def test_broken_external_data_is_a_usage_error(tmp_path: Path, entries: dict[str, str], got: str) -> None:
    model_with(tmp_path / "a.onnx", **entries)
    with pytest.raises(UsageError) as error:
        verify(tmp_path / "a.onnx")
    assert got in error.value.got
    assert "'w'" in error.value.where


def test_external_data_without_a_location_is_refused(tmp_path: Path) -> None:
    model_with(tmp_path / "a.onnx", offset="0")
    with pytest.raises(UnsafeInput):
        verify(tmp_path / "a.onnx")


def test_inline_data_of_another_size_than_its_dims_is_a_usage_error(tmp_path: Path) -> None:
    model_with(tmp_path / "a.onnx", location="w.data")
    model = onnx.load_model(tmp_path / "a.onnx", load_external_data=False)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.zeros(4, np.float32), "w"))
    model.graph.initializer[0].dims[:] = [5]
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UsageError) as error:
        verify(tmp_path / "a.onnx")
    assert (error.value.got, error.value.need) == ("16 bytes of data", "20, as its dims and type say")


T = onnx.TensorProto


@pytest.mark.parametrize(
    ("dtype", "dims", "numbers", "need"),
    [
        (T.FLOAT, [3, 5], 15, 15),
        (T.FLOAT, [], 2, 1),
        (T.INT64, [0, 7], 1, 0),
        (T.FLOAT16, [3], 2, 3),
        (T.COMPLEX64, [3], 6, 6),
        (T.COMPLEX64, [3], 3, 6),
        (T.INT4, [3], 2, 2),
        (T.INT4, [3], 3, 2),
    ],
)
def test_numbers_in_a_typed_field_are_as_many_as_the_dims_say(
    tmp_path: Path, dtype: int, dims: list[int], numbers: int, need: int
) -> None:
    model_with(tmp_path / "a.onnx", location="w.data")
    model = onnx.load_model(tmp_path / "a.onnx", load_external_data=False)
    constant = onnx.TensorProto(name="c", data_type=dtype, dims=dims)
    getattr(constant, onnx.helper.tensor_dtype_to_field(dtype)).extend([1] * numbers)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.zeros(4, np.float32), "w"))
    model.graph.initializer.append(constant)
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    if numbers == need:
        verify(tmp_path / "a.onnx")
        return
    with pytest.raises(UsageError) as error:
        verify(tmp_path / "a.onnx")
    assert (error.value.got, error.value.need) == (f"{numbers} numbers", f"{need}, as its dims and type say")


def test_a_type_that_onnx_has_not_is_a_usage_error(tmp_path: Path) -> None:
    model_with(tmp_path / "a.onnx", location="w.data")
    model = onnx.load_model(tmp_path / "a.onnx", load_external_data=False)
    model.graph.initializer[0].data_type = 99
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(UsageError) as error:
        verify(tmp_path / "a.onnx")
    assert error.value.got == "data type 99"


@pytest.mark.parametrize("place", ["node", "input", "attribute"])
def test_a_name_that_is_no_text_is_a_usage_error(tmp_path: Path, place: str) -> None:
    model = onnx.parser.parse_model(IN_A_FUNCTION)
    message = {
        "node": model.graph.node[0],
        "input": model.graph.input[0],
        "attribute": model.graph.node[0].attribute[0],
    }
    message[place].doc_string = "marker"
    data = model.SerializeToString()
    assert data.count(b"marker") == 1
    (tmp_path / "a.onnx").write_bytes(data.replace(b"marker", b"mark\xeer"))
    with pytest.raises(UsageError) as error:
        verify(tmp_path / "a.onnx")
    assert error.value.got == "a name that is no UTF-8"


IN_A_FUNCTION = """
<ir_version: 9, opset_import: ["" : 18, "own" : 1]>
main (float[4] x) => (float[4] y) { y = own.Leaky <slope = 0.5> (x) }
<domain: "own", opset_import: ["" : 18]>
Leaky <slope> (x) => (y) { y = LeakyRelu <alpha : float = @slope> (x) }
"""


def test_an_attribute_refers_to_a_function_only_inside_one(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(IN_A_FUNCTION)
    onnx.save(model, tmp_path / "a.onnx")
    verify(tmp_path / "a.onnx")
    model.graph.node[0].attribute[0].ref_attr_name = "slope"
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(UsageError) as error:
        verify(tmp_path / "a.onnx")
    assert error.value.got == "attribute 'slope' refers to 'slope' of a function"


def test_a_placement_on_devices_that_cannot_be_written_again_is_a_usage_error(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(IN_A_FUNCTION)
    model.graph.node[0].device_configurations.add()
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(UsageError, match="cannot be read") as error:
        verify(tmp_path / "a.onnx")
    assert error.value.need == "a model that onnx_ir reads and writes"


@pytest.mark.parametrize("content", [b"\x08", b"\x08\x09", b"\x08\x09garbage", b"\x12\x03abc", b"\x08\x09\x3a\x00"])
def test_bytes_that_only_begin_like_onnx_are_a_usage_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.onnx").write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read"):
        load(Options(source=tmp_path / "a.onnx"))


def test_a_graph_that_the_checker_refuses_is_a_usage_error(tmp_path: Path) -> None:
    model_with(tmp_path / "a.onnx", location="w.data")
    model = onnx.load_model(tmp_path / "a.onnx", load_external_data=False)
    model.graph.node[0].input[0] = "nobody"
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UsageError, match="cannot be read"):
        verify(tmp_path / "a.onnx")


@pytest.mark.parametrize("limits", [Limits(nodes=0), Limits(rank=0), Limits(dim=3)])
def test_each_limit_is_enforced(tmp_path: Path, limits: Limits) -> None:
    model_with(tmp_path / "a.onnx", location="w.data")
    with pytest.raises(UnsafeInput):
        verify(tmp_path / "a.onnx", limits)


def test_flipped_bits_are_refused_or_harmless(tmp_path: Path) -> None:
    """Every single-byte change of a small model either passes or ends in an error of ours."""
    model_with(tmp_path / "a.onnx", location="w.data", length="16")
    honest = (tmp_path / "a.onnx").read_bytes()
    refused = 0
    for at in range(len(honest)):
        changed = bytearray(honest)
        changed[at] ^= 1 << (at % 8)
        (tmp_path / "a.onnx").write_bytes(changed)
        try:
            load(Options(source=tmp_path / "a.onnx"))
        except (UsageError, UnsafeInput):
            refused += 1
    assert refused > len(honest) // 3
