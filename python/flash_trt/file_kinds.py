# SPDX-License-Identifier: Apache-2.0
"""What a file is, told by its first bytes, for the message about one that stands where another kind is needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from flash_export import regular_file
from flash_export.errors import UsageError

PLAN_MAGIC = (b"ftrt", b"ptrt", b"vtrt")
"""First bytes of TensorRT's and TensorRT for RTX's plans."""

MODEL_SUFFIXES = (".onnx", ".pt", ".pth", ".pt2", ".safetensors")
"""Names of models that are no engines."""

Kind = Literal["engine", "arrays", "array", "pytorch", "zip", "safetensors", ""]

SPELLED: dict[Kind, str] = {
    "engine": "a TensorRT engine",
    "arrays": "NumPy arrays",
    "array": "a NumPy array",
    "pytorch": "a file of PyTorch",
    "zip": "a zip archive",
    "safetensors": "a file of safetensors",
}
_INSTEAD: dict[Kind, str] = {
    "engine": "give the .onnx that it was built from; flash-trt run and flash_trt.open_engine take the engine itself",
    "arrays": "give the model; arrays are what --inputs and --values take",
    "array": "give the model; --inputs takes arrays with names, as numpy.savez(FILE, **{name: array}) writes them",
    "zip": "give the model; where it lies in this archive, unpack it first",
    "pytorch": "run flash-export on it first, which makes an .onnx of a model of PyTorch",
    "safetensors": "run flash-export on the model's folder first, which makes an .onnx of it",
}
"""Another kind of file where an ONNX model is needed -> what helps."""
_ZIP = b"PK\x03\x04"
_PYTORCH = re.compile(rb"/(data\.pkl|archive_format|version|byteorder|data/.+|code/.+)$")
"""What torch.save, TorchScript and torch.export begin their archives with, below a folder of the archive's name."""
_ZIP_NAME = 30
"""Where the name of a zip file's first member begins."""


def kind_of(path: Path) -> Kind:
    """What ``path`` is; "" for an ONNX file, and for all else that no first bytes tell.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    head = regular_file.head(path, 512)
    if head.startswith(PLAN_MAGIC):
        return "engine"
    if head.startswith(_ZIP):
        member = head[_ZIP_NAME : _ZIP_NAME + int.from_bytes(head[26:28], "little")]
        return "arrays" if member.endswith(b".npy") else "pytorch" if _PYTORCH.search(member) else "zip"
    if head.startswith(b"\x93NUMPY"):
        return "array"
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":  # a pickle
        return "pytorch" if len(head) > 1 else ""
    return "safetensors" if head[4:9] == b"\0\0\0\0{" else ""


def require_onnx(path: Path) -> None:
    """Refuses what its first bytes say is no ONNX model.

    Raises:
        UsageError: it is of another kind.
        OSError: it cannot be read, or is no file.
    """
    if kind := kind_of(path):
        raise UsageError(
            "this is no ONNX model",
            where=str(path),
            got=SPELLED[kind],
            need="an ONNX model, as flash-export writes it",
            do=_INSTEAD[kind],
        )
