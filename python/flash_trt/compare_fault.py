# SPDX-License-Identifier: Apache-2.0
"""Whether a comparison would have seen a fault of attention: FUSED once more, with faults that are put into it.

A row that sees one key gets that key's value whatever the scale, and so does every row where a model takes no length
but 1. As in flash-export's own check, inputs on which such a fault does not show prove nothing of attention. All scales
are made 1 % wrong at once; then each node's alone, tenfold, since a node that is seen hides one that is not; then each
window is left out, alone as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from flash_export.check_site import SEEDED_FAULT
from flash_export.errors import UnsupportedModel
from flash_export.function_builder import CONSTANT_TAKES_NUMBERS
from flash_export.op import DOMAIN, OPERATORS
from flash_export.trials import Trial
from flash_trt import onnx_file, runners
from flash_trt.compare_choice import infer
from flash_trt.compare_sight import Sight, UnseenWindow
from flash_trt.verdict import Outputs, RunOutputs, judge_runs

_TENFOLD = 10.0
"""Alone, 1 % of one node may drown in the rounding of a deep model that is right."""

_MOST_LOADED = 8 * 2**30
"""Bytes of weights that are loaded, of all nodes together, to try each alone: twelve layers of 440 MB take 20 s."""

_Nodes = Any
"""A repeated field of nodes: of a graph or a function."""
_Change = Callable[[_Nodes, onnx.NodeProto], bool]
"""Puts a fault into one node, which lies in these; False where it cannot."""


def look(fused: Path, runs: Sequence[RunOutputs], more: Sequence[tuple[Outputs, Outputs]], *, softcap: bool) -> Sight:
    """What ``runs`` would not have seen of the FlashAttention nodes in ``fused``.

    All is taken for seen where it cannot be tried: before opset 12, where the bodies hold the scale themselves, and
    where this ONNX Runtime does not load a model with weights in other files from memory.

    Args:
        fused: the file that gave the runs' outputs, in float32.
        runs, more, softcap: as ``judge_runs`` was given them, and failed none of them.
    """
    proto = onnx.load(str(fused), format="protobuf", load_external_data=False)
    if any(o.domain == "" and o.version < CONSTANT_TAKES_NUMBERS for o in proto.opset_import):
        return Sight()
    tried = _Tried(fused, proto, list(runs), more, softcap)
    # Two nodes may have one name, as those in the branches of an If.
    every = [node for _, node in _places(proto)]
    needed = [node.written for node in onnx_file.flash_nodes(proto) if node.is_needed]
    places = {i: node for i, node in enumerate(every) if any(node is one for one in needed)}
    if not tried.shows(_scaled(SEEDED_FAULT)):
        return Sight(blind=True)
    windows = list(_windows(places))
    loads = len(places) + len(windows)
    together = len(places) > 1 and loads * _loaded_bytes(fused, proto) > _MOST_LOADED
    alone = places if len(places) > 1 and not together else {}
    hidden = tuple(_name(node) for i, node in alone.items() if not tried.shows(_scaled(_TENFOLD), only=i))
    return Sight(nodes=hidden, together=together, windows=tuple(_unseen_windows(windows, tried, together=together)))


_Window = tuple[int, UnseenWindow]
"""A window, and the place of its node."""


def _windows(places: Mapping[int, onnx.NodeProto]) -> Iterator[_Window]:
    for i, node in places.items():
        values = {a.name: a.i for a in node.attribute if not a.ref_attr_name}
        for attribute in ("window_left", "window_right"):
            size = values.get(attribute, -1)
            # A causal mask hides all that a window to the right would.
            if size >= 0 and not (attribute == "window_right" and values.get("causal")):
                yield i, UnseenWindow(_name(node), attribute, size)


def _unseen_windows(windows: Sequence[_Window], tried: _Tried, *, together: bool) -> Iterator[UnseenWindow]:
    """Those without which the runs pass too; of one size ``together``, the first node's is given for all of them."""
    first: dict[tuple[str, int], _Window] = {}
    for i, window in windows:
        first.setdefault((window.attribute, window.size), (i, window))
    for i, window in first.values() if together else windows:
        if not tried.shows(_without_window(window.attribute, window.size), only=None if together else i):
            yield window


@dataclasses.dataclass(slots=True)
class _Tried:
    """FUSED with a fault on the inputs of every run, the one on which the last fault showed first."""

    path: Path
    proto: onnx.ModelProto
    runs: list[RunOutputs]
    more: Sequence[tuple[Outputs, Outputs]]
    softcap: bool

    def shows(self, change: _Change, *, only: int | None = None) -> bool:
        """Whether a run fails once ``change`` was made in every node, or in ``only`` that of ``_places``.

        True where nothing was changed.
        """
        faulty = onnx.ModelProto()
        faulty.CopyFrom(self.proto)
        made = [change(*place) for i, place in enumerate(list(_places(faulty))) if only in (None, i)]
        if not any(made):
            return True
        for function in faulty.functions:  # one of FlashAttention alone may do without the standard operators
            if all(entry.domain for entry in function.opset_import):
                function.opset_import.extend(entry for entry in faulty.opset_import if not entry.domain)
        try:
            runner = runners.open_onnx(self.path, "fused", instead=bytes(faulty.SerializeToString()))
        except UnsupportedModel:
            return True
        try:
            for i, run in enumerate(self.runs):
                if self._fails(i, infer(runner, Trial(run.name, run.feeds))):
                    self.runs.insert(0, self.runs.pop(i))
                    return True
            return False
        finally:
            runner.deactivate()

    def _fails(self, i: int, outputs: Outputs | Exception) -> bool:
        if isinstance(outputs, Exception):
            return True
        runs = [*self.runs[:i], dataclasses.replace(self.runs[i], fused=outputs), *self.runs[i + 1 :]]
        return any(verdict.failed for verdict in judge_runs(runs, more=self.more, softcap=self.softcap))


def _scaled(factor: float) -> _Change:
    """Multiplies the scale; where a function's caller says it, the query, which is the same."""

    def change(nodes: _Nodes, node: onnx.NodeProto) -> bool:
        scale = next((a for a in node.attribute if a.name == "scale"), None)
        if scale is not None and not scale.ref_attr_name:
            scale.f = min(max(scale.f * factor, -1e38), 1e38)
            return True
        if OPERATORS[node.op_type].inputs[0] != "query":
            return False
        names = [f"{node.output[0]}_{part}" for part in ("fault", "faulty_query")]
        number = helper.make_tensor(names[0], onnx.TensorProto.FLOAT, (), [factor])
        index = next(i for i, other in enumerate(nodes) if other is node)
        nodes.insert(index, helper.make_node("Constant", [], names[:1], value=number))
        nodes.insert(index + 1, helper.make_node("Mul", [node.input[0], names[0]], names[1:]))
        nodes[index + 2].input[0] = names[1]
        return True

    return change


def _without_window(attribute: str, size: int) -> _Change:
    def change(_: _Nodes, node: onnx.NodeProto) -> bool:
        mine = [a for a in node.attribute if a.name == attribute and not a.ref_attr_name and a.i == size]
        for one in mine:
            one.i = -1
        return bool(mine)

    return change


def _places(proto: onnx.ModelProto) -> Iterator[tuple[_Nodes, onnx.NodeProto]]:
    """Every FlashAttention node that is written down, functions and subgraphs included, and the nodes it lies in."""
    waiting: list[_Nodes] = [proto.graph.node, *(function.node for function in proto.functions)]
    for nodes in waiting:  # grows on the way
        for node in nodes:
            if node.domain == DOMAIN and node.op_type in OPERATORS:
                yield nodes, node
            waiting += [graph.node for attribute in node.attribute for graph in onnx_file.graphs_of(attribute)]


def _name(node: onnx.NodeProto) -> str:
    return str(node.name or node.output[0])


def _loaded_bytes(path: Path, proto: onnx.ModelProto) -> int:
    """What a session of the model reads from the disk."""
    return sum(file.stat().st_size for file in (path, *onnx_file.external_files(path, proto).values()))
