"""Closing what consists of several parts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)


async def run_all(*steps: Callable[[], Awaitable[object]]) -> None:
    """Runs all steps in order, also where one raises. Logs each error, and raises the first one in
    the end. A cancellation ends it at once."""
    first: Exception | None = None
    for step in steps:
        try:
            await step()
        except Exception as error:  # noqa: BLE001 (raised below)
            _log.exception("could not close everything: %s", error)
            first = first or error
    if first is not None:
        raise first
