# SPDX-License-Identifier: Apache-2.0
"""A module becomes an ExportedProgram with dynamic dimensions, or the user hears why it cannot."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils import _pytree as pytree

from flash_export import same_size
from flash_export.eager import Eager
from flash_export.errors import UnsupportedModel, UsageError
from flash_export.export_dims import as_number, is_sum
from flash_export.export_forward import named_parameters, plain_attention
from flash_export.inputs import ALL_INPUTS, CHECK_INPUTS, MAX_DIM
from flash_export.load import Argument, Loaded

MOST_WIDE_BYTES = 4 * 2**30
"""Of float64 weights: the most that a run for the model's own rounding may take."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """How the model is called in eager PyTorch: ``tensors`` are the leaves of its arguments that are tensors."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    advice: str = CHECK_INPUTS
    arguments: tuple[Argument, ...] = ()
    """Those of a module, whose dimensions may have to be one."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """Calls the model with ``tensors`` in the place of the example's.

        Raises:
            UsageError: forward itself fails, for example because ``--input`` gives it a wrong shape.
        """
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        try:
            with torch.no_grad(), plain_attention():
                return self.function(*args, **kwargs)
        except Exception as error:  # the user's own forward may raise anything
            raise UsageError(
                "the model fails on the inputs described",
                where="forward() in eager PyTorch",
                got=f"{type(error).__name__}: {_said(error)}; inputs {[list(t.shape) for t in tensors]}",
                need="inputs that forward accepts",
                do=same_size.advice(str(error), self.arguments) or self.advice,
            ) from error

    def reference(self, names: list[str]) -> Eager:
        """Eager PyTorch on inputs by the graph's input ``names``."""

        def run(inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            outputs = self.run([from_numpy(inputs[name]) for name in names])
            return [to_numpy(tensor) for tensor in tensors_in(outputs)]

        def in_float64(inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            outputs = self._widened().run([_doubled(from_numpy(inputs[name])) for name in names])
            return [to_numpy(tensor) for tensor in tensors_in(outputs)]

        return Eager(run, in_float64)

    def _widened(self) -> Call:
        """The same call with a copy of the module in float64, where there is a module that is not too large to copy."""
        if not isinstance(self.function, torch.nn.Module):
            raise TypeError("a function without weights to widen")
        tensors = [*self.function.parameters(), *self.function.buffers()]
        if sum(8 * tensor.numel() for tensor in tensors if tensor.is_floating_point()) > MOST_WIDE_BYTES:
            raise MemoryError("too many weights for a copy in float64")
        leaves = [_doubled(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return Call(copy.deepcopy(self.function).double(), leaves, self.spec)


def _said(error: Exception) -> str:
    """What an exception says; TorchScript's puts all of its own frames first."""
    lines = str(error).strip().splitlines()
    in_script = lines and "TorchScript interpreter" in lines[0]
    return (lines[-1].removeprefix("RuntimeError: ") if in_script else str(error))[:300]


def call_of(loaded: Loaded) -> Call:
    """The call of a loaded source, on its example inputs."""
    if loaded.program is not None:
        if loaded.program.example_inputs is None:
            raise UsageError(
                "the ExportedProgram has no example inputs",
                where=str(loaded.path),
                got="a program saved without them",
                need="the example inputs it was exported with",
                do="save it again with torch.export.save, which keeps them",
            )
        args, kwargs = loaded.program.example_inputs
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return Call(loaded.program.module(check_guards=False), leaves, spec)
    assert loaded.module is not None  # every source is a program or a module; ONNX does not come here
    leaves, spec = pytree.tree_flatten(_call_arguments(loaded))
    checks = {"module": "check names, types and sizes of example_inputs", "hugging_face": ALL_INPUTS}
    advice = _other_floats(loaded) or checks.get(loaded.source_kind, CHECK_INPUTS)
    return Call(loaded.module, leaves, spec, advice, loaded.arguments)


def _other_floats(loaded: Loaded) -> str:
    """What to do about inputs whose float type is not that of any weight; empty where there are none."""
    assert loaded.module is not None
    weights = {tensor.dtype for tensor in loaded.module.parameters() if tensor.is_floating_point()}
    odd = [a for a in loaded.arguments if a.tensor.is_floating_point() and a.tensor.dtype not in weights]
    if not odd or len(weights) != 1:
        return ""
    wanted, given = (str(dtype).removeprefix("torch.") for dtype in (weights.pop(), odd[0].tensor.dtype))
    if loaded.source_kind == "module":
        return f"the weights are {wanted} and {odd[0].name} is {given}: cast the example, or cast it in forward"
    inputs = " ".join(f"--input {a.name}:{wanted}:..." for a in odd)
    return f"the weights are {wanted} and {odd[0].name} is {given}: try {inputs}, or cast it in forward"


def _call_arguments(loaded: Loaded) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    if loaded.by_position:
        return tuple(argument.tensor for argument in loaded.arguments), {}
    return (), {argument.name: argument.tensor for argument in loaded.arguments}


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    """A program, the ranges of its named dimensions as the model narrows them, and notes on ranges that the user gave.

    ``left_out``: dimension -> sizes at an end of its range at which PyTorch takes another way, so that it exports none
    of them. A table as long as the longest length gives such an end: there a slice of it is no slice. What the graph
    computes there may well be right, and has to be tried.
    """

    program: torch.export.ExportedProgram
    ranges: dict[str, tuple[int, int]]
    notes: list[str] = dataclasses.field(default_factory=list)
    left_out: dict[str, list[int]] = dataclasses.field(default_factory=dict)


def capture(loaded: Loaded, call: Call) -> Captured:
    """The module as a program.

    A range the user did not give is taken from the model (a table of 512 positions ends a length at 512).

    Raises:
        UnsupportedModel: control flow that depends on data, a dynamic dimension that the model bakes in.
    """
    if loaded.program is not None:
        return Captured(loaded.program, {}, _merged_inputs(loaded.program))
    assert loaded.module is not None
    dims = [dim for a in loaded.arguments for dim in a.dims.values() if not is_sum(dim)]
    ranges = {dim.name: (1 if dim.low is None else dim.low, dim.high) for dim in dims}
    fixed = {dim.name for dim in dims if dim.high is not None}
    notes: list[str] = []
    left_out: dict[str, list[int]] = {}
    deferred = False
    for _ in range(4):
        try:
            program = _export(loaded, ranges, deferred=deferred)
        except torch._dynamo.exc.UserError as error:
            narrowed = _narrowed(str(error), ranges)
            if narrowed is None and not deferred and _is_unproven_guard(str(error)):
                deferred = True
                continue
            if narrowed is None:
                raise _uncapturable(error, ranges, loaded) from error
            ends = _excluded(str(error)) or []
            for name, size in ends:
                left_out.setdefault(name, []).append(size)
            notes += [
                f"{n}: {_range(ranges[n])} narrowed to {_range(r)} by the model"
                for n, r in narrowed.items()
                if n in fixed and not ends
            ]
            ranges |= narrowed
        except Exception as error:  # torch.export raises many types; each is a model it cannot capture
            raise _uncapturable(error, ranges, loaded) from error
        else:
            limits = {name: (low, high or MAX_DIM) for name, (low, high) in ranges.items()}
            return Captured(program, limits, notes, left_out)
    raise _uncapturable(RuntimeError("the ranges of the dynamic dimensions do not settle"), ranges, loaded)


def _merged_inputs(program: torch.export.ExportedProgram) -> list[str]:
    """A note where the program was captured with one tensor for several inputs, of which PyTorch then reads one."""
    names = program.graph_signature.user_inputs
    examples = pytree.tree_leaves(program.example_inputs)
    if len(names) != len(examples):
        return []
    unread = {node.name for node in program.graph.nodes if node.op == "placeholder" and not node.users}
    groups: dict[int, list[str]] = {}
    for name, tensor in zip(names, examples, strict=True):
        if isinstance(tensor, torch.Tensor):
            groups.setdefault(id(tensor), []).append(str(name))
    return [
        f"the program was captured with one tensor for {', '.join(group)}, so it reads only "
        f"{', '.join(n for n in group if n not in unread) or 'none of them'}: export it again with a clone for each"
        for group in groups.values()
        if len(group) > 1 and not unread.isdisjoint(group)
    ]


def _export(
    loaded: Loaded, ranges: dict[str, tuple[int, int | None]], *, deferred: bool
) -> torch.export.ExportedProgram:
    assert loaded.module is not None
    dims = {name: torch.export.Dim(name, min=low, max=high) for name, (low, high) in ranges.items()}
    named = {
        # torch.export has no name for a sum of two dimensions, and finds the sum itself.
        a.name: {axis: torch.export.Dim.AUTO if is_sum(dim) else dims[dim.name] for axis, dim in a.dims.items()}
        for a in loaded.arguments
    }
    shapes = (tuple(named.values()),) if loaded.by_position else named
    args, kwargs = _call_arguments(loaded)
    # At some failures PyTorch prints the whole graph so far.
    with (
        torch.no_grad(),
        plain_attention(),
        named_parameters(loaded.module, [] if loaded.by_position else list(named)),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        return torch.export.export(
            loaded.module,
            args,
            kwargs,
            dynamic_shapes=shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=deferred,
        )


_SUGGESTED = re.compile(r"^\s*(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)\s*$", re.MULTILINE)
_BAKED = re.compile(r"^\s*(\w+) = (.+?)\s*$", re.MULTILINE)


def _narrowed(message: str, ranges: dict[str, tuple[int, int | None]]) -> dict[str, tuple[int, int | None]] | None:
    """The ranges that PyTorch suggests, where all it asks for is narrower ranges; else None."""
    excluded = _excluded(message)
    if excluded is not None:
        return _without_end(excluded, ranges)
    _, found, suggestions = message.partition("Suggested fixes:")
    suggestions = suggestions.split("\n\n")[0]
    matches = list(_SUGGESTED.finditer(suggestions))
    if not found or len(matches) != len(_BAKED.findall(suggestions)):
        return None
    narrowed = {}
    for name, low, high in (match.groups() for match in matches):
        if name not in ranges:
            return None
        old_low, old_high = ranges[name]
        new_high = int(high) if high else old_high
        narrowed[name] = (
            max(old_low, int(low or 0)),
            new_high if old_high is None or new_high is None else min(old_high, new_high),
        )
    return narrowed if any(ranges[name] != r for name, r in narrowed.items()) else None


_EXCLUDED = re.compile(r"^  - Not all values of (\w+) = .* satisfy the generated guard .* != (\d+)\.$", re.MULTILINE)


def _excluded(message: str) -> list[tuple[str, int]] | None:
    """(dimension, size that it may not have), where that is all PyTorch has against the ranges; else None."""
    complaints = re.findall(r"^  - ", message, re.MULTILINE)
    found = [(name, int(size)) for name, size in _EXCLUDED.findall(message)]
    return found if found and len(found) == len(complaints) else None


def _without_end(
    excluded: list[tuple[str, int]], ranges: dict[str, tuple[int, int | None]]
) -> dict[str, tuple[int, int | None]] | None:
    """The ranges without those sizes, where each is an end of its range."""
    narrowed: dict[str, tuple[int, int | None]] = {}
    for name, size in excluded:
        low, high = narrowed.get(name) or ranges.get(name, (0, 0))
        if size == high and size > low:
            narrowed[name] = (low, size - 1)
        elif size == low and size != high:
            narrowed[name] = (size + 1, high)
        else:
            return None
    return narrowed


def _range(limits: tuple[int, int | None]) -> str:
    return f"{limits[0]}..{'' if limits[1] is None else limits[1]}"


def _uncapturable(error: Exception, ranges: dict[str, tuple[int, int | None]], loaded: Loaded) -> UnsupportedModel:
    """PyTorch's reason in the user's terms: which dimension is baked in, or where data decides."""
    text = str(error)
    suggestions = text.partition("Suggested fixes:")[2].split("\n\n")[0]
    baked = [(name, value) for name, value in _BAKED.findall(suggestions) if name in ranges]
    baked.sort(key=lambda found: found[1].startswith("Dim("))  # a narrower range alone is no reason
    if baked:
        name, value = baked[0]
        return UnsupportedModel(
            f"the dimension {name} cannot be dynamic in this model",
            where="torch.export",
            got=f"forward only works for {name} = {value}",
            need=f"a forward that works for every {name} in {_range(ranges[name])}",
            do=same_size.with_fixed(name, value, loaded.arguments)
            or f"{as_number(name, loaded.told_in)}, or take len/shape at run time in forward",
        )
    for name, size in _excluded(text) or []:
        low, high = ranges.get(name, (1, None))
        left: list[tuple[int, int | None]] = [(low, size - 1)] if size > low else []
        left += [(size + 1, high)] if high is None or size < high else []
        others = " or ".join(f"{name}={_range(limits)}" for limits in left) or f"a number in the place of {name}"
        told_in = loaded.told_in if left or loaded.told_in != "dynamic_shapes" else "example_inputs"
        return UnsupportedModel(
            f"the dimension {name} cannot have every size of its range in this model",
            where="torch.export",
            got=f"forward takes another way for {name} = {size}",
            need=f"one way for every {name} in {_range((low, high))}",
            do=("leave --kv-cache out" if told_in == "--kv-cache" else f"give {others} in {told_in}")
            + ", or make that table one longer",
        )
    if "data-dependent" in text or "DataDependent" in type(error).__name__ or ".item()" in text:
        return UnsupportedModel(
            "forward decides by the values of a tensor, which a graph cannot follow",
            where=_user_frame(text),
            got=text.strip().splitlines()[0][:300],
            need="control flow and sizes that depend on shapes only",
            do="use torch.where or torch.cond there, or take that part out of the exported model",
        )
    return UnsupportedModel(
        "PyTorch cannot export this model",
        where=_user_frame(text),
        got=f"{type(error).__name__}: {text.strip().splitlines()[0][:300] if text.strip() else 'no message'}",
        need="a module that torch.export.export captures",
        do="try torch.export.draft_export on it, which names each place; or give an ONNX file",
    )


def _is_unproven_guard(text: str) -> bool:
    """A condition on sizes that PyTorch can neither prove nor turn into a range.

    Left for the run, it names no size that the model cannot have: whether the graph is right at other sizes than the
    example's is tried afterwards, as for every export.
    """
    return "Constraints violated" in text and "generated guard" in text and "Suggested fixes" not in text


def _user_frame(text: str) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    own = [frame for frame in frames if "site-packages" not in frame[0]]
    return "{}:{} in {}".format(*own[-1]) if own else "torch.export"


def tensors_in(outputs: Any) -> list[torch.Tensor]:
    """The tensors that the model returned, in the order of the graph's outputs."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def output_names(outputs: Any) -> list[str]:
    """A name for each tensor: its key in a dict or dataclass, else ``output`` or ``output_INDEX``."""
    paths = [path for path, leaf in pytree.tree_flatten_with_path(outputs)[0] if isinstance(leaf, torch.Tensor)]
    if len(paths) == 1 and not _keys(paths[0]):
        return ["output"]
    return ["_".join(["output", *keys] if keys[:1] and keys[0].isdigit() else keys) for keys in map(_keys, paths)]


def _keys(path: Any) -> list[str]:
    keys = [str(next(getattr(k, a) for a in ("key", "idx", "name") if hasattr(k, a))) for k in path]
    return [re.sub(r"[^\w.]", "_", key) for key in keys]


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values; bfloat16 as ml_dtypes has it, which NumPy lacks."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.uint16).numpy()).view(ml_dtypes.bfloat16)
    return np.asarray(tensor.numpy())


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """The reverse of ``to_numpy``."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
