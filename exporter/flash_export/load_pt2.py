# SPDX-License-Identifier: Apache-2.0
"""An ExportedProgram (``torch.export.save``), looked through before PyTorch opens it.

``torch.export.load`` is no safe door: where a weights-only load fails it falls back to full unpickling. So, with the
very reader that PyTorch uses:

1. Members: only those a program needs. Compiled code (AOTInductor) and pickled objects are refused.
2. Sizes: the members together are no larger than the file, so nothing in it inflates.
3. Pickles: each passes a weights-only load, hence PyTorch's own attempt succeeds and never falls back.
4. JSON: every string in it passes ``pt2_rules``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flash_export import pt2_rules
from flash_export.errors import UnsafeInput, UnsupportedModel, UsageError, UserError
from flash_export.load_torch import named_in_pickle

if TYPE_CHECKING:
    from torch.export import ExportedProgram

MAX_JSON_BYTES = 256 << 20

_PLAIN = re.compile(
    r"archive_format|archive_version|version|byteorder|\.data/(version|serialization_id)|\.format_version|"
    r"\.storage_alignment|models/[\w.-]+\.json|data/(weights|constants)/((weight|tensor)_\d+|[\w.-]+_config\.json)|"
    r"extra/.*",
    re.ASCII,
)
_PICKLE = re.compile(r"data/(sample_inputs|weights|constants)/[\w.-]+\.pt", re.ASCII)
_CODE = {
    "data/aotinductor/": "compiled code (AOTInductor), which runs on loading",
    "data/constants/custom_obj_": "a pickled custom object",
    "data/constants/opaque_obj_": "a pickled object",
}


def load_program(path: Path) -> ExportedProgram:
    """The one program in the archive, after the four checks of this file's head.

    Raises:
        UsageError: no archive of torch 2.8 or newer, broken, or none or several programs in it.
        UnsafeInput: something in it could run code.
        UnsupportedModel: this PyTorch cannot read it, for example because a newer one wrote it.
    """
    archive = _Archive(path)
    names = _members(archive)
    _check_sizes(archive, names)
    documents = {name: _json(archive, name) for name in names if name.endswith(".json")}
    for name, document in documents.items():
        try:
            pt2_rules.check_document(document)
        except pt2_rules.Forbidden as error:
            raise _unsafe(path, name, str(error)) from None
    payloads = list(_payloads(documents, path))
    pickles = {name for name in names if _PICKLE.fullmatch(name)}
    pickles |= {member for member, payload in payloads if payload.get("use_pickle")}
    for name in sorted(pickles):
        _check_pickle(archive, name)
    for member, payload in payloads:
        _check_payload(archive, member, payload)
    if any(b"transformers.modeling_outputs." in archive.read(name) for name in documents):
        _import_output_classes()
    return _deserialize(path)


class _Archive:
    """PyTorch's own reader of the archive.

    Raises:
        UsageError: from every method, where the archive is no program's or is broken at that place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = torch._C.PyTorchFileReader(str(path))
            is_program = self._reader.get_record("archive_format") == b"pt2"
        except RuntimeError as error:
            if "serialized_exported_program.json" not in str(error) and "failed finding" in str(error).lower():
                raise self._damaged(error) from None
            is_program = False
        if not is_program:
            raise _broken(path, "an archive of another form, as torch before 2.8 wrote it, or a broken one")

    def names(self) -> list[str]:
        """Every member."""
        try:
            names: list[str] = self._reader.get_all_records()
        except (RuntimeError, UnicodeDecodeError) as error:
            raise self._damaged(error) from None
        return names

    def has(self, name: str) -> bool:
        return bool(self._reader.has_record(name))

    def size(self, name: str) -> int:
        """Bytes of a member."""
        try:
            return int(self._reader.get_record_size(name))
        except RuntimeError as error:
            raise self._damaged(error) from None

    def read(self, name: str) -> bytes:
        """A member's content."""
        try:
            return bytes(self._reader.get_record(name))
        except RuntimeError as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> UserError:
        return _broken(self.path, str(error).splitlines()[0][:200])


def _members(archive: _Archive) -> list[str]:
    names = archive.names()
    for name in names:
        for prefix, what in _CODE.items():
            if name.startswith(prefix):
                raise _unsafe(archive.path, name, what)
        if not _PLAIN.fullmatch(name) and not _PICKLE.fullmatch(name):
            raise _unsafe(archive.path, name, "a member that no ExportedProgram needs")
    models = [name for name in names if name.startswith("models/")]
    if len(models) != 1:
        raise UsageError(
            "the archive does not hold one program",
            where=str(archive.path),
            got=f"{len(models)} programs",
            need="one",
            do="save each program with torch.export.save in a file of its own",
        )
    return names


def _check_sizes(archive: _Archive, names: list[str]) -> None:
    total = sum(archive.size(name) for name in names)
    size = archive.path.stat().st_size
    if total > size:
        raise _unsafe(archive.path, "its members", f"{total} bytes in a file of {size}: compressed to inflate")


def _json(archive: _Archive, name: str) -> Any:
    if archive.size(name) > MAX_JSON_BYTES:
        raise _unsafe(archive.path, name, f"more than {MAX_JSON_BYTES} bytes of JSON")
    try:
        return json.loads(archive.read(name))
    except (ValueError, RecursionError) as error:
        raise _broken(archive.path, f"{name}: {error}") from None


def _payloads(documents: dict[str, Any], path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """(member, payload) of every weight and constant that the archive's configs list."""
    for name, document in documents.items():
        if not name.endswith("_config.json"):
            continue
        config = document.get("config", {}) if isinstance(document, dict) else None
        if not isinstance(config, dict) or not all(isinstance(payload, dict) for payload in config.values()):
            raise _broken(path, f"{name} is no list of tensors")
        folder = name.rpartition("/")[0]
        for payload in config.values():
            yield f"{folder}/{payload.get('path_name')}", payload


def _check_pickle(archive: _Archive, name: str) -> None:
    content = archive.read(name)
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _unsafe(archive.path, name, named_in_pickle(error)) from None
    except Exception as error:
        # Whatever makes the weights-only load fail would make PyTorch fall back to full unpickling.
        got = f"a pickle that a weights-only load rejects ({type(error).__name__})"
        raise _unsafe(archive.path, name, got) from None


def _check_payload(archive: _Archive, member: str, payload: dict[str, Any]) -> None:
    """A member without bytes stands for a tensor without elements: PyTorch would allocate whatever its sizes say."""
    meta = payload.get("tensor_meta") or {}
    sizes = meta.get("sizes", []) if isinstance(meta, dict) else None
    if not isinstance(sizes, list) or not all(isinstance(size, dict) for size in sizes):
        raise _broken(archive.path, f"{member} has no shape")
    numbers = [size.get("as_int") for size in sizes]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _unsafe(archive.path, member, f"a weight of shape {numbers[:8]}")
    if math.prod(numbers) and not archive.has(member):
        raise _broken(archive.path, f"{member} is missing")
    if math.prod(numbers) and not archive.size(member):
        raise _unsafe(archive.path, member, f"a weight of shape {numbers[:8]} without data")


def _import_output_classes() -> None:
    """PyTorch knows transformers' output classes once they are imported; else it says that it does not."""
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers.modeling_outputs")


def _deserialize(path: Path) -> ExportedProgram:
    from torch.export.pt2_archive._package import load_pt2

    try:
        programs = load_pt2(str(path)).exported_programs
        (program,) = programs.values()
    except Exception as error:  # PyTorch raises many types for a program that it cannot read
        raise UnsupportedModel(
            "this PyTorch cannot read the ExportedProgram",
            where=str(path),
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}",
            need=f"a program that torch {torch.__version__} reads",
            do="save it again with this version of PyTorch, or upgrade torch",
        ) from error
    # Guards only check the sizes of inputs; without them no text of the file is ever compiled.
    program._guards_code = []
    _forget_computed_ranges(program)
    loaded: ExportedProgram = program
    return loaded


def _forget_computed_ranges(program: ExportedProgram) -> None:
    """Leaves ranges to symbols: PyTorch writes one of ``4*s0`` too, which the symbol's own implies, and then fails."""
    values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
    modes = (getattr(value, "fake_mode", None) for value in values)
    shapes = next((mode.shape_env for mode in modes if mode is not None), None)
    for ranges in (getattr(shapes, "var_to_range", {}), program._range_constraints):
        for size in [size for size in ranges if not size.is_Symbol]:
            del ranges[size]


def _unsafe(path: Path, member: str, got: str) -> UserError:
    return UnsafeInput(
        "the ExportedProgram holds something that could run code",
        where=f"{member} in {path}",
        got=got,
        need="tensors, tensor operators and sizes, as torch.export.save writes them",
        do="save the program again from its source, with torch 2.8 or newer and without custom objects",
    )


def _broken(path: Path, got: str) -> UsageError:
    return UsageError(
        "the ExportedProgram cannot be read",
        where=str(path),
        got=got,
        need="a file written by torch.export.save of torch 2.8 or newer",
        do="check that the file was copied whole, or save it again",
    )
