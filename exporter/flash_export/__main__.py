# SPDX-License-Identifier: Apache-2.0
"""``python -m flash_export`` is ``flash-export``."""

from flash_export import first_moment


def main() -> None:
    """The console script."""
    first_moment.end_quietly()
    from flash_export import process

    process.main("flash_export.cli")


if __name__ == "__main__":
    main()
