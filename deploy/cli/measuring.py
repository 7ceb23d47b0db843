"""What the parts of `outrider bench` share: how one is added, and how it speaks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

Measure = Callable[[argparse.Namespace], int]
"""Runs a measurement; returns the exit code."""
AddMeasurement = Callable[[str, str, Measure], argparse.ArgumentParser]
"""Adds a subcommand by its name and purpose, and returns its parser."""


def progress(line: str) -> None:
    """On standard error."""
    print(line, file=sys.stderr, flush=True)
