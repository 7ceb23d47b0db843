"""The sessions that run at a coordinator, from their beginning until what they held is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from outrider.errors import StaleEpoch
from outrider.sessions.store import Counters, SessionRecord

from .generation import SessionRun
from .session_creation import SessionCreator


class Runs:
    """Runs by session: one at a time, and none begins before the one before it is closed."""

    def __init__(
        self,
        opener: SessionCreator,
        resume_grace_s: float,
        in_background: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        """A session whose client is gone may be resumed for so many seconds before it counts as
        cancelled; work that nobody waits for goes `in_background`."""
        self._opener = opener
        self._resume_grace_s = resume_grace_s
        self._in_background = in_background
        self._running: dict[str, SessionRun] = {}
        self._ending: dict[str, asyncio.Task[bool]] = {}
        """What closes runs that are not among them any more."""
        self._closing = asyncio.Event()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def session_ids(self) -> set[str]:
        """Of those that run."""
        return set(self._running)

    def has(self, session_id: str) -> bool:
        """Whether the session runs here, or is being closed."""
        return session_id in self._running or session_id in self._ending

    @property
    def is_closing(self) -> bool:
        """Whether what runs has been cancelled."""
        return self._closing.is_set()

    def get(self, session_id: str) -> SessionRun | None:
        """The session's run; None where it does not run here."""
        return self._running.get(session_id)

    def add(self, run: SessionRun) -> None:
        """A session runs, which was opened just now, or for which there was room (`vacate`)."""
        self._running[run.session_id] = run

    def end(self, run: SessionRun, is_gone: bool = False) -> None:
        """The client has its last event, or an error, or is gone: frees what the session holds,
        unless it was handed over."""
        if self._running.get(run.session_id) is not run:
            return
        if is_gone and self._resume_grace_s > 0:
            ending = self._free(run, run.hand_over())
            self.wait_for_client(run.session_id, run.epoch, run.counters, ending)
        else:
            ending = self._free(run, run.close())
            ending.add_done_callback(lambda _: self._release_unrecorded(run))

    async def vacate(self, record: SessionRecord) -> None:
        """Ends what runs here of a session that was taken over under a newer epoch. Raises
        `StaleEpoch` where another stream has done that meanwhile."""
        session_id = record.session_id
        while True:
            run = self._running.get(session_id)
            if run is not None:
                if run.epoch >= record.epoch:
                    raise StaleEpoch(f"session {session_id} was resumed by another stream")
                self._free(run, run.hand_over())
            ending = self._ending.get(session_id)
            if ending is None:
                return
            await asyncio.wait([ending])

    def wait_for_client(
        self,
        session_id: str,
        epoch: int,
        counters: Counters,
        ending: asyncio.Task[bool] | None = None,
    ) -> None:
        """Nothing is decoded for a client that is gone. It may come back, to any coordinator: the
        session is released from this one's lease. Else it counts as cancelled. Where this
        coordinator closes, that is left to others."""
        self._in_background(self._wait(session_id, epoch, counters, ending))

    def close(self) -> None:
        """Cancels what runs."""
        self._closing.set()
        for run in self._running.values():
            run.cancel()

    def _release_unrecorded(self, run: SessionRun) -> None:
        """The store did not take the end of a run: the session is given up as one whose client is
        gone."""
        if run.is_unrecorded and not self._closing.is_set():
            self.wait_for_client(run.session_id, run.epoch, run.counters)

    def _free(self, run: SessionRun, closing: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        session_id = run.session_id
        del self._running[session_id]
        ending = self._ending[session_id] = self._in_background(closing)
        ending.add_done_callback(lambda _: self._ending.pop(session_id, None))
        return ending

    async def _wait(
        self,
        session_id: str,
        epoch: int,
        counters: Counters,
        ending: asyncio.Task[bool] | None,
    ) -> None:
        if ending is not None and await ending:
            return
        await self._opener.release(session_id, epoch)
        try:
            async with asyncio.timeout(self._resume_grace_s):
                await self._closing.wait()
        except TimeoutError:
            await self._opener.cancel(session_id, epoch, counters, is_released=True)
