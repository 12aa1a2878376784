# SPDX-License-Identifier: Apache-2.0
"""A process that times one runtime: ONNX Runtime or PyTorch. Two thread pools in one process disturb each other.

Reads one JSON object a line, ``{"way", "problem" or "model", "threads", "seconds"}``, and answers with the seconds that
one run takes, or with the memory that a first run adds when ``seconds`` is 0.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_graphs
import onnx_ir as ir
from cpu_graphs import Problem

Run = Callable[[], Any]


def main() -> None:
    """Answers until its input ends."""
    subject = ""
    ways: dict[str, Run] = {}
    took: dict[str, float] = {}
    for line in sys.stdin:
        request = json.loads(line)
        seconds, way = request.pop("seconds"), request.pop("way")
        if subject != json.dumps(request):  # a new problem: lets go of the old one's sessions
            subject, ways, took = json.dumps(request), {}, {}
        if way not in ways:
            ways[way] = open_way(way, bound=seconds > 0, **request)
        if seconds:
            answer = took[way] = timed(ways[way], seconds, warm_up=took.get(way, 0.0) < seconds)
        else:
            answer = added_bytes(ways[way])
        print(json.dumps(answer), flush=True)


def open_way(
    way: str,
    threads: int,
    problem: dict[str, Any] | None = None,
    model: str = "",
    length: int = 0,
    *,
    bound: bool = False,
) -> Run:
    """What one run is. With ``bound``, a session of ONNX Runtime has its arrays bound once: a run passes none."""
    if model:
        return model_run(way, Path(model), threads, length)
    assert problem is not None
    if way == "PyTorch SDPA":
        return torch_run(Problem(**problem), threads)
    graph = cpu_graphs.GRAPHS[way](Problem(**problem))
    session = onnx_session(graph.model().SerializeToString(), threads, ours=way.startswith("operator"))
    if bound:
        return bound_run(session, graph)
    return lambda: session.run([graph.output], graph.inputs)


def bound_run(session: Any, graph: cpu_graphs.Graph) -> Run:
    """A run between arrays that stay where they are; it returns what ``session.run`` would."""
    import onnxruntime

    binding = session.io_binding()
    output = onnxruntime.OrtValue.ortvalue_from_numpy(session.run([graph.output], graph.inputs)[0])
    inputs = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in graph.inputs.items()}
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output(graph.output, output)

    def run() -> list[Any]:
        session.run_with_iobinding(binding)
        return [output]

    return run


def onnx_session(model: bytes | str, threads: int, *, ours: bool) -> Any:
    """A session whose threads stop spinning when a run ends, so that the next runtime has the processor."""
    import onnxruntime

    import flash_trt

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if ours:
        options.register_custom_ops_library(flash_trt.cpu_operator_path())
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def torch_run(problem: Problem, threads: int) -> Run:
    """PyTorch's scaled_dot_product_attention."""
    import torch

    torch.set_num_threads(threads)
    given = {name: torch.from_numpy(array) for name, array in problem.arrays().items()}
    query, key, value = (given[name] for name in ("query", "key", "value"))
    attention = torch.nn.functional.scaled_dot_product_attention
    options = {"attn_mask": given.get("mask"), "is_causal": problem.causal, "enable_gqa": bool(problem.kv_heads)}

    def run() -> Any:
        with torch.inference_mode():
            return attention(query, key, value, **options)

    return run


def model_run(way: str, path: Path, threads: int, length: int) -> Run:
    """A whole model on one sequence of ``length`` ids, every one of them real, with an empty cache where it has one."""
    from flash_export import draw

    session = onnx_session(str(path), threads, ours=way == "fused")
    dims = draw.dynamic_dims(ir.load(path))
    sizes = {name: 1 if is_batch else 0 if "past" in name else length for name, is_batch in dims.items()}
    feeds = draw.draw_inputs(path, sizes, kind="full")
    return lambda: session.run(None, feeds)


def timed(run: Run, seconds: float, *, warm_up: bool = True) -> float:
    """Seconds of one run, the mean over ``seconds``; with ``warm_up`` one run first that does not count."""
    if warm_up:
        run()
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or count == 0:
        run()
        count += 1
    return elapsed / count


def added_bytes(run: Run) -> int:
    """What the peak of resident memory during the first run lies above what was there before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    output = run()
    return resident("VmHWM") - before - sum(getattr(x, "nbytes", 0) for x in output)


def resident(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
