# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model folder: local files, safetensors, transformers' own code only.

No network, no ``trust_remote_code``, no kernel from a hub: the attention is set by us (``huggingface_attention``),
whatever the folder's config asks for.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from flash_export.errors import MissingHere, UnsafeInput, UnsupportedModel, UsageError
from flash_export.load import Loaded, read_json, require_torch
from flash_export.options import Dim, InputSpec, Options
from flash_export.requirements import pip_install

BATCH, SEQ = "batch", "seq"
_FLOATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def load_folder(options: Options) -> Loaded:
    """Builds the model that ``config.json`` names and loads the folder's safetensors into it.

    Inputs come from the model: ``input_ids``, ``attention_mask`` and, where it takes them, ``token_type_ids``, ``bbox``
    (places on a page), ``decoder_input_ids`` and ``pixel_values``; or ``pixel_values`` alone; or ``input_features`` of
    speech. Batch and lengths are dynamic. ``--input`` replaces them.

    Raises:
        UsageError: no model folder, broken weights, or an architecture whose inputs must be named.
        UnsafeInput: the model needs Python code from the folder, or has only pickled weights.
        UnsupportedModel: an architecture unknown to the installed transformers, or quantised weights.
    """
    folder = options.source
    config = _read_config(folder)
    _refuse_unsafe(folder, config)
    if options.model is not None:
        raise UsageError(
            "--model does not go with a model folder",
            where=str(folder),
            got=f"--model {options.model}",
            need="the model that config.json names",
            do="leave --model out, or give the safetensors file itself with --model",
        )
    require_torch()
    transformers = _import_transformers()
    from flash_export import example

    cls = _architecture(transformers, config, folder)
    dtype = example.TORCH_DTYPES[options.dtype or "fp32"]
    module = _from_pretrained(cls, folder, dtype).eval().requires_grad_(False)
    if options.kv_cache:
        return _with_cache(module, options)
    specs = options.inputs or default_inputs(module, options.dtype or "fp32")
    _check_names(module, specs)
    return Loaded(folder, "hugging_face", module, arguments=example.make_arguments(module, specs))


def _with_cache(module: Any, options: Options) -> Loaded:
    from flash_export import cached_model

    if options.inputs:
        raise UsageError(
            "--input does not go with --kv-cache",
            where=str(options.source),
            got=f"--input {options.inputs[0].name}",
            need="the inputs of a cached model, which follow from the model",
            do="leave --input out",
        )
    text = getattr(module.config, "text_config", None) or module.config
    cached, arguments = cached_model.with_cache(module, _longest(module, text))
    return Loaded(options.source, "hugging_face", cached.eval(), arguments=arguments, by_position=True)


def default_inputs(module: Any, dtype: str) -> tuple[InputSpec, ...]:
    """The inputs of a transformers model by its main input and the signature of its ``forward``."""
    config, taken = module.config, inspect.signature(module.forward).parameters
    text = getattr(config, "text_config", None) or config
    batch = Dim(BATCH, 1)
    main = module.main_input_name
    if main == "input_ids":
        seq = Dim(SEQ, 1, _longest(module, text))
        names = ["input_ids", "attention_mask", *_token_types(config, taken)]
        specs = [InputSpec(name, "int64", (batch, seq)) for name in names if name in taken]
        if "bbox" in taken:
            specs.append(InputSpec("bbox", "int64", (batch, seq, 4)))
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
            specs.append(InputSpec("decoder_input_ids", "int64", (batch, Dim("decoder_seq", 1, seq.high))))
        vision = getattr(config, "vision_config", config)
        if "pixel_values" in taken and getattr(vision, "image_size", None):
            specs.append(_pixels(vision, batch, dtype))
        return tuple(specs)
    if main == "pixel_values" and getattr(config, "image_size", None):
        return (_pixels(config, batch, dtype),)
    bins = getattr(config, "num_mel_bins", None)
    if main == "input_features" and bins and getattr(config, "max_source_positions", None):
        # Two frames become one position, and the model takes its full length only.
        features = InputSpec(main, _FLOATS[dtype], (batch, bins, 2 * config.max_source_positions))
        longest = getattr(config, "max_target_positions", None)
        return (features, InputSpec("decoder_input_ids", "int64", (batch, Dim("decoder_seq", 1, longest))))
    raise UsageError(
        "the inputs of this model are not known",
        where=type(module).__name__,
        got=f"main input {main!r}; forward takes {', '.join(list(taken)[:8])}",
        need="every input that forward needs",
        do=f"--input {main}:float32:batch,... for each of them",
    )


def _pixels(config: Any, batch: Dim, dtype: str) -> InputSpec:
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return InputSpec("pixel_values", _FLOATS[dtype], (batch, getattr(config, "num_channels", 3), height, width))


def _longest(module: Any, config: Any) -> int | None:
    """The longest sequence, where the model's table of positions sets one.

    RoBERTa and its kin number positions from padding_idx + 1, so their table is longer than the sequence may be.
    """
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    if not isinstance(longest, int) or longest < 2:
        return None
    for name, part in module.named_modules():
        padding = getattr(part, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            longest = min(longest, part.num_embeddings - padding - 1)
    return longest


def _token_types(config: Any, taken: Any) -> list[str]:
    has_types = getattr(config, "type_vocab_size", None) or 0
    return ["token_type_ids"] if "token_type_ids" in taken and has_types else []


def _check_names(module: Any, specs: tuple[InputSpec, ...]) -> None:
    taken = inspect.signature(module.forward).parameters
    for spec in specs:
        if spec.name not in taken:
            raise UsageError(
                f"an input is unknown: {spec.name}",
                where=f"{type(module).__name__}.forward",
                got=f"--input {spec.name}",
                need="one of " + ", ".join(n for n, p in taken.items() if p.kind is not p.VAR_KEYWORD),
                do="check the name, or leave --input out for the usual inputs",
            )


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise UsageError(
            "the folder holds no Hugging Face model",
            where=str(folder),
            got="no config.json in it",
            need="config.json and model.safetensors, as save_pretrained writes them",
            do="give the folder that has config.json, or a model file",
        )
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise UsageError(
            "config.json is no model's config",
            where=str(folder / "config.json"),
            got=f"a {type(config).__name__}",
            need="an object with model_type and architectures",
            do="save the model again with save_pretrained",
        )
    return config


def _refuse_unsafe(folder: Path, config: dict[str, Any]) -> None:
    if not list(folder.glob("*.safetensors")):
        pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
        error = UnsafeInput if pickles else UsageError
        raise error(
            "the folder has no safetensors weights",
            where=str(folder),
            got=", ".join(pickles[:3]) or "no weights at all",
            need="model.safetensors; pickled weights can run code on loading",
            do="convert it where you trust it: model.save_pretrained(folder) writes safetensors",
        )
    for index in folder.glob("*.safetensors.index.json"):
        _check_shards(folder, index)
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModel(
            "the folder holds an adapter",
            where=str(folder / "adapter_config.json"),
            got="weights that change those of another model",
            need="the whole model",
            do="merge the adapter into its model (merge_and_unload of peft) and save that",
        )
    if "quantization_config" in config:
        raise UnsupportedModel(
            "the weights are quantised",
            where=str(folder / "config.json"),
            got=f"quantization_config {config['quantization_config']!r:.100}",
            need="fp32, fp16 or bf16 weights",
            do="export the model from its unquantised weights",
        )


def _check_shards(folder: Path, index: Path) -> None:
    """A shard is a plain file name in this folder, nothing else."""
    content = read_json(index)
    shards = content.get("weight_map", {}) if isinstance(content, dict) else {}
    for name in set(shards.values()) if isinstance(shards, dict) else ():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UnsafeInput(
                "the weights' index points outside the folder",
                where=str(index),
                got=repr(name)[:200],
                need="names of .safetensors files in the model's own folder",
                do="get the model from its source again",
            )


def _import_transformers() -> Any:
    # Before the import: transformers reads it once. A model folder is complete; nothing is fetched for it.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError:
        raise MissingHere(
            "transformers is not installed",
            where="this Python environment",
            got="no module named transformers",
            need="transformers 5 to read a Hugging Face folder",
            do=pip_install("torch", "transformers"),
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _architecture(transformers: Any, config: dict[str, Any], folder: Path) -> Any:
    """The transformers class that the config names; AutoModel where it names none."""
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    model_type = config.get("model_type")
    if model_type not in known:
        error = UnsafeInput if "auto_map" in config else UnsupportedModel
        raise error(
            "the model is not part of transformers",
            where=str(folder / "config.json"),
            got=f"model_type {model_type!r}" + (", with Python code in the folder" if "auto_map" in config else ""),
            need=f"one of the {len(known)} model types of transformers {transformers.__version__}",
            do="save it as an ExportedProgram (torch.export.save), or give its weights with --model",
        )
    names = config.get("architectures") or []
    found = getattr(transformers, str(names[0]), None) if names else transformers.AutoModel
    if found is transformers.AutoModel:
        found = found._model_mapping[transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]]
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UnsupportedModel(
            "the architecture is not part of transformers",
            where=str(folder / "config.json"),
            got=f"architectures {names!r}",
            need=f"a model class of transformers {transformers.__version__}",
            do="save it as an ExportedProgram (torch.export.save), or give its weights with --model",
        )
    return found


def _from_pretrained(cls: Any, folder: Path, dtype: Any) -> Any:
    from flash_export import huggingface_attention

    huggingface_attention.register()
    settings = {
        "output_loading_info": True,
        "local_files_only": True,
        "use_safetensors": True,
        "trust_remote_code": False,
        "dtype": dtype,
        "experts_implementation": huggingface_attention.EXPERTS,
    }
    ours = huggingface_attention.NAME if huggingface_attention.fits(cls) else "eager"
    try:
        try:
            module, found = cls.from_pretrained(folder, attn_implementation=ours, **settings)
        except KeyError:  # a class with a table of the attentions that it knows
            module, found = cls.from_pretrained(folder, attn_implementation="sdpa", **settings)
    except Exception as error:  # transformers raises whatever its parts raise
        raise UsageError(
            "the model folder cannot be loaded",
            where=str(folder),
            got=f"{type(error).__name__}: {str(error)[:300]}",
            need=f"a folder that transformers loads as {cls.__name__}",
            do="check that the folder was copied whole",
        ) from error
    missing = sorted(found["missing_keys"])
    if missing:  # transformers would go on with random numbers in their place
        raise UsageError(
            "the folder lacks weights of its model",
            where=str(folder),
            got=f"{len(missing)} missing, {', '.join(missing[:3])}",
            need=f"every weight of {cls.__name__}, which config.json names",
            do="check that every shard was copied, and that architectures in config.json is the saved model's",
        )
    huggingface_attention.keep_no_cache(module)
    return module
