# SPDX-License-Identifier: Apache-2.0
"""Replaces found attentions by FlashAttention nodes, in place; a site is rewritten wholly or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir

from flash_export import function_body
from flash_export.arrange import Move
from flash_export.drafts import is_draft, is_loose_constant
from flash_export.feeds import BiasFeed, Feed
from flash_export.op import DOMAIN, FLASH_ATTENTION_EX, OPERATORS, VERSION
from flash_export.plan import Plan
from flash_export.sites import Site

_NUMPY = {
    ir.DataType.FLOAT: np.dtype(np.float32),
    ir.DataType.FLOAT16: np.dtype(np.float16),
    ir.DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


def rewrite(model: ir.Model, sites: Sequence[Site], *, fallback: bool = True) -> int:
    """Puts a FlashAttention node in place of every fused site and removes what nothing needs any more.

    Sites come from ``find`` on the same model; those that are not ``fused``, or are FlashAttention nodes already,
    change nothing. Values keep their names; the graph stays in topological order.

    Args:
        model: changed in place.
        sites: what ``find`` returned.
        fallback: whether the function bodies are added, which let any runtime run the file.

    Returns:
        The number of nodes put in.
    """
    plans = [site.match for site in sites if site.status == "fused" and isinstance(site.match, Plan)]
    position = {node: i for i, node in enumerate(model.graph)}
    plans.sort(key=lambda plan: position[_producer(plan.output)])
    builder = _Builder(model.graph, model.opset_imports.get("", 1))
    for plan in plans:
        builder.replace(plan)
    if plans:
        _remove_dead(model.graph)
        model.opset_imports[DOMAIN] = VERSION
    if plans and fallback:
        nodes = [n for n in model.graph if n.domain == DOMAIN and n.op_type in OPERATORS]
        for function in function_body.functions_for(nodes, model.opset_imports.get("", 1)):
            model.functions[function.identifier()] = function
    return len(plans)


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node


class _Builder:
    """Emits nodes before a place in the graph; equal constants and equal biases are made once."""

    def __init__(self, graph: ir.Graph, opset: int) -> None:
        self._graph = graph
        self._opset = opset
        self._names = {str(v.name) for n in graph for v in n.outputs} | set(graph.initializers)
        self._names |= {str(v.name) for v in graph.inputs}
        self._node_names = {str(n.name) for n in graph}
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], ir.Value] = {}
        self._biases: dict[object, ir.Value] = {}
        # One attention may read another's output: plans name the values that find saw.
        self._replaced: dict[ir.Value, ir.Value] = {}

    def replace(self, plan: Plan) -> None:
        """Emits the node of ``plan`` and hands its result to all who read the old output."""
        place = _producer(plan.output)
        prefix = plan.anchor.name or str(plan.anchor.outputs[0].name)
        late = self._between(plan.anchor, place) if any(is_draft(value) for value in plan.sources) else set()
        for value in plan.sources:
            # A draft stands above the anchor where it can, so that others may read it from there on.
            self._place_draft(value, place if _reads(value, late) else plan.anchor, prefix)
        for old, new in plan.also:
            self._place_draft(new, _producer(old), prefix)
        inputs = [self._feed(f, place, prefix) for f in plan.operands]
        operator = plan.operator
        if operator is FLASH_ATTENTION_EX:
            inputs += self._side_inputs(plan, place, prefix)
        node = ir.node(
            operator.name,
            inputs,
            dict(plan.attributes.as_dict()),
            domain=DOMAIN,
            num_outputs=len(operator.outputs),
            name=self._unique_node(f"{prefix}/{operator.name}"),
            version=VERSION,
        )
        node.metadata_props["flash_export.anchor"] = prefix
        self._graph.insert_before(place, node)
        result = node.outputs[0]
        result.name = self._unique(f"{prefix}/output")
        result.dtype = plan.dtype
        if len(node.outputs) > 1:
            node.outputs[1].name = self._unique(f"{prefix}/lse")
            node.outputs[1].dtype = ir.DataType.FLOAT
        self._hand_over(plan.output, self._move(result, plan.output_moves, place, prefix))
        for old, new in plan.also:
            self._hand_over(old, new)

    def _side_inputs(self, plan: Plan, place: ir.Node, prefix: str) -> list[ir.Value]:
        """Bias, lengths and sinks, each in the operator's type; the neutral constant where there is none."""
        bias = self._constant(np.zeros((1, 1, 1, 1), dtype=_NUMPY[plan.dtype]), "no_bias")
        lengths = self._constant(np.array([2**31 - 1], dtype=np.int32), "no_kv_lengths")
        sinks = self._constant(np.array([-np.inf], dtype=np.float32), "no_sinks")
        if plan.biases:
            bias = self._bias(plan, place, prefix)
        if plan.lengths is not None:
            lengths = self._cast(self._feed(plan.lengths, place, prefix), ir.DataType.INT32, place, prefix)
        if plan.sinks is not None:
            sinks = self._cast(self._feed(plan.sinks, place, prefix), ir.DataType.FLOAT, place, prefix)
        return [bias, lengths, sinks]

    def _cast(self, value: ir.Value, dtype: ir.DataType, place: ir.Node, prefix: str) -> ir.Value:
        if value.dtype == dtype:
            return value
        value = self._emit("Cast", [value], {"to": int(dtype)}, place, prefix)
        value.dtype = dtype
        return value

    def _hand_over(self, old: ir.Value, new: ir.Value) -> None:
        name = str(old.name)
        new.shape = old.shape
        if old.dtype is not None:
            new.dtype = old.dtype
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name = self._unique(f"{name}/replaced")
        new.name = name
        self._replaced[old] = new

    def _feed(self, feed: Feed, place: ir.Node, prefix: str) -> ir.Value:
        value = self._replaced.get(feed.value, feed.value)
        if is_loose_constant(value):
            value = self._owned(value)
        return self._move(value, feed.moves, place, prefix)

    def _owned(self, constant: ir.Value) -> ir.Value:
        """The graph's own constant in place of one that a draft reads."""
        assert constant.const_value is not None
        return self._constant(constant.const_value.numpy(), "constant")

    def _between(self, first: ir.Node, last: ir.Node) -> set[ir.Node]:
        """The nodes from ``first`` up to ``last``."""
        nodes = list(self._graph)
        return set(nodes[nodes.index(first) : nodes.index(last)])

    def _place_draft(self, value: ir.Value, place: ir.Node, prefix: str) -> None:
        """Puts the drafts that make ``value`` into the graph."""
        node = value.producer()
        if node is None or not is_draft(value):
            return
        for index, source in enumerate(node.inputs):
            if source is None:
                continue
            if is_loose_constant(source):
                node.replace_input_with(index, self._owned(source))
            else:
                self._place_draft(source, place, prefix)
        node.name = self._unique_node(f"{prefix}/{node.op_type}")
        self._graph.insert_before(place, node)
        value.name = self._unique(f"{node.name}_output")

    def _move(self, value: ir.Value, moves: Iterable[Move], place: ir.Node, prefix: str) -> ir.Value:
        for move in moves:
            source = value
            if move.op == "Transpose":
                value = self._emit("Transpose", [value], {"perm": list(move.numbers)}, place, prefix)
            elif move.op == "Reshape":
                target = self._constant(np.array(move.numbers, dtype=np.int64), "shape")
                value = self._emit("Reshape", [value, target], {}, place, prefix)
            elif move.op == "ComputedReshape":
                # A length of 0 is one, and does not ask for a copy of the dim at its place.
                zero: dict[str, object] = {"allowzero": 1} if self._opset >= 14 else {}
                value = self._emit("Reshape", [value, self._target(move, place, prefix)], zero, place, prefix)
            elif self._opset < 13:
                value = self._emit(move.op, [value], {"axes": list(move.numbers)}, place, prefix)
            else:
                axes = self._constant(np.array(move.numbers, dtype=np.int64), "axes")
                value = self._emit(move.op, [value, axes], {}, place, prefix)
            if source.dtype is not None:
                value.dtype = source.dtype
        return value

    def _target(self, move: Move, place: ir.Node, prefix: str) -> ir.Value:
        """The shape that a ComputedReshape is to, from the shapes of the values that its lengths are had from."""
        parts: list[ir.Value] = []
        for number, sources in move.lengths:
            part = self._constant(np.array([number], dtype=np.int64), "shape") if number != 1 or not sources else None
            for source, axis, times in sources:
                shape = self._emit("Shape", [self._replaced.get(source, source)], {}, place, prefix)
                at = self._constant(np.array([axis], dtype=np.int64), "axis")
                length = self._emit("Gather", [shape, at], {"axis": 0}, place, prefix)
                if times != 1:
                    by = self._constant(np.array([times], dtype=np.int64), "shape")
                    length = self._emit("Div", [length, by], {}, place, prefix)
                part = length if part is None else self._emit("Mul", [part, length], {}, place, prefix)
            assert part is not None
            parts.append(part)
        return self._emit("Concat", parts, {"axis": 0}, place, prefix)

    def _bias(self, plan: Plan, place: ir.Node, prefix: str) -> ir.Value:
        wide = any(b.dtype != plan.dtype for b in plan.biases)
        dtype = ir.DataType.FLOAT if wide else plan.dtype
        key = (plan.biases, dtype)
        if key not in self._biases:
            total: ir.Value | None = None
            for bias in plan.biases:
                if bias.overrides:
                    total = self._masked(bias, total, dtype, place, prefix)
                    continue
                part = self._summand(bias, dtype, place, prefix)
                total = part if total is None else self._emit("Add", [total, part], {}, place, prefix)
                total.dtype = dtype
            assert total is not None
            self._biases[key] = total
        return self._biases[key]

    def _summand(self, bias: BiasFeed, dtype: ir.DataType, place: ir.Node, prefix: str) -> ir.Value:
        if bias.keeps:
            return self._masked(bias, None, dtype, place, prefix)
        value = self._feed(bias.feeds[0], place, prefix)
        if bias.dtype != dtype:
            value = self._emit("Cast", [value], {"to": int(dtype)}, place, prefix)
        if bias.factor != 1.0:
            factor = self._constant(np.array(bias.factor, dtype=_NUMPY[dtype]), "factor")
            value = self._emit("Mul", [value, factor], {}, place, prefix)
        value.dtype = dtype
        return value

    def _masked(
        self, bias: BiasFeed, below: ir.Value | None, dtype: ir.DataType, place: ir.Node, prefix: str
    ) -> ir.Value:
        """``Where(all visible, below or 0, fill)``; one literal keeps its sense, several are brought to "visible"."""
        values = [self._feed(f, place, prefix) for f in bias.feeds]
        seen = below or self._constant(np.array(0.0, dtype=_NUMPY[dtype]), "zero")
        fill = self._constant(np.array(bias.fill, dtype=_NUMPY[dtype]), "fill")
        if len(values) == 1:
            branches = [seen, fill] if bias.keeps[0] else [fill, seen]
            result = self._emit("Where", [values[0], *branches], {}, place, prefix)
        else:
            visible: ir.Value | None = None
            for value, keep in zip(values, bias.keeps, strict=True):
                part = value if keep else self._emit("Not", [value], {}, place, prefix)
                visible = part if visible is None else self._emit("And", [visible, part], {}, place, prefix)
            assert visible is not None
            result = self._emit("Where", [visible, seen, fill], {}, place, prefix)
        result.dtype = dtype
        return result

    def _emit(
        self, op: str, inputs: list[ir.Value], attributes: dict[str, object], place: ir.Node, prefix: str
    ) -> ir.Value:
        name = self._unique_node(f"{prefix}/{op}")
        node = ir.node(op, inputs, attributes, name=name)  # type: ignore[arg-type]
        self._graph.insert_before(place, node)
        node.outputs[0].name = self._unique(f"{name}_output")
        return node.outputs[0]

    def _constant(self, array: np.ndarray, what: str) -> ir.Value:
        key = (str(array.dtype), array.tobytes(), array.shape)
        if key not in self._constants:
            value = ir.Value(name=self._unique(f"{DOMAIN}/{what}"), const_value=ir.tensor(array))
            value.const_value.name = value.name  # type: ignore[union-attr]
            value.dtype, value.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
            self._graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def _unique(self, name: str) -> str:
        return _fresh(name, self._names)

    def _unique_node(self, name: str) -> str:
        return _fresh(name, self._node_names)


def _reads(draft: ir.Value, nodes: set[ir.Node]) -> bool:
    """Whether a draft reads a result of one of ``nodes``, itself or through other drafts."""
    producer = draft.producer()
    if producer in nodes:
        return True
    return producer is not None and is_draft(draft) and any(_reads(v, nodes) for v in producer.inputs if v is not None)


def _fresh(name: str, taken: set[str]) -> str:
    result, number = name, 1
    while result in taken:
        number += 1
        result = f"{name}_{number}"
    taken.add(result)
    return result


def _remove_dead(graph: ir.Graph) -> None:
    """Removes nodes none of whose outputs is read, and initializers that lost their last reader."""
    for node in reversed(list(graph)):
        if not any(v.uses() or v.is_graph_output() for v in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            del graph.initializers[name]
