# SPDX-License-Identifier: Apache-2.0
"""Does the unfused export work at other lengths than the one it was made at? Asked before anything is fused.

PyTorch's exporters may write a size that forward computed in Python as a number. Such a file says that a dimension is
dynamic, and fails, or answers in another shape, at any other length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from flash_export.draw import draw_inputs, dynamic_dims, sizes_in
from flash_export.eager import Reference
from flash_export.errors import UnsupportedModel, UsageError
from flash_export.export_dims import as_number
from flash_export.extent import Extent

_ROUGHLY = 1e-2

MOST_ELEMENTS = 2**28
"""In one tensor of a run at the end of a range: 1 GiB in float32, of which PyTorch and ONNX Runtime hold several."""


def refuse_fixed_lengths(
    path: Path,
    reference: Reference,
    example: Mapping[str, np.ndarray],
    dims: Mapping[str, tuple[int, int]],
    *,
    traced: bool = False,
    told_in: str = "--input",
) -> None:
    """Runs the file at the example's sizes, then with each dynamic dimension changed, beside eager PyTorch.

    Where ONNX Runtime does not take the example itself (it has no kernels for bfloat16, say), nothing can be told and
    nothing is refused; a change that PyTorch does not take either is not the export's fault, unless the model was
    ``traced``: torch.export has asked whether its dimensions may change, torch.jit.trace has not.

    Args:
        told_in: where the user said what is dynamic, ``Loaded.told_in``.

    Raises:
        UnsupportedModel: PyTorch works at another size and the file does not, or gives another shape.
    """
    model = ir.load(path, format="protobuf")
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    settings.enable_cpu_mem_arena = False
    try:
        session = ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
        session.run(None, dict(example))
    except Exception:  # ONNX Runtime has a type for each kind of failure
        return
    sizes = _sizes(model, example)
    for name, limits in dims.items():
        other = _another(sizes[name], limits)
        if other is None:
            continue
        feeds = draw_inputs(model, sizes | {name: other})
        try:
            expected = [output.shape for output in reference(feeds)]
        except UsageError as error:
            if traced:
                raise only_at(name, sizes[name], other, error.got, told_in) from error
            continue
        try:
            found = [output.shape for output in session.run(None, feeds)]
        except Exception as error:  # see above
            raise only_at(name, sizes[name], other, " ".join(str(error).split())[-200:], told_in) from error
        if found != expected:
            raise only_at(name, sizes[name], other, f"outputs {found} where PyTorch gives {expected}", told_in)


def take_back(
    path: Path,
    reference: Reference,
    example: Mapping[str, np.ndarray],
    dims: dict[str, tuple[int, int]],
    left_out: Mapping[str, Sequence[int]],
) -> list[str]:
    """Takes sizes that PyTorch's exporter left out back into ``dims`` where the file gives PyTorch's numbers there.

    Returns a note on every size that stays out. The numbers are compared roughly: a graph that computes something
    else is far off, and what is taken back is measured like any other size by the check. A length that has several
    names, as PyTorch's ``Dim.AUTO`` gives it, has the size under all of them.
    """
    notes = []
    for name, sizes in left_out.items():
        for size in sorted(sizes, key=lambda n: n > dims[name][1], reverse=True):
            low, high = dims[name]
            why = _why_not(path, reference, example, dims, {name: size})
            if why is not None and (alike := _alike(path, example, name, [n for n in left_out if size in left_out[n]])):
                why = _why_not(path, reference, example, dims, dict.fromkeys(alike, size))
            if why is None:
                dims[name] = (min(low, size), max(high, size))
            else:
                notes.append(
                    f"{name} = {size}: forward takes another way there, which PyTorch's exporter leaves out{why}; the"
                    f" file is right for {name} from {low} to {high} alone"
                )
    return notes


def _alike(path: Path, example: Mapping[str, np.ndarray], name: str, names: Sequence[str]) -> list[str]:
    """Those of ``names`` with the size of ``name`` in ``example``: of one length that has several names; [] of one."""
    sizes = _sizes(ir.load(path, format="protobuf"), example)
    alike = [other for other in names if sizes.get(other) == sizes.get(name)]
    return alike if len(alike) > 1 else []


def _why_not(
    path: Path,
    reference: Reference,
    example: Mapping[str, np.ndarray],
    dims: Mapping[str, tuple[int, int]],
    changed: Mapping[str, int],
) -> str | None:
    """The end of a note; None where the file gives PyTorch's numbers at the example's sizes with one of them changed.

    Where that asks for much memory, scores being as large as the square of a length, the others are their smallest.
    """
    model = ir.load(path, format="protobuf")
    extent, sizes = Extent(model), {**_sizes(model, example), **changed}
    if extent.largest(sizes) > MOST_ELEMENTS:
        sizes |= {name: max(1, low) for name, (low, _) in dims.items() if name not in changed}
    if extent.largest(sizes) > MOST_ELEMENTS:
        return f" and nobody tried, since a tensor of it has {extent.largest(sizes):,} elements"
    return None if _agrees(path, reference, draw_inputs(model, sizes)) else ""


def _agrees(path: Path, reference: Reference, feeds: Mapping[str, np.ndarray]) -> bool:
    """Whether the file gives PyTorch's numbers but for rounding."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    settings.enable_cpu_mem_arena = False
    try:
        expected = reference(feeds)
        found = ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"]).run(None, dict(feeds))
    except Exception:  # ONNX Runtime has a type for each kind of failure
        return False
    return all(
        a.shape == b.shape and np.allclose(a.astype(float), b.astype(float), _ROUGHLY, _ROUGHLY, equal_nan=True)
        for a, b in zip(found, expected, strict=True)
    )


def _sizes(model: ir.Model, example: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Dynamic dim -> its size in ``example``; a sum such as ``past + seq`` follows its parts and has none itself."""
    known = dynamic_dims(model)
    return {dim: size for dim, size in sizes_in(model, example).items() if dim in known}


def _another(size: int, limits: tuple[int, int]) -> int | None:
    """A size that is neither the example's nor a multiple of it, inside the limits where they leave one."""
    low, high = limits
    return next((other for other in (size + 2, size + 1, size - 1, size - 2) if max(low, 1) <= other <= high), None)


def only_at(name: str, size: int, other: int, got: str, told_in: str = "--input") -> UnsupportedModel:
    """What the user hears of a model that works at one size of a dimension that should be dynamic."""
    cached = told_in == "--kv-cache"
    return UnsupportedModel(
        f"the exported model only works at {name} = {size}",
        where=f"dimension {name}, tried at {other}",
        got=got,
        need=f"a graph that works for every {name}",
        do="look for sizes that forward turns into Python numbers (int(), len(), a traced module); "
        + (
            as_number(name, told_in)
            if cached
            else f"or give {size} in the place of {name}, in --input or dynamic_shapes"
        ),
    )
