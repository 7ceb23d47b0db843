"""Prints tables of Rich's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH: Final = 160
"""Of a table in a file or a pipe, in characters; Rich would take 80, and cut what is wider."""


def show(table: RenderableType, *, highlight: bool = True, soft_wrap: bool = False) -> None:
    """On standard output. `highlight` colours numbers and the like; with `soft_wrap` lines are
    left to the terminal to wrap."""
    from rich.console import Console

    console = Console(highlight=highlight)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    console.print(table, soft_wrap=soft_wrap)
