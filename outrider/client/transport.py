"""How a client reaches a coordinator."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final, Protocol

from outrider.client.results import CoordinatorDescription, SessionView
from outrider.request import Event, GenerateRequest, ResumeRequest

CLOSED: Final = "the client is closed"
"""Why a call on a closed transport is `Unavailable`."""


class Transport(Protocol):
    """Carries calls to one coordinator. Every method is for one event loop, ends within the
    `timeout_s` seconds it is given, and raises errors of `outrider.errors` alone, `Unavailable` and
    `DeadlineExceeded` among them, and `StreamBroken` where no coordinator answers. Requests have
    been checked (`outrider.client.requests`)."""

    @property
    def address(self) -> str:
        """Names the coordinator for people: HOST:PORT, where there is one."""
        ...

    def generate(self, request: GenerateRequest, timeout_s: float) -> AsyncGenerator[Event]:
        """The events of one generation; closing the iterator early cancels its session."""
        ...

    def resume(self, request: ResumeRequest, timeout_s: float) -> AsyncGenerator[Event]:
        """The events of a generation whose stream broke, from `Started` on, without the tokens that
        had come; closing the iterator early cancels its session."""
        ...

    async def cancel(self, session_id: str, timeout_s: float) -> None:
        """Ends a session as cancelled; a finished one is unchanged. Raises `NotFound`."""
        ...

    async def get_session(self, session_id: str, timeout_s: float) -> SessionView:
        """Reads a session from the store. Raises `NotFound`."""
        ...

    async def describe(self, timeout_s: float) -> CoordinatorDescription:
        """What is served, and how many sessions run."""
        ...

    async def healthy(self, timeout_s: float) -> bool:
        """Whether the coordinator says that it can serve."""
        ...

    async def close(self) -> None:
        """Ends what runs on this transport. A second time it does nothing."""
        ...
