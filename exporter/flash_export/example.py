# SPDX-License-Identifier: Apache-2.0
"""Example inputs for tracing: from ``--input`` to tensors that ``forward`` accepts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

import torch

from flash_export.errors import UsageError
from flash_export.input_roles import holds_boxes
from flash_export.load import Argument
from flash_export.options import Dim, InputSpec, Options

TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}

EXAMPLE_SIZES = (2, 7, 5, 11, 13, 3, 17, 19)
"""Sizes of the dynamic dimensions while tracing, by order of appearance: never 0 or 1, which PyTorch bakes in, and
all different, so that two dimensions are not taken for one."""


def arguments_for(module: torch.nn.Module, options: Options) -> tuple[Argument, ...]:
    """The tensors that ``forward`` is traced with, in the order of its parameters.

    Raises:
        UsageError: an ``--input`` that forward does not take, or a required parameter without one.
    """
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    given = {spec.name: spec for spec in options.inputs}
    unknown = [name for name in given if name not in named and not takes_any]
    required = [name for name, p in named.items() if p.default is p.empty]
    missing = [name for name in required if name not in given]
    if unknown or missing:
        what = f"an input is unknown: {unknown[0]}" if unknown else f"an input is missing: {missing[0]}"
        raise UsageError(
            what,
            where=f"{type(module).__name__}.forward",
            got=", ".join(f"--input {name}" for name in given) or "no --input",
            need="forward takes " + (", ".join(_shown(n, p) for n, p in named.items()) or "no inputs"),
            do=f"describe each tensor: {suggested(required[:2] or ['x'], module)}"
            " (names for dims that change, numbers for dims that do not)",
        )
    return make_arguments(module, options.inputs)


def suggested(names: Sequence[str], module: torch.nn.Module) -> str:
    """Flags as they may look; token ids and masks are integers where the module has an embedding to look them up in."""
    embeds = any("Embedding" in getattr(m, "original_name", type(m).__name__) for m in module.modules())

    def one(name: str) -> str:
        integers = embeds and (len(names) == 1 or re.search(r"ids?\b|_id|token|mask", name.lower()) is not None)
        return f"--input {name}:" + ("int64:batch,seq=1..512" if integers else "float32:batch,64,256")

    return " ".join(map(one, names))


def _shown(name: str, parameter: inspect.Parameter) -> str:
    return name if parameter.default is parameter.empty else f"[{name}]"


def make_arguments(module: torch.nn.Module, specs: tuple[InputSpec, ...], seed: int = 0) -> tuple[Argument, ...]:
    """Tensors of the shapes and types of ``specs``: floats standard normal, integers 0 or 1, booleans true.

    Boxes, which ``holds_boxes`` knows, have their corners in order, floats of them from 0 to 1.

    They come in the order of forward's parameters, as torch.export orders the graph's inputs.
    """
    order = list(inspect.signature(module.forward).parameters)
    specs = tuple(sorted(specs, key=lambda spec: order.index(spec.name) if spec.name in order else len(order)))
    return draw_arguments(specs, seed)


def draw_arguments(specs: tuple[InputSpec, ...], seed: int = 0) -> tuple[Argument, ...]:
    """``make_arguments`` in the order of ``specs``."""
    generator = torch.Generator().manual_seed(seed)
    sizes = example_sizes(specs)
    arguments = []
    for spec in specs:
        shape = [sizes[dim.name] if isinstance(dim, Dim) else dim for dim in spec.dims]
        dims = {axis: dim for axis, dim in enumerate(spec.dims) if isinstance(dim, Dim)}
        tensor = _tensor(TORCH_DTYPES[spec.dtype], shape, generator)
        if holds_boxes(spec.name, shape):
            tensor = _in_order(
                torch.rand(shape, generator=generator).to(tensor) if tensor.is_floating_point() else tensor
            )
        arguments.append(Argument(spec.name, tensor, dims))
    return tuple(arguments)


def example_sizes(specs: tuple[InputSpec, ...]) -> dict[str, int]:
    """Dimension name -> its size while tracing, inside its range; as a rule from ``EXAMPLE_SIZES``."""
    sizes: dict[str, int] = {}
    for dim in (dim for spec in specs for dim in spec.dims if isinstance(dim, Dim)):
        if dim.name in sizes:
            continue
        low, high = max(dim.low or 1, 2), dim.high
        wanted = [size for size in EXAMPLE_SIZES if size >= low and (high is None or size <= high)]
        free = [size for size in wanted if size not in sizes.values()]
        sizes[dim.name] = (free or wanted or [low if high is None else min(low, high)])[0]
    return sizes


def _in_order(boxes: torch.Tensor) -> torch.Tensor:
    """``x0, y0, x1, y1`` such that x0 <= x1 and y0 <= y1."""
    return boxes.unflatten(-1, (2, 2)).sort(dim=-2).values.flatten(-2)


def _tensor(dtype: torch.dtype, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
