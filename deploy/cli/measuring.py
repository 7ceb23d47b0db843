"""What the parts of `outrider bench` share: how one is added."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Measure = Callable[[argparse.Namespace], int]
"""Runs a measurement; returns the exit code."""
AddMeasurement = Callable[[str, str, Measure], argparse.ArgumentParser]
"""Adds a subcommand by its name and purpose, and returns its parser."""
