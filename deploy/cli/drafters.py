"""`outrider drafters`: who can draft, and what each needs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Final

from outrider.drafters.names import DRAFTERS

from .tables import show

LONGEST_WORD: Final = 10
"""Of what they propose and of their files: a narrow terminal cuts no word of ..."""
_WORDY: Final = ("proposes", "files")
"""... these columns."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How to tell."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints them all."""
    found = [asdict(drafter) for drafter in DRAFTERS]
    if arguments.json:
        print(json.dumps({"drafters": found}))
        return 0
    from rich.table import Table

    table = Table(show_lines=True)
    for name in found[0]:
        is_name = name == "draft_model"
        table.add_column(
            "--draft-model" if is_name else name,
            no_wrap=is_name,
            min_width=LONGEST_WORD if name in _WORDY else None,
        )
    for drafter in found:
        table.add_row(*drafter.values())
    show(table)
    return 0
