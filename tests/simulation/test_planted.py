"""Planted bugs, to show that runs can fail: each is found within a few seeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.decoding.committer import Committer
from coordinator.decoding.loop import OutputQueue
from coordinator.decoding.sessions import OwnedSessions
from coordinator.routing.discovery import Discovery
from coordinator.routing.replica_pool import SessionRoute
from outrider.drafters.autoregressive_draft import AutoregressiveDraft
from outrider.errors import OutriderError, StoreUnavailable
from outrider.kv_cache.session_table import Aligned, SessionTable
from outrider.sessions import redis_store
from outrider.sessions.redis_scripts import Script
from outrider.sessions.state import Session
from outrider.sessions.store import SessionRecord
from tests.simulation.faults import GREATER
from tests.simulation.processes import Process, wall_clock_s
from tests.simulation.redis_host import Command, RedisServer
from tests.simulation.scenario import run_seed

NUM_SEEDS = 80
Fields = dict[bytes, bytes]
EPOCH, OWNER, LENGTH = 0, 1, 3
"""Places of arguments of the scripts."""
ANY_LENGTH = b"-1"


def found(planted: pytest.MonkeyPatch, *kinds: str) -> bool:
    """Whether one of the first seeds fails, with greater faults of these kinds alone, or of all;
    what is planted must be the reason: the seed must not fail without."""
    for seed in range(NUM_SEEDS):
        try:
            run_seed(seed, kinds=kinds or GREATER)
        except OutriderError:
            planted.undo()
            run_seed(seed, kinds=kinds or GREATER)
            return True
    return False


def test_tokens_that_are_shown_before_they_are_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(self: Committer, session: Any, length: int) -> int:
        return length

    monkeypatch.setattr(Committer, "shown", at_once)
    assert found(monkeypatch)


def test_a_cache_that_keeps_refused_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_at_all(self: SessionTable, session_id: str, sequence: Any, length: int) -> None:
        pass

    monkeypatch.setattr(SessionTable, "_cut", not_at_all)
    assert found(monkeypatch)


def test_a_running_stream_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client must not take a stream that dies half-way for one that was never opened."""
    read, reads = OutputQueue.read, itertools.count()

    async def sometimes(self: OutputQueue) -> Any:
        if next(reads) % 10 == 9:
            raise StoreUnavailable("planted")
        return await read(self)

    monkeypatch.setattr(OutputQueue, "read", sometimes)
    assert found(monkeypatch)


def test_a_replica_that_trusts_the_callers_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def goes_on(self: SessionTable, head: Any, entry: Any) -> Aligned:
        return Aligned(entry.sequence, head.append)

    monkeypatch.setattr(SessionTable, "_resync", goes_on)
    assert found(monkeypatch)


def test_a_store_that_disregards_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes tokens of a coordinator that was thought dead."""

    def of_any_epoch(stored: Fields, given: list[bytes]) -> None:
        given[EPOCH], given[OWNER] = stored[b"epoch"], stored[b"owner"]

    change_arguments(monkeypatch, redis_store._APPEND, of_any_epoch)
    assert found(monkeypatch, "oust")


def test_a_take_over_that_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of the coordinator that did not hear of it never lapses, and that one does not heed
    that the session is wanted elsewhere."""

    async def unreleased(self: OwnedSessions, seen: SessionRecord) -> SessionRecord:
        return await self._store.take_over(seen, self._owner)

    async def ignored(self: OwnedSessions, session_id: str) -> None:
        return None

    monkeypatch.setattr(OwnedSessions, "_take_over", unreleased)
    monkeypatch.setattr(OwnedSessions, "release_wanted", ignored)
    assert found(monkeypatch, "unheard_take_over")


def test_a_finish_that_asks_for_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis gives an epoch a second time, and the one that had it first ends the session."""

    def of_any_owner(stored: Fields, given: list[bytes]) -> None:
        if given[EPOCH] == stored[b"epoch"]:
            given[OWNER], given[LENGTH] = stored[b"owner"], ANY_LENGTH

    change_arguments(monkeypatch, redis_store._FINISH, of_any_owner)
    assert found(monkeypatch, "lost_take_over")


def test_leases_that_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ends are times of the owner's wall clock, and others compare them with their own."""
    execute_for = RedisServer.execute_for

    def by_its_own_clock(self: RedisServer, client: Process, commands: Any) -> list[Any]:
        if any(command[0] != b"EVALSHA" for command in commands):
            return execute_for(self, client, commands)
        now_ms, self.data.now_ms = self.data.now_ms, lambda: wall_clock_s(client) * 1e3
        try:
            return execute_for(self, client, commands)
        finally:
            self.data.now_ms = now_ms

    monkeypatch.setattr(RedisServer, "execute_for", by_its_own_clock)
    assert found(monkeypatch, "clock_jump", "death", "stall")


def change_arguments(
    planted: pytest.MonkeyPatch, script: Script, change: Callable[[Fields, list[bytes]], None]
) -> None:
    """Has a script run with other arguments, which depend on what is stored of the session."""
    execute = RedisServer.execute

    def changed(self: RedisServer, command: Command) -> Any:
        if command[0] == b"EVALSHA" and command[1] == script.sha.encode():
            first = 3 + int(command[2])
            stored = self.data.get(command[3])
            if stored is not None:
                given = list(command[first:])
                change(stored, given)
                command = (*command[:first], *given)
        return execute(self, command)

    planted.setattr(RedisServer, "execute", changed)


def test_a_deadline_that_is_asked_after_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drawn too late is dropped, so the length of a proposal depends on its tokens."""
    add = AutoregressiveDraft.add

    def in_time(self: AutoregressiveDraft, token_ids: tuple[int, ...], q: Any) -> None:
        if self.deadline.allows_draw():
            add(self, token_ids, q)
        else:
            self.num_wanted = len(self.token_ids)

    monkeypatch.setattr(AutoregressiveDraft, "goes_on", lambda self: not self.is_whole)
    monkeypatch.setattr(AutoregressiveDraft, "add", in_time)
    assert found(monkeypatch)


def test_a_mailbox_that_is_left_behind_by_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(self: SessionRoute[Any, Any]) -> None:
        self._replica = None

    monkeypatch.setattr(SessionRoute, "close", stays)
    assert found(monkeypatch)


def test_a_release_where_a_session_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    move = SessionRoute.move

    def and_release(self: Any) -> bool:
        before, session = self._replica, self.context.session
        moves = move(self)
        if moves and before is not None:
            before.link.release(session.session_id, session.epoch)
        return moves

    monkeypatch.setattr(SessionRoute, "move", and_release)
    assert found(monkeypatch, "break")


def test_a_belief_in_late_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_round(self: SessionRoute[Any, Any], answer: Any) -> None:
        self._answers.setdefault(self._round, answer)
        self._wake()

    monkeypatch.setattr(SessionRoute, "put", any_round)
    assert found(monkeypatch)


def test_an_owner_that_forgets_what_the_store_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail that Redis lost is not sent again."""
    acknowledge = Session.acknowledge

    def never_less(self: Session, stored_length: int) -> None:
        acknowledge(self, max(stored_length, self.acknowledged_length))

    monkeypatch.setattr(Session, "acknowledge", never_less)
    assert found(monkeypatch, "restart")


def test_a_roster_that_believes_in_names_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stays(self: Discovery, pool: Any, name: str, is_replaced: bool) -> None:
        pass

    monkeypatch.setattr(Discovery, "_doubt", stays)
    assert found(monkeypatch)
