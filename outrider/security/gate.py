"""What stands before everything that a coordinator serves, by gRPC and by HTTP: one object asks
for keys, and counts what each caller runs.

    caller = gate.identify(shown)                             # raises Unauthenticated
    async for event in gate.generation(caller, events): ...   # raises Overloaded
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Final

from outrider.errors import Unauthenticated
from outrider.limits import API_KEY_CHARS_MAX
from outrider.request import Event, Finished, Started
from outrider.security.callers import ANYBODY, Caller
from outrider.security.key_file import KeyFile
from outrider.security.keys import given_keys
from outrider.security.limits import Grant, Limiter

_SCHEME: Final = "bearer"


class Gate:
    """Lets callers in. Without keys everybody is one caller, `ANYBODY`, without limits."""

    def __init__(self, keys: KeyFile | None = None, limiter: Limiter | None = None) -> None:
        """No `keys`: none is asked for. No `limiter`: nothing is counted."""
        self._keys = keys
        self._limiter = limiter

    @property
    def asks_for_keys(self) -> bool:
        """Whether a caller needs one."""
        return self._keys is not None

    def identify(self, shown: Sequence[str]) -> Caller:
        """Who shows `Bearer KEY`, once, as the header of HTTP or metadata of gRPC that is named
        `authorization`. Raises `Unauthenticated`."""
        if len(shown) > 1:
            raise Unauthenticated("authorization: there are several; send one")
        if self._keys is None:
            return ANYBODY
        if not shown:
            raise Unauthenticated("authorization: there is none; send `Bearer` and an API key")
        scheme, _, key = shown[0].strip().partition(" ")
        if scheme.lower() != _SCHEME:
            raise Unauthenticated("authorization: is of another kind; send `Bearer` and an API key")
        key = key.strip()
        found = self._keys.keys.find(key) if 0 < len(key) <= API_KEY_CHARS_MAX else None
        if found is None:
            raise Unauthenticated("authorization: there is no such API key")
        return found

    def check_rate(self, caller: Caller) -> None:
        """Raises `Overloaded` where it is known, without asking anybody, that the caller has made
        all requests that it may for now; then its next one need not be read."""
        if self._limiter is not None:
            self._limiter.check_rate(caller)

    @asynccontextmanager
    async def admit(
        self, caller: Caller, resumes: str = "", num_generations: int = 1
    ) -> AsyncIterator[Grant]:
        """Counts one request of the caller, which runs so many generations while the context lasts,
        all of them or none; `resumes` is the session that it goes on with, if there is one. Raises
        `Overloaded`, with the time to try again, and `StoreUnavailable` where nobody can count."""
        if self._limiter is None or not caller.is_limited:
            yield Grant()
            return
        async with self._limiter.admit(caller, resumes, num_generations) as grant:
            yield grant

    async def generation(
        self, caller: Caller, events: AsyncGenerator[Event], resumes: str = ""
    ) -> AsyncGenerator[Event]:
        """The events of a generation, which begins once there is room for it, and closes with this.
        Its place is free when its last event comes, so that who has that may ask again. Raises as
        `admit`, and what `events` raises."""
        async with aclosing(events), self.admit(caller, resumes) as grant:
            async for event in events:
                if isinstance(event, Started):
                    grant.name_after(event.session_id)
                elif isinstance(event, Finished):
                    await grant.release()
                yield event

    async def close(self) -> None:
        """Counts nothing any more."""
        if self._limiter is not None:
            await self._limiter.close()


OPEN = Gate()
"""Asks for nothing."""


def gate_of(
    api_keys: str,
    api_key_file: str,
    limiter: Limiter | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Gate:
    """The gate that these settings ask for. Raises `ConfigError`."""
    if not api_keys and not api_key_file:
        return OPEN
    path = Path(api_key_file) if api_key_file else None
    return Gate(KeyFile(path, given_keys(api_keys), clock), limiter)
