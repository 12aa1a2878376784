# SPDX-License-Identifier: Apache-2.0
"""Run as a program: fuses mutated models one after the other, and prints as JSON how each ended and what that took.

``open_mutated.py COUNT SEED MODEL.onnx...``. Everything is done that the command does, but for running the models.
"""

from __future__ import annotations

import collections
import json
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

import onnx
from end_to_end.big_model import peak_resident_bytes
from security.mutations import mutated

from flash_export import pipeline
from flash_export.errors import UserError
from flash_export.options import Options


def main(count: int, seed: int, sources: list[Path]) -> None:
    models = [onnx.load(source) for source in sources]
    endings: collections.Counter[str] = collections.Counter()
    bugs = []
    for i in range(count):
        rng = random.Random(f"{seed}/{i}")
        which = rng.randrange(len(models))
        data = mutated(models[which], rng)
        try:
            endings[fuse(data)] += 1
        except Exception as error:
            bugs.append(f"{sources[which].name}, mutation {seed}/{i}: {error!r}\n{traceback.format_exc(limit=-6)}")
    print(json.dumps({"endings": endings, "bugs": bugs, "peak": peak_resident_bytes(), "seconds": time.process_time()}))


def fuse(data: bytes) -> str:
    """How the export of the ONNX file ``data`` ends: ``done``, or the class of our own error."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "m.onnx")
        source.write_bytes(data)
        try:
            pipeline.run(Options(source=source, allow_none=True, check=False, quiet=True))
        except UserError as error:
            return type(error).__name__
    return "done"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [Path(path) for path in sys.argv[3:]])
