# SPDX-License-Identifier: Apache-2.0
"""Parses every body of the contract with TensorRT for RTX and builds some into engines, no plugin registered.

Run by test_function_body.py in a process of its own. Prints one line a failure, with FAILED in it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import tensorrt_rtx as trt

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "exporter")]

from contract import tensors  # noqa: E402
from contract.cases import CASES, Case  # noqa: E402
from contract.node_model import feeds, model_of_case  # noqa: E402

BUILT = {
    "fp16_bottom_right",
    "fp32_full",
    "head_dim_15_fp32",
    "gqa",
    "bias_of_keys",
    "everything_at_once",
    "packed_gqa",
}
"""One of each kind; a build takes 0.1 s to 0.5 s."""


def failure(case: Case, builder: trt.Builder, logger: trt.Logger) -> str | None:
    """What TensorRT says against the case's model; None: nothing."""
    arrays = tensors.node_inputs(case, tensors.make(case))
    model = model_of_case(case, arrays, 18)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model.SerializeToString()):
        return "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
    layers = [network.get_layer(i).type for i in range(network.num_layers)]
    if trt.LayerType.PLUGIN_V3 in layers:
        return "a plugin was taken instead of the body"
    if case.name in BUILT and builder.build_serialized_network(network, config_for(case, model, builder)) is None:
        return "no engine"
    return None


def config_for(case: Case, model: onnx.ModelProto, builder: trt.Builder) -> trt.IBuilderConfig:
    """One target and a profile in which batch and lengths vary, as far as the case's tensors allow."""
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    values = feeds(case, tensors.node_inputs(case, tensors.make(case)))
    for graph_input in model.graph.input:
        largest = values[graph_input.name].shape
        sequence = 2 if case.layout == 1 else 1
        varies = {0, sequence} if graph_input.name in ("query", "key", "value", "qkv") else {0}
        # Batch and lengths go from 1 up together; axes that hold heads keep their size.
        smallest = tuple(1 if axis in varies else size for axis, size in enumerate(largest))
        if case.operator == "FlashAttentionEx":
            smallest = largest
        profile.set_shape(graph_input.name, smallest, largest, largest)
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM80, 0)
    return config


def main() -> None:
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    for case in CASES:
        if reason := failure(case, builder, logger):
            print(f"FAILED {case.name}: {reason}")
    print(f"{len(CASES)} bodies parsed, {len(BUILT)} built")


if __name__ == "__main__":
    main()
