# SPDX-License-Identifier: Apache-2.0
"""``flash-trt``: flags -> one step -> exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from flash_export.help_text import Command, Group
from flash_export.talk import Talk, plain, printable
from flash_trt import __version__, backends, command_lines, engine_inspector, environment, inspect_file
from flash_trt.attention import attention_rows
from flash_trt.backends import BackendChoice
from flash_trt.bench import BenchOptions, Setting, Timing
from flash_trt.bench import bench as bench_step
from flash_trt.build import BuildOptions
from flash_trt.build import build as build_step
from flash_trt.byte_sizes import spell_bytes
from flash_trt.compare import CompareOptions
from flash_trt.compare import compare as compare_step
from flash_trt.compare_inputs import InputOptions
from flash_trt.engine_file import Profile, spell_profile
from flash_trt.examples import epilog
from flash_trt.output import sidecar_path
from flash_trt.run import Place, RunOptions, RunResult
from flash_trt.run import run as run_step
from flash_trt.triton import Device, TritonOptions
from flash_trt.triton import triton as triton_step

app = typer.Typer(
    name="flash-trt",
    cls=Group,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Builds, compares and inspects TensorRT engines of models that flash-export has fused.",
    epilog="[b]Exit codes[/b]  0 done · 1 numbers differ · 2 usage · 3 refused as unsafe · 4 unsupported · "
    "5 something is missing here · 70 our bug · 130 interrupted",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"flash-trt {__version__}")
        raise typer.Exit


@app.callback()
def _flash_trt(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command(cls=Command, epilog=epilog("build"))
def build(
    model: Annotated[Path, typer.Argument(help="ONNX file with FlashAttention nodes.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help=r"The engine. \[default: MODEL.engine beside MODEL]")
    ] = None,
    backend: Annotated[BackendChoice, typer.Option(help="Which TensorRT builds.")] = "auto",
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MIN,OPT,MAX",
            help="Shapes of one input, as trtexec spells them: input_ids:1x1,4x512,8x4096. A symbol that one input "
            "settles holds for the others. An input's second --shape makes a second optimization profile.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SM,...",
            help=r"GPU generations to build for (RTX): sm80,sm89. \[default: the GPU here; without one, all that "
            r"the backend builds for]",
        ),
    ] = None,
    embed_plugin: Annotated[
        bool, typer.Option("--embed-plugin", help="Put the plugin's library into the engine: one file runs alone.")
    ] = False,
    timing_cache: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Kernel timings kept from build to build (TensorRT).")
    ] = None,
    allow_none: Annotated[bool, typer.Option("--allow-none", help="Accept a model without FlashAttention.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings, errors and results.")] = False,
) -> int:
    """Builds a TensorRT engine and proves that our plugin is in it for every FlashAttention node.

    The engine's facts (hashes, versions, shapes, plugin layers, scratch memory) go to OUTPUT.json beside it.
    """
    talk = Talk(quiet=quiet)
    options = BuildOptions(
        model=model,
        output=output or model.parent / f"{model.stem}.engine",
        backend=backend,
        shapes=tuple(shape or ()),
        targets=backends.parse_targets(target or ()),
        embed_plugin=embed_plugin,
        timing_cache=timing_cache,
        allow_none=allow_none,
    )
    sidecar = build_step(options, talk)
    engine_inspector.complete(options.output, sidecar)
    talk.result(_build_table(options, sidecar))
    if sidecar["polygraphy_lacks"]:
        talk.warn(f"polygraphy convert has no {', '.join(sidecar['polygraphy_lacks'])}: its line below builds without")
    if split := command_lines.names_that_trtexec_splits(sidecar["profiles"]):
        talk.warn(f"trtexec reads commas and quotes in names itself: its line below has no input {', '.join(split)}")
    print(printable(sidecar["polygraphy"]))
    print(printable(sidecar["trtexec"]))
    return 0


def _build_table(options: BuildOptions, sidecar: dict[str, Any]) -> Table:
    operators = [layer["operator"] for layer in sidecar["plugin_layers"]]
    counted = ", ".join(f"{operators.count(name)} {name}" for name in dict.fromkeys(operators)) or "none"
    scratch = sidecar["scratch_bytes"]
    rows = {
        "engine": f"{options.output}  ({spell_bytes(sidecar['engine']['bytes'])})",
        "facts": str(sidecar_path(options.output)),
        "backend": f"{sidecar['backend']['name']} {sidecar['backend']['version']}",
        "targets": ", ".join(sidecar["targets"]) or _spell_gpu(sidecar["gpu"]),
        "plugin layers": f"{counted}  (proven by {proof})" if (proof := sidecar["plan_proof"]) else counted,
        **attention_rows(sidecar["attention"]),
        "scratch memory": "not told" if scratch is None else f"{spell_bytes(scratch)} at the largest shapes",
        **_profile_rows(sidecar["profiles"]),
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(f"[b]{name}[/b]", plain(value))
    return table


def _spell_gpu(own: dict[str, str] | None) -> str:
    return f"the GPU here, {own['name']} ({own['sm']})" if own else "the GPU here"


def _profile_rows(profiles: list[Profile]) -> dict[str, str]:
    names = ["shapes"] if len(profiles) < 2 else [f"shapes, profile {number}" for number in range(len(profiles))]
    return dict(zip(names, map(spell_profile, profiles), strict=True)) if profiles else {"shapes": "static"}


@app.command(cls=Command, epilog=epilog("run"))
def run(
    model: Annotated[
        Path, typer.Argument(help="An ONNX file, fused or not, or an engine (on a GPU).", show_default=False)
    ],
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", "-i", metavar="FILE", help=r"NPZ, safetensors or JSON. \[default: drawn inputs]"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Writes the outputs: .npz, .safetensors, .json."),
    ] = None,
    on: Annotated[Place, typer.Option(help="Where ONNX Runtime runs; an engine runs on the GPU.")] = "auto",
    bodies: Annotated[
        bool, typer.Option("--bodies", help="Compute attention by the file's function bodies, not our CPU library.")
    ] = False,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="NAME:DIMS", help="Shapes of drawn inputs: input_ids:4x512.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="What the drawn inputs depend on.")] = 0,
    trust_engine: Annotated[
        bool, typer.Option("--trust-engine", help="Load an engine without our sidecar. An engine is code.")
    ] = False,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Launch an engine's work as one CUDA graph.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings, errors and results.")] = False,
) -> int:
    """Runs a model once, shows its outputs, and says what computed its attention."""
    talk = Talk(quiet=quiet)
    result = run_step(
        RunOptions(model, inputs, output, on, bodies, tuple(shape or ()), seed, trust_engine, cuda_graph), talk
    )
    talk.result(_run_table(result))
    print(f"attention computed by: {result.implementation}")
    return 0


def _run_table(result: RunResult) -> Table:
    title = "outputs of drawn inputs" if result.drawn else "outputs"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("output", "type", "shape", "smallest", "mean", "largest", "NaN"):
        table.add_column(column)
    for name, array in result.outputs.items():
        wide = array.astype(np.float64) if array.dtype.kind not in "OSU" else np.empty(0)
        finite = wide[np.isfinite(wide)]
        numbers = [f"{part:.6g}" for part in (finite.min(), finite.mean(), finite.max())] if finite.size else ["-"] * 3
        table.add_row(plain(name), str(array.dtype), str(list(array.shape)), *numbers, str(int(np.isnan(wide).sum())))
    return table


@app.command(cls=Command, epilog=epilog("compare"))
def compare(
    fused: Annotated[Path, typer.Argument(help="The fused ONNX file, or its engine (on a GPU).", show_default=False)],
    reference: Annotated[
        Path, typer.Argument(help="The independent unfused file: NAME.flash.unfused.onnx.", show_default=False)
    ],
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:MIN,OPT,MAX", help="Limits the dims of one input, spelled as for build."),
    ] = None,
    values: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Compare on these inputs instead of drawn ones.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="What the drawn inputs depend on.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Sets of inputs for each setting of the dynamic dims.")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Writes every verdict to FILE.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draws the verdicts as a page that loads and runs nothing.")
    ] = None,
    save_inputs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Saves the inputs of every run, to replay it with --values.")
    ] = None,
    trust_engine: Annotated[
        bool, typer.Option("--trust-engine", help="Load an engine without our sidecar. An engine is code.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings, errors and results.")] = False,
) -> int:
    """Runs both models on the same inputs and fails (1) on any differing, missing or NaN output."""
    options = CompareOptions(
        fused=fused,
        reference=reference,
        inputs=InputOptions(shapes=tuple(shape or ()), values=values, seed=seed, repeats=repeats),
        json=json_file,
        html=html,
        save_inputs=save_inputs,
        trust_engine=trust_engine,
    )
    compare_step(options, Talk(quiet=quiet))
    return 0


@app.command(cls=Command, epilog=epilog("bench"))
def bench(
    models: Annotated[
        list[Path], typer.Argument(help="ONNX files and engines; the last is the baseline.", show_default=False)
    ],
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="DIM=SIZE,...", help="Sizes of the dynamic dims; several times for several settings."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long to time each model at each setting.")] = 3.0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Writes the figures.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draws the latencies.")] = None,
    trust_engine: Annotated[
        bool, typer.Option("--trust-engine", help="Load an engine without our sidecar. An engine is code.")
    ] = False,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Time each engine launched as a CUDA graph too.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings, errors and results.")] = False,
) -> int:
    """Times models on the same inputs, with every implementation that is here: fused against unfused."""
    talk = Talk(quiet=quiet)
    options = BenchOptions(tuple(models), tuple(at or ()), seconds, json_file, plot, trust_engine, cuda_graph)
    for setting in bench_step(options, talk):
        talk.result(_bench_table(setting))
    return 0


def _bench_table(setting: Setting) -> Table:
    table = Table(title=setting.name, title_justify="left", box=None, pad_edge=False)
    for column in ("model", "computed by", "median ms", "p90 ms", "p99 ms", "items/s", "speedup"):
        table.add_column(column, justify="left" if column in ("model", "computed by") else "right")
    for timing in setting.timings:
        figures = [f"{timing.percentile_ms(percent):.3f}" for percent in (50, 90, 99)]
        table.add_row(
            plain(timing.model.name),
            plain(timing.implementation),
            *figures,
            f"{setting.per_second(timing):.1f}",
            _spell_speedup(setting, timing),
        )
    return table


def _spell_speedup(setting: Setting, timing: Timing) -> str:
    """``1.31 (1.27 to 1.36)``; of the baseline 1."""
    if timing is setting.timings[-1]:
        return "1"
    low, high = setting.speedup_range(timing)
    told = f"{setting.speedup(timing):.2f} ({low:.2f} to {high:.2f})"
    return told if setting.is_told(timing) else f"not told: {told}"


@app.command(cls=Command, epilog=epilog("triton"))
def triton(
    repository: Annotated[Path, typer.Argument(metavar="DIR", help="The model repository.", show_default=False)],
    model: Annotated[Path, typer.Argument(help="An engine of TensorRT, or an ONNX file.", show_default=False)],
    name: Annotated[str | None, typer.Option(help=r"The model's name. \[default: the file's]")] = None,
    device: Annotated[Device, typer.Option(help="Where an ONNX file is served.")] = "gpu",
    max_batch: Annotated[
        int | None,
        typer.Option(
            min=1, max=2**31 - 1, help=r"Largest batch. \[default: that of the shapes, 8 where there are none]"
        ),
    ] = None,
    instances: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="Copies of the model that serve at once.")] = 1,
    delay_us: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="How long a request waits for others to batch with.")
    ] = 100,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:MIN,OPT,MAX", help="Shapes of an ONNX file on the GPU, spelled as for build."),
    ] = None,
    trust_engine: Annotated[
        bool, typer.Option("--trust-engine", help="Serve an engine without our sidecar. An engine is code.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings, errors and results.")] = False,
) -> int:
    """Puts a model, its configuration and our libraries into a Triton model repository; prints the server's line."""
    given = tuple(shape or ())
    options = TritonOptions(repository, model, name, device, max_batch, instances, delay_us, given, trust_engine)
    print(triton_step(options, Talk(quiet=quiet)).server_line)
    return 0


@app.command(cls=Command, epilog=epilog("inspect"))
def inspect(
    file: Annotated[Path, typer.Argument(help="An engine, its sidecar, or an ONNX file.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    trust_engine: Annotated[
        bool,
        typer.Option("--trust-engine", help="On a GPU, load an engine without our sidecar too. An engine is code."),
    ] = False,
) -> int:
    """Says what a file holds, from its bytes; of an engine, on a GPU, what TensorRT's engine inspector tells too."""
    found = inspect_file.inspect(file, trusted=trust_engine)
    print(json.dumps(found, indent=2) if as_json else printable("\n".join(inspect_file.as_lines(found))))
    return 0


@app.command(cls=Command, epilog=epilog("env"))
def env(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for a bug report.")] = False,
) -> int:
    """Says what is installed here: versions, the plugin, the compiler, the GPUs."""
    description = environment.describe()
    print(json.dumps(description, indent=2) if as_json else "\n".join(environment.as_lines(description)))
    return 0
