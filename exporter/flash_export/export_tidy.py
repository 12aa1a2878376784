# SPDX-License-Identifier: Apache-2.0
"""A freshly translated graph made fit to read: names a person can follow, constants folded, dead nodes gone."""

from __future__ import annotations

import ast
import re

import onnx.helper
import onnx_ir as ir
import onnxscript.optimizer
from onnx_ir.passes import common

from flash_export.value_types import drop_contradicted, infer

IR_VERSION = 9
"""What opset 18 to 20 are written at: ONNX Runtime 1.17 refuses IR version 10."""

SCOPES = "pkg.torch.onnx.name_scopes"


def tidy(model: ir.Model, input_names: list[str], output_names: list[str]) -> None:
    """Tidies ``model`` in place; what it computes stays the same.

    1. Nodes are named after their module: ``/encoder/layer.0/attention/MatMul``.
    2. PyTorch's notes on each node go: they hold source paths of the exporting machine.
    3. Inlined, folded, common subexpressions merged, dead nodes removed. Not onnxscript's ``optimize``, which takes
       minutes on ten thousand nodes.
    4. Types that the operators contradict go.
    5. Inputs and outputs get the model's own names; an output is never an input or another output.
    """
    name_nodes(model.graph)
    common.InlinePass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    onnxscript.optimizer.fold_constants(model)
    drop_contradicted(model)
    for step in (
        common.IdentityEliminationPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.OutputFixPass(),  # last: merging would undo it
    ):
        step(model)
    name_boundary(model.graph, input_names, output_names)
    model.ir_version = max(IR_VERSION, _least_ir_version(model))
    infer(model)


def _least_ir_version(model: ir.Model) -> int:
    return int(
        onnx.helper.find_min_ir_version_for(
            [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()],
            ignore_unknown=True,
        )
    )


def name_nodes(graph: ir.Graph) -> None:
    """Names every node ``/scope/.../OpType``, numbered from the second of a name on."""
    taken: dict[str, int] = {}
    for node in graph.all_nodes():
        name = "/" + "/".join([*_scopes(node), node.op_type])
        count = taken[name] = taken.get(name, 0) + 1
        node.name = name if count == 1 else f"{name}_{count - 1}"


def _scopes(node: ir.Node) -> list[str]:
    """``['', 'encoder', 'encoder.layer.0', 'linear_1']`` -> ``['encoder', 'layer.0']``; the last is no module."""
    text = node.metadata_props.get(SCOPES)
    if not text:
        return []
    # torch.export calls the modules of nodes that have none "_empty_nn_module_stack_from_metadata_hook".
    paths = [path for path in ast.literal_eval(text)[:-1] if path and not path.startswith("_empty_nn_module")]
    scopes, outer = [], ""
    for path in paths:
        scopes.append(path.removeprefix(outer + ".") if outer else path)
        outer = path
    return scopes


def name_boundary(graph: ir.Graph, input_names: list[str], output_names: list[str]) -> None:
    """Gives the graph's inputs and outputs their names; whatever bears one of these names already is renamed."""
    wanted: dict[str, ir.Value] = {}
    for values, names in ((graph.inputs, input_names), (graph.outputs, output_names)):
        for value, name in zip(values, names, strict=False):
            while name in wanted:
                name += "_"
            wanted[name] = value
    named = {value.name: value for node in graph.all_nodes() for value in node.outputs}
    named |= {value.name: value for value in [*graph.inputs, *graph.initializers.values()]}
    for name, value in wanted.items():
        holder = named.get(name)
        if holder is not None and holder is not value and holder not in wanted.values():
            fresh = next(f"{name}_inner{i}" for i in range(len(named) + 1) if f"{name}_inner{i}" not in named)
            holder.name = fresh
            named[fresh] = holder
    for name, value in wanted.items():
        value.name = name


def name_dims(model: ir.Model, dims: dict[str, tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
    """Gives the symbols of the inputs' dynamic axes their names, everywhere in the graph.

    Args:
        dims: symbol -> (name, smallest, largest).

    Returns:
        name -> (smallest, largest).
    """
    symbols = {symbol: name for symbol, (name, _, _) in dims.items()}
    for value in [*model.graph.inputs, *(v for node in model.graph.all_nodes() for v in node.outputs)]:
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(dim, symbols) for dim in value.shape])
    return {name: (low, high) for name, low, high in dims.values()}


def _renamed(dim: int | ir.SymbolicDim, symbols: dict[str, str]) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    return re.sub(r"[A-Za-z_]\w*", lambda match: symbols.get(match[0], match[0]), dim.value)
