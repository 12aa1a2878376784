# SPDX-License-Identifier: Apache-2.0
"""One command line of each command, shown below its flags by ``--help``."""

from __future__ import annotations

_LINES = {
    "build": "flash-trt build model.flash.onnx --shape input_ids:1x1,4x128,16x512 --target sm89,sm120",
    "run": "flash-trt run model.flash.onnx --inputs in.npz -o out.npz",
    "compare": "flash-trt compare model.flash.onnx model.flash.unfused.onnx --json verdict.json",
    "bench": "flash-trt bench model.flash.onnx model.flash.unfused.onnx --at batch=1,seq=128 --at batch=8,seq=512",
    "triton": "flash-trt triton models/ model.engine --name encoder --instances 2",
    "inspect": "flash-trt inspect model.engine --json",
    "env": "flash-trt env --json",
}


def epilog(command: str) -> str:
    """The example of ``command`` in rich's markup."""
    return f"[b]Example[/b]  {_LINES[command]}"
