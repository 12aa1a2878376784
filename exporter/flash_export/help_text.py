# SPDX-License-Identifier: Apache-2.0
"""What both commands' ``--help`` share."""

from __future__ import annotations

from typing import Any

import typer.core

_FLAG = " "
"""The metavar of a flag: typer would write <bool>, as if it took a value."""


class _PlainFlags:
    """A command whose help shows its flags without a value, ``--help`` among them."""

    def get_params(self, ctx: Any) -> Any:
        """As typer's."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = _FLAG
        return params


class Command(_PlainFlags, typer.core.TyperCommand):
    """One command."""


class Group(_PlainFlags, typer.core.TyperGroup):
    """A command of commands."""
