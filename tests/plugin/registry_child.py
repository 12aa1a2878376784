# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA's own code makes of the plugin, in a process of its own: TensorRT for RTX, no GPU.

    registry_child.py LIBRARY_FOLDER MODEL.onnx PLAN SHAPES_JSON [alias]

Loads the plugin into the registry, parses the model, builds an engine for four GPU generations and writes its plan.
Prints one JSON line: the registry's creators, the network's layers, the parser's errors, whether a plan came.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import tensorrt_rtx as trt

TARGETS = ("SM80", "SM86", "SM89", "SM120")


def build(model: bytes, shapes: dict[str, list[list[int]]]) -> tuple[bytes | None, dict[str, object]]:
    """The plan, or None; and what was seen."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(model)
    seen: dict[str, object] = {
        "errors": [parser.get_error(i).desc() for i in range(parser.num_errors)],
        "layers": [str(layer.type) for layer in network],
        "outputs": [list(network.get_output(i).shape) for i in range(network.num_outputs)] if parsed else [],
    }
    if not parsed:
        return None, seen
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(TARGETS)
    for i, target in enumerate(TARGETS):
        config.set_compute_capability(getattr(trt.ComputeCapability, target), i)
    if shapes:
        profile = builder.create_optimization_profile()
        for name, points in shapes.items():
            profile.set_shape(name, *points)
        config.add_optimization_profile(profile)
    if len(sys.argv) > 5 and sys.argv[5] == "alias":
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    plan = builder.build_serialized_network(network, config)
    return (None if plan is None else bytes(plan)), seen


def main() -> None:
    libraries, model, plan_path = (Path(argument) for argument in sys.argv[1:4])
    ctypes.CDLL(str(libraries / "libtensorrt_rtx.so"))
    registry = trt.get_plugin_registry()
    loaded = registry.load_library(str(libraries / "libflash_attention_plugin.so")) is not None
    creators = [[c.name, c.plugin_namespace, c.plugin_version] for c in registry.all_creators]
    plan, seen = build(model.read_bytes(), json.loads(sys.argv[4]))
    if plan is not None:
        plan_path.write_bytes(plan)
    print(json.dumps({"loaded": loaded, "creators": creators, "built": plan is not None, **seen}))


if __name__ == "__main__":
    main()
