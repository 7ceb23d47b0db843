"""Which of several coordinators a call asks."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from outrider.client import Client, SyncClient
from outrider.client.failover import AVOIDED_S, Turns


def test_calls_begin_with_each_in_turn() -> None:
    turns = Turns(range(3), lambda: 0.0, first=2)
    assert [turns.begin() for _ in range(5)] == [2, 0, 1, 2, 0]


def test_one_that_does_not_answer_is_passed_over_for_a_while() -> None:
    now = [0.0]
    turns = Turns(range(3), lambda: now[0])
    assert turns.after(turns.begin()) == 1
    assert [turns.begin() for _ in range(4)] == [1, 2, 1, 2]
    now[0] = AVOIDED_S
    assert [turns.begin() for _ in range(3)] == [0, 1, 2]


def test_one_that_says_when_is_passed_over_for_so_long() -> None:
    now = [0.0]
    turns = Turns(range(2), lambda: now[0])
    assert turns.after(turns.begin(), 0.5) == 1
    assert [turns.begin() for _ in range(2)] == [1, 1]
    now[0] = 0.5
    assert [turns.begin() for _ in range(2)] == [0, 1]


def test_what_another_call_says_of_its_session_ends_no_wait() -> None:
    turns = Turns(range(2), lambda: 0.0)
    turns.after(0)
    turns.after(0, 0.0)
    assert [turns.begin() for _ in range(2)] == [1, 1]


def test_where_none_answers_all_are_asked() -> None:
    turns = Turns(range(2), lambda: 0.0)
    for tried in range(2):
        turns.after(tried)
    assert [turns.begin() for _ in range(3)] == [0, 1, 0]


async def test_clients_begin_with_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda number: number - 1)
    addresses = "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3"
    async with Client(addresses) as client:
        transport: Any = client._transport
        assert transport._turns.begin().address == "127.0.0.1:3"
    with SyncClient(addresses) as blocking:
        assert blocking._turns.begin().address == "127.0.0.1:3"
