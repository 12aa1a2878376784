# SPDX-License-Identifier: Apache-2.0
"""``python -m flash_trt`` is ``flash-trt``."""

from flash_export import first_moment


def main() -> None:
    """The console script."""
    first_moment.end_quietly()
    from flash_export import process

    process.main("flash_trt.cli")


if __name__ == "__main__":
    main()
