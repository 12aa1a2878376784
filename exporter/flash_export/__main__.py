# SPDX-License-Identifier: Apache-2.0
"""``python -m flash_export`` is ``flash-export``."""

from flash_export import process


def main() -> None:
    """The console script."""
    process.main("flash_export.cli")


if __name__ == "__main__":
    main()
