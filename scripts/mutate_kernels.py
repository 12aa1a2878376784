# SPDX-License-Identifier: Apache-2.0
"""Seeds one-line faults into the kernels, one at a time, and prints how many the tests catch.

    python scripts/mutate_kernels.py [--sample N] [WORDS]

WORDS: only faults whose name holds them; --sample: N of them, spread over the list. The faults are in
tests/plugin/kernels/faults.py. Needs g++ and no GPU; about 8 seconds a fault.
Ends with 0: all are caught; 1: one is not; 5: there is no g++.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from plugin.kernels.fault_bench import Bench
from plugin.kernels.faults import FAULTS


def main() -> int:
    """Runs the faults, a line each, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="?", default="", help="only faults whose name holds this")
    parser.add_argument("--sample", type=int, help="so many of them")
    arguments = parser.parse_args()
    if shutil.which("g++") is None:
        print("there is no g++ to compile the emulated kernels with", file=sys.stderr)
        return 5
    faults = [fault for fault in FAULTS if arguments.words in fault.name]
    if arguments.sample and arguments.sample < len(faults):
        faults = [faults[i * len(faults) // arguments.sample] for i in range(arguments.sample)]
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for fault in faults:
            start = time.monotonic()
            why = bench.why_missed(fault)
            killed += not why
            print(f"{'MISSED' if why else 'caught'} {fault.name} ({time.monotonic() - start:.0f} s)", flush=True)
            if why:
                print(f"  {why}")
    print(f"{killed} of {len(faults)} faults caught")
    return 0 if killed == len(faults) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
