# SPDX-License-Identifier: Apache-2.0
"""``python -m flash_export`` is ``flash-export``."""

from flash_export.cli import main

main()
