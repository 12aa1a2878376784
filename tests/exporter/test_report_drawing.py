# SPDX-License-Identifier: Apache-2.0
"""A drawn graph shows every node that data passes, in layers, without overlap, and is nothing but text and shapes."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

from flash_export.report_drawing import draw_graph

SVG = "{http://www.w3.org/2000/svg}"


def graph(nodes: list[tuple[str, list[str], str]], inputs: list[str], output: str, **scalars: str) -> dict[str, Any]:
    entries = [
        {"name": f"node_{i}", "op": op, "inputs": operands, "outputs": [made], "sizes": op == "Shape"}
        for i, (op, operands, made) in enumerate(nodes)
    ]
    return {"inputs": inputs, "output": output, "scalars": scalars, "nodes": entries}


ATTENTION = graph(
    [
        ("Shape", ["q"], "sizes"),
        ("Transpose", ["k"], "kt"),
        ("MatMul", ["q", "kt"], "scores"),
        ("Mul", ["scores", "scale"], "scaled"),
        ("Softmax", ["scaled"], "probs"),
        ("MatMul", ["probs", "v"], "heads"),
        ("Reshape", ["heads", "sizes"], "flat"),
        ("Add", ["flat", "q"], "out"),
    ],
    ["q", "k", "v"],
    "out",
    scale="0.125",
)


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def boxes(svg: str) -> dict[str, tuple[float, float, float, float]]:
    """Title -> (left, top, right, bottom)."""
    found = {}
    for group in parsed(svg).iter(f"{SVG}g"):
        rect, title = group.find(f"{SVG}rect"), group.find(f"{SVG}title")
        assert rect is not None
        assert title is not None
        x, y, width, height = (float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
        found[title.text or ""] = (x, y, x + width, y + height)
    return found


def test_every_node_that_data_passes_is_drawn_with_its_number() -> None:
    texts = [text.text for text in parsed(draw_graph(ATTENTION, "before")).iter(f"{SVG}text")]
    operators = ["Transpose", "MatMul", "Mul 0.125", "Softmax", "MatMul", "Reshape", "Add"]
    assert sorted(filter(None, texts)) == sorted([*operators, "q", "k", "v", "out"])


def test_boxes_do_not_overlap_and_lie_inside_the_picture() -> None:
    svg = draw_graph(ATTENTION, "before")
    left, top, width, height = map(float, parsed(svg).get("viewBox", "").split())
    for a, b in itertools.combinations(boxes(svg).values(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for box in boxes(svg).values():
        assert left <= box[0] <= box[2] <= left + width
        assert top <= box[1] <= box[3] <= top + height


def test_each_box_is_below_what_it_reads_and_an_input_just_above_its_first_reader() -> None:
    place = boxes(draw_graph(ATTENTION, "before"))
    order = ["input k", "Transpose node_1", "MatMul node_2", "Mul node_3", "Softmax node_4", "MatMul node_5"]
    tops = [place[title][1] for title in order]
    assert tops == sorted(set(tops))
    assert place["input v"][1] == place["Softmax node_4"][1]
    assert place["input q"][1] == place["Transpose node_1"][1]


def test_an_edge_over_several_layers_passes_beside_the_boxes_between() -> None:
    svg = draw_graph(ATTENTION, "before")
    verticals = re.findall(r"([\d.-]+) (\d+) V (\d+)", svg)
    assert len(verticals) == 5  # q -> Add crosses the layers between
    for x, start, end in verticals:
        crossed = [b for b in boxes(svg).values() if b[1] < float(end) and b[3] > float(start)]
        assert all(not b[0] < float(x) < b[2] for b in crossed)


def test_a_hostile_name_stays_text() -> None:
    name = "</text><script>alert(1)</script>"
    svg = draw_graph(graph([("Relu", [name], '"><x')], [name], '"><x'), name)
    assert "<script" not in svg
    assert [element.tag for element in parsed(svg).iter() if element.tag == f"{SVG}script"] == []


def test_a_graph_without_any_node_is_an_empty_picture() -> None:
    assert boxes(draw_graph(graph([], [], "out"), "after")) == {}


def test_several_hundred_nodes_are_drawn_in_a_moment() -> None:
    nodes = [("Add", [f"v{i}", f"v{max(i - 7, 0)}"], f"v{i + 1}") for i in range(400)]
    assert len(boxes(draw_graph(graph(nodes, ["v0"], "v400"), "before"))) == 402
