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
    reader = _open(path)
    names = _members(reader, path)
    _check_sizes(reader, names, path)
    documents = {name: _json(reader, name, path) for name in names if name.endswith(".json")}
    for name, document in documents.items():
        try:
            pt2_rules.check_document(document)
        except pt2_rules.Forbidden as error:
            raise _unsafe(path, name, str(error)) from None
    pickles = {name for name in names if _PICKLE.fullmatch(name)} | _pickled_payloads(documents)
    for name in sorted(pickles):
        _check_pickle(reader, name, path)
    _check_payloads(reader, documents, path)
    if any("transformers.modeling_outputs." in reader.get_record(name).decode() for name in names if name in documents):
        _import_output_classes()
    return _deserialize(path)


def _open(path: Path) -> Any:
    try:
        reader = torch._C.PyTorchFileReader(str(path))
        is_program = reader.get_record("archive_format") == b"pt2"
    except RuntimeError as error:
        if "serialized_exported_program.json" in str(error) or "failed finding" not in str(error).lower():
            is_program = False
        else:
            raise _broken(path, str(error).splitlines()[0][:200]) from None
    if not is_program:
        raise _broken(path, "an archive of another form, as torch before 2.8 wrote it, or a broken one")
    return reader


def _members(reader: Any, path: Path) -> list[str]:
    names: list[str] = reader.get_all_records()
    for name in names:
        for prefix, what in _CODE.items():
            if name.startswith(prefix):
                raise _unsafe(path, name, what)
        if not _PLAIN.fullmatch(name) and not _PICKLE.fullmatch(name):
            raise _unsafe(path, name, "a member that no ExportedProgram needs")
    models = [name for name in names if name.startswith("models/")]
    if len(models) != 1:
        raise UsageError(
            "the archive does not hold one program",
            where=str(path),
            got=f"{len(models)} programs",
            need="one",
            do="save each program with torch.export.save in a file of its own",
        )
    return names


def _check_sizes(reader: Any, names: list[str], path: Path) -> None:
    total = sum(reader.get_record_size(name) for name in names)
    if total > path.stat().st_size:
        raise _unsafe(path, "its members", f"{total} bytes in a file of {path.stat().st_size}: compressed to inflate")


def _json(reader: Any, name: str, path: Path) -> Any:
    if reader.get_record_size(name) > MAX_JSON_BYTES:
        raise _unsafe(path, name, f"more than {MAX_JSON_BYTES} bytes of JSON")
    try:
        return json.loads(reader.get_record(name))
    except (ValueError, RecursionError, RuntimeError) as error:
        raise _broken(path, f"{name}: {error}") from None


def _configs(documents: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """(member, payload) of every weight and constant that the archive's configs list."""
    for name, document in documents.items():
        if not name.endswith("_config.json"):
            continue
        folder = name.rpartition("/")[0]
        for payload in document.get("config", {}).values():
            yield f"{folder}/{payload.get('path_name')}", payload


def _pickled_payloads(documents: dict[str, Any]) -> set[str]:
    return {member for member, payload in _configs(documents) if payload.get("use_pickle")}


def _check_pickle(reader: Any, name: str, path: Path) -> None:
    try:
        torch.load(io.BytesIO(reader.get_record(name)), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _unsafe(path, name, named_in_pickle(error)) from None
    except Exception as error:
        # Whatever makes the weights-only load fail would make PyTorch fall back to full unpickling.
        raise _unsafe(path, name, f"a pickle that a weights-only load rejects ({type(error).__name__})") from None


def _check_payloads(reader: Any, documents: dict[str, Any], path: Path) -> None:
    """A member without bytes stands for a tensor without elements: PyTorch would allocate whatever its sizes say."""
    for member, payload in _configs(documents):
        sizes = (payload.get("tensor_meta") or {}).get("sizes", [])
        numbers = [size.get("as_int") for size in sizes]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise _unsafe(path, member, f"a weight of shape {numbers[:8]}")
        if math.prod(numbers) and not reader.has_record(member):
            raise _broken(path, f"{member} is missing")
        if math.prod(numbers) and not reader.get_record_size(member):
            raise _unsafe(path, member, f"a weight of shape {numbers[:8]} without data")


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
    loaded: ExportedProgram = program
    return loaded


def _unsafe(path: Path, member: str, got: str) -> UserError:
    return UnsafeInput(
        "the ExportedProgram holds something that could run code",
        where=f"{member} in {path}",
        got=got,
        need="tensors, tensor operators and sizes, as torch.export.save writes them",
        do="save the program again from its source, with torch 2.8 or newer and without custom objects",
    )


def _broken(path: Path, got: str) -> UserError:
    return UsageError(
        "the ExportedProgram cannot be read",
        where=str(path),
        got=got,
        need="a file written by torch.export.save of torch 2.8 or newer",
        do="check that the file was copied whole, or save it again",
    )
