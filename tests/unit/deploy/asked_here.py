"""A deployment that runs, as commands find and ask it, without Ray."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from recorded import record

from deploy.fleet.local_state import publish, state_directory
from outrider.errors import Unavailable

Answers = Mapping[str, Callable[..., Awaitable[Any]]]


class Connections:
    """Where commands have connected."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str]] = []
        """Address and namespace of each ..."""
        self.tokens: list[str | None] = []
        """... and the file of the token that was shown."""
        self.num_open = 0
        self.num_lost = 0
        """Calls from now on that a reconciler answers only with its death."""


def answer(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> Connections:
    """From now on a reconciler gives these answers, by method, wherever commands look for one."""
    seen = Connections()

    class Connection:
        def __init__(self, address: str, namespace: str) -> None:
            seen.opened.append((address, namespace))

        async def connect(self) -> None:
            seen.num_open += 1
            seen.tokens.append(os.environ.get("RAY_AUTH_TOKEN_PATH"))

        async def disconnect(self) -> None:
            seen.num_open -= 1

    class Reconciler:
        async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
            if seen.num_lost:
                seen.num_lost -= 1
                raise Unavailable("the reconciler actor died")
            return await answers[method](*arguments)

    async def find(namespace: str) -> Any:
        return Reconciler() if answers else None

    monkeypatch.setattr("deploy.fleet.reconciler.RayConnection", Connection)
    monkeypatch.setattr("deploy.fleet.reconciler.find_reconciler", find)
    monkeypatch.setattr("deploy.fleet.reconciler.RETRY_PERIOD_S", 0.01)
    return seen


def deployed_here(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> Connections:
    """The same, of the deployment that runs on this machine."""
    publish(state_directory(os.environ), record())
    return answer(monkeypatch, answers)
