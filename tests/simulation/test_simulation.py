"""Whole runs on a virtual clock under faults; and planted bugs, to show that runs can fail."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from coordinator.commits import Committer
from coordinator.journal import Journal
from coordinator.mailbox import Mailbox
from coordinator.replicas import Berth
from outrider.engine.sequences import Aligned, SequenceTable
from outrider.errors import OutriderError, StoreUnavailable
from outrider.sessions.memory_store import MemoryStore
from outrider.sessions.store import Append

from .adversary import CALM, Odds
from .scenario import RankCount, run_seed

NUM_SEEDS = 60
FAULTS = {"drop", "delay", "duplicate", "reorder", "crash", "scale", "fall", "store"}


def test_runs_under_faults_lose_and_duplicate_nothing() -> None:
    """Seeds 0..59: every check of `scenario` holds, and every kind of fault came up. False alarm
    of the one statistical check (6 standard deviations): below 1e-8."""
    faults: Counter[str] = Counter()
    ranks, num_moves = RankCount(), 0
    for seed in range(NUM_SEEDS):
        result = run_seed(seed)
        faults += result.faults
        ranks.merge(result.ranks)
        num_moves += result.num_moves
    assert num_moves > 50
    assert set(faults) == FAULTS
    assert ranks.num_tokens > 1000
    assert ranks.largest_deviation() < 6


def test_a_seed_replays() -> None:
    first, second = run_seed(5), run_seed(5)
    assert (first.faults, first.num_tokens) == (second.faults, second.num_tokens)


def test_without_faults_there_are_none() -> None:
    for seed in range(5):
        assert not run_seed(seed, CALM).faults


def found(seeds: int, odds: Odds | None = None) -> bool:
    """Whether one of so many seeds fails."""
    for seed in range(seeds):
        try:
            run_seed(seed, odds)
        except OutriderError:
            return True
    return False


def test_planted_show_before_commit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(self: Committer, session: Any, length: int) -> int:
        return length

    monkeypatch.setattr(Committer, "shown", at_once)
    assert found(20)


def test_planted_cache_that_keeps_refused_tokens_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_at_all(self: SequenceTable, session_id: str, sequence: Any, length: int) -> None:
        pass

    monkeypatch.setattr(SequenceTable, "_cut", not_at_all)
    assert found(20)


def test_planted_failure_of_a_running_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client must not take a stream that dies half-way for one that was never opened."""
    read, reads = Journal.read, itertools.count()

    async def sometimes(self: Journal) -> Any:
        if next(reads) % 10 == 9:
            raise StoreUnavailable("planted")
        return await read(self)

    monkeypatch.setattr(Journal, "read", sometimes)
    assert found(5)


def test_planted_replica_that_trusts_the_callers_length_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def goes_on(self: SequenceTable, head: Any, entry: Any) -> Aligned:
        return Aligned(entry.sequence, head.append)

    monkeypatch.setattr(SequenceTable, "_resync", goes_on)
    assert found(5)


@pytest.mark.long
def test_planted_disregard_of_epochs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By store and replicas: each alone keeps the tokens of a coordinator that was thought dead
    out."""
    append, entry = MemoryStore._append, SequenceTable._entry

    def of_any_epoch(self: MemoryStore, one: Append) -> int | OutriderError:
        kept = self._find(one.session_id)
        epoch = one.epoch if kept is None else kept.record.epoch
        return append(self, replace(one, epoch=epoch, owner=""))

    async def all_own(self: MemoryStore, owner: str, sessions: Any) -> list[str]:
        return []

    def of_this_epoch(self: SequenceTable, head: Any) -> Any:
        known = self._entries.get(head.session_id)
        return entry(self, head if known is None else replace(head, epoch=known.epoch))

    monkeypatch.setattr(MemoryStore, "_append", of_any_epoch)
    monkeypatch.setattr(MemoryStore, "renew", all_own)
    monkeypatch.setattr(SequenceTable, "_entry", of_this_epoch)
    assert found(600, Odds(store_failure=0.05, reorder=0.1, fall_s=0.5))


def test_planted_mailbox_left_behind_by_a_move_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(self: Berth[Any, Any]) -> None:
        self._office = None

    monkeypatch.setattr(Berth, "close", stays)
    assert found(5)


def test_planted_belief_in_late_answers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_round(self: Mailbox[Any], answer: Any) -> None:
        self._answers.setdefault(self._round, answer)
        self._wake()

    monkeypatch.setattr(Mailbox, "put", any_round)
    assert found(50)
