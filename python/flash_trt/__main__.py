# SPDX-License-Identifier: Apache-2.0
"""``python -m flash_trt`` is ``flash-trt``."""

from flash_trt.cli import main

main()
