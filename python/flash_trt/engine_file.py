# SPDX-License-Identifier: Apache-2.0
"""An engine on disk with its sidecar, and why it must not or cannot run here. Nothing of it is executed.

An engine is code: it can carry libraries and kernels. So one is loaded only when its hash is the one that its sidecar
holds, or when the user vouches for it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from flash_export import regular_file
from flash_export.errors import MissingHere, UnsafeInput, UsageError
from flash_trt import file_kinds, gpu, plan, shapes
from flash_trt.backends import BackendName
from flash_trt.build import SIDECAR_SCHEMA
from flash_trt.file_kinds import PLAN_MAGIC
from flash_trt.onnx_file import GraphInput
from flash_trt.output import sidecar_path
from flash_trt.plugin_library import PluginLibrary, sha256_of

_DEPTH = 16

Profile = dict[str, dict[str, list[int]]]
"""Dynamic input -> "min", "opt" and "max", the shapes that an engine was built for."""


def is_engine(path: Path) -> bool:
    """Whether ``path`` holds a TensorRT plan, told by its first bytes."""
    try:
        return regular_file.head(path, 4) in PLAN_MAGIC
    except OSError:
        return False  # reading it as ONNX says what is wrong


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFile:
    """An engine and what its sidecar says of it; ``sidecar`` is {} where there is none that can be read."""

    path: Path
    sidecar: dict[str, Any]

    @property
    def backend(self) -> BackendName:
        """The TensorRT that built it; TensorRT where no sidecar tells."""
        described = self.sidecar.get("backend")
        is_rtx = isinstance(described, dict) and described.get("name") == "tensorrt-rtx"
        return "tensorrt-rtx" if is_rtx else "tensorrt"

    @property
    def targets(self) -> list[str]:
        """GPU generations it was built for; [] where the sidecar does not tell."""
        targets = self.sidecar.get("targets")
        named = [str(target) for target in targets] if isinstance(targets, list) else []
        return named or ([self.built_on["sm"]] if self.built_on else [])

    @property
    def built_on(self) -> dict[str, str] | None:
        """``name`` and ``sm`` of the GPU it was built on and for; None where it was built for ``targets``."""
        described = self.sidecar.get("gpu")
        if not isinstance(described, dict) or not isinstance(described.get("sm"), str):
            return None
        return {"name": str(described.get("name")), "sm": described["sm"]}

    @property
    def carries_plugin(self) -> bool:
        """Whether our library is inside the engine, so that none must be loaded first."""
        return self.sidecar.get("embedded_plugin") is True

    @property
    def profiles(self) -> list[Profile]:
        """Its optimization profiles, without what the sidecar does not tell; [] where it tells of none."""
        told = self.sidecar.get("profiles")
        if told is None:  # the form of before there were several
            told = [self.sidecar.get("profile")]
        listed = [profile for profile in told if isinstance(profile, dict)] if isinstance(told, list) else []
        known = [{name: limits for name, limits in profile.items() if _are_limits(limits)} for profile in listed]
        return [profile for profile in known if profile]

    @property
    def tensors(self) -> tuple[tuple[GraphInput, ...], tuple[GraphInput, ...]] | None:
        """The model's inputs and outputs; None where the sidecar does not tell them."""
        told = self.sidecar.get("tensors")
        if not isinstance(told, dict):
            return None
        inputs, outputs = _tensors(told.get("inputs")), _tensors(told.get("outputs"))
        return None if inputs is None or outputs is None else (inputs, outputs)


def spell_profile(profile: Profile) -> str:
    """``--shape ids:1x1,4x64,8x512 --shape mask:…``."""
    return " ".join(
        f"--shape {name}:{','.join(shapes.spell(tuple(limits[key])) for key in ('min', 'opt', 'max'))}"
        for name, limits in profile.items()
    )


def _are_limits(limits: object) -> bool:
    if not isinstance(limits, dict) or not limits.keys() >= {"min", "opt", "max"}:
        return False
    shapes_ = [limits[key] for key in ("min", "opt", "max")]
    return all(isinstance(s, list) and all(_is_size(n) for n in s) for s in shapes_) and (
        len({len(s) for s in shapes_}) == 1
    )


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _tensors(side: object) -> tuple[GraphInput, ...] | None:
    if not isinstance(side, list) or not all(_is_tensor(entry) for entry in side):
        return None
    return tuple(GraphInput(entry["name"], entry["dtype"], tuple(entry["dims"])) for entry in side)


def _is_tensor(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not isinstance(entry.get("dims"), list):
        return False
    known = type(entry.get("dtype")) is int and entry["dtype"] in onnx.TensorProto.DataType.values()
    return known and all(isinstance(dim, str) or _is_size(dim) for dim in entry["dims"])


def _is_flat(document: object) -> bool:
    """Whether lists and objects lie in one another no deeper than a sidecar's do: what prints them follows each."""
    level = [document]
    for _ in range(_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return not level


def read(path: Path) -> EngineFile:
    """``path`` with its sidecar.

    Raises:
        UsageError: there is no such file, or one that does not begin as an engine does.
    """
    if not path.is_file():
        raise UsageError(
            "the engine cannot be read",
            where=str(path),
            got="a folder" if path.is_dir() else "a device, pipe or socket" if path.exists() else "no such file",
            need="an engine that flash-trt build wrote",
            do="correct the path",
        )
    if not is_engine(path):
        kind = file_kinds.kind_of(path) if os.access(path, os.R_OK) else ""
        raise UsageError(
            "this is no TensorRT engine",
            where=str(path),
            got=file_kinds.SPELLED.get(kind, "a file that does not begin as an engine does"),
            need="an engine that flash-trt build wrote",
            do="build one of an .onnx with flash-trt build, or open the .onnx itself with flash_trt.session",
        )
    try:
        regular_file.require(sidecar_path(path))
        sidecar = json.loads(sidecar_path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        sidecar = {}
    return EngineFile(path, sidecar if isinstance(sidecar, dict) and _is_flat(sidecar) else {})


def require_trust(engine: EngineFile) -> None:
    """Refuses an engine that is not the one its sidecar describes.

    Raises:
        UnsafeInput: no sidecar, one that cannot be read or is of another schema, or another hash.
    """
    described = engine.sidecar.get("engine")
    expected = described.get("sha256") if isinstance(described, dict) else None
    found = sha256_of(engine.path)
    schema = engine.sidecar.get("schema")
    if found == expected and schema == SIDECAR_SCHEMA:
        return
    got = f"SHA-256 {found}, its sidecar says {expected or 'nothing'}"
    if found == expected:
        got = f"a sidecar of schema {schema}"
    raise UnsafeInput(
        "the engine is not known to be ours, and loading an engine runs code that it carries",
        where=str(engine.path),
        got=got,
        need=f"the hash in {sidecar_path(engine.path).name}, as flash-trt build writes it (schema {SIDECAR_SCHEMA})",
        do="build it again with flash-trt build, or pass --trust-engine if you made it yourself",
    )


def require_gpu(engine: EngineFile) -> None:
    """Refuses an engine that no GPU here can run.

    Raises:
        MissingHere: no GPU, or none of a generation that the engine was built for.
    """
    here = [device.sm for device in gpu.devices()]
    if not here:
        raise MissingHere(
            "an engine runs only where a GPU is",
            where=str(engine.path),
            got="no NVIDIA GPU, or no driver for it",
            need=f"a GPU that it was built for: {', '.join(engine.targets) or 'the sidecar does not tell'}",
            do="use the .onnx that it was built from here, and the engine on the GPU machine",
        )
    # TensorRT runs on the first GPU unless CUDA_VISIBLE_DEVICES says otherwise, which `devices` heeds too.
    if engine.targets and here[0] not in engine.targets:
        raise MissingHere(
            "the engine was built for other GPUs",
            where=str(engine.path),
            got=f"{here[0]} ({gpu.devices()[0].name})",
            need=f"one of {', '.join(engine.targets)}" + (f" ({engine.built_on['name']})" if engine.built_on else ""),
            do=f"build it again on this machine, or with --target {here[0]}",
        )


def require_plugin(engine: EngineFile, library: PluginLibrary) -> None:
    """Refuses an engine whose plugins are of another version than ``library`` has.

    Raises:
        MissingHere: as said, with both versions.
    """
    for record in plan.plugin_records(engine.path.read_bytes()):
        version = library.operators.get(record.operator)
        if version != record.version:
            raise MissingHere(
                f"the engine needs another version of the plugin {record.operator}",
                where=str(engine.path),
                got=f"version {version} in {library.path}",
                need=f"version {record.version}, with which the engine was built",
                do="build the engine again, or install the flash-export that built it",
            )


def require_shapes(engine: EngineFile, feeds: Mapping[str, np.ndarray]) -> None:
    """Refuses inputs outside the shapes that the engine was built for.

    Raises:
        UsageError: no profile holds them all; of each, the first input that it does not hold, with its range.
    """
    profiles = engine.profiles
    # Of an input that TensorRT reads as a shape a profile holds the values.
    told = {tensor.name: tensor.may_hold_sizes for tensor in (engine.tensors or ((), ()))[0]}
    got = {name: tuple(array.ravel().tolist()) if told.get(name) else array.shape for name, array in feeds.items()}
    outside = [_first_outside(profile, got) for profile in profiles]
    if not profiles or None in outside:
        return
    named = [name for name in outside if name is not None]
    ranges = [_spell_range(profile[name]) for profile, name in zip(profiles, named, strict=True)]
    shown = {name: shapes.spell(got[name]) for name in named}
    if len(profiles) > 1:
        ranges = [f"profile {i}: {name} {ranges[i]}" for i, name in enumerate(named)]
        shown = {name: f"{name} {shape}" for name, shape in shown.items()}
    raise UsageError(
        "an input is outside the shapes that the engine was built for",
        where=f"input {', '.join(shown)} of {engine.path}",
        got=", ".join(shown.values()),
        need="; ".join(ranges),
        do="give other inputs, or build the engine again with a --shape that holds them",
    )


def _first_outside(profile: Profile, got: Mapping[str, shapes.Dims]) -> str | None:
    """The first input in ``got`` that ``profile`` does not hold."""
    for name, limits in profile.items():
        if name in got:
            low, high = limits["min"], limits["max"]
            if len(got[name]) != len(low) or not all(a <= n <= b for a, n, b in zip(low, got[name], high, strict=True)):
                return name
    return None


def _spell_range(limits: Mapping[str, list[int]]) -> str:
    return f"{shapes.spell(tuple(limits['min']))} to {shapes.spell(tuple(limits['max']))}"
