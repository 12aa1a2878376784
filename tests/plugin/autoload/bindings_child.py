# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own Python bindings of TensorRT 11 with our plugin in their registry, by the loader that flash-trt has.

    bindings_child.py LIBNVINFER_LEAN FOLDER_OF_THE_BINDINGS FIELDS_JSON

Makes a plugin of every operator by the registry's creators from FIELDS_JSON, [name, "INT" or "FLOAT", value] each.
Prints one JSON line: the version, the operators that ``plugin_library.load`` found, and each plugin's own words.
"""

from __future__ import annotations

import ctypes
import json
import sys

import numpy as np


def main() -> None:
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    sys.path.insert(0, sys.argv[2])
    import tensorrt_lean_bindings as trt

    from flash_trt import plugin_library
    from flash_trt.backends import Backend

    library = plugin_library.load(Backend("tensorrt", trt, [], None))
    registry = trt.get_plugin_registry()
    made = {}
    for operator in library.operators:
        fields = []
        for name, kind, value in json.loads(sys.argv[3]):
            if name == "has_kv_lengths":
                value = int("Cache" in operator)
            dtype = np.int32 if kind == "INT" else np.float32
            type_ = trt.PluginFieldType.INT32 if kind == "INT" else trt.PluginFieldType.FLOAT32
            fields.append(trt.PluginField(name, np.array([value], dtype), type_))
        creator = registry.get_creator(operator, "1", "flash_export")
        plugin = creator.create_plugin("attn", trt.PluginFieldCollection(fields), trt.TensorRTPhase.RUNTIME)
        core = plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
        made[operator] = [core.plugin_name, core.plugin_version, core.plugin_namespace]
    print(json.dumps({"version": trt.__version__, "operators": library.operators, "made": made}))


if __name__ == "__main__":
    main()
