"""A lock between processes that falls with its holder, so that nobody waits for a dead one."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Within, no other holder of this file's lock is; the file is made, and stays. Raises
    `BlockingIOError` where there is one and it is not waited for."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
