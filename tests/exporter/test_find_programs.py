# SPDX-License-Identifier: Apache-2.0
"""Every program, through every exporter, with fixed and with dynamic lengths: the right outcome and right numbers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import pytest
import torch
from contract.tolerance import why_rejected
from exporter.graphs import renamed
from exporter.programs import PROGRAMS, Program, Sizes
from exporter.torch_exports import EXPORTERS, Wrapped, capture, export, run

from flash_export.find import find
from flash_export.op import DOMAIN
from flash_export.rewrite import rewrite
from flash_export.sites import Site

Exported = Callable[[str, str, str], Path]
EXPAND_GONE = ("gqa_interleave",)
"""Programs that repeat K and V for the heads that share them: the fused file reads each once."""

CELLS = [(p, e, d) for p in PROGRAMS for e in EXPORTERS for d in ("static", "dynamic")]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Exports a program once a session; the dynamo exporters share what torch.export captures."""
    folder = tmp_path_factory.mktemp("programs")

    @functools.cache
    def captured(name: str, dims: str) -> torch.export.ExportedProgram:
        program = PROGRAMS[name]
        axes = program.axes if dims == "dynamic" else None
        return capture(Wrapped(program.forward), program.inputs(program.sizes), axes)

    @functools.cache
    def get(name: str, exporter: str, dims: str) -> Path:
        program = PROGRAMS[name]
        path = folder / f"{name}.{exporter}.{dims}.onnx"
        axes = program.axes if dims == "dynamic" else None
        module = captured(name, dims) if EXPORTERS[exporter][0] else Wrapped(program.forward)
        export(module, program.inputs(program.sizes), path, exporter, axes)
        return path

    return get


def outcome(path: Path) -> tuple[ir.Model, list[Site]]:
    """The model and its sites, rewritten."""
    model = ir.load(path)
    sites = find(model)
    rewrite(model, sites)
    return model, sites


def sizes_of(program: Program, dims: str) -> list[Sizes]:
    return [program.sizes, *program.others] if dims == "dynamic" else [program.sizes]


def reference(
    program: Program, inputs: tuple[torch.Tensor, ...], exporter: str = ""
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The outputs in float64 and in float32 of the program, or of what ``exporter`` makes of it."""
    forward = program.exported_as.get(exporter, program.forward)
    doubles = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    right, base = forward(*doubles), forward(*inputs)
    as_list = lambda r: [t.numpy() for t in (r if isinstance(r, tuple) else (r,))]  # noqa: E731
    return as_list(right), as_list(base)


@pytest.mark.parametrize(("name", "exporter", "dims"), CELLS)
def test_the_outcome_and_the_numbers_are_right(name: str, exporter: str, dims: str, exported: Exported) -> None:
    program = PROGRAMS[name]
    path = exported(name, exporter, dims)
    before = onnx.load(path)
    model, sites = outcome(path)
    assert [s.name for s in sites if s.status == "not_attention"] == []
    assert len(sites) == 1
    operators = [n.op_type for n in model.graph]
    if program.refused is not None:
        assert (sites[0].status, sites[0].reason.code if sites[0].reason else "") == ("refused", program.refused)
        assert as_it_is(ir.to_proto(model)) == as_it_is(before)
    else:
        assert sites[0].status == "fused", sites[0].reason
        assert operators.count("Softmax") == operators.count("Attention") == 0
        assert sum(n.domain == DOMAIN for n in model.graph) == 1
        if name in EXPAND_GONE:
            assert "Expand" in [n.op_type for n in before.graph.node]
            assert "Expand" not in operators
        check_attributes(program, exporter, dims, sites[0])
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=exporter != "legacy17", check_custom_domain=True)
    compared = 0
    for sizes in sizes_of(program, dims):
        inputs = program.inputs(sizes)
        right, base = reference(program, inputs, exporter)
        got = run(proto.SerializeToString(), [x.numpy() for x in inputs])
        for output, ref, plain in zip(got, right, base, strict=True):
            assert why_rejected(output, ref, plain, softcap=program.attributes.get("softcap", 0.0)) == [], sizes
            compared += output.size
    assert compared > 0


def as_it_is(proto: onnx.ModelProto) -> list[object]:
    """All that a graph computes, bit by bit: nodes, inputs, outputs, and the bytes of its weights."""
    graph = proto.graph
    weights = {w.name: (w.data_type, tuple(w.dims), onnx.numpy_helper.to_array(w).tobytes()) for w in graph.initializer}
    return [list(graph.node), list(graph.input), list(graph.output), weights]


@pytest.mark.parametrize(("name", "exporter", "dims"), CELLS)
def test_a_second_run_changes_nothing(name: str, exporter: str, dims: str, exported: Exported) -> None:
    model, first = outcome(exported(name, exporter, dims))
    once = ir.to_proto(model)
    again = ir.from_proto(once)
    second = find(again)
    rewrite(again, second)
    assert [facts(s) for s in second] == [facts(s) for s in first]
    assert ir.to_proto(again).SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)


@pytest.mark.parametrize(("name", "exporter", "dims"), CELLS)
def test_names_and_the_order_of_nodes_do_not_matter(name: str, exporter: str, dims: str, exported: Exported) -> None:
    proto = onnx.load(exported(name, exporter, dims))
    sites = [find(ir.from_proto(p)) for p in (proto, renamed(proto, 1), renamed(proto, 2))]
    right, *others = [[(*facts(s), s.operator, s.head_dim, s.v_head_dim, s.bias_shape) for s in one] for one in sites]
    assert others == [right, right]


def facts(site: Site) -> tuple[object, ...]:
    """What became of a site, whatever it is called; the scale in fp32, as a file holds it."""
    numbers = None if site.attributes is None else dataclasses.asdict(site.attributes)
    if numbers is not None:
        numbers["scale"] = float(np.float32(numbers["scale"]))
    return site.status, site.reason.code if site.reason else None, numbers


def check_attributes(program: Program, exporter: str, dims: str, site: Site) -> None:
    assert site.attributes is not None
    written = dataclasses.asdict(site.attributes)
    for key, number in program.attributes.items():
        assert written[key] == pytest.approx(number, rel=1e-6), key
    assert (site.bias_shape is not None) == program.biased


@pytest.mark.parametrize(("name", "exporter"), [(n, e) for n, p in PROGRAMS.items() for e in p.exported_as])
@pytest.mark.parametrize("dims", ["static", "dynamic"])
def test_an_export_that_differs_from_pytorch_does_so_by_itself(
    name: str, exporter: str, dims: str, exported: Exported
) -> None:
    """Before anything is fused: SDPA of a boolean mask at opset 18 gives the mean of V in a row without a key."""
    program = PROGRAMS[name]
    inputs = program.inputs(program.sizes)
    (got,) = run(str(exported(name, exporter, dims)), [x.numpy() for x in inputs])
    (right,), (base,) = reference(program, inputs, exporter)
    assert why_rejected(got, right, base) == []
    pytorchs = program.forward(*inputs)
    assert isinstance(pytorchs, torch.Tensor)
    assert np.abs(got - pytorchs.numpy()).max() > 0.09


@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if p.mistake is not None])
def test_the_mistake_that_the_program_provokes_would_be_seen(name: str) -> None:
    program = PROGRAMS[name]
    inputs = program.inputs(program.sizes)
    right, base = reference(program, inputs)
    assert program.mistake is not None
    wrong = program.mistake(*inputs)
    assert isinstance(wrong, torch.Tensor)
    wrong = wrong.expand(right[0].shape)
    assert why_rejected(wrong.numpy(), right[0], base[0]) != []
    assert np.abs(wrong.numpy() - right[0]).max() > 0.09
