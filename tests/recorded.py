"""The record of a deployment of this process, for tests of what reads it."""

from __future__ import annotations

import os
from typing import Any

from deploy.fleet.local_state import DeploymentRecord, process_start

RAY = "127.0.0.1:6379"


def record(**others: Any) -> DeploymentRecord:
    """With one replica of each role."""
    known: dict[str, Any] = {
        "pid": os.getpid(), "process_start": process_start(os.getpid()) or 0,
        "started_at": "2026-11-20T00:00:00+00:00",
        "model": "m", "draft_model": "ngram", "served_model_name": "m", "grpc_address": "h:1",
        "target_addresses": ["h:2"], "draft_addresses": ["h:3"], "target_directory": "",
        "tokenizer_directory": "", "deployment": "d",
        "redis": {"url": "unix:///own.sock", "key_prefix": "ours:"},
        "wanted": {"coordinator": 1, "target": 1, "draft": 1}, "ray_address": RAY,
    }  # fmt: skip
    return DeploymentRecord(**(known | others))
