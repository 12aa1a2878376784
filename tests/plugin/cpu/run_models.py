# SPDX-License-Identifier: Apache-2.0
"""Runs models with the operator's library in whichever ONNX Runtime this process has; needs numpy and that alone.

python run_models.py FOLDER LIBRARY      NAME.onnx with NAME.npz (its inputs) -> NAME.out.npz (its outputs, in order)

A model with a cache is run twice, the second time with its caches bound to both sides, and must give the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime

CACHES = ("key_cache", "value_cache")


def run_in_place(session: onnxruntime.InferenceSession, inputs: dict[str, np.ndarray], wanted: list) -> None:
    """The same run with the caches' outputs in their inputs' memory."""
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in inputs.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        if output.name.removesuffix("_out") in CACHES:
            binding.bind_ortvalue_output(output.name, values[output.name.removesuffix("_out")])
        else:
            binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    for output, made, array in zip(session.get_outputs(), binding.copy_outputs_to_cpu(), wanted, strict=True):
        if made.tobytes() != array.tobytes():
            raise SystemExit(f"{output.name} differs in place")


def main(folder: Path, library: str) -> None:
    """Runs every model of the folder and prints the runtime's version."""
    for path in sorted(folder.glob("*.onnx")):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 2
        options.register_custom_ops_library(library)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        with np.load(path.with_suffix(".npz")) as inputs:
            given = dict(inputs)
        outputs = session.run(None, given)
        if any(name in given for name in CACHES):
            run_in_place(session, given, outputs)
        np.savez(path.with_suffix(".out.npz"), *outputs)
    print(onnxruntime.__version__)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
