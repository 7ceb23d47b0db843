"""Connections to the coordinators of a deployment, as far as a client knows them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeAlias, TypeVar

from outrider.client.requests import addresses_of

_log = logging.getLogger(__name__)

Server: TypeAlias = str | Callable[[], str]
"""HOST:PORT, or several with commas between them, or a function that says so. It is asked in the
thread, or on the event loop, that calls, and so must not take long."""
T = TypeVar("T")
LOOK_S: Final = 0.5
"""The function is not asked again sooner."""
GONE_MAX: Final = 16
"""Connections that are kept to coordinators which are named no more: calls may still run there."""


class Found(Generic[T]):
    """One connection to each coordinator that is named. Any number of threads may share it."""

    def __init__(
        self, server: Server, connect: Callable[[str], T], clock: Callable[[], float]
    ) -> None:
        """`connect` makes a connection to HOST:PORT, without sending anything; `clock` counts
        seconds. Raises what the function does, and `BadRequest` for what are no addresses. A
        function may name none at first, by an empty text."""
        self._name = server if callable(server) else None
        self._connect = connect
        self._clock = clock
        self._looked_at = clock()
        named = server() if callable(server) else server
        names_none = callable(server) and named == ""
        self._named = dict.fromkeys([] if names_none else addresses_of(named))
        self._open = {address: connect(address) for address in self._named}
        """The oldest first; those that are named no more among them."""
        self._trouble = ""
        """What the function failed with last, if it did."""
        self._changing = threading.Lock()

    @property
    def may_change(self) -> bool:
        """Whether others may be named, by a function."""
        return self._name is not None

    @property
    def each(self) -> list[T]:
        """To those that were named last; empty until a function has named any."""
        return [self._open[address] for address in self._named]

    @property
    def all(self) -> list[T]:
        """What is open."""
        return list(self._open.values())

    def renew(self) -> list[T] | None:
        """For one that does not answer: has the coordinators named again. Returns None where they
        are those that are known, else what is to be closed, as it is to one of long ago. A
        function that names none (an empty text) changes nothing, nor does one that fails, which the
        log says, once."""
        with self._changing:
            now = self._clock()
            if self._name is None or now - self._looked_at < LOOK_S:
                return None
            self._looked_at = now
            try:
                text = self._name()
                if not text:  # For the moment, as while the only one is replaced.
                    return None
                named = dict.fromkeys(addresses_of(text))
            except Exception as error:  # noqa: BLE001 (the caller's function)
                if repr(error) != self._trouble:
                    _log.warning("the coordinators stay those that are known: %r", error)
                self._trouble = repr(error)
                return None
            self._trouble = ""
            if named.keys() == self._named.keys():
                return None
            for address in named:
                if address not in self._open:
                    self._open[address] = self._connect(address)
            self._named = named
            gone = [address for address in self._open if address not in named]
            return [self._open.pop(address) for address in gone[: max(0, len(gone) - GONE_MAX)]]
