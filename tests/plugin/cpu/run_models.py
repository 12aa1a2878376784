# SPDX-License-Identifier: Apache-2.0
"""Runs models with the operator's library in whichever ONNX Runtime this process has; needs numpy and that alone.

python run_models.py FOLDER LIBRARY      NAME.onnx with NAME.npz (its inputs) -> NAME.out.npz (its outputs, in order)
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime


def main(folder: Path, library: str) -> None:
    """Runs every model of the folder and prints the runtime's version."""
    for path in sorted(folder.glob("*.onnx")):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 2
        options.register_custom_ops_library(library)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        with np.load(path.with_suffix(".npz")) as inputs:
            outputs = session.run(None, dict(inputs))
        np.savez(path.with_suffix(".out.npz"), *outputs)
    print(onnxruntime.__version__)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
