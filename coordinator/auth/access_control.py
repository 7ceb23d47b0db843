"""What stands before everything that a coordinator serves, by gRPC and by HTTP: one object asks
for keys, and counts what each caller runs.

    caller = access.identify(shown)           # raises Unauthenticated
    async with access.admit(caller) as grant: # raises Overloaded
        ...                                   # one generation, of which `grant.note` hears
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Final

from coordinator.auth.rate_limits import Limiter, RedisSlots
from outrider.api_keys import ANYBODY, Caller, KeyEntry, Keyring, given_keys, read_key_file
from outrider.errors import Unauthenticated
from outrider.files import FileWatch
from outrider.limits import API_KEY_CHARS_MAX
from outrider.transport.server import HEALTH_PATH, Context

_log = logging.getLogger(__name__)

_OTHERS_MAY_WRITE: Final = 0o022
_HEADER: Final = "authorization"
_SCHEME: Final = "bearer"


_CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)


def current_caller() -> Caller:
    """Who has made the gRPC call that is being answered; `ANYBODY` where no key is asked for."""
    return _CALLER.get()


def watch_keys(
    path: Path | None,
    given: tuple[KeyEntry, ...] = (),
    clock: Callable[[], float] = time.monotonic,
) -> FileWatch[Keyring]:
    """The keys of a file and those that are given, as they are now. `clock` counts seconds. Raises
    `ConfigError` for a file that cannot be read, or is wrong."""

    def read() -> Keyring:
        return Keyring([*(read_key_file(path) if path else ()), *given])

    watch = FileWatch([path], read, clock)
    if path is not None and path.stat().st_mode & _OTHERS_MAY_WRITE:
        _log.warning("%s: others may write it, and so add keys", path)
    return watch


class AccessControl(Limiter):
    """Lets callers in. Without keys everybody is one caller, `ANYBODY`, without limits."""

    def __init__(
        self, keys: FileWatch[Keyring] | None = None, slots: RedisSlots | None = None
    ) -> None:
        super().__init__(slots)
        self._keys = keys

    @property
    def asks_for_keys(self) -> bool:
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
        found = self._keys.current().find(key) if 0 < len(key) <= API_KEY_CHARS_MAX else None
        if found is None:
            raise Unauthenticated("authorization: there is no such API key")
        return found

    def check_call(self, method: str, context: Context) -> None:
        """The guard of a gRPC server, see `identify`. Health is answered to everybody who can
        connect: probes and balancers have no key."""
        if not method.startswith(HEALTH_PATH):
            metadata = context.invocation_metadata() or ()
            _CALLER.set(self.identify([str(value) for key, value in metadata if key == _HEADER]))


OPEN = AccessControl()
"""Asks for nothing."""


def access_control_of(
    api_keys: str, api_key_file: str, slots: RedisSlots | None = None
) -> AccessControl:
    """The access that these settings ask for. Raises `ConfigError`."""
    path = Path(api_key_file) if api_key_file else None
    return AccessControl(watch_keys(path, given_keys(api_keys)), slots)
