# SPDX-License-Identifier: Apache-2.0
"""The scores inside an operator, as the fused node's query and key give them, are those of NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from flash_export.find import find
from flash_export.op import DOMAIN, FLASH_ATTENTION_PACKED
from flash_export.rewrite import rewrite
from flash_export.runtime import Session
from flash_export.score_probe import PREFIX, add_score_probes

H, KV, D = 4, 2, 8
FORMS = {
    "heads first": (
        "out = Attention (q, k, v)",
        "float[B, 4, S, 8] q, float[B, 4, T, 8] k, float[B, 4, T, 8] v",
        23,
        H,
    ),
    "grouped": ("out = Attention (q, k, v)", "float[B, 4, S, 8] q, float[B, 2, T, 8] k, float[B, 2, T, 8] v", 23, KV),
    "heads beside": (
        "out = Attention <q_num_heads = 4, kv_num_heads = 2, scale = -0.7> (q, k, v)",
        "float[B, S, 32] q, float[B, T, 16] k, float[B, T, 16] v",
        23,
        KV,
    ),
    "contrib": (
        "out = com.microsoft.MultiHeadAttention <num_heads = 4, scale = 0.3> (q, k, v)",
        "float[B, S, 32] q, float[B, T, 32] k, float[B, T, 32] v",
        18,
        H,
    ),
    "packed": (
        "out = com.microsoft.Attention <num_heads = 4> (x, w, b)",
        "float[B, S, 32] x, float[32, 96] w, float[96] b",
        18,
        H,
    ),
}
SCALES = {"heads beside": 0.7, "contrib": 0.3}


def apart(form: str, feeds: dict[str, np.ndarray], kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Query and key in float64 as ``[B, H, S, D]``, the key's heads repeated."""
    if form == "packed":
        qkv = feeds["x"].astype(np.float64) @ feeds["w"] + feeds["b"]
        query, key, _ = np.split(qkv, 3, axis=-1)
    else:
        query, key = feeds["q"].astype(np.float64), feeds["k"].astype(np.float64)
    if query.ndim == 3:
        query = query.reshape(*query.shape[:2], H, D).transpose(0, 2, 1, 3)
        key = key.reshape(*key.shape[:2], kv_heads, D).transpose(0, 2, 1, 3)
    return query, np.repeat(key, H // kv_heads, axis=1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [(5, 7), (1, 1), (0, 3)])
def test_the_largest_score_is_that_of_numpy(form: str, lengths: tuple[int, int], tmp_path: Path) -> None:
    body, inputs, opset, kv_heads = FORMS[form]
    rank4 = "4, S, 8" in inputs
    out = "float[B, 4, S, 8] out" if rank4 else "float[B, S, 32] out"
    header = f'<ir_version: 9, opset_import: ["": {opset}, "com.microsoft": 1]>\n'
    proto = onnx.parser.parse_model(f"{header} g ({inputs}) => ({out}) {{ {body} }}")
    model = ir.from_proto(proto)
    sites = find(model)
    assert [s.status for s in sites] == ["fused"], sites[0].reason
    rewrite(model, sites)
    (node,) = (n for n in model.graph if n.domain == DOMAIN)
    assert (node.op_type == FLASH_ATTENTION_PACKED.name) == (form == "packed")
    probed, names = add_score_probes(model, sites)
    assert names == [PREFIX + sites[0].name]
    assert len(model.graph.outputs) == 1, "the model itself stays as it is"

    sizes = {"B": 2, "S": lengths[0], "T": lengths[1]}
    rng = np.random.default_rng(0)
    feeds = {
        v.name: rng.standard_normal([sizes.get(str(d), d) for d in v.shape]).astype(np.float32)
        for v in model.graph.inputs
    }
    query, key = apart(form, feeds, kv_heads)
    scores = SCALES.get(form, D**-0.5) * (query @ np.swapaxes(key, -1, -2))
    largest = Session(probed, tmp_path).run(feeds, names)[0]
    np.testing.assert_allclose(largest, np.abs(scores).max(initial=0.0), rtol=1e-5)
