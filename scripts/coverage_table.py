# SPDX-License-Identifier: Apache-2.0
"""Measures the corpus of architectures and writes docs/coverage.md and the golden outcomes of its test.

    python scripts/coverage_table.py [CELL ...]

About ten minutes for all cells on two quiet cores. With names of cells (``bert.sdpa.dynamo18``; wildcards allowed)
only those are measured anew; the others keep their outcomes, without errors and times.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "coverage.md"
sys.path.insert(0, str(ROOT / "tests"))

HEAD = """\
# Coverage

What becomes of the attention in the exports of well-known architectures: small models with random weights
(`tests/corpus/families.py`), batch and lengths dynamic, each way that PyTorch can export them, and our own way from a
Hugging Face folder. Made by `scripts/coverage_table.py`; the counts are golden numbers of `tests/corpus`.

`make corpus` holds every fused file to flash-export's own check, to being found wrong with any scale 1 % off, and to
PyTorch's numbers on valid tokens with masks `1111111`, `0001111`, `1110000` and with holes; `make test` does it for a
sample. A blank figure was not measured on a quiet machine yet. *Error* is the largest difference there from
PyTorch in float64; *seconds* are PyTorch's export, and everything after it: find, rewrite, check and save (for a folder
the export too).

| model | attention written as | exported by | layers | fused | refused | error | seconds |
|---|---|---|---|---|---|---|---|
"""

BEYOND = """\

## Beyond the corpus

Tried once:

- Sixteen other architectures of Hugging Face in eager form, by the legacy exporter at opset 17 with dynamic batch and
  length: CodeGen, DeBERTa v1 and v2, DistilBERT, ESM, Funnel, GPT-Neo, GPT-NeoX, ModernBERT, MPNet, MPT, OPT, Phi-3,
  Qwen3, RoFormer, XLNet. All 32 attentions are fused and proven, with no change of code for any of them.
- Five more as SDPA, by the dynamo exporter at opset 18 and 23 and from the folder, with the corpus's lengths and (but
  for images) padding masks: Cohere2 and Gemma 3 (each a layer with a sliding window and one without), DINOv2, ELECTRA,
  OLMo 2. All 30 attentions of the 15 exports are fused, proven, found wrong with a scale 1 % off, and within 4e-6 of
  PyTorch in float64 on valid tokens, with no change of code. Opset 23 of Gemma 3 and OLMo 2 runs on a batch of one
  alone, as Llama's does.
- Seven more by all three exporters, eager and (where the architecture has it) SDPA, but for BEiT also from the folder,
  and with padding masks where they take one: Swin, LayoutLMv3, M2M100, GPT-J, Starcoder2, BEiT (eager alone) and
  Wav2Vec2 (not from the folder, whose inputs have to be named). All 97 attentions of the 38 exports are fused, proven,
  found wrong with a scale 1 % off, and within 2e-6 of PyTorch in float64 (BEiT 1.3e-5). One thing was missing: a
  folder of LayoutLMv3 was exported without `bbox`. Opset 23 of Starcoder2 runs on a batch of one alone.
- Every architecture of transformers 5.24 from Afmoe to EXAONE 4 that one rule makes small enough and PyTorch exports,
  with padding masks where it takes one: 46 as a module from Python, 105 attentions, all fused (two of DiffLlama, which
  multiplies what one softmax gives with two tensors, only since each product is an attention of its own); 40 in eager
  form by the legacy exporter at opset 17, 105 attentions, all fused. All fused ones are proven. Missing were: queries
  that a batch shares (AIMv2), a rank that only a Concat tells (DINOv3), a learned bias whose attention changes its
  strides (Doge), experts and caches of a module from Python, and PyTorch's own rounding beside the graph's (BEiT).
- From EXAONE MoE to GLM-4 MoE in the same way, and some others: nine as a module from Python (EXAONE MoE, FlauBERT,
  FlexOLMo, Flint, Gemma, Gemma 3, GLM, GLM-4, GLM-4 MoE), 18 attentions; thirteen in eager form by the legacy exporter
  (of those nine but GLM and GLM-4 themselves, and FSMT, GPT-BigCode, GPT-OSS, MobileBERT, SegFormer on 128 pixels,
  SqueezeBERT), 32 attentions. All are fused and proven, with no change of code, those of sequences in at most 0.8 GB
  of memory. A SAM encoder of 1,024 pixels, whose bias is 4,096 x 4,096 for each query and head, held the biases of all
  its layers while it was checked, 14 GB for six small layers; it holds one now.
- From GPT-NeoX Japanese to HunYuan v4, and some others (Falcon Mamba, FNet, I-BERT, Jamba, LFM2, PVT), in the same
  way: 22 as a module from Python, 54 attentions, all fused and proven; 22 in eager form by the legacy exporter, 58
  attentions, of which 54 are fused and proven. The four that are not are Granite's and Granite MoE's with a sliding
  window, whose eager form takes the log-sum-exp of the scores beside the softmax (`scores_used`); from the module they
  are fused. HGNet, FNet and Falcon Mamba have no attention and are said to have none. Of Helium the legacy exporter
  writes a file that no runtime runs; layers of Mamba, which PyTorch unrolls step by step, take a fixed length alone.
- From Inkling to ViT-MSN in the same way, eager and, where the architecture has it, SDPA, from Python: Inkling,
  InternLM 3, IQuest Coder, Jais 2, Jina Embeddings 3, Kolibri, Laguna, Mellum, MiMo 2 Flash, MiniMax and M2, Ministral
  and 3, MVP, nanochat, NeoMME, Nomic BERT, OLMo 3, OpenAI's privacy filter, Persimmon, Phi, PhiMoE, PLBart, Qwen 2
  MoE, Qwen 3 MoE, RoBERTa, Seed-OSS, SmolLM 3, StableLM, TIPS v2, UltraBERT, UMT5, VaultGemma, VisualBERT, ViT-MSN,
  XGLM. All 148 attentions of the 65 exports are fused and proven, and within 1.4e-6 of PyTorch relative to its largest
  output, on three sizes with padding, with no change of code. XLM with heads of 512 is refused (`head_dim_large`);
  Qwen 3.5, whose linear attention PyTorch unrolls, takes a fixed length alone.
- The corpus's 23 files of the legacy exporter, saved again by ONNX Runtime 1.32 at its basic, extended and full level
  of optimization: all 60 attentions are fused at each level, and proven at the extended one.
- ONNX Runtime GenAI's form (`tests/end_to_end/genai_models.py`): GroupQueryAttention with packed Q, K and V, rotation
  and a cache that grows or is a buffer; prompts of unequal lengths give the same twelve tokens.
- Two small ones with random weights, eager, from the folder, and axial attention of our own. LiLT (two layers): one
  attention is fused and proven, two of three are refused (`scores_used`): text and layout take a softmax each of one
  sum of scores, and FlashAttention never forms it for the other. VitDet (two layers, one of them in windows, biases of
  the keys' rows and columns): both are fused and proven, within 7e-6 of the unfused graph on batches of 1 to 8, and
  read a bias of queries x keys, which the model forms anyway. Along the rows and along the columns of a grid, written
  as einsum: all are fused and proven with batch, rows and columns dynamic, in any combination.

## TorchScript

An archive of `torch.jit.save` (with `--trust-pickle`) has no other way than PyTorch's legacy exporter, at opset 18 by
default, and that knows less of a loaded module than of the one in Python. Tried with torch 2.13, traced and saved:

- An attention written out in projections, a rotation of one's own and `scaled_dot_product_attention`, grouped, with
  causal, window and padding masks, after `nn.LayerNorm`: fused and proven.
- `nn.RMSNorm`: not exported, "Exporting the operator 'aten::rms_norm' to ONNX opset version 18 is not supported".
- `nn.MultiheadAttention`, and so `nn.TransformerEncoderLayer`: not exported once the archive is loaded, "ONNX export of
  transpose for tensor of unknown rank", since a loaded graph has no shapes.

Where the module is at hand, `torch.export.save` gives a `.pt2` of each of these, which exports.
"""


def row(name: str, outcome: Mapping[str, object], layers: int) -> str:
    """One line of the table; ``outcome`` as in the measurements' file."""
    refused = outcome["refused"]
    assert isinstance(refused, dict)
    error, seconds = outcome.get("max_error"), outcome.get("seconds")
    cells = [
        *name.split("."),
        str(layers),
        "-" if outcome["not_exported"] else str(outcome["fused"]),
        ", ".join(f"{count} `{code}`" for code, count in refused.items()) or "0",
        "" if error is None else f"{error:.1e}",
        "" if not isinstance(seconds, (list, tuple)) else f"{seconds[0]:.1f} + {seconds[1]:.1f}",
    ]
    if outcome["not_exported"]:
        cells[5:] = [f"PyTorch cannot export it: {outcome['not_exported']}", "", ""]
    return "| " + " | ".join(cells) + " |"


def page(outcomes: Mapping[str, Mapping[str, object]], layers: Mapping[str, int]) -> str:
    """docs/coverage.md."""
    exported = {name: o for name, o in outcomes.items() if not o["not_exported"]}
    total = sum(layers[name.split(".")[0]] for name in exported)
    fused = sum(int(str(o["fused"])) for o in exported.values())
    lines = [row(name, o, layers[name.split(".")[0]]) for name, o in outcomes.items()]
    tail = f"\n**{fused} of {total} attentions in {len(exported)} exports are fused.**\n"
    broken = [name for name, o in outcomes.items() if o["not_run"]]
    if broken:
        tail += (
            "\nONNX Runtime does not run these exports of PyTorch's on a batch of two, fused or not; they are compared "
            f"on a batch of one: {', '.join(f'`{name}`' for name in broken)}.\n"
        )
    return HEAD + "\n".join(lines) + "\n" + tail + BEYOND


def main() -> int:
    """Measures, prints progress to stderr, writes both files after every cell."""
    from corpus.cells import CELLS, GOLDEN, measure, read_golden
    from corpus.families import FAMILIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", help="names of cells; all when none is given")
    wanted = parser.parse_args().cells or ["*"]
    layers = {name: family.attentions for name, family in FAMILIES.items()}
    known = read_golden() if GOLDEN.exists() else {}
    measured: dict[str, dict[str, object]] = {}
    for name, cell in CELLS.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in wanted):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = measure(cell, Path(folder))
        known[name] = found.as_golden()
        measured[name] = known[name] | {"max_error": found.max_error, "seconds": found.seconds}
        print(row(name, measured[name], layers[cell.family]), file=sys.stderr, flush=True)
        golden = {name: known[name] for name in CELLS if name in known}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
        PAGE.write_text(page(golden | measured, layers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
