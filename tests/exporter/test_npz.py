# SPDX-License-Identifier: Apache-2.0
"""NPZ files are what NumPy reads and writes; of a broken one nothing is believed, and its error is the file's."""

from __future__ import annotations

import io
import lzma
import zipfile

import numpy as np
import pytest

from flash_export import npz


def _member(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    text = header.encode()
    return b"\x93NUMPY" + bytes(version) + len(text).to_bytes(2, "little") + text + data


def _archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _corrupt(compression: int) -> bytes:
    """A member whose compressed bytes are noise, and whose folder still fits."""
    noise = np.random.default_rng(0).bytes(4000)
    data = bytearray(_archive({"x.npy": noise}, compression))
    data[60:300] = bytes(255 - byte for byte in data[60:300])
    return bytes(data)


SHAPE = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"
BROKEN = {
    "nothing": b"",
    "no archive": b"PK\x03\x04",
    "a member without suffix": _archive({"x": _member(SHAPE % "(1,)", bytes(4))}),
    "both spellings": _archive({"x": b"", "x.npy": _member(SHAPE % "(1,)", bytes(4))}),
    "no array": _archive({"x.npy": b"hello"}),
    "a pickle": _archive({"x.npy": b"\x80\x04N."}),
    "an open bracket": _archive({"x.npy": _member("{'descr': (")}),
    "an open string": _archive({"x.npy": _member("{'descr': '''")}),
    "9000 minus signs": _archive({"x.npy": _member("-" * 9000 + "1")}),
    "2^40 rows": _archive({"x.npy": _member(SHAPE % f"({2**40}, 64)", bytes(4))}),
    "more rows than a machine counts": _archive({"x.npy": _member(SHAPE % f"({10**30},)", bytes(4))}),
    "one number too few": _archive({"x.npy": _member(SHAPE % "(3,)", bytes(8))}),
    "rows below 0": _archive({"x.npy": _member(SHAPE % "(-1, 64)", bytes(4))}),
    "rank 100": _archive({"x.npy": _member(SHAPE % ("(" + "1," * 100 + ")"), bytes(4))}),
    "objects": _archive({"x.npy": _member("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", bytes(8))}),
    "deflate": _corrupt(zipfile.ZIP_DEFLATED),
    "bzip2": _corrupt(zipfile.ZIP_BZIP2),
    "lzma": _corrupt(zipfile.ZIP_LZMA),
    "stored": _corrupt(zipfile.ZIP_STORED),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_the_files_fault(what: str) -> None:
    with pytest.raises(npz.Broken):
        npz.loads(BROKEN[what])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_writes_is_read(save: object) -> None:
    arrays = {
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "empty": np.zeros((0, 3), np.int8),
        "scalar": np.array(True),
        "big-endian": np.arange(3, dtype=">i4"),
    }
    buffer = io.BytesIO()
    save(buffer, **arrays)  # type: ignore[operator]
    read = npz.loads(buffer.getvalue())
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        assert read[name].flags.writeable
        np.testing.assert_array_equal(read[name], array)


def test_numpy_reads_what_is_written() -> None:
    arrays = {"allow_pickle": np.arange(3), "file": np.eye(2, dtype=np.float16).T, "a/b": np.zeros((0, 2))}
    with np.load(io.BytesIO(npz.dumps(arrays)), allow_pickle=False) as read:
        assert set(read.files) == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(read[name], array)
    with pytest.raises(ValueError, match="allow_pickle"):
        npz.dumps({"x": np.array([lzma], object)})


@pytest.mark.parametrize(("name", "kept"), [("x" * npz.LONGEST_NAME, True), ("x" * 2**16, False), ("a\0b", False)])
def test_a_name_is_kept_or_refused(name: str, kept: bool) -> None:
    if kept:
        assert npz.loads(npz.dumps({name: np.arange(3)})).keys() == {name}
    else:
        with pytest.raises(ValueError, match="no member of this name"):
            npz.dumps({name: np.arange(3)})
