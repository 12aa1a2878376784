# SPDX-License-Identifier: Apache-2.0
"""A fused file in the form in which ONNX Runtime's TensorRT provider hands its nodes to our plugin.

The provider makes an operator of every plugin in TensorRT's registry, all in the domain ``trt.plugins``; a node of
another domain is none of them, and ONNX Runtime would run its function body, silently. So the nodes are moved into that
domain and the bodies left out: where the plugin is missing, ONNX Runtime refuses the model and names the node.

Sources: ``tensorrt_execution_provider_custom_ops.cc`` of github.com/microsoft/onnxruntime; plugins of our kind
(``IPluginCreatorV3One``) are in its list since pull request 24211, which came with ONNX Runtime 1.22.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
import onnx.inliner

from flash_export.errors import UnsupportedModel
from flash_export.op import CACHE_OPERATORS, DOMAIN
from flash_trt.onnx_file import PROVIDER_DOMAIN, OnnxFile

_Types = dict[str, int]
"""Name of a value -> its ONNX element type."""


def provider_model(file: OnnxFile) -> tuple[onnx.ModelProto, set[int]]:
    """The model for the provider, and the ONNX types in which its attentions compute; weights stay in their files.

    The operators that the provider registers infer no types, so every output of a node gets its own in the file.

    Raises:
        UnsupportedModel: a cache that is written in place or bfloat16, for which the provider has no switch in a
            server's configuration, or a type that shape inference does not tell.
    """
    ours = [(f.domain, f.name) for f in file.proto.functions if f.domain == DOMAIN]
    # A function is called from another graph, where the provider would not look for plugins.
    flat = onnx.inliner.inline_selected_functions(file.proto, ours, exclude=True)
    model = onnx.shape_inference.infer_shapes(flat)
    computed_in = {_moved(node, types, file) for node, types in _flash_nodes(model.graph, {})}
    opsets = [opset for opset in model.opset_import if opset.domain != DOMAIN]
    del model.functions[:], model.opset_import[:]
    model.opset_import.extend([*opsets, onnx.helper.make_opsetid(PROVIDER_DOMAIN, 1)])
    return model, computed_in


def _flash_nodes(graph: onnx.GraphProto, outer: Mapping[str, int]) -> Iterator[tuple[onnx.NodeProto, _Types]]:
    """Every FlashAttention node of the graph and the graphs in it, with the types that it sees."""
    told = [*graph.input, *graph.output, *graph.value_info]
    types = {**outer, **{value.name: value.type.tensor_type.elem_type for value in told}}
    for node in graph.node:
        if node.domain == DOMAIN:
            yield node, types
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from _flash_nodes(inner, types)


def _moved(node: onnx.NodeProto, types: _Types, file: OnnxFile) -> int:
    """Moves one node into the provider's domain; returns the type it computes in."""
    if node.op_type in CACHE_OPERATORS:
        raise _unserved(node, file, f"{node.op_type}, which writes its cache in place")
    kinds = [types.get(name, 0) for name in node.output]
    if not all(kinds):
        raise _unserved(node, file, "an output whose type the file does not tell")
    if kinds[0] == onnx.TensorProto.BFLOAT16:
        raise _unserved(node, file, "bfloat16")
    node.domain = PROVIDER_DOMAIN
    return kinds[0]


def _unserved(node: onnx.NodeProto, file: OnnxFile, got: str) -> UnsupportedModel:
    return UnsupportedModel(
        "ONNX Runtime's TensorRT provider cannot be given this model",
        where=f"{file.path}, node {node.name or node.output[0]}",
        got=got,
        need="attention in fp32 or fp16, with a cache that grows where there is one",
        do="build an engine with flash-trt build --backend tensorrt on the GPU machine and serve that: "
        "flash-trt triton DIR MODEL.engine",
    )
