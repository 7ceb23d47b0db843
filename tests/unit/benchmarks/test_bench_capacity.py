"""`bench capacity`: replicas that answer at the ends of steps, and one small run of everything."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from rounds import make_head

from benchmarks.capacity_replicas import StepReplica, StepTime
from benchmarks.overhead_canned import canned_draft
from benchmarks.overhead_clocks import RoundClock
from deploy.cli.main import main
from outrider.clock import run_virtually
from outrider.messages import DraftItem
from outrider.sessions.store import Append, CacheState, Counters
from outrider.speculation.sampling_params import Rule


def draft_item(session: int, round_index: int = 1) -> DraftItem:
    head = make_head((1, 2, 3), session=session, round_index=round_index, rule=Rule.TOKEN)
    return DraftItem(head, 2)


def test_steps_take_their_time_and_as_many_as_fit() -> None:
    """Five at once and one in between, two a step of 10 ms: they end at 10, 20 and 30 ms."""
    heard: list[tuple[float, int]] = []

    async def play() -> list[float]:
        replica = StepReplica(canned_draft(), StepTime(0.01, 2))
        loop = asyncio.get_running_loop()
        connection = replica.connect(lambda answers: heard.append((loop.time(), len(answers))))
        connection.receive([draft_item(session) for session in range(1, 6)])
        await asyncio.sleep(0.015)
        connection.receive([draft_item(6)])
        await asyncio.sleep(0.1)
        connection.receive([draft_item(7)])
        await asyncio.sleep(0.1)
        return [hold.seconds for hold in replica.holds]

    held = run_virtually(play())
    assert heard == [
        (pytest.approx(end), number)
        for end, number in ((0.01, 2), (0.02, 2), (0.03, 2), (0.125, 1))
    ]
    assert held == pytest.approx([0.01, 0.01, 0.02, 0.02, 0.03, 0.015, 0.01])


def test_spans_are_of_rounds_that_are_over_and_are_told_once() -> None:
    clock = RoundClock()
    for session in (1, 2):
        clock.draft_sent(draft_item(session))
    append = Append(f"{1:032x}", 1, "c", 0, (1,), 0, CacheState(), CacheState(), Counters(2, 0, 0))
    clock.committed(clock.commit_sent([append]))
    [(session_id, index, span)] = clock.take_spans()
    assert (session_id, index) == (f"{1:032x}", 1)
    assert span > 0
    assert clock.take_spans() == []


def measured(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["bench", "capacity", "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, "--sessions", "3", "--seconds", "1", "--load", "0.5")
    most, at_load = found["most"], found["at_load"]
    # Three sessions whose rounds take 28.7 ms and more cannot have more than 104 a second.
    assert 3 < most["rounds_per_second"] < 105
    assert at_load["step_sessions"] >= 1
    for crowd in (most, at_load):
        assert 0 < crowd["added_ms_p50"] <= crowd["added_ms_p99"]
        assert 0 < crowd["coordinator_cpu"] <= 1.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sessions", "0"), "sessions"),
        (("--seconds", "0"), "seconds"),
        (("--load", "1.5"), "load"),
        (("--flame", "f.svg"), "flame: needs py-spy on the PATH"),
    ],
)
def test_wrong_flags_are_named(
    flags: tuple[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["bench", "capacity", *flags]) == 2
    assert message in capsys.readouterr().err
