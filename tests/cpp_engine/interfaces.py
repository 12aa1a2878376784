# SPDX-License-Identifier: Apache-2.0
"""From TensorRT's own headers: classes of its interfaces in which every call that a test does not expect ends the
process with its name. A stand-in derives from them and overrides what it plays."""

from __future__ import annotations

import re
from pathlib import Path

HEADERS = {
    "VRuntime": "NvInferImpl.h",
    "VCudaEngine": "NvInferImpl.h",
    "VExecutionContext": "NvInferImpl.h",
    "IPluginRegistry": "NvInferRuntimeCommon.h",
}

_PURE = re.compile(
    r"\n\s*(?:TRT_DEPRECATED |TRT_NODISCARD )*virtual (?P<result>[^;(]+?)(?P<name>\w+)\((?P<parameters>[^;]*?)\)"
    r"(?P<rest>(?: const)?(?: noexcept)?)\s*= 0;"
)


def unexpected(headers: Path) -> str:
    """C++: ``unexpected::VRuntime`` and so on, with every pure function of the original."""
    parts = ["#pragma once", "#include <NvInferRuntime.h>", "#include <cstdio>", "#include <cstdlib>"]
    parts += ["namespace unexpected {", "using namespace nvinfer1;", "using namespace nvinfer1::apiv;"]
    parts.append('[[noreturn]] inline void end(char const* call) { std::fprintf(stderr, "unexpected %s\\n", call); ')
    parts.append("std::_Exit(99); }")
    for name, header in HEADERS.items():
        parts += _class(name, (headers / header).read_text())
    return "\n".join([*parts, "}  // namespace unexpected", ""])


def _class(name: str, text: str) -> list[str]:
    body = text[re.search(rf"^class {name}\b[^;]*?\n\{{", text, re.MULTILINE).end() :]  # type: ignore[union-attr]
    body = body[: body.index("\n};")]
    body = re.sub(r"//[^\n]*", "", re.sub(r"#if .*?#endif", "", body, flags=re.DOTALL))
    spelled = "nvinfer1::" if name.startswith("I") else "nvinfer1::apiv::"
    lines = [f"class {name} : public {spelled}{name} {{ public:"]
    for found in _PURE.finditer(body):
        call = f'{{ end("{name}::{found["name"]}"); }}'
        lines.append(f"{found['result']} {found['name']}({found['parameters']}){found['rest']} override {call}")
    return [*lines, "};"]
