# SPDX-License-Identifier: Apache-2.0
"""The operator that ONNX Runtime keeps in ONNX's own domain: without its schema onnx's checker refuses whole files.

``SimplifiedLayerNormalization`` stands in most language models of ONNX Runtime GenAI and in what its optimizer saves.
Importing this module registers it.
"""

from __future__ import annotations

import onnx.defs
from onnx.shape_inference import InferenceContext

_NAME = "SimplifiedLayerNormalization"
_FLOATS = ["tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"]


def _infer(context: InferenceContext) -> None:
    """The result has the input's shape and the scale's type."""
    result, scale = context.get_input_type(0), context.get_input_type(1)
    if result is not None and scale is not None:
        result.tensor_type.elem_type = scale.tensor_type.elem_type
        context.set_output_type(0, result)


def register_schemas() -> None:
    """Registers the schema with onnx, once a process."""
    if onnx.defs.has(_NAME):
        return
    parameter, option = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.FormalParameterOption
    schema = onnx.defs.OpSchema(
        _NAME,
        "",
        1,
        doc="X / sqrt(mean(X^2) + epsilon) * scale over the last axes, as ONNX Runtime defines it.",
        inputs=[parameter("X", "T"), parameter("scale", "V")],
        outputs=[
            parameter("Y", "V"),
            parameter("inv_std_var", "U", param_option=option.Optional),
        ],
        attributes=[
            onnx.defs.OpSchema.Attribute("axis", onnx.defs.OpSchema.AttrType.INT, required=False),
            onnx.defs.OpSchema.Attribute("epsilon", onnx.defs.OpSchema.AttrType.FLOAT, required=False),
            onnx.defs.OpSchema.Attribute("stash_type", onnx.defs.OpSchema.AttrType.INT, required=False),
        ],
        type_constraints=[
            ("T", _FLOATS, "element type of X"),
            ("U", _FLOATS, "element type of the statistics"),
            ("V", _FLOATS, "element type of scale and result"),
        ],
    )
    schema.set_type_and_shape_inference_function(_infer)
    onnx.defs.register_schema(schema)


register_schemas()
