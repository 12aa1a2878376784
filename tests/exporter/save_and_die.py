# SPDX-License-Identifier: Apache-2.0
"""Run as a program: saves over and over in child processes that are killed, and prints as JSON what was left each time.

``save_and_die.py FOLDER FIRST.onnx SECOND.onnx KILLS SEED``. The two models take turns. First each call that changes
the disk is the last one of a child; then children are killed at ``KILLS`` random moments. A process of its own, since
only one without threads may fork.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from flash_export import save, save_commit
from flash_export.load_onnx import verify

save.INLINE_LIMIT_BYTES = 1000
CHANGES = ((os, "fsync"), (os, "link"), (os, "unlink"), (os, "mkdir"), (os, "rmdir"), (Path, "replace"))


class Bundles:
    """Two unfused models and the place to which their exports go."""

    def __init__(self, folder: Path, sources: list[Path]) -> None:
        self.output = folder / "m.flash.onnx"
        self.sources = sources
        self.weights = [self.weight(source) for source in sources]

    def save(self, which: int) -> None:
        """Publishes model ``which`` as the command does."""
        model = ir.load(self.sources[which])
        model.graph.initializers["s"].const_value = ir.tensor(np.float32([3.0]), name="s")
        with save.staged(model, self.sources[which], self.output) as files:
            files.publish({"which": which}, page=f"{which}")

    def finish(self) -> None:
        """What every command does first with a model that it is given."""
        save_commit.finish_interrupted(self.output)

    def found(self) -> tuple[int, int, int, int]:
        """Which model the unfused file, the page, the numbers and the fused file are of; raises if one is not whole."""
        folder, unfused = self.output.parent, save.unfused_path(self.output)
        for path in (unfused, self.output):
            verify(path)
        numbers = json.loads((folder / save.REPORT).read_text())["which"]
        return self.which(unfused), int((folder / save.PAGE).read_text()), numbers, self.which(self.output)

    def which(self, path: Path) -> int:
        weight = self.weight(path)
        return next(i for i, expected in enumerate(self.weights) if np.array_equal(weight, expected))

    def weight(self, path: Path) -> np.ndarray:
        tensor = ir.load(path).graph.initializers["w"].const_value
        assert tensor is not None
        return tensor.numpy()


def in_a_child(work: Callable[[], None]) -> int:
    """Starts ``work`` in a fork; returns its process id."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return child


def die_at(call: int) -> None:
    """From now on the ``call``-th change of the disk kills this process just before it happens."""
    calls = 0

    def deadly(original: Callable) -> Callable:
        def wrapper(*arguments: object, **named: object) -> object:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        return wrapper

    for owner, name in CHANGES:
        setattr(owner, name, deadly(getattr(owner, name)))


def at_every_call(bundles: Bundles) -> list[dict[str, tuple[int, ...]]]:
    """What was left by a child that died at its first, second, ... change of the disk, until one lived.

    Then by another one that died while it finished that, and in the end.
    """
    left = []
    for call in range(1, 200):
        bundles.save(0)
        child = in_a_child(lambda call=call: (die_at(call), bundles.save(1)))  # type: ignore[misc]
        _, status = os.waitpid(child, 0)
        states = {"killed": bundles.found()}
        os.waitpid(in_a_child(lambda call=call: (die_at(1 + call % 7), bundles.finish())), 0)  # type: ignore[misc]
        states["killed_again"] = bundles.found()
        bundles.finish()
        states["finished"] = bundles.found()
        left.append(states)
        if os.WIFEXITED(status):
            return left
    raise AssertionError("a save has no end")


def at_random_moments(bundles: Bundles, kills: int, rng: random.Random) -> list[tuple[int, ...]]:
    """What was left by children killed at moments spread evenly over the time that a save takes."""
    times = []
    for _ in range(5):
        start = time.monotonic()
        os.waitpid(in_a_child(lambda: bundles.save(1)), 0)
        times.append(time.monotonic() - start)
    left = []
    for _ in range(kills):
        bundles.save(0)
        child = in_a_child(lambda: bundles.save(1))
        time.sleep(rng.uniform(0, max(times)))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        bundles.found()
        bundles.finish()
        left.append(bundles.found())
    return left


if __name__ == "__main__":
    place = Path(sys.argv[1])
    both = Bundles(place, [Path(path) for path in sys.argv[2:4]])
    every = at_every_call(both)
    moments = at_random_moments(both, int(sys.argv[4]), random.Random(int(sys.argv[5])))
    both.save(1)
    print(
        json.dumps(
            {
                "every": every,
                "moments": [[*state, count] for state, count in collections.Counter(moments).items()],
                "hidden": [path.name for path in place.iterdir() if path.name.startswith(".")],
                "last": both.found(),
            }
        )
    )
