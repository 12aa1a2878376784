# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a command is still importing what handles signals (``interrupt``): it ends without a traceback.

Nothing has begun that would have to be cleaned up, so the system's own way is taken. This module imports nothing else,
and the packages' ``__init__`` not even ``typing``: what comes before takes longer than all that is done here.
"""

from __future__ import annotations

import signal


def end_quietly() -> None:
    """From now on Ctrl-C ends this process at once; where it is ignored, or a program handles it, nothing changes."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
