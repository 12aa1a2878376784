# SPDX-License-Identifier: Apache-2.0
"""ONNX -> TensorRT engine, with proof that our plugin is in it.

TensorRT never says when it did not use a plugin: a node whose plugin it does not find is replaced by the function body
in the file, and the engine is then right but slow and large. So the plugin layers are counted after parsing, and the
finished plan's bytes are read for each node's attributes.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flash_trt
from flash_export import dim_ranges
from flash_export.errors import MissingHere, UnsupportedModel, UsageError
from flash_export.op import CACHE_OPERATORS, DOMAIN, VERSION
from flash_export.talk import Talk
from flash_trt import (
    attention,
    backends,
    build_profiles,
    command_lines,
    gpu,
    node_bodies,
    onnx_file,
    plan,
    plugin_library,
    profile_order,
    shapes,
)
from flash_trt.backends import Backend, BackendChoice, Progress
from flash_trt.file_kinds import PLAN_MAGIC
from flash_trt.onnx_file import FlashNode, OnnxFile
from flash_trt.output import check_engine, check_outputs, files_read, sidecar_path, write_atomically, write_engine
from flash_trt.plugin_library import PluginLibrary, sha256_of

SIDECAR_SCHEMA = 1
_NO_CACHE = (*PLAN_MAGIC, b"\x7fELF", b"PK\x03\x04", b"\x93NUMPY")
"""How files begin that a slip of the hand may name as the timing cache."""
_OLDEST_GENERATION = 80
"""The kernels use mma and cp.async of sm_80; an older GPU cannot run the plugin."""


@dataclasses.dataclass(frozen=True, slots=True)
class BuildOptions:
    """The flags of ``flash-trt build``; see its ``--help``."""

    model: Path
    output: Path
    backend: BackendChoice = "auto"
    shapes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    embed_plugin: bool = False
    timing_cache: Path | None = None
    allow_none: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """A built engine that is not on disk yet.

    Args:
        data: the plan.
        layers: name and operator of each of our plugin layers, in the network's order.
        scratch_bytes: "Max Scratch Memory" as TensorRT logs it: what attention and its neighbours take at the largest
            shapes, weights apart; None when this TensorRT does not log it.
        timing_cache: what it measured, for a later build; None where it was not asked for.
    """

    data: bytes
    layers: tuple[tuple[str, str], ...]
    scratch_bytes: int | None
    timing_cache: bytes | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Extras:
    """What a build may take besides model and shapes.

    Args:
        embedded: a library to put into the engine.
        timing_cache: what an earlier build measured; b"" starts a new one, None does without.
    """

    embedded: Path | None = None
    timing_cache: bytes | None = None


def build(options: BuildOptions, talk: Talk) -> dict[str, Any]:
    """Builds the engine, proves that every FlashAttention node is a plugin in it, and writes it with its sidecar.

    Returns:
        The sidecar, as written to ``OUTPUT.json``.

    Raises:
        UsageError: an unreadable model, a wrong shape or target, an output that cannot be created or is no engine.
        UnsupportedModel: no FlashAttention node (unless ``allow_none``), or TensorRT refuses the model.
        MissingHere: no TensorRT, no plugin, or a node that the plugin does not serve.
    """
    outputs = (options.output, sidecar_path(options.output), options.timing_cache)
    with talk.step("read", str(options.model)):
        file = onnx_file.read(options.model)
        check_outputs(outputs, files_read([file]))
        check_engine(options.output)
        measured = _read_cache(options.timing_cache)
        given = [shapes.parse(text) for text in options.shapes]
        profiles = shapes.plan_profiles(file.inputs, given, file.dim_ranges)
        _require_flash_nodes(file, options.allow_none)
        node_bodies.require_obeyed(file)
    backend = backends.select(options.backend, targets=bool(options.targets))
    backends.check_targets(backend, options.targets, served_targets(backend))
    targets = options.targets or default_targets(backend)
    plugin = plugin_library.load(backend) if file.flash_nodes else None
    _tell_choices(profiles, targets, options, talk)
    extras = _extras(options, backend, plugin, measured, talk)
    with talk.step("build", f"by {backend.name} {backend.version} for {', '.join(targets) or 'the GPU here'}"):
        engine = build_engine(backend, file, profiles, targets, talk.progress, extras)
    with talk.step("prove", f"{len(file.flash_nodes)} FlashAttention nodes in the plan"):
        proof = prove_plugins(backend, file, engine)
        attentions = attention.describe(file, engine.data)
    sidecar = _sidecar(options, file, backend, plugin, profiles, targets, engine, proof)
    sidecar["attention"] = [found.as_json() for found in attentions]
    with talk.step("write", str(options.output)):
        if options.timing_cache and engine.timing_cache:
            write_atomically(options.timing_cache, engine.timing_cache)
        sidecar["engine"]["sha256"] = hashlib.sha256(engine.data).hexdigest()
        sidecar["seconds"] = dict(talk.seconds)
        write_engine(options.output, engine.data, sidecar)
    return sidecar


def default_targets(backend: Backend) -> tuple[str, ...]:
    """What to build for when nothing is asked: the GPU here, else all that backend and plugin both serve.

    A backend without targets builds for the GPU here, (), and says itself when there is none. One with targets is told
    the generation: left alone, TensorRT for RTX builds for every one from sm80 on, GPU or not.
    """
    served = served_targets(backend)
    return next(((device.sm,) for device in gpu.devices() if device.sm in served), served)


def served_targets(backend: Backend) -> tuple[str, ...]:
    """The targets that both the backend can build for and the kernels can run on."""
    return tuple(target for target in backend.targets if int(target.removeprefix("sm")) >= _OLDEST_GENERATION)


def _require_flash_nodes(file: OnnxFile, allow_none: bool) -> None:
    if not file.flash_nodes and not allow_none:
        of_ours = any(entry.key == dim_ranges.PROPERTY for entry in file.proto.metadata_props)
        first = "flash-export wrote it, and" if of_ours else "run flash-export on it; where that made it,"
        raise UnsupportedModel(
            "the model has no FlashAttention node",
            where=str(file.path),
            got=f"{len(file.proto.graph.node)} nodes, none of them in domain {DOMAIN}",
            need="a model in which flash-export has fused an attention",
            do=f"{first} every attention was refused: its report.json says why, and flash-export --require-all ends "
            "with that; --allow-none builds it as it is",
        )


def _tell_choices(
    profiles: Sequence[shapes.Profile], targets: Sequence[str], options: BuildOptions, talk: Talk
) -> None:
    for symbol, triple in {choice: None for profile in profiles for choice in profile.chosen.items()}:
        talk.warn(f"no --shape settles {symbol}: taking {','.join(map(str, triple))} (min,opt,max)")
    for number, earlier in profile_order.never_run(profiles):
        talk.warn(
            f"flash-trt never runs profile {number} ({' '.join(map(str, profiles[number].ranges))}): profile {earlier} "
            "holds all its shapes and comes first; give the --shape of the narrower one first"
        )
    if targets and not options.targets:
        here = "the GPU here" if {device.sm for device in gpu.devices()} & set(targets) else "no GPU that it builds for"
        talk.say(f"{here}: taking {', '.join(targets)}; --target chooses")


def _read_cache(path: Path | None) -> bytes:
    """What an earlier build measured; b"" where there is nothing yet.

    Raises:
        UsageError: ``path`` holds something else, which the cache would replace: an engine, a library, a model or text.
    """
    if path is None or not path.exists():
        return b""
    measured = path.read_bytes()
    if measured.startswith(_NO_CACHE) or _is_text(measured) or path.suffix == ".onnx":
        raise UsageError(
            "the file for the timing cache is no timing cache",
            where=f"--timing-cache {path}",
            got=f"a file that begins with {measured[:16]!r}",
            need="a file that an earlier build wrote, or a name that is free",
            do="give another name, or remove that file",
        )
    return measured


def _is_text(data: bytes) -> bool:
    try:
        return bool(data) and "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def _extras(
    options: BuildOptions, backend: Backend, plugin: PluginLibrary | None, measured: bytes, talk: Talk
) -> Extras:
    embedded = plugin.path if plugin and options.embed_plugin else None
    if options.timing_cache is None:
        return Extras(embedded)
    if backend.name == "tensorrt-rtx":
        talk.warn("TensorRT for RTX measures nothing when it builds: --timing-cache is left out")
        return Extras(embedded)
    return Extras(embedded, measured)


# --- the engine -------------------------------------------------------------------------------------------------------


def build_engine(
    backend: Backend,
    file: OnnxFile,
    profiles: Sequence[shapes.Profile],
    targets: Sequence[str] = (),
    progress: Progress | None = None,
    extras: Extras | None = None,
) -> Engine:
    """Parses, checks the plugin layers and builds.

    Raises:
        UsageError: an input that TensorRT reads as a shape has no values among ``profiles``.
        UnsupportedModel: TensorRT refuses the model; its own words are in the message.
        MissingHere: a FlashAttention node did not become a plugin layer, or this TensorRT needs a GPU and none is here.
    """
    mark = len(backend.log)
    builder = backends.create_builder(backend)
    network = backends.create_network(backend, builder)
    parser = backend.trt.OnnxParser(network, backend.logger)
    if not parser.parse_from_file(str(file.path)):
        raise _refused("parse", backend, file, _parser_errors(parser) or backend.errors_since(mark))
    layers = plugin_layers(backend, network)
    _require_plugin_layers(file.flash_nodes, layers, file)
    config = builder.create_builder_config()
    config.profiling_verbosity = backend.trt.ProfilingVerbosity.DETAILED  # else the engine inspector knows names alone
    backends.set_targets(backend, config, targets)
    if writes_in_place(layers):
        backends.alias_outputs(backend, config)
    if extras and extras.embedded:
        config.plugins_to_serialize = [str(extras.embedded)]
    if extras and extras.timing_cache is not None:
        backends.set_timing_cache(config, extras.timing_cache)
    keep_alive = backends.set_progress(backend, config, progress) if progress else None
    build_profiles.add_profiles(builder, config, network, profiles)
    serialized = builder.build_serialized_network(network, config)
    del keep_alive
    if serialized is None:
        raise _refused("build", backend, file, backend.errors_since(mark))
    measured = backends.timing_cache(config) if extras and extras.timing_cache is not None else None
    return Engine(bytes(serialized), layers, backend.scratch_bytes_since(mark), measured)


def _parser_errors(parser: Any) -> list[str]:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return backends.without_driver_noise(
        f"node {error.node_name() or error.node()} ({error.node_operator()}): {error.desc()}" for error in errors
    )


def _refused(step: str, backend: Backend, file: OnnxFile, errors: Sequence[str]) -> UnsupportedModel:
    return UnsupportedModel(
        f"{backend.name} {backend.version} cannot {step} the model",
        where=str(file.path),
        got="; ".join(dict.fromkeys(errors)) or "no reason given",
        need="a model, and shapes, that this TensorRT supports",
        do="where a FlashAttention node is named, the plugin says why in the lines above; else check --shape",
    )


def plugin_layers(backend: Backend, network: Any) -> tuple[tuple[str, str], ...]:
    """Name and operator of each layer of ``network`` that is a plugin of ours."""
    trt = backend.trt
    found = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.PLUGIN_V3:
            layer.__class__ = trt.IPluginV3Layer
            core = layer.plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
            if core.plugin_namespace == DOMAIN:
                found.append((layer.name, core.plugin_name))
    return tuple(found)


def writes_in_place(layers: Sequence[tuple[str, str]]) -> bool:
    """Whether one of our plugin ``layers`` writes into the memory of its input."""
    return any(operator in CACHE_OPERATORS for _, operator in layers)


def _require_plugin_layers(nodes: Sequence[FlashNode], layers: Sequence[tuple[str, str]], file: OnnxFile) -> None:
    """Fails when TensorRT inlined a node's function body instead of taking the plugin."""
    short = Counter(node.operator for node in nodes) - Counter(operator for _, operator in layers)
    if not short:
        return
    unnamed = [n for n in nodes if n.attributes.get("plugin_namespace") != DOMAIN]
    unnamed += [n for n in nodes if n.attributes.get("plugin_version") != str(VERSION)]
    names = {name for name, _ in layers}
    lost = [node.name for node in nodes if node.operator in short and node.name not in names]
    got = f"{len(layers)} plugin layers for {len(nodes)} FlashAttention nodes; missing: {', '.join(lost[:5])}"
    if unnamed:
        first = unnamed[0]
        raise UnsupportedModel(
            "TensorRT took the function body of a FlashAttention node instead of the plugin",
            where=f"{file.path}, node {first.name}",
            got=f"{got}; plugin_namespace {first.attributes.get('plugin_namespace')!r}, "
            f"plugin_version {first.attributes.get('plugin_version')!r}",
            need=f"plugin_namespace {DOMAIN!r} and plugin_version {str(VERSION)!r} on every node",
            do="export the model again with this version of flash-export",
        )
    raise MissingHere(
        "TensorRT took the function body of a FlashAttention node instead of the plugin",
        where=str(file.path),
        got=got,
        need="one plugin layer for every FlashAttention node",
        do="load the plugin before parsing (flash-trt env shows it); TensorRT 10.0 to 10.6 prefers the body: "
        "export with flash-export --no-fallback there",
    )


def prove_plugins(backend: Backend, file: OnnxFile, engine: Engine) -> plan.Proof:
    """Reads the plan for every FlashAttention node with its attributes.

    Raises:
        MissingHere: the plan lacks one; such an engine must not be used.
    """
    proof = plan.prove(engine.data, [node for node in file.flash_nodes if node.is_needed])
    if proof.problems:
        raise MissingHere(
            "the engine does not hold every FlashAttention node as a plugin",
            where=str(file.path),
            got="; ".join(proof.problems[:3]),
            need="each node's operator and attributes in the plan",
            do=f"report this with the model; it is a disagreement of {backend.name} {backend.version} and the plugin",
        )
    return proof


# --- the sidecar ------------------------------------------------------------------------------------------------------


def _sidecar(
    options: BuildOptions,
    file: OnnxFile,
    backend: Backend,
    plugin: PluginLibrary | None,
    profiles: Sequence[shapes.Profile],
    targets: Sequence[str],
    engine: Engine,
    proof: plan.Proof,
) -> dict[str, Any]:
    """What the engine was made of and with; ``flash-trt run`` trusts an engine whose hash this holds."""
    in_place = writes_in_place(engine.layers)
    return {
        "schema": SIDECAR_SCHEMA,
        "engine": {"file": options.output.name, "bytes": len(engine.data)},
        "model": {
            "file": str(file.path),
            "sha256": sha256_of(file.path),
            "external": {name: sha256_of(path) for name, path in sorted(file.external.items())},
            "outputs": file.outputs,
        },
        "plugin": plugin and {"file": str(plugin.path), "sha256": plugin.sha256, "operators": plugin.operators},
        "embedded_plugin": options.embed_plugin and plugin is not None,
        "plugin_layers": [{"name": name, "operator": operator} for name, operator in engine.layers],
        "plan_proof": proof.kind if file.flash_nodes else None,
        "backend": {"name": backend.name, "version": backend.version},
        "flash_trt": flash_trt.__version__,
        "targets": list(targets),
        "gpu": None if targets else _own_gpu(),
        "tensors": {
            "inputs": [tensor.as_json() for tensor in file.inputs],
            "outputs": [tensor.as_json() for tensor in file.output_tensors],
        },
        "profile": profiles[0].as_json(),
        "profiles": [profile.as_json() for profile in profiles if profile.ranges],
        "scratch_bytes": engine.scratch_bytes,
        "built": datetime.datetime.fromtimestamp(time.time(), datetime.UTC).isoformat(timespec="seconds"),
        "trtexec": command_lines.trtexec(options, backend, plugin, targets, profiles, in_place=in_place),
        "polygraphy": command_lines.polygraphy(options, backend, targets, profiles, in_place=in_place),
        "polygraphy_lacks": command_lines.polygraphy_lacks(options, plugin),
    }


def _own_gpu() -> dict[str, str] | None:
    """The GPU that a build without targets is for: TensorRT takes the first that this process sees."""
    return next(({"name": device.name, "sm": device.sm} for device in gpu.devices()), None)
