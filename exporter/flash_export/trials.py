# SPDX-License-Identifier: Apache-2.0
"""The inputs that the check runs a whole model on: the user's values, the exporter's example, or drawn ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from flash_export import npz, regular_file
from flash_export.draw import Drawn, Padding, concrete_shape, dynamic_dims, sizes_in, sizes_to_try
from flash_export.errors import UsageError
from flash_export.extent import Extent
from flash_export.input_roles import Role, fed_inputs, read_roles
from flash_export.longer import longer_setting
from flash_export.twin import is_float

STATIC_TRIALS = 3
"""Seeds tried on a model without dynamic dims."""

MOST_ELEMENTS = 2**25
"""In one tensor of a run, where the dynamic dims leave a choice: 128 MiB in float32, and the check holds several."""
EASY_ELEMENTS = 2**23
"""Above this a run takes long (logits of a wide vocabulary): one setting keeps its batch, the others their lengths."""

SMALL_MODEL_BYTES = 16 * 2**20
"""A model of up to this many weights is cheap to run again."""


def weight_bytes(model: ir.Model) -> int:
    """The size of all weights of the graph itself."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One set of inputs. ``name`` says where they come from: ``values``, ``example``, or sizes and seed.

    ``sizes`` are those of the dynamic dims where the inputs are drawn, ``batch`` is the largest that is a batch; 0
    where none is.
    """

    name: str
    feeds: Mapping[str, np.ndarray]
    sizes: dict[str, int] | None = None
    batch: int = 0

    def why_unfair(self, outputs: Mapping[ir.Value, np.ndarray]) -> str:
        """Empty where every output has the shape that the model declares for these sizes.

        Another shape means that lengths which must be equal were broadcast against each other.
        """
        for value, array in outputs.items():
            try:
                declared = concrete_shape(value, self.sizes or {})
            except UsageError:
                continue
            if declared != array.shape:
                return f"output {value.name} is {list(array.shape)} where the model declares {list(declared)}"
        return ""


@dataclasses.dataclass(frozen=True, slots=True)
class TrialPlan:
    """The trials of one check, each a list of choices of which the first that the unfused model takes counts.

    ``too_large``: the windows that the model may have and that no trial is longer than, since it asks for too much
    memory.
    """

    trials: list[list[Trial]]
    too_large: tuple[str, ...] = ()


def plan_trials(
    model: ir.Model,
    *,
    example: Mapping[str, np.ndarray],
    ranges: Mapping[str, tuple[int, int]],
    values: Path | None,
    seed: int,
    windows: Collection[int] = (),
) -> TrialPlan:
    """The trials of one check: ``values`` alone where given, else drawn ones and the example.

    Without masks and lengths nothing is drawn at the sizes that the example has. One more is longer than every window
    that the model can be run past.

    Args:
        windows: the sizes of those that were read.

    Raises:
        UsageError: ``values`` is no readable NPZ file or lacks an input; an input cannot be drawn.
    """
    if values is not None:
        return TrialPlan([[Trial("values", read_values(model, values))]])
    whole = bool(example) and set(example) >= set(fed_inputs(model))
    settings, extent = sizes_to_try(model, ranges, example), Extent(model)
    if settings == [[{}]]:
        settings *= STATIC_TRIALS if extent.largest({}) <= MOST_ELEMENTS else 1
    batches = [name for name, is_batch in dynamic_dims(model).items() if is_batch]
    roles = read_roles(model)
    # Each setting has masks and lengths of other kinds; without any of them it has nothing but its sizes.
    sizes_alone = not any(role.kind in ("mask", "length") for role in roles.values())
    shown = sizes_in(model, example) if whole and sizes_alone else {}
    if sizes_alone and batches and len(batches) == len(dynamic_dims(model)) and weight_bytes(model) > SMALL_MODEL_BYTES:
        # One row and several, of which the example may be one.
        several = max(shown.get(name, 1) for name in batches) > 1
        settings = settings[1:2] if several else settings[1::-1]
    roomy: list[list[dict[str, int]]] = []
    for i, choices in enumerate(settings):
        found = roomy_choices(choices, extent, batches, keep_batch=i == 0)
        if found == [{}] or (found not in roomy and found[0] != shown):  # nothing large is run twice at the same sizes
            roomy.append(found)
    trials = [[_draw(model, sizes, seed + i, batches, roles) for sizes in found] for i, found in enumerate(roomy)]
    taken = [choices[0] for choices in settings]
    longer = longer_setting(model, taken, [ranges], windows, most=EASY_ELEMENTS)
    if longer and longer.choices:
        trials.append([_draw(model, sizes, seed, batches, roles, "full") for sizes in longer.choices])
    if whole:
        trials.append([Trial("example", dict(example))])
    return TrialPlan(trials, longer.too_large if longer else ())


def roomy_choices(
    choices: list[dict[str, int]], extent: Extent, batches: Sequence[str], *, keep_batch: bool
) -> list[dict[str, int]]:
    """The choices in the order in which they are tried, without those whose tensors are too large.

    Where the first of all is no easy one, easy ones come first that ``keep_batch``, or else the longest of the smallest
    batch. Where none fits, all of them stay, the smallest first.
    """
    fitting = [sizes for sizes in choices if extent.largest(sizes) <= MOST_ELEMENTS]
    if not fitting:
        return sorted(choices, key=extent.largest)
    if extent.largest(choices[0]) <= EASY_ELEMENTS:
        return fitting
    if keep_batch:
        return sorted(fitting, key=lambda sizes: extent.largest(sizes) > EASY_ELEMENTS)

    def longest(sizes: Mapping[str, int]) -> tuple[int, int]:
        rows = sum(sizes[name] for name in batches)
        return rows - sum(sizes.values()), rows

    return sorted(fitting, key=longest)


def _draw(
    model: ir.Model,
    sizes: dict[str, int],
    seed: int,
    batches: Sequence[str],
    roles: Mapping[str, Role],
    kind: Padding = "mixed",
) -> Trial:
    batch = max((sizes[name] for name in batches), default=0)
    return Trial(_name(sizes, seed), Drawn(model, sizes, seed, kind, roles=roles), sizes, batch)


def _name(sizes: Mapping[str, int], seed: int) -> str:
    return " ".join([*(f"{name}={size}" for name, size in sizes.items()), f"seed={seed}"])


def read_values(model: ir.Model, path: Path) -> dict[str, np.ndarray]:
    """The arrays of ``--values FILE.npz``, one for every graph input. Pickled arrays are refused.

    Raises:
        UsageError: the file is missing, is no NPZ, holds objects, or lacks an input.
    """
    needed = fed_inputs(model)
    try:
        regular_file.require(path)
        found = npz.loads(path.read_bytes())
    except (OSError, npz.Broken) as error:
        raise UsageError(
            "cannot read the values for the check",
            where=f"--values {path}",
            got=" ".join(str(error).split())[:200],
            need="an NPZ file of plain arrays",
            do="write it with numpy.savez(FILE, **{input name: array})",
        ) from error
    for name, value in needed.items():
        if name not in found:
            raise UsageError(
                "the values for the check lack an input",
                where=f"--values {path}",
                got=f"arrays {sorted(found)}",
                need=f"one array for each of {sorted(needed)}",
                do=f"add {name} with numpy.savez(FILE, **{{input name: array}})",
            )
        _refuse_misfit(path, name, value, found[name])
    return {name: found[name] for name in needed}


def _refuse_misfit(path: Path, name: str, value: ir.Value, array: np.ndarray) -> None:
    shape = value.shape
    fits = shape is None or (
        len(shape) == array.ndim
        and all(not isinstance(want, int) or want == got for want, got in zip(shape, array.shape, strict=True))
    )
    if not fits:
        raise _misfit(path, name, f"shape {list(array.shape)}", f"shape {shape}")
    dtype = value.dtype
    if dtype is not None and dtype != ir.DataType.STRING and not _holds(dtype.numpy(), array):
        raise _misfit(path, name, f"{array.dtype} numbers", f"numbers that {dtype.numpy()} holds")


def _holds(dtype: np.dtype, array: np.ndarray) -> bool:
    """Whether an input of ``dtype`` takes the array's numbers: floats may be rounded, all others must stay the same."""
    if not (is_float(array.dtype) or array.dtype.kind in "biu"):
        return False
    with np.errstate(invalid="ignore"):
        return is_float(dtype) or bool((array.astype(dtype) == array).all())


def _misfit(path: Path, name: str, got: str, need: str) -> UsageError:
    return UsageError(
        "the values for the check do not fit an input",
        where=f"--values {path}, array {name}",
        got=got,
        need=need,
        do="give an array of that shape and type",
    )
