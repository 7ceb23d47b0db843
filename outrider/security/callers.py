"""Who calls, and how much that caller may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from, as its key says. Its text has no secret."""

    name: str = ""
    """Of the key, and of the counts of its limits; empty where no key is asked for."""
    tenant: str = ""
    """Whose sessions and cached prefixes these are. It never comes from the request."""
    requests_per_minute: int = 0
    """0 = any number."""
    concurrency: int = 0
    """Generations that may run at a time, of which a request may have several; 0 = any number."""
    admin: bool = False
    """Whether sessions of every tenant may be read and cancelled."""

    @property
    def is_limited(self) -> bool:
        """Whether its requests are counted."""
        return bool(self.requests_per_minute or self.concurrency)

    @property
    def reach(self) -> str | None:
        """The tenant whose sessions may be read and cancelled; None = every one's."""
        return None if self.admin else self.tenant


ANYBODY = Caller()
"""Where no key is asked for: one tenant, without limits."""
