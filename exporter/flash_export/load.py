# SPDX-License-Identifier: Apache-2.0
"""Step 1: a file or folder becomes a module, a program or a verified ONNX file, and no code in it runs.

What a source is, is told by its content and never by its suffix. Each kind has its file: ``load_onnx``, ``load_pt2``,
``load_torch`` (state dicts and pickles) and ``load_huggingface``. docs/security.md says what is refused and why.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flash_export import regular_file
from flash_export.errors import MissingHere, UsageError
from flash_export.options import Dim, Options
from flash_export.requirements import pip_install
from flash_export.save_commit import finish_interrupted
from flash_export.save_report import is_report

if TYPE_CHECKING:
    import torch

SourceKind = Literal[
    "onnx",
    "onnx_model",
    "exported_program",
    "module",
    "state_dict",
    "pickled_module",
    "torchscript",
    "torch_package",
    "hugging_face",
]
"""``module`` and ``onnx_model`` are those that were in memory; all others are files."""
FileKind = Literal[
    "onnx", "exported_program", "torch_zip", "torchscript", "torch_package", "legacy_pickle", "safetensors"
]

PLAN_MAGIC = (b"ftrt", b"ptrt", b"vtrt")
"""First bytes of TensorRT's and TensorRT for RTX's engines."""


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One tensor that ``forward`` takes: its name, an example, and axis -> dynamic dimension.

    A dimension may be a sum of others, such as ``past + seq``.
    """

    name: str
    tensor: torch.Tensor
    dims: dict[int, Dim]


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A source that is open. ``module`` (eval mode) with its ``arguments``, or ``program``, or neither for ONNX.

    ``by_position``: forward takes the arguments by their order alone. ``files`` are those the weights lie in, or that
    say how to read them, where ``path`` is not all of it: no output may replace one. ``notes`` are what the user should
    hear of.
    """

    path: Path
    source_kind: SourceKind
    module: torch.nn.Module | None = None
    program: torch.export.ExportedProgram | None = None
    arguments: tuple[Argument, ...] = ()
    by_position: bool = False
    files: frozenset[Path] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def told_in(self) -> str:
        """Where the user says what is dynamic: a flag of the command, or an argument of ``flash_export.export``."""
        if self.source_kind == "hugging_face" and self.by_position:
            return "--kv-cache"
        return "dynamic_shapes" if self.source_kind == "module" else "--input"


def load(options: Options) -> Loaded:
    """Opens ``options.source``, whatever it is.

    Raises:
        UsageError: no such file, unreadable, empty, of no kind we know, or flags that do not fit the kind.
        UnsafeInput: opening it would run code that it carries.
        UnsupportedModel: recognised, and not supported.
        MissingHere: PyTorch or transformers is needed and not installed.
    """
    path = options.source
    if path.is_dir():
        from flash_export.load_huggingface import load_folder

        return dataclasses.replace(load_folder(options), files=_files_of_folder(path))
    if options.kv_cache:
        if not path.exists():
            raise _unreadable(path, "no such file or folder")
        raise UsageError(
            "--kv-cache needs a Hugging Face folder",
            where=str(path),
            got="a file",
            need="the folder of a causal language model, as save_pretrained writes it",
            do="give the folder, or write past keys and values as inputs of your own forward",
        )
    finish_interrupted(path)
    kind = file_kind(path)
    if kind == "onnx":
        from flash_export.load_onnx import data_files, verify

        refuse_flags(options, kind)
        verify(path)
        return Loaded(path, "onnx", files=data_files(path))
    require_torch()
    if kind == "exported_program":
        from flash_export.load_pt2 import load_program

        refuse_flags(options, kind)
        return Loaded(path, "exported_program", program=load_program(path))
    if kind in ("torchscript", "torch_package"):
        from flash_export.load_code import load_package, load_torchscript

        return load_torchscript(options) if kind == "torchscript" else load_package(options)
    from flash_export.load_torch import load_pickled_module, load_state_dict

    if kind in ("torch_zip", "legacy_pickle") and options.model is None and options.trust_pickle:
        return load_pickled_module(options)
    return load_state_dict(options, kind)


def _files_of_folder(folder: Path) -> frozenset[Path]:
    """What transformers reads there. An older export may lie in the folder too, and a new one replaces that."""
    return frozenset(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors") and not is_report(p))


def file_kind(path: Path) -> FileKind:
    """What the file is, by its first bytes and, for a zip, its members' names. Nothing of it is unpickled.

    Raises:
        UsageError: missing, unreadable, empty, a broken zip, or of no kind we know.
    """
    try:
        head = regular_file.head(path, 4096)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    if not head:
        raise _unreadable(path, "an empty file")
    if head.startswith(b"PK"):
        return _zip_kind(path)
    if _is_safetensors(head, path.stat().st_size):
        return "safetensors"
    if head.startswith(b"\x80") and head[1:2] in b"\x02\x03\x04\x05":
        return "legacy_pickle"
    if _is_onnx(head):
        return "onnx"
    if head.startswith(PLAN_MAGIC):
        do = "give the model that the engine was built from; flash-trt run, inspect and compare read engines"
        raise _unreadable(path, "a TensorRT engine, which holds no graph to fuse", do)
    if head.startswith(b"\x93NUMPY"):
        raise _unreadable(path, "a NumPy array", "give the model; arrays to compare it on go with --values FILE.npz")
    if head.lstrip()[:1] == b"{":
        raise _unreadable(path, "JSON", "give the model that it describes, or the folder that it is the config of")
    shown = head[:24].decode("ascii", "replace")
    raise _unreadable(path, f"a file that begins with {shown!r}, which is none of the kinds known")


def _zip_kind(path: Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            top = set(archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise _unreadable(path, f"a zip archive that is broken or cut short ({error})") from None
    if "archive_format" in names or "serialized_exported_program.json" in top:
        return "exported_program"
    if ".data/extern_modules" in names or any(name.endswith(".data/extern_modules") for name in top):
        return "torch_package"
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        return "torchscript"
    if "data.pkl" in names:
        return "torch_zip"
    if top and all(name.endswith(".npy") for name in top):
        raise _unreadable(path, "NumPy arrays", "give the model; arrays to compare it on go with --values FILE.npz")
    raise _unreadable(path, f"a zip archive with {len(top)} members and no model among them")


def _is_safetensors(head: bytes, size: int) -> bool:
    length = int.from_bytes(head[:8], "little")
    return len(head) > 8 and head[8:9] == b"{" and 2 <= length <= size - 8


def _is_onnx(head: bytes) -> bool:
    """A ModelProto begins with ir_version (tag 0x08) or, from some exporters, with another of its fields.

    Their tags are letters too, so a file that is text all through is none.
    """
    is_text = all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head[:64])
    return head[0] == 0x08 or (head[0] in b"\x12\x1a\x22\x32\x3a\x42\x72" and not is_text)


def require_torch() -> None:
    """Raises MissingHere unless PyTorch, new enough that ``weights_only`` loading is safe, can be imported."""
    try:
        import torch
    except ImportError:
        raise MissingHere(
            "PyTorch is not installed",
            where="this Python environment",
            got="no module named torch",
            need="torch 2.10 or newer to read a PyTorch model",
            do=f"{pip_install('torch', 'torch', 'onnxscript')}, or give an ONNX file",
        ) from None
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 10):
        raise MissingHere(
            "PyTorch is too old to open untrusted files safely",
            where="this Python environment",
            got=f"torch {torch.__version__}",
            need="torch 2.10 or newer (CVE-2026-24747 is fixed there)",
            do=pip_install("torch", "torch"),
        )


def refuse_flags(options: Options, kind: str) -> None:
    """Raises UsageError for a flag that an ONNX file or an ExportedProgram has no use for: they bring all of it."""
    for flag, given in (
        ("--model", options.model is not None),
        ("--input", bool(options.inputs)),
        ("--dtype", options.dtype is not None),
        ("--opset", options.opset is not None and kind == "onnx"),
    ):
        if given:
            what = "an ONNX file" if kind == "onnx" else "an ExportedProgram"
            raise UsageError(
                f"{flag} does not go with {what}",
                where=str(options.source),
                got=flag,
                need=f"{what} as it is: it brings its own inputs, types and opset",
                do=f"leave {flag} out, or give the model's weights with --model",
            )


def _unreadable(path: Path, got: str, do: str = "check the path, and that the file was copied whole") -> UsageError:
    return UsageError(
        "the model cannot be read",
        where=str(path),
        got=got,
        need="an ExportedProgram, a state dict or safetensors with --model, a Hugging Face folder or an ONNX file",
        do=do,
    )


def read_json(path: Path, limit: int = 64 << 20) -> object:
    """The JSON in ``path``, at most ``limit`` bytes of it.

    Raises:
        UsageError: missing, larger than the limit, or no JSON.
    """
    try:
        regular_file.require(path)
        if path.stat().st_size > limit:
            raise _unreadable(path, f"{path.stat().st_size} bytes of JSON, limit {limit}")
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"no JSON ({error})") from None
