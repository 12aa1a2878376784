# SPDX-License-Identifier: Apache-2.0
"""ONNX files whose external data leads out of their folder or beyond their file: ``attack(path, marker)``."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx.helper


def model_with(path: Path, **entries: str) -> None:
    """A model with one weight of 4 floats kept outside, described by ``entries``; the folder holds ``w.data``."""
    weight = onnx.TensorProto(name="w", dims=[4], data_type=onnx.TensorProto.FLOAT)
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [value("x", onnx.TensorProto.FLOAT, [4])],
        [value("y", onnx.TensorProto.FLOAT, [4])],
        [weight],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    (path.parent / "w.data").write_bytes(bytes(16))


def secret(path: Path) -> Path:
    """A file outside the model's folder."""
    outside = path.parent.parent / f"{path.parent.name}.secret"
    outside.write_bytes(bytes(16))
    return outside


def parent_folder(path: Path, marker: Path) -> None:
    model_with(path, location=f"../{secret(path).name}")


def parent_folder_in_disguise(path: Path, marker: Path) -> None:
    (path.parent / "a").mkdir()
    model_with(path, location=f"a/../../{secret(path).name}")


def parent_folder_with_backslashes(path: Path, marker: Path) -> None:
    model_with(path, location=f"..\\{secret(path).name}")


def absolute(path: Path, marker: Path) -> None:
    model_with(path, location=str(secret(path)))


def symbolic_link(path: Path, marker: Path) -> None:
    (path.parent / "link").symlink_to(secret(path))
    model_with(path, location="link")


def symbolic_link_to_a_folder(path: Path, marker: Path) -> None:
    (path.parent / "link").symlink_to(secret(path).parent)
    model_with(path, location=f"link/{secret(path).name}")


def hard_link(path: Path, marker: Path) -> None:
    os.link(secret(path), path.parent / "link")
    model_with(path, location="link")


def device(path: Path, marker: Path) -> None:
    os.mkfifo(path.parent / "pipe")
    model_with(path, location="pipe")


def negative_offset(path: Path, marker: Path) -> None:
    model_with(path, location="w.data", offset="-16", length="16")


def offset_that_is_no_number(path: Path, marker: Path) -> None:
    model_with(path, location="w.data", offset="1e3", length="16")


def location_given_twice(path: Path, marker: Path) -> None:
    model_with(path, location="w.data")
    model = onnx.load_model(path, load_external_data=False)
    model.graph.initializer[0].external_data.add(key="location", value=f"../{secret(path).name}")
    path.write_bytes(model.SerializeToString())


def attribute_injected(path: Path, marker: Path) -> None:
    """onnx once set any attribute that a key named (CVE-2026-34445)."""
    model_with(path, location="w.data", __class__="evil")


def dims_beyond_any_model(path: Path, marker: Path) -> None:
    model_with(path, location="w.data")
    model = onnx.load_model(path, load_external_data=False)
    model.graph.initializer[0].dims[:] = [2**40, 2**40]
    path.write_bytes(model.SerializeToString())


def inside_a_constant_node(path: Path, marker: Path) -> None:
    """The tensor of a Constant node, where a scan of the initializers does not look."""
    model_with(path, location=f"../{secret(path).name}")
    model = onnx.load_model(path, load_external_data=False)
    node = onnx.helper.make_node("Constant", [], ["w"])
    attribute = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
    attribute.t.CopyFrom(model.graph.initializer.pop())
    model.graph.node.insert(0, node)
    path.write_bytes(model.SerializeToString())
