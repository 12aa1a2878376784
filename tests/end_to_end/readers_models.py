# SPDX-License-Identifier: Apache-2.0
"""What a reader of our pages has before the first command: small models, one of each kind that the pages name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from python.attention_models import unfused
from torch import Tensor, nn
from transformers import BertConfig, BertModel

WIDTH, HEADS, WORDS, LONGEST = 64, 2, 97, 512

MODULE = """
from torch import nn

class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(256, 4, 128, batch_first=True)

    def forward(self, x):
        return self.layer(x)

def build():
    return Mixer()
"""


class Encoder(nn.Module):
    """One layer of attention over words and places: int64 [batch, seq] -> float32 [batch, seq, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, length = input_ids.shape
        hidden = self.words(input_ids) + self.places(torch.arange(length))
        heads = self.into(hidden).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


def save_program(path: Path) -> Path:
    """An ExportedProgram of ``Encoder`` with both lengths dynamic, as torch.export.save writes it."""
    torch.manual_seed(0)
    dims = {"input_ids": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seq", max=LONGEST)}}
    ids = torch.randint(0, WORDS, (3, 11))
    torch.export.save(torch.export.export(Encoder().eval(), (ids,), dynamic_shapes=dims), path)
    return path


def save_folder(path: Path) -> Path:
    """A Hugging Face folder of an encoder whose dims are named batch and seq."""
    torch.manual_seed(0)
    small = BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=WIDTH
    )
    BertModel(small).save_pretrained(path)
    return path


def save_each_kind(folder: Path) -> None:
    """model.pt2, model.pt with my_package.my_module, my_hugging_face_folder and anybodys.onnx."""
    save_program(folder / "model.pt2")
    package = folder / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "my_module.py").write_text(MODULE)
    made: dict[str, Any] = {}
    exec(MODULE, made)
    torch.save(made["build"]().state_dict(), folder / "model.pt")
    save_folder(folder / "my_hugging_face_folder")
    unfused(folder / "anybodys.onnx")


def save_inputs(path: Path) -> None:
    """Inputs of ``save_folder``'s model as NPZ."""
    shape = (2, 37)
    ids = np.random.default_rng(1).integers(0, WORDS, shape)
    np.savez(path, input_ids=ids, attention_mask=np.ones(shape, np.int64), token_type_ids=np.zeros(shape, np.int64))
