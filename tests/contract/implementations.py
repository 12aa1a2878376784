# SPDX-License-Identifier: Apache-2.0
"""Everything that computes the operator, behind one face: why not, and run."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from contract import emulated_library
from contract.cases import Case
from contract.node_model import feeds, model_of_case, results
from contract.tensors import Tensors, heads_first, node_inputs
from flash_trt import cpu_operator_path

OPSET = 18
"""What new exports default to; test_function_body.py runs the table on the others."""


NO_PROMISE = "it promises nothing for this NaN or infinity behind a mask (docs/op.md, NaN and infinities)"


class Implementation(Protocol):
    """One implementation of the operator."""

    name: str

    def why_not(self, case: Case, tensors: Tensors) -> list[str]:
        """Why it cannot run this case, one sentence a reason; empty: it can."""

    def run(self, case: Case, tensors: Tensors) -> tuple[NDArray, NDArray | None]:
        """Heads-first output in the case's dtype, and lse where the operator has one."""


class BodyInOnnxRuntime:
    """The function body in plain ONNX Runtime on the CPU, no library of ours."""

    name = "body_in_onnxruntime"

    def why_not(self, case: Case, tensors: Tensors) -> list[str]:
        """It takes everything else."""
        return [NO_PROMISE] if case.is_odd_value_hidden else []

    def run(self, case: Case, tensors: Tensors) -> tuple[NDArray, NDArray | None]:
        """Inlines the body and runs it."""
        arrays = node_inputs(case, tensors)
        return results(case, run_in_onnxruntime(model_of_case(case, arrays, OPSET), feeds(case, arrays)))


class BodyInReferenceEvaluator:
    """The function body in onnx's own evaluator: slow numpy, an independent reading of the standard ops."""

    name = "body_in_reference_evaluator"

    def why_not(self, case: Case, tensors: Tensors) -> list[str]:
        """Its Softmax takes no empty axis."""
        if case.seqlen_kv == 0:
            return ["onnx's reference evaluator has no Softmax or ReduceMax over an empty axis"]
        return [NO_PROMISE] if case.is_odd_value_hidden else []

    def run(self, case: Case, tensors: Tensors) -> tuple[NDArray, NDArray | None]:
        """Evaluates the body node by node."""
        arrays = node_inputs(case, tensors)
        evaluator = ReferenceEvaluator(model_of_case(case, arrays, OPSET))
        with np.errstate(all="ignore"):  # log(0) and (-inf) - (-inf) are part of the body
            return results(case, evaluator.run(None, feeds(case, arrays)))


class EmulatedKernels:
    """The CUDA kernels' own source, compiled for the CPU and run lane by lane."""

    name = "emulated_kernels"

    def why_not(self, case: Case, tensors: Tensors) -> list[str]:
        """What the kernels say themselves."""
        if case.is_odd_value_hidden:
            return [NO_PROMISE]
        return emulated_library.why_unsupported(emulated_library.Problem(case, tensors).arguments)

    def run(self, case: Case, tensors: Tensors) -> tuple[NDArray, NDArray | None]:
        """Launches on host buffers."""
        problem = emulated_library.Problem(case, tensors)
        problem.launch()
        return heads_first(problem.output, case.layout, case.heads_q), problem.lse


class CpuOperator:
    """The operator's library in ONNX Runtime on the CPU, with the fastest kernels that this processor runs."""

    name = "cpu_operator"

    def why_not(self, case: Case, tensors: Tensors) -> list[str]:
        """It takes everything."""
        return []

    def run(self, case: Case, tensors: Tensors) -> tuple[NDArray, NDArray | None]:
        """Runs the node without its body: nothing else could run it."""
        arrays = node_inputs(case, tensors)
        model = model_of_case(case, arrays, OPSET)
        del model.functions[:]
        return results(case, run_in_onnxruntime(model, feeds(case, arrays), library=cpu_operator_path()))


def run_in_onnxruntime(model: onnx.ModelProto, values: dict[str, NDArray], library: str = "") -> list[NDArray]:
    """The model's outputs from ONNX Runtime's CPU provider, one thread, with a custom-op library where one is given."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if library:
        options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, values))


IMPLEMENTATIONS: list[Implementation] = [
    BodyInOnnxRuntime(),
    BodyInReferenceEvaluator(),
    EmulatedKernels(),
    CpuOperator(),
]
