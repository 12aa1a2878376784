# SPDX-License-Identifier: Apache-2.0
"""A host of TensorRT plugins, in a process of its own: opens libraries in the order given, then lists the creators.

    host_child.py [TENSORRT_LIBRARY] -- [ACTION=LIBRARY]...

ACTION is ``open`` (dlopen, as hosts do that only open) or ``load`` (the registry's loadLibrary). Prints one JSON line:
what each action gave, how many creators the registry had before, and how many came to it.
"""

from __future__ import annotations

import ctypes
import json
import sys

SLOTS = {10: 10, 11: 6, 1: 6}
"""Major version -> where loadLibrary stands in the registry's virtual table."""


def method(registry: int, slot: int, result: type, *arguments: type) -> ctypes._CFuncPtr:
    """A virtual method of the registry as a C function."""
    table = ctypes.cast(registry, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
    return ctypes.CFUNCTYPE(result, ctypes.c_void_p, *arguments)(table[slot])


def count_creators(registry: int, slot: int) -> int:
    """How many creators the registry has."""
    count = ctypes.c_int()
    method(registry, slot + 3, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(registry, ctypes.byref(count))
    return count.value


def main() -> None:
    separator = sys.argv.index("--")
    host = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_LOCAL) if separator > 1 else None
    registry, slot, before = 0, 0, 0
    if host is not None:
        host.getPluginRegistry.restype = ctypes.c_void_p
        registry, slot = host.getPluginRegistry(), SLOTS[host.getInferLibVersion() // 10000]
        before = count_creators(registry, slot)
    given = []
    for action, library in (argument.split("=", 1) for argument in sys.argv[separator + 1 :]):
        if action == "open":
            given.append(bool(ctypes.CDLL(library)._handle))
        else:
            load = method(registry, slot, ctypes.c_void_p, ctypes.c_char_p)
            given.append(load(registry, library.encode()) is not None)
    added = count_creators(registry, slot) - before if host is not None else 0
    print(json.dumps({"given": given, "before": before, "added": added}))


if __name__ == "__main__":
    main()
