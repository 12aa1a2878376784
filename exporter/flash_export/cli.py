# SPDX-License-Identifier: Apache-2.0
"""``flash-export``: flags -> Options -> pipeline -> exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flash_export import __version__, pipeline
from flash_export.help_text import Command
from flash_export.inputs import parse_inputs
from flash_export.options import DtypeName, Options

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

_EPILOG = (
    "[b]Examples[/b]\n\n"
    "flash-export model.pt2\n\n"
    "flash-export model.pt --model my_package.model:build --input x:float32:batch,seq=1..512,256\n\n"
    "flash-export ./bert_folder -o bert.onnx\n\n"
    "flash-export other.onnx --dry-run\n\n"
    "[b]Exit codes[/b]  0 done · 1 numbers differ · 2 usage · 3 refused as unsafe · 4 unsupported or no attention · "
    "5 something is missing here · 70 our bug · 130 interrupted"
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"flash-export {__version__}")
        raise typer.Exit


@app.command(name="flash-export", cls=Command, epilog=_EPILOG, no_args_is_help=True)
def _flash_export(
    source: Annotated[
        Path,
        typer.Argument(
            help="ExportedProgram (.pt2), state dict (.pt, .pth, .safetensors; with --model), Hugging Face folder "
            "or ONNX file; told by its content, not its name.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help=r"Fused model. \[default: NAME.flash.onnx beside SOURCE]")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PKG.MOD:CALLABLE", help="Builds the module that a state dict belongs to."),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME:DTYPE:DIM,DIM,...",
            help="One model input; a DIM that is a name is dynamic, with its range where it matters: "
            "input_ids:int64:batch,seq=1..512. Once for each input.",
        ),
    ] = None,
    dtype: Annotated[
        DtypeName | None,
        typer.Option(
            help="Casts the weights before export, of state dicts, Hugging Face folders and what --trust-pickle opens; "
            "what --input describes is taken as written."
        ),
    ] = None,
    opset: Annotated[int | None, typer.Option(help=r"ONNX opset. \[default: 18; an ONNX file keeps its own]")] = None,
    require_all: Annotated[bool, typer.Option("--require-all", help="Fail (4) when any attention is refused.")] = False,
    allow_none: Annotated[bool, typer.Option("--allow-none", help="Accept a model without attention.")] = False,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="SITE", help="Leave this attention as it is. Repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")] = False,
    no_check: Annotated[
        bool,
        typer.Option("--no-check", help="Publish without comparing numbers (the graph is still checked)."),
    ] = False,
    values: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Inputs by name to compare the whole model on.")
    ] = None,
    no_fallback: Annotated[
        bool,
        typer.Option(
            "--no-fallback",
            help="Leave out the function bodies: needed by TensorRT 10.0 to 10.6; ONNX Runtime then needs a library.",
        ),
    ] = False,
    trust_pickle: Annotated[
        bool,
        typer.Option("--trust-pickle", help="Let SOURCE run the code it carries. Only for files you made."),
    ] = False,
    kv_cache: Annotated[
        bool,
        typer.Option(
            "--kv-cache",
            help="Export a Hugging Face causal language model with its cache as in- and outputs.",
        ),
    ] = False,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            "--pattern",
            metavar="PKG.MOD",
            help="Imports your module, which adds readers of your own operators to PATTERNS (docs/api.md). Repeatable.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=r"Where report.json and report.html go. \[default: beside the output]"),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings, errors and results.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> int:
    """Exports SOURCE to ONNX with every attention fused into one FlashAttention node, proven numerically.

    Every attention is either fused or refused with a reason; nothing is written unless the fused model computes
    what the unfused one does. The fused file runs in plain ONNX Runtime and, with our plugin, in TensorRT.
    """
    options = Options(
        source=source,
        output=output,
        model=model,
        inputs=parse_inputs(inputs or []),
        dtype=dtype,
        opset=opset,
        require_all=require_all,
        allow_none=allow_none,
        skip=tuple(skip or ()),
        dry_run=dry_run,
        check=not no_check,
        values=values,
        fallback=not no_fallback,
        trust_pickle=trust_pickle,
        kv_cache=kv_cache,
        patterns=tuple(pattern or ()),
        report=report,
        quiet=quiet,
    )
    pipeline.run(options)
    return 0
