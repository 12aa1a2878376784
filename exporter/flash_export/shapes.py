# SPDX-License-Identifier: Apache-2.0
"""Symbolic shapes: a dim is a polynomial in named lengths, so ``4*batch`` splits into ``batch`` and 4 provably.

Real exports compute Reshape targets in the graph (Shape, Gather, Concat, Mul), and the legacy exporter states no
shape between input and output. ``Shapes`` walks a graph once, forward, and knows afterwards the shape of every value
that layout operators can make and the contents of the small integer tensors among them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from flash_export import graph as g

Monomial = tuple[str, ...]
MAX_CONTENTS = 64
"""Integer tensors of more elements are data, not a shape."""


class Dim:
    """A length: a polynomial with integer coefficients in the names of the dynamic dims. Immutable."""

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms: dict[Monomial, int] = {m: c for m, c in sorted(terms.items()) if c}

    @staticmethod
    def of(number: int) -> Dim:
        """A fixed length."""
        return Dim({(): int(number)})

    @staticmethod
    def named(name: str) -> Dim:
        """The dim that a ``dim_param`` stands for; sums and products such as ``4*s0 + 1`` are understood."""
        if re.fullmatch(r"[\w.:/\-+* ]+", name) and not re.search(r"[^\s+*]\s+[^\s+*]|[\d\w]-", name):
            terms = [_parse_product(part) for part in name.split("+")]
            if all(t is not None for t in terms):
                return sum((t for t in terms if t is not None), Dim({}))
        return Dim({(name,): 1})

    @property
    def static(self) -> int | None:
        """The number, when it is one."""
        if not self.terms:
            return 0
        return self.terms[()] if set(self.terms) == {()} else None

    @property
    def symbol(self) -> str | None:
        """The name, when the dim is a single dynamic dim."""
        if len(self.terms) != 1:
            return None
        ((monomial, coefficient),) = self.terms.items()
        return monomial[0] if coefficient == 1 and len(monomial) == 1 else None

    @property
    def symbols(self) -> set[str]:
        """Every name that the dim depends on."""
        return {name for monomial in self.terms for name in monomial}

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """The number at these sizes of the named dims."""
        return sum(c * math.prod(sizes[name] for name in m) for m, c in self.terms.items())

    def renamed(self, names: Callable[[str], str]) -> Dim:
        """The dim with every name mapped."""
        return sum((Dim({tuple(sorted(map(names, m))): c}) for m, c in self.terms.items()), Dim({}))

    def divided(self, other: Dim) -> Dim | None:
        """The exact quotient, or None when it is no polynomial."""
        if self == other:
            return Dim.of(1)
        if len(other.terms) == 1:
            ((monomial, coefficient),) = other.terms.items()
            quotients = {_without(m, monomial): c for m, c in self.terms.items()}
            if None not in quotients and all(c % coefficient == 0 for c in self.terms.values()):
                return Dim({m: c // coefficient for m, c in quotients.items() if m is not None})
            return None
        if self.terms.keys() == other.terms.keys():
            ratios = {self.terms[m] / c for m, c in other.terms.items()}
            ratio = ratios.pop()
            if not ratios and ratio == int(ratio):
                return Dim.of(int(ratio))
        return None

    def __add__(self, other: Dim) -> Dim:
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return Dim(terms)

    def __mul__(self, other: Dim) -> Dim:
        product = Dim({})
        for a, x in self.terms.items():
            for b, y in other.terms.items():
                product = product + Dim({tuple(sorted(a + b)): x * y})
        return product

    def __sub__(self, other: Dim) -> Dim:
        return self + other * Dim.of(-1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(tuple(self.terms.items()))

    def __repr__(self) -> str:
        parts = ["*".join(([str(c)] if c != 1 or not m else []) + list(m)) for m, c in self.terms.items()]
        return " + ".join(parts) or "0"


def _parse_product(text: str) -> Dim | None:
    product = Dim.of(1)
    for factor in (f.strip() for f in text.split("*")):
        if not factor:
            return None
        product = product * (Dim.of(int(factor)) if factor.isdigit() else Dim({(factor,): 1}))
    return product


def _without(monomial: Monomial, part: Monomial) -> Monomial | None:
    rest = list(monomial)
    for name in part:
        if name not in rest:
            return None
        rest.remove(name)
    return tuple(rest)


ONE = Dim.of(1)
Shape = tuple[Dim, ...]

_UNARY = frozenset(
    [
        "Identity",
        "Cast",
        "Dropout",
        "Softmax",
        "LogSoftmax",
        "Tanh",
        "Sigmoid",
        "Relu",
        "Gelu",
        "Erf",
        "Sqrt",
        "Neg",
        "Abs",
        "Exp",
        "Not",
        "IsNaN",
        "Trilu",
        "CastLike",
        "LayerNormalization",
        "RMSNormalization",
        "Clip",
        "LeakyRelu",
        "Elu",
        "Softplus",
        "Reciprocal",
        "Log",
        "Sin",
        "Cos",
        "Floor",
        "Ceil",
    ]
)
_BROADCASTING = frozenset(
    [
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Pow",
        "Where",
        "And",
        "Or",
        "Xor",
        "Equal",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
        "Max",
        "Min",
        "Mod",
    ]
)

_OWN_TYPE = frozenset(
    [
        "ArgMax",
        "ArgMin",
        "ConvInteger",
        "EyeLike",
        "If",
        "Loop",
        "MatMulInteger",
        "Multinomial",
        "NonZero",
        "OneHot",
        "QLinearConv",
        "QLinearMatMul",
        "QuantizeLinear",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Scan",
        "Size",
    ]
)
"""Operators whose output type is not their first input's; their outputs' types must be declared."""
_BOOLEAN = frozenset(["And", "Or", "Xor", "Not", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN"])


class Shapes:
    """The symbolic shapes and integer contents of one graph's values.

    Two dynamic dims that meet in an elementwise operator or a product are taken as equal (``unify``): a broadcast of
    a dynamic dim that happens to be 1 at run time is no attention any program means.
    """

    def __init__(
        self,
        graph: ir.Graph | ir.Function,
        outer: Shapes | None = None,
        inferred: Mapping[str, ir.TypeAndShape] | None = None,
    ) -> None:
        self._inferred = inferred or {}
        self._shapes: dict[ir.Value, Shape | None] = {} if outer is None else dict(outer._shapes)
        self._contents: dict[ir.Value, tuple[Dim, ...]] = {} if outer is None else dict(outer._contents)
        self._same: dict[str, str] = {} if outer is None else outer._same
        self._dtypes: dict[ir.Value, ir.DataType | None] = {} if outer is None else dict(outer._dtypes)
        self._fresh: int = 0 if outer is None else outer._fresh + 1_000_000
        for node in graph:
            self._infer(node)

    @property
    def unknown(self) -> bool:
        """True when some value's rank or element type is known neither from the file nor by a rule."""
        return any(shape is None or self.dtype(value) is None for value, shape in self._shapes.items())

    def shape(self, value: ir.Value | None) -> Shape | None:
        """The shape of ``value``; None when not even its rank is known."""
        if value is None:
            return None
        if value not in self._shapes:
            self._shapes[value] = self._declared(value)
        return self._shapes[value]

    def contents(self, value: ir.Value | None) -> tuple[Dim, ...] | None:
        """The elements of a small integer tensor of rank 0 or 1, where they are known."""
        if value is None:
            return None
        if value in self._contents:
            return self._contents[value]
        if value.dtype not in (None, ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL):
            return None
        tensor = value.const_value
        if tensor is not None and tensor.size > MAX_CONTENTS:
            return None
        array = g.constant(value)
        if array is None or array.size > MAX_CONTENTS or array.ndim > 1 or array.dtype.kind not in "iub":
            return None
        self._contents[value] = tuple(Dim.of(int(i)) for i in array.reshape(-1))
        return self._contents[value]

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The element type, declared or derived."""
        if value is None:
            return None
        if value.dtype is not None:
            return value.dtype
        known = self._dtypes.get(value)
        inferred = self._inferred.get(str(value.name))
        if known is None and inferred is not None and isinstance(inferred.type, ir.TensorType):
            return inferred.type.dtype
        return known

    def fresh(self) -> Dim:
        """A dim about which nothing is known."""
        self._fresh += 1
        return Dim({(f"?{self._fresh}",): 1})

    def unify(self, a: Dim, b: Dim) -> None:
        """Notes that two single dynamic dims are one and the same length."""
        left, right = a.symbol, b.symbol
        if left is not None and right is not None and self.representative(left) != self.representative(right):
            self._same[self.representative(right)] = self.representative(left)

    def representative(self, name: str) -> str:
        """The name that stands for all dims known to equal ``name``."""
        while name in self._same:
            name = self._same[name]
        return name

    def normal(self, dim: Dim) -> Dim:
        """``dim`` written in representatives."""
        return dim.renamed(self.representative) if self._same else dim

    def _declared(self, value: ir.Value) -> Shape | None:
        shape = value.shape
        if shape is None and (inferred := self._inferred.get(str(value.name))) is not None:
            shape = inferred.shape
        if shape is not None:
            return tuple(self._declared_dim(d) for d in shape)
        if value.const_value is not None:
            return tuple(Dim.of(int(d)) for d in value.const_value.shape.numpy())
        return None

    def _declared_dim(self, dim: int | ir.SymbolicDim) -> Dim:
        if isinstance(dim, int):
            return Dim.of(dim)
        return self.fresh() if dim.value is None else Dim.named(dim.value)

    def _infer(self, node: ir.Node) -> None:
        if not node.outputs or (node.domain not in ("", "ai.onnx")):
            return
        dtype = self._derived_dtype(node)
        for value in node.outputs if node.op_type == "Split" else node.outputs[:1]:
            self._dtypes[value] = dtype
        derived: list[Shape | None] = [None] * len(node.outputs)
        rule = _RULES.get(node.op_type)
        if rule is not None:
            derived[: len(node.outputs)] = rule(self, node)[: len(node.outputs)]
        for value, shape in zip(node.outputs, derived, strict=True):
            self._shapes[value] = self._merged(value, shape)
        if node.op_type in _CONTENTS:
            contents = _CONTENTS[node.op_type](self, node)
            if contents is not None and len(contents) <= MAX_CONTENTS:
                self._contents[node.outputs[0]] = contents

    def _derived_dtype(self, node: ir.Node) -> ir.DataType | None:
        if node.op_type == "Cast":
            return ir.DataType(g.int_attribute(node, "to", 1))
        if node.op_type in ("Constant", "ConstantOfShape"):
            attribute = node.attributes.get("value")
            if attribute is not None:
                return attribute.as_tensor().dtype
            return ir.DataType.INT64 if {"value_int", "value_ints"} & set(node.attributes) else ir.DataType.FLOAT
        if node.op_type in _BOOLEAN:
            return ir.DataType.BOOL
        if node.op_type == "Shape":
            return ir.DataType.INT64
        if node.op_type in _OWN_TYPE:
            return None
        return self.dtype(g.input_of(node, 1 if node.op_type in ("Where", "CastLike", "DequantizeLinear") else 0))

    def _merged(self, value: ir.Value, derived: Shape | None) -> Shape | None:
        """Static beats derived, derived beats a declared name: exporters invent a name an output."""
        declared = self._declared(value)
        if derived is None or declared is None or len(derived) != len(declared):
            return declared if derived is None else derived
        merged = []
        for d, s in zip(derived, declared, strict=True):
            guessed = d.symbol is not None and d.symbol.startswith("?")
            merged.append(s if s.static is not None or guessed else d)
        return tuple(merged)

    def broadcast(self, shapes: Sequence[Shape | None]) -> Shape | None:
        """NumPy's broadcast of the shapes."""
        known = [s for s in shapes if s is not None]
        if len(known) != len(shapes) or not known:
            return None
        rank = max(map(len, known))
        result = []
        for axis in range(rank):
            dims = [s[axis - rank + len(s)] for s in known if axis - rank + len(s) >= 0]
            wide = [d for d in dims if d != ONE] or [ONE]
            fixed = [d for d in wide if d.static is not None]
            result.append((fixed or wide)[0])
        return tuple(result)


# Shape rules: one function an operator (or family), from a node to its outputs' shapes.


def _same(s: Shapes, node: ir.Node) -> list[Shape | None]:
    return [s.shape(node.inputs[0])] * len(node.outputs)


def _broadcast(s: Shapes, node: ir.Node) -> list[Shape | None]:
    return [s.broadcast([s.shape(v) for v in node.inputs])]


def _matmul(s: Shapes, node: ir.Node) -> list[Shape | None]:
    a, b = s.shape(node.inputs[0]), s.shape(node.inputs[1])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return [None]
    batch = s.broadcast([a[:-2], b[:-2]])
    return [None if batch is None else (*batch, a[-2], b[-1])]


def _gemm(s: Shapes, node: ir.Node) -> list[Shape | None]:
    a, b = s.shape(node.inputs[0]), s.shape(node.inputs[1])
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return [None]
    rows = a[1] if g.int_attribute(node, "transA", 0) else a[0]
    return [(rows, b[0] if g.int_attribute(node, "transB", 0) else b[1])]


def _reduce(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape, axes = s.shape(node.inputs[0]), g.axes_of(node)
    if shape is None or (axes is None and len(node.inputs) > 1):
        return [None]
    at = set(range(len(shape))) if axes is None else {a % len(shape) for a in axes}
    kept = g.int_attribute(node, "keepdims", 1)
    return [tuple(ONE if i in at else d for i, d in enumerate(shape) if kept or i not in at)]


def _transpose(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape = s.shape(node.inputs[0])
    if shape is None:
        return [None]
    perm = g.ints_attribute(node, "perm") or list(range(len(shape)))[::-1]
    return [tuple(shape[i] for i in perm)]


def reshape_target(s: Shapes, node: ir.Node) -> Shape | None:
    """The output shape of a Reshape node with 0 and -1 resolved; None when it cannot be told."""
    shape, target = s.shape(node.inputs[0]), s.contents(g.input_of(node, 1))
    if target is None:
        return None
    dims: list[Dim | None] = []
    for axis, dim in enumerate(target):
        if dim.static == 0 and not g.int_attribute(node, "allowzero", 0):
            if shape is None or axis >= len(shape):
                return None
            dims.append(shape[axis])
        else:
            dims.append(None if dim.static == -1 else dim)
    if None not in dims:
        return tuple(d for d in dims if d is not None)
    if shape is None:
        return tuple(s.fresh() if d is None else d for d in dims)
    total = math.prod(shape, start=ONE)
    rest = total.divided(math.prod((d for d in dims if d is not None), start=ONE))
    return tuple((rest or s.fresh()) if d is None else d for d in dims)


def _reshape(s: Shapes, node: ir.Node) -> list[Shape | None]:
    return [reshape_target(s, node)]


def _unsqueeze(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape, axes = s.shape(node.inputs[0]), g.axes_of(node)
    if shape is None or axes is None:
        return [None]
    rank = len(shape) + len(axes)
    at = {a % rank for a in axes}
    rest = iter(shape)
    return [tuple(ONE if i in at else next(rest) for i in range(rank))]


def _squeeze(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape, axes = s.shape(node.inputs[0]), g.axes_of(node)
    if shape is None:
        return [None]
    if axes is None:
        if len(node.inputs) > 1 or any(d.static is None for d in shape):
            return [None]
        return [tuple(d for d in shape if d != ONE)]
    at = {a % len(shape) for a in axes}
    return [tuple(d for i, d in enumerate(shape) if i not in at)]


def _expand(s: Shapes, node: ir.Node) -> list[Shape | None]:
    target = s.contents(node.inputs[1])
    if target is None:
        return [None]
    return [s.broadcast([s.shape(node.inputs[0]), tuple(ONE if d.static == -1 else d for d in target)])]


def _concat(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shapes = [s.shape(v) for v in node.inputs]
    known = [x for x in shapes if x is not None]
    if len(known) != len(shapes) or not known or len({len(x) for x in known}) != 1 or not known[0]:
        return [None]
    axis = g.int_attribute(node, "axis", 0) % len(known[0])
    return [tuple(sum((x[i] for x in known), Dim({})) if i == axis else known[0][i] for i in range(len(known[0])))]


def _gather(s: Shapes, node: ir.Node) -> list[Shape | None]:
    data, indices = s.shape(node.inputs[0]), s.shape(node.inputs[1])
    if data is None or indices is None or not data:
        return [None]
    axis = g.int_attribute(node, "axis", 0) % len(data)
    return [data[:axis] + indices + data[axis + 1 :]]


def _slice(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape = s.shape(node.inputs[0])
    if shape is None or len(node.inputs) < 3:
        return [None]
    bounds = [s.contents(v) for v in node.inputs[1:5]]
    starts, ends = bounds[0], bounds[1]
    axes = bounds[2] if len(bounds) > 2 else tuple(Dim.of(i) for i in range(len(starts or ())))
    steps = bounds[3] if len(bounds) > 3 else tuple(ONE for _ in starts or ())
    if axes is None:
        return [tuple(s.fresh() for _ in shape)]
    dims = list(shape)
    for i, axis in enumerate(axes):
        at = (axis.static or 0) % len(shape)
        known = starts is not None and ends is not None and steps is not None
        dims[at] = _sliced(shape[at], starts[i], ends[i], steps[i]) if known else None  # type: ignore
    return [tuple(s.fresh() if d is None else d for d in dims)]


def _sliced(dim: Dim, start: Dim, end: Dim, step: Dim) -> Dim | None:
    first, last, stride = start.static, end.static, step.static
    if dim.static is not None and first is not None and last is not None and stride is not None:
        return Dim.of(len(range(dim.static)[first:last:stride]))
    if stride == 1 and first == 0 and last is not None and last >= 2**31 - 1:
        return dim
    if stride == 1 and first == 0 and last is None:
        return end  # a slice past the end is shorter than it asks for; programs do not mean that
    return None


def _split(s: Shapes, node: ir.Node) -> list[Shape | None]:
    shape = s.shape(node.inputs[0])
    sizes = s.contents(g.input_of(node, 1))
    written = g.ints_attribute(node, "split")
    if shape is None:
        return [None] * len(node.outputs)
    axis = g.int_attribute(node, "axis", 0) % len(shape)
    if sizes is None and written is not None:
        sizes = tuple(Dim.of(i) for i in written)
    if sizes is None:
        part = shape[axis].divided(Dim.of(len(node.outputs)))
        sizes = tuple(part or s.fresh() for _ in node.outputs)
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]


def _shape_of(s: Shapes, node: ir.Node) -> list[Shape | None]:
    contents = _contents_shape(s, node)
    return [None if contents is None else (Dim.of(len(contents)),)]


def _constant_of_shape(s: Shapes, node: ir.Node) -> list[Shape | None]:
    return [s.contents(node.inputs[0])]


def _constant(s: Shapes, node: ir.Node) -> list[Shape | None]:
    array = g.constant(node.outputs[0])
    return [None if array is None else tuple(Dim.of(i) for i in array.shape)]


def _range(s: Shapes, node: ir.Node) -> list[Shape | None]:
    start, limit, delta = (s.contents(v) for v in node.inputs)
    if start is not None and limit is not None and delta is not None and delta[0] == ONE:
        return [(limit[0] - start[0],)]
    return [(s.fresh(),)]


def einsum_letters(node: ir.Node) -> tuple[list[str], str] | None:
    """The letters of an explicit Einsum of two operands without ellipsis, e.g. ``(["bhqd", "bhkd"], "bhqk")``."""
    attribute = node.attributes.get("equation")
    text = "" if attribute is None else attribute.as_string().replace(" ", "")
    left, arrow, right = text.partition("->")
    operands = left.split(",")
    if not arrow or "." in text or len(operands) != 2 or any(len(set(o)) != len(o) for o in (*operands, right)):
        return None
    return operands, right


def _einsum(s: Shapes, node: ir.Node) -> list[Shape | None]:
    letters = einsum_letters(node)
    if letters is None:
        return [None]
    dims: dict[str, Dim] = {}
    for names, value in zip(letters[0], node.inputs, strict=True):
        shape = s.shape(value)
        if shape is None or len(shape) != len(names):
            return [None]
        for name, dim in zip(names, shape, strict=True):
            dims[name] = dim if dims.get(name, ONE) == ONE else dims[name]
    return [tuple(dims[name] for name in letters[1])]


_RULES: dict[str, Callable[[Shapes, ir.Node], list[Shape | None]]] = {
    **dict.fromkeys(_UNARY, _same),
    **dict.fromkeys(_BROADCASTING, _broadcast),
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"), _reduce),
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Expand": _expand,
    "Concat": _concat,
    "Gather": _gather,
    "Slice": _slice,
    "Split": _split,
    "Shape": _shape_of,
    "ConstantOfShape": _constant_of_shape,
    "Constant": _constant,
    "Range": _range,
    "Einsum": _einsum,
}

# Contents rules: what a small integer tensor holds.


def _contents_shape(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    shape = s.shape(node.inputs[0])
    if shape is None:
        return None
    start, end = g.int_attribute(node, "start", 0), node.attributes.get("end")
    return shape[start : None if end is None else end.as_int()]


def _contents_same(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    if node.op_type == "Cast" and g.int_attribute(node, "to", 7) not in (6, 7, 9):
        return None
    return s.contents(node.inputs[0])


def _contents_gather(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    data, indices = s.contents(node.inputs[0]), s.contents(node.inputs[1])
    if data is None or indices is None:
        return None
    at = [i.static for i in indices]
    if any(i is None or not -len(data) <= i < len(data) for i in at):
        return None
    return tuple(data[i] for i in at if i is not None)


def _contents_slice(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    data = s.contents(node.inputs[0])
    bounds = [s.contents(v) for v in node.inputs[1:]]
    if data is None or len(bounds) < 2 or any(b is None or len(b) != 1 or b[0].static is None for b in bounds):
        return None
    start, end = bounds[0][0].static, bounds[1][0].static  # type: ignore
    step = bounds[3][0].static if len(bounds) > 3 else 1  # type: ignore
    return data[start:end:step]


def _contents_concat(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    parts = [s.contents(v) for v in node.inputs]
    known = [p for p in parts if p is not None]
    return None if len(known) != len(parts) else tuple(d for p in known for d in p)


def _contents_binary(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    a, b = s.contents(node.inputs[0]), s.contents(node.inputs[1])
    if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    pairs = [(a[i % len(a)], b[i % len(b)]) for i in range(max(len(a), len(b)))]
    results = [_arithmetic(node.op_type, x, y) for x, y in pairs]
    known = [r for r in results if r is not None]
    return tuple(known) if len(known) == len(results) else None


def _arithmetic(op: str, x: Dim, y: Dim) -> Dim | None:
    if op == "Add":
        return x + y
    if op == "Sub":
        return x - y
    if op == "Mul":
        return x * y
    if op == "Equal":
        # A length is never negative, so a symbol differs from -1.
        if x.static is None and y.static is None:
            return ONE if x == y else None
        if x.static is None or y.static is None:
            number = y.static if x.static is None else x.static
            return Dim.of(0) if number is not None and number < 0 else None
        return Dim.of(int(x == y))
    a, b = x.static, y.static
    if a is not None and b:
        # ONNX integer division truncates towards zero.
        return Dim.of(int(a / b)) if op == "Div" else Dim.of(a % b) if b > 0 else None
    return x.divided(y) if op == "Div" and b != 0 else None


def _contents_where(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    parts = [s.contents(v) for v in node.inputs]
    if any(p is None or not p for p in parts):
        return None
    condition, x, y = (p for p in parts if p is not None)
    length = max(len(condition), len(x), len(y))
    choice = [condition[i % len(condition)].static for i in range(length)]
    if None in choice:
        return None
    return tuple((x if choice[i] else y)[i % len(x if choice[i] else y)] for i in range(length))


def _contents_constant_of_shape(s: Shapes, node: ir.Node) -> tuple[Dim, ...] | None:
    target = s.contents(node.inputs[0])
    if target is None or len(target) != 1 or target[0].static is None or target[0].static > MAX_CONTENTS:
        return None
    attribute = node.attributes.get("value")
    array = np.zeros(1) if attribute is None else attribute.as_tensor().numpy()
    if array.dtype.kind not in "iub":
        return None
    return (Dim.of(int(array.reshape(-1)[0])),) * target[0].static


_CONTENTS: dict[str, Callable[[Shapes, ir.Node], tuple[Dim, ...] | None]] = {
    "Shape": _contents_shape,
    **dict.fromkeys(("Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape"), _contents_same),
    "Gather": _contents_gather,
    "Slice": _contents_slice,
    "Concat": _contents_concat,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Mod", "Equal"), _contents_binary),
    "Where": _contents_where,
    "ConstantOfShape": _contents_constant_of_shape,
}
