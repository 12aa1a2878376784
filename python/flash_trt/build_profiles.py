# SPDX-License-Identifier: Apache-2.0
"""Gives a parsed network its optimization profiles, once TensorRT tells which inputs it reads as shapes.

For such an input a range is of its values, as trtexec spells it: of a tensor of two sizes ``target:1x1,4x64,8x512``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flash_export.errors import UsageError
from flash_trt.shapes import Profile, ShapeRange


def add_profiles(builder: Any, config: Any, network: Any, profiles: Sequence[Profile]) -> None:
    """Puts ``profiles`` into ``config``; a static model gets none.

    Raises:
        UsageError: an input that TensorRT reads as a shape has no values, or one that it does not read so has.
    """
    inputs = {tensor.name: tensor for tensor in (network.get_input(i) for i in range(network.num_inputs))}
    for profile in profiles:
        ranges = {range_.name: range_ for range_ in profile.ranges}
        for name, tensor in inputs.items():
            _require_fitting(tensor, ranges.get(name))
        if not ranges:
            continue
        optimization = builder.create_optimization_profile()
        for name, range_ in ranges.items():
            setter = optimization.set_shape_input if inputs[name].is_shape_tensor else optimization.set_shape
            setter(name, range_.smallest, range_.usual, range_.largest)
        config.add_optimization_profile(optimization)


def _require_fitting(tensor: Any, given: ShapeRange | None) -> None:
    dims = tuple(tensor.shape)
    if tensor.is_shape_tensor:
        count = dims[0] if dims else 1
        if given is None or len(given.smallest) != count:
            raise UsageError(
                "TensorRT reads an input as a shape, and has to know its values",
                where=f"--shape, input {tensor.name}",
                got=str(given) if given else f"no --shape {tensor.name}",
                need=f"{tensor.name}:MIN,OPT,MAX of {count} value{'' if count == 1 else 's'} each, divided by x",
                do="give the smallest, the usual and the largest values, as for a shape: 1x1,4x64,8x512",
            )
    elif given is not None and not _is_shape_of(dims, given):
        raise UsageError(
            f"the shape of {tensor.name} contradicts the model",
            where="--shape",
            got=str(given),
            need=f"[{', '.join(str(dim) if dim >= 0 else '?' for dim in dims)}]: TensorRT does not read it as a shape",
            do="leave this --shape out",
        )


def _is_shape_of(dims: tuple[int, ...], given: ShapeRange) -> bool:
    return len(dims) == len(given.smallest) and all(
        dim < 0 or dim == low == high for dim, low, high in zip(dims, given.smallest, given.largest, strict=True)
    )
