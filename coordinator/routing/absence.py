"""How long a request waits for a replica, if no replica can be reached."""

import asyncio
from typing import Protocol

from outrider.config.deployment import CoordinatorConfig
from outrider.errors import LinkLost, Overloaded, Unavailable
from outrider.registry.registry import Role, Starts


class Pool(Protocol):
    """The replicas of a role. `starts` says which replicas are being started."""

    @property
    def role(self) -> Role: ...
    @property
    def starts(self) -> Starts: ...


class Absence:
    """A request's wait for a replica of a pool. It begins when the object is made.

    The wait may last `target_gone_ms`, because within this time the reconciler notices that a
    replica is gone, and a new replica joins the pool. While the registry says that a replica is
    being started, the wait may last longer, up to `target_start_ms`. Such starts do not matter if a
    replica is there, but its stream is full."""

    def __init__(self, pool: Pool, config: CoordinatorConfig) -> None:
        self._pool = pool
        self._gone_s = config.target_gone_ms / 1e3
        self._most_s = max(config.target_start_ms, config.target_gone_ms) / 1e3
        self._began = self._known = asyncio.get_running_loop().time()
        """`_known` is the latest time at which a replica was known to be starting."""

    def check_error(self, error: LinkLost | Overloaded) -> None:
        """Does `check` after an item could not be sent."""
        if isinstance(error, LinkLost):
            self.check(f"no {self._pool.role} can be reached: {error.message}")
        else:
            self.check(
                f"the stream to the {self._pool.role} is full: {error.message}", is_away=False
            )

    def check(self, cause: str, *, is_away: bool = True) -> None:
        """Raises `Unavailable`, with the `cause` of the wait, if the wait has lasted too long.
        `is_away` is whether no replica can be reached."""
        now, starts = asyncio.get_running_loop().time(), self._pool.starts
        if is_away and starts.expected:
            self._known = now
        what = f"{cause}; {starts}" if is_away else cause
        if now - self._began >= self._most_s:
            raise Unavailable(f"{what}; waited for {self._most_s:g} s")
        if now - self._known >= self._gone_s:
            raise Unavailable(f"{what}; waited for {now - self._began:.0f} s")
