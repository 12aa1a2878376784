# SPDX-License-Identifier: Apache-2.0
"""Makes an encoder of any size in a sparse file, and exports one, saying how much memory that took.

As a program: ``big_model.py SOURCE OUTPUT`` runs the export and prints ``peak resident bytes`` of the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.helper

HEADS, WIDTH, LAYERS = 8, 512, 3
_PAGE = 4096


class Weights:
    """Weights appended to one sparse file. What is not written takes no place on the disk and reads as zeros."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0
        self.tensors: list[onnx.TensorProto] = []
        path.touch()

    def add(self, name: str, shape: tuple[int, ...], content: np.ndarray) -> None:
        """A float32 weight that begins with ``content`` and is zero after it."""
        size = 4 * int(np.prod(shape))
        with self.path.open("r+b") as file:
            file.seek(self.end)
            file.write(content.astype(np.float32).tobytes())
            file.truncate(self.end + size)
        tensor = onnx.TensorProto(name=name, dims=shape, data_type=onnx.TensorProto.FLOAT)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", self.path.name), ("offset", self.end), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        self.tensors.append(tensor)
        self.end += size + -size % _PAGE


def write_model(folder: Path, size_bytes: int, *, seed: int = 0) -> Path:
    """An encoder with about ``size_bytes`` of weights: random in its attention, else zeros behind one number each.

    ids int64 [B, S] -> hidden float32 [B, S, WIDTH]. That number keeps the contents apart, so that no two weights
    can share their place. Half of the bytes is the table of embeddings, the rest lies in the layers' MLPs.
    """
    rng = np.random.default_rng(seed)
    weights = Weights(folder / "big.onnx.data")
    rows = size_bytes // 2 // (4 * WIDTH)
    inner = (size_bytes - 4 * WIDTH * rows) // (LAYERS * 2 * 4 * WIDTH)
    weights.add("table", (rows, WIDTH), rng.standard_normal((500, WIDTH)))
    nodes = [onnx.helper.make_node("Gather", ["table", "ids"], ["hidden_0"], "embed")]
    for layer in range(LAYERS):
        for name in "qkvo":
            weights.add(f"{name}_{layer}", (WIDTH, WIDTH), rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5)
        for name, shape in (("up", (WIDTH, inner)), ("down", (inner, WIDTH))):
            weights.add(f"{name}_{layer}", shape, rng.standard_normal(1))
        nodes += _layer(layer)
    constants = [
        onnx.helper.make_tensor("heads", onnx.TensorProto.INT64, [4], [0, 0, HEADS, WIDTH // HEADS]),
        onnx.helper.make_tensor("merged", onnx.TensorProto.INT64, [3], [0, 0, WIDTH]),
        onnx.helper.make_tensor("scale", onnx.TensorProto.FLOAT, [], [(WIDTH // HEADS) ** -0.5]),
    ]
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "big",
        [value("ids", onnx.TensorProto.INT64, ["B", "S"])],
        [value(f"hidden_{LAYERS}", onnx.TensorProto.FLOAT, ["B", "S", WIDTH])],
        [*constants, *weights.tensors],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    path = folder / "big.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _layer(i: int) -> list[onnx.NodeProto]:
    """Attention and a MLP, each added to what it reads."""
    make = onnx.helper.make_node
    nodes = []
    for name in "qkv":
        perm = [0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]
        nodes += [
            make("MatMul", [f"hidden_{i}", f"{name}_{i}"], [f"{name}p_{i}"]),
            make("Reshape", [f"{name}p_{i}", "heads"], [f"{name}h_{i}"]),
            make("Transpose", [f"{name}h_{i}"], [f"{name}t_{i}"], perm=perm),
        ]
    return [
        *nodes,
        make("MatMul", [f"qt_{i}", f"kt_{i}"], [f"scores_{i}"]),
        make("Mul", [f"scores_{i}", "scale"], [f"scaled_{i}"]),
        make("Softmax", [f"scaled_{i}"], [f"probs_{i}"], f"softmax_{i}", axis=-1),
        make("MatMul", [f"probs_{i}", f"vt_{i}"], [f"attended_{i}"]),
        make("Transpose", [f"attended_{i}"], [f"turned_{i}"], perm=[0, 2, 1, 3]),
        make("Reshape", [f"turned_{i}", "merged"], [f"flat_{i}"]),
        make("MatMul", [f"flat_{i}", f"o_{i}"], [f"attention_{i}"]),
        make("Add", [f"hidden_{i}", f"attention_{i}"], [f"middle_{i}"]),
        make("MatMul", [f"middle_{i}", f"up_{i}"], [f"wide_{i}"]),
        make("Relu", [f"wide_{i}"], [f"active_{i}"]),
        make("MatMul", [f"active_{i}", f"down_{i}"], [f"mlp_{i}"]),
        make("Add", [f"middle_{i}", f"mlp_{i}"], [f"hidden_{i + 1}"]),
    ]


def peak_resident_bytes() -> int:
    """The most memory this program has held, mapped files included (VmHWM; getrusage's also counts its parent's)."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    from flash_export import pipeline
    from flash_export.options import Options

    pipeline.run(Options(source=Path(sys.argv[1]), output=Path(sys.argv[2]), require_all=True))
    print(peak_resident_bytes())
