"""The record of a deployment that this process pretends to be."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.fleet.local_state import LOCK_NAME, DeploymentRecord, publish

RAY = "127.0.0.1:6379"


def record(**others: Any) -> DeploymentRecord:
    """A record with one replica of each role."""
    known: dict[str, Any] = {
        "pid": os.getpid(),
        "started_at": "2026-11-20T00:00:00+00:00",
        "draft_model": "ngram",
        "served_model_name": "m",
        "grpc_address": "h:1",
        "target_addresses": ["h:2"],
        "draft_addresses": ["h:3"],
        "target_directory": "",
        "tokenizer_directory": "",
        "name": "d",
        "redis": {"url": "unix:///own.sock", "key_prefix": "ours:"},
        "wanted": {"coordinator": 1, "target": 1, "draft": 1},
        "ray_address": RAY,
    }
    return DeploymentRecord(**(known | others))


def run_here(directory: Path, found: DeploymentRecord) -> None:
    """Publishes the record and takes the deployment's lock, as a deployment does."""
    lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    with suppress(BlockingIOError):  # This process already holds the lock.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, str(os.getpid()).encode())
    publish(directory, found)
