# SPDX-License-Identifier: Apache-2.0
"""The symbolic shape of every value of a graph, and what its small integer tensors hold.

Real exports compute Reshape targets in the graph (Shape, Gather, Concat, Mul), and the legacy exporter states no
shape between input and output. ``Shapes`` walks a graph once, forward, by the rules of ``shape_rules``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from flash_export import graph as g
from flash_export.contents_rules import MAX_CONTENTS, contents_of
from flash_export.contrib_shapes import CONTRIB_SHAPE_RULES, SKIPPING
from flash_export.dims import ONE, Dim, Shape
from flash_export.shape_rules import SHAPE_RULES

_OWN_TYPE_NAMES = (
    "ArgMax ArgMin Bernoulli BitCast BlackmanWindow ConcatFromSequence ConvInteger DynamicQuantizeLinear EyeLike "
    "HammingWindow HannWindow If ImageDecoder Loop MatMulInteger MelWeightMatrix Multinomial NonMaxSuppression NonZero "
    "OneHot Optional OptionalGetElement OptionalHasElement QLinearConv QLinearMatMul QuantizeLinear RandomNormal "
    "RandomNormalLike RandomUniform RandomUniformLike RegexFullMatch Scan SequenceAt SequenceConstruct SequenceEmpty "
    "SequenceErase SequenceInsert SequenceLength SequenceMap Size SplitToSequence StringSplit TfIdfVectorizer"
)
_OWN_TYPE = frozenset(_OWN_TYPE_NAMES.split())
"""Operators whose output type is not their first input's; their outputs' types must be declared."""
_BOOLEAN_NAMES = "And Or Xor Not Equal Less LessOrEqual Greater GreaterOrEqual IsInf IsNaN"
_RULES = {"": SHAPE_RULES, **CONTRIB_SHAPE_RULES}
_BOOLEAN = frozenset(_BOOLEAN_NAMES.split())


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
        self._floors: dict[str, tuple[Dim, int]] = {} if outer is None else outer._floors
        self._lengths: dict[Dim, Dim] = {} if outer is None else outer._lengths
        self._formulas: dict[str, Dim] = {} if outer is None else outer._formulas
        self._fresh: int = 0 if outer is None else outer._fresh + 1_000_000
        for node in graph:
            self.add(node)

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
        known = self._shapes[value]
        return tuple(map(self.length, known)) if known is not None and self._lengths else known

    def contents(self, value: ir.Value | None) -> tuple[Dim, ...] | None:
        """The elements of a small integer tensor, row by row, where they are known."""
        if value is None:
            return None
        if value in self._contents:
            known = self._contents[value]
            return tuple(map(self.length, known)) if self._lengths else known
        if value.dtype not in (None, ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL):
            return None
        tensor = value.const_value
        if tensor is not None and tensor.size > MAX_CONTENTS:
            return None
        array = g.constant(value)
        if array is None or array.size > MAX_CONTENTS or array.dtype.kind not in "iub":
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

    def quotient(self, dim: Dim, divisor: int) -> Dim:
        """``dim`` divided by a positive number and rounded down: what is no multiple of it gets a name of its own.

        Equal quotients are equal dims: multiples come out of the fraction, and a quotient of a quotient is one.
        """
        outer = Dim({})
        while True:
            dim = self._written_out(dim)
            whole = Dim({m: c // divisor for m, c in dim.terms.items()})
            rest = dim - whole * Dim.of(divisor)
            if rest.static is not None:
                return outer + whole
            ((name, *others), number) = sorted(rest.symbols), rest.terms.get((), 0)
            if name not in self._floors or others or (rest - Dim.of(number)).symbol != name:
                break
            inner, by = self._floors[name]
            outer, dim, divisor = outer + whole, inner + Dim.of(number * by), by * divisor
        name = f"?({rest})//{divisor}"
        self._floors[name] = rest, divisor
        return outer + self.length(whole + Dim({(name,): 1}))

    def length(self, dim: Dim) -> Dim:
        """``dim`` by the name that the file has for it, where it is known to have one."""
        return self._lengths.get(self._written_out(dim), dim) if self._lengths else dim

    def _name(self, formula: Dim, name: Dim) -> None:
        """Notes what the file calls the length; one name is taken to stand for one formula.

        A name that the length is computed from is none for it: the file has it for two lengths.
        """
        if name.symbol is not None and name.symbol in self._origins(formula):
            return
        if name.symbol is None or self._formulas.setdefault(name.symbol, formula) == formula:
            self._lengths.setdefault(formula, name)

    def _origins(self, formula: Dim) -> set[str]:
        """Every name that the length depends on, those inside of quotients and of named lengths too."""
        found: set[str] = set()
        ahead = set(formula.symbols)
        while ahead:
            found.add(name := ahead.pop())
            known = [self._formulas.get(name), self._floors[name][0] if name in self._floors else None]
            ahead |= {n for dim in known if dim is not None for n in dim.symbols} - found
        return found

    def _written_out(self, dim: Dim) -> Dim:
        """``dim`` with the names of quotients replaced by what they stand for."""
        if dim.symbols.isdisjoint(self._formulas):
            return dim
        whole = Dim({})
        for names, count in dim.terms.items():
            parts = (self._formulas.get(name, Dim({(name,): 1})) for name in names)
            whole += math.prod(parts, start=Dim.of(count))
        return whole

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

    def add(self, node: ir.Node) -> None:
        """Learns what ``node`` says of its outputs; those of its inputs must be known."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        if not node.outputs or domain not in _RULES:
            return
        dtype = self._derived_dtype(node)
        for index, value in enumerate(node.outputs):
            if index == 0 or node.op_type == "Split" or (node.op_type in SKIPPING and index == 3):
                self._dtypes[value] = dtype
        derived: list[Shape | None] = [None] * len(node.outputs)
        rule = _RULES[domain].get(node.op_type)
        if rule is not None:
            known = rule(self, node)[: len(node.outputs)]
            derived[: len(known)] = known
        for value, shape in zip(node.outputs, derived, strict=True):
            self._shapes[value] = self._merged(value, shape)
        if domain:
            return
        for value, contents in zip(node.outputs, contents_of(self, node), strict=False):
            if contents is not None and len(contents) <= MAX_CONTENTS:
                self._contents[value] = contents

    def _derived_dtype(self, node: ir.Node) -> ir.DataType | None:
        if node.op_type == "Cast":
            return ir.DataType(g.int_attribute(node, "to", 1))
        if node.op_type in ("Constant", "ConstantOfShape"):
            attribute = node.attributes.get("value")
            if attribute is not None:
                return g.tensor_of(attribute).dtype
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
            formula = self._written_out(d)
            if not formula.symbols.isdisjoint(self._floors) and not any(name.startswith("?") for name in s.symbols):
                self._name(formula, s)
            d = self.length(d)
            guessed = d.symbol is not None and d.symbol.startswith("?") and d.symbol not in self._floors
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
