# SPDX-License-Identifier: Apache-2.0
"""Latency and throughput of several models on the same inputs, on whatever runs here.

Every contender runs once in every round, so that a machine that slows down slows all of them. An engine's time is that
of the GPU's work alone; ONNX Runtime's is that of the whole call, copies to a GPU included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from flash_export import dim_ranges, interrupt
from flash_export.draw import draw_inputs, dynamic_dims
from flash_export.errors import UsageError
from flash_export.talk import Talk
from flash_trt import bench_plot, engine_file, engine_load, gpu, onnx_file, ort, shapes
from flash_trt.engine_load import LoadedEngine
from flash_trt.engine_session import EngineSession
from flash_trt.onnx_file import OnnxFile
from flash_trt.output import check_outputs, files_read, write_atomically

BENCH_SCHEMA = 1
_LEAST_ROUNDS = 5
_WARM_UP_ROUNDS = 2
_MOST_SECONDS = 86_400
_PERCENTILES = (10, 50, 90, 99)

Feeds = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class BenchOptions:
    """The flags of ``flash-trt bench``; see its ``--help``."""

    models: tuple[Path, ...]
    at: tuple[str, ...] = ()
    seconds: float = 3.0
    json: Path | None = None
    plot: Path | None = None
    trust_engine: bool = False
    cuda_graph: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """One model as one implementation runs it; ``run`` gives the seconds of one run."""

    model: Path
    implementation: str
    run: Callable[[Feeds], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """What one contender took at one setting of the dynamic dims."""

    model: Path
    implementation: str
    seconds: tuple[float, ...]

    def percentile_ms(self, percent: int) -> float:
        """That percentile of the latency."""
        return float(np.percentile(self.seconds, percent)) * 1e3

    @property
    def median_ms(self) -> float:
        return self.percentile_ms(50)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """All contenders at one setting of the dynamic dims. ``batch`` is the first size of the first input."""

    sizes: dict[str, int]
    batch: int
    timings: tuple[Timing, ...]

    @property
    def name(self) -> str:
        """``batch=1 seq=128``."""
        return " ".join(f"{dim}={size}" for dim, size in self.sizes.items()) or "static"

    def speedup(self, timing: Timing) -> float:
        """How many times as fast as the last contender, the baseline: the median of the rounds' ratios."""
        return float(np.median(self._ratios(timing)))

    def speedup_range(self, timing: Timing) -> tuple[float, float]:
        """Between what the speedup lies, 95 times of 100.

        The interval of the ratios' median by the sign test (Conover, Practical Nonparametric Statistics, section 3.2),
        which asks nothing of their distribution; the median found is always in it.
        """
        ratios = self._ratios(timing)
        reach = 0.98 * len(ratios) ** 0.5
        low = max(math.floor(len(ratios) / 2 - reach), 0)
        high = min(math.ceil(len(ratios) / 2 + reach), len(ratios) - 1)
        return ratios[low], ratios[high]

    def _ratios(self, timing: Timing) -> list[float]:
        """The baseline's time over this one's in each round, in which both ran one after the other; sorted."""
        return sorted(b / t for b, t in zip(self.timings[-1].seconds, timing.seconds, strict=True))

    def is_told(self, timing: Timing) -> bool:
        """Whether the rounds tell this contender from the baseline: 1 is outside the speedup's range."""
        low, high = self.speedup_range(timing)
        return not low <= 1 <= high

    def per_second(self, timing: Timing) -> float:
        """Items of the batch a second."""
        return self.batch / timing.median_ms * 1e3


def bench(options: BenchOptions, talk: Talk) -> list[Setting]:
    """Times every model at every setting, and writes the figures and the plot where asked.

    Raises:
        UsageError: an unreadable file, a setting that does not fit, no ONNX file to draw inputs from, or seconds
            that nobody waits for.
        UnsafeInput, UnsupportedModel, MissingHere: a model cannot be run here; see ``engine_load`` and ``ort``.
    """
    _require_seconds(options.seconds)
    with talk.step("read", ", ".join(map(str, options.models))):
        files = {path: onnx_file.read(path) for path in options.models if not engine_file.is_engine(path)}
        check_outputs((options.json, options.plot), files_read([files.get(path, path) for path in options.models]))
        _require_svg(options.plot)
        model = _model_to_draw_from(options, files)
        _require_same_inputs(files)
        limits = next(iter(files.values())).dim_ranges
        settings = [_sizes(text, model, limits) for text in options.at or ("",)]
    with contextlib.ExitStack() as stack, interrupt.temporary_folder("flash-trt-") as folder:
        first = draw_inputs(model, settings[0])
        with talk.step("load", "every model with every implementation that is here"):
            contenders = [
                c for path in options.models for c in _contenders(path, files, first, Path(folder), options, stack)
            ]
        measured = []
        for sizes in settings:
            feeds = draw_inputs(model, sizes)
            with talk.step("time", " ".join(f"{dim}={size}" for dim, size in sizes.items()) or "static shapes"):
                timings = _time(contenders, feeds, options.seconds, talk)
            batch = next((array.shape[0] for array in feeds.values() if array.ndim), 1)
            measured.append(Setting(sizes, batch, tuple(timings)))
            _warn_of_noise(measured[-1], talk)
    if options.json:
        write_atomically(options.json, json.dumps(as_json(measured), indent=2).encode() + b"\n")
    if options.plot:
        write_atomically(options.plot, bench_plot.draw(_bars(measured)).encode())
    return measured


def _require_seconds(seconds: float) -> None:
    if not 0 <= seconds <= _MOST_SECONDS:  # NaN is refused too
        raise UsageError(
            "a model is not timed for so long",
            where="--seconds",
            got=f"{seconds:g}",
            need=f"0 to {_MOST_SECONDS}, a day",
            do="give the seconds that each model runs at each setting: 3 as a rule, more on a noisy machine",
        )


def _warn_of_noise(setting: Setting, talk: Talk) -> None:
    for timing in setting.timings[:-1]:
        if not setting.is_told(timing):
            low, high = setting.speedup_range(timing)
            talk.warn(
                f"{setting.name}: too noisy to tell {timing.model.name} ({timing.implementation}) from "
                f"{setting.timings[-1].model.name}: a speedup of {low:.2f} to {high:.2f} in {len(timing.seconds)} "
                "rounds; more --seconds, or a quieter machine"
            )


def _model_to_draw_from(options: BenchOptions, files: Mapping[Path, OnnxFile]) -> ir.Model:
    if not files:
        raise UsageError(
            "an engine does not tell what its inputs are for, so none are drawn",
            where=", ".join(map(str, options.models)),
            got="engines alone",
            need="one ONNX file among the models",
            do="add the .onnx that the engines were built from",
        )
    return ir.load(next(iter(files)), format="protobuf")


def _require_same_inputs(files: Mapping[Path, OnnxFile]) -> None:
    """Refuses ONNX files that the same drawn inputs do not fit by name."""
    (first, names), *others = [(path, {i.name for i in file.inputs}) for path, file in files.items()]
    for path, mine in others:
        if mine != names:
            raise UsageError(
                "two models take different inputs",
                where=f"{first} and {path}",
                got=f"only in the first: {sorted(names - mine)}; only in the second: {sorted(mine - names)}",
                need="the same inputs by name: every model runs on the same numbers",
                do="time a fused model and the unfused file written beside it",
            )


def _require_svg(plot: Path | None) -> None:
    if plot is not None and plot.suffix.lower() != ".svg":
        raise UsageError(
            "the plot is an SVG, and its name says something else",
            where=f"--plot {plot}",
            got=f"the suffix {plot.suffix}" if plot.suffix else "no suffix",
            need="a name that ends in .svg",
            do=f"give {plot.with_suffix('.svg')}",
        )


def _sizes(text: str, model: ir.Model, limits: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """``batch=2,seq=128`` as sizes of the model's dynamic dims, within ``limits``.

    A batch that it leaves out is 1, a length 128, or the nearest with which the model works.
    """
    usual = {name: 1 if is_batch else 128 for name, is_batch in dynamic_dims(model).items()}
    range_of = {name: limits.get(name, (0, size)) for name, size in usual.items()}
    sizes = {name: min(max(size, range_of[name][0]), range_of[name][1]) for name, size in usual.items()}
    given: set[str] = set()
    for part in filter(None, text.split(",")):
        name, _, spelled = part.strip().partition("=")
        size = shapes.size(spelled)
        if name not in sizes or size is None or name in given:
            raise UsageError(
                "a setting of the dynamic dims cannot be read",
                where="--at",
                got=repr(text)[:200],
                need=f"DIM=SIZE,... once for each of {', '.join(sizes) or 'no dim: this model is static'}",
                do="spell it like --at " + (",".join(f"{dim}={size}" for dim, size in sizes.items()) or "nothing"),
            )
        low, high = limits.get(name, (0, size))
        if not low <= size <= high:
            raise UsageError(
                "a setting leaves the range in which the model works",
                where="--at",
                got=f"{name}={size}",
                need=f"{name} in {dim_ranges.spell((low, high))}, as the model was exported for",
                do=f"keep {name} in that range, or export the model again for another one",
            )
        sizes[name] = size
        given.add(name)
    return sizes


# --- contenders -------------------------------------------------------------------------------------------------------


def _contenders(
    path: Path,
    files: Mapping[Path, OnnxFile],
    feeds: Feeds,
    folder: Path,
    options: BenchOptions,
    stack: contextlib.ExitStack,
) -> Iterator[Contender]:
    """``path`` as each implementation here runs it, each proven by a profiled run on ``feeds``."""
    if path not in files:
        loaded = engine_load.load(path, trusted=options.trust_engine)
        for graph in (False, True) if options.cuda_graph else (False,):
            session = EngineSession(loaded, cuda_graph=graph)
            stack.callback(session.close)
            yield Contender(path, session.implementation(), _timed_engine(loaded, session))
        return
    file = files[path]
    has_bodies = {f.name for f in file.proto.functions} & {node.operator for node in file.flash_nodes}
    ways = [(True, False)] if ort.has_cuda() else []
    ways += [(False, True)] if file.flash_nodes and ort.has_library() else []
    ways += [(False, False)] if has_bodies or not file.flash_nodes else []
    for cuda, library in ways:
        proof = ort.Session(file, cuda=cuda, library=library, profile_into=folder)
        proof.run(feeds)
        timed = ort.Session(file, cuda=cuda, library=library)
        yield Contender(path, f"{proof.where}, {proof.implementation()}", _timed_session(timed))


def _timed_session(session: ort.Session) -> Callable[[Feeds], float]:
    def run(feeds: Feeds) -> float:
        start = time.perf_counter()
        session.run(feeds)
        return time.perf_counter() - start

    return run


def _timed_engine(loaded: LoadedEngine, session: EngineSession) -> Callable[[Feeds], float]:
    def run(feeds: Feeds) -> float:
        engine_file.require_shapes(loaded.file, feeds)
        return session.time(feeds)

    return run


def _time(contenders: Sequence[Contender], feeds: Feeds, budget_s: float, talk: Talk) -> list[Timing]:
    """Rounds of one run each until ``budget_s`` seconds a contender are spent."""
    for _ in range(_WARM_UP_ROUNDS):
        for contender in contenders:
            contender.run(feeds)
    taken: list[list[float]] = [[] for _ in contenders]
    end = time.monotonic() + budget_s * len(contenders)
    while len(taken[0]) < _LEAST_ROUNDS or time.monotonic() < end:
        for contender, seconds in zip(contenders, taken, strict=True):
            seconds.append(contender.run(feeds))
        talk.progress("rounds", len(taken[0]), len(taken[0]))
    return [Timing(c.model, c.implementation, tuple(seconds)) for c, seconds in zip(contenders, taken, strict=True)]


# --- results ----------------------------------------------------------------------------------------------------------


def as_json(settings: Sequence[Setting]) -> dict[str, Any]:
    """The figures as data, schema 1."""
    return {
        "schema": BENCH_SCHEMA,
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "gpus": [device.name for device in gpu.devices()],
        },
        "settings": [
            {
                "sizes": setting.sizes,
                "timings": [
                    {
                        "model": str(timing.model),
                        "implementation": timing.implementation,
                        "runs": len(timing.seconds),
                        **{f"p{percent}_ms": timing.percentile_ms(percent) for percent in _PERCENTILES},
                        "per_second": setting.per_second(timing),
                        "speedup": setting.speedup(timing),
                        "speedup_range": setting.speedup_range(timing),
                        "told_apart": setting.is_told(timing),
                    }
                    for timing in setting.timings
                ],
            }
            for setting in settings
        ],
    }


def _bars(settings: Sequence[Setting]) -> list[bench_plot.Group]:
    return [
        bench_plot.Group(
            setting.name,
            [
                bench_plot.Bar(f"{t.model.name}: {t.implementation}", *(t.percentile_ms(p) for p in (10, 50, 90)))
                for t in setting.timings
            ],
        )
        for setting in settings
    ]
