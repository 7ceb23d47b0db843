"""When requests of `bench serve` are sent, what is kept of them, and the figures from that."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.prompts import BenchPrompt
from benchmarks.serve import Load, Record, ServeOptions, arrival_times
from benchmarks.serve_clients import Answer, RequestFailed, Speculation, StreamTimes
from benchmarks.serve_report import (
    is_good,
    round_values,
    running,
    speculation_values,
    spread,
    tokens_by_time,
)
from outrider.clock import run_virtually
from outrider.errors import InvariantError, Unavailable
from outrider.request import RoundReport

NUMBER = 20_000


def gaps(rate: float, burstiness: float, seed: int = 0) -> np.ndarray:
    times = [0.0, *islice(arrival_times(rate, burstiness, seed), NUMBER)]
    return np.array([after - before for before, after in pairwise(times)])


@pytest.mark.parametrize(("burstiness", "tail"), [(0.25, 24.0), (1.0, 6.0), (4.0, 1.5)])
def test_gaps_have_the_mean_and_the_variance_of_their_law(burstiness: float, tail: float) -> None:
    """Gamma of shape k and mean 1/R: the variance is 1 / (k R^2), its excess kurtosis 6 / k. Each
    of mean and variance is held to 5 standard errors, which a right one misses with probability
    6e-7 where the sum is normal; the seed is fixed."""
    rate = 8.0
    found = gaps(rate, burstiness)
    variance = 1 / (burstiness * rate**2)
    assert abs(found.mean() - 1 / rate) < 5 * math.sqrt(variance / NUMBER)
    assert abs(found.var() - variance) < 5 * variance * math.sqrt((tail + 2) / NUMBER)


def test_times_without_chance_and_a_seed_that_repeats_them() -> None:
    assert list(islice(arrival_times(math.inf, 1.0, 0), 3)) == [0.0, 0.0, 0.0]
    assert list(islice(arrival_times(4.0, math.inf, 0), 3)) == pytest.approx([0.25, 0.5, 0.75])
    assert gaps(5.0, 1.0, seed=7).tolist() == gaps(5.0, 1.0, seed=7).tolist()
    assert gaps(5.0, 1.0, seed=7).tolist() != gaps(5.0, 1.0, seed=8).tolist()


class ScriptedServer:
    """Answers `num_tokens` tokens, one a second, unless the script says an error."""

    def __init__(self, num_tokens: int = 4, fails: Callable[[int], str] = lambda _: "") -> None:
        self.num_tokens = num_tokens
        self.fails = fails
        self.asked: list[tuple[float, BenchPrompt, int]] = []
        self.running = self.most_running = self.cancelled = 0

    async def answer(self, prompt: BenchPrompt, max_tokens: int, times: StreamTimes) -> Answer:
        error = self.fails(len(self.asked))
        self.asked.append((asyncio.get_running_loop().time(), prompt, max_tokens))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(self.num_tokens):
                await asyncio.sleep(1.0)
                times.chunk(1)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if error:
            raise RequestFailed(error)
        return Answer(3, self.num_tokens)


def play(options: ServeOptions, server: ScriptedServer) -> Load:
    run = Load(options, server, {})
    run_virtually(run.measure())
    return run


def test_without_a_rate_all_come_at_once() -> None:
    server = ScriptedServer()
    run = play(ServeOptions(num_prompts=100), server)
    assert [at for at, _, _ in server.asked] == [0.0] * 100
    assert server.most_running == 100
    assert run.duration_s == pytest.approx(4.0)
    assert len({prompt.text for _, prompt, _ in server.asked}) == 48
    record = run.records[0]
    assert record.times.chunk_s.tolist() == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert (record.answer, record.error) == (Answer(3, 4), "")


def test_a_rate_sends_at_its_own_times_whoever_is_answered() -> None:
    server = ScriptedServer()
    options = ServeOptions(num_prompts=30, request_rate=2.0, burstiness=0.5, seed=4)
    run = play(options, server)
    due = list(islice(arrival_times(2.0, 0.5, 4), 30))
    assert [at for at, _, _ in server.asked] == pytest.approx(due)
    assert [record.due_s for record in run.records] == pytest.approx(due)
    assert server.most_running > 4


def test_a_fixed_concurrency_is_kept_full_and_never_passed() -> None:
    server = ScriptedServer()
    run = play(ServeOptions(num_prompts=10, max_concurrency=3), server)
    assert server.most_running == 3
    assert run.duration_s == pytest.approx(16.0)
    assert all(record.due_s == record.started_s for record in run.records)


def test_what_a_rate_holds_back_waits_outside_of_its_latency() -> None:
    """One a second, and each takes four: the i-th waits 3 i seconds here, and takes four."""
    server = ScriptedServer()
    options = ServeOptions(
        num_prompts=5, request_rate=1.0, burstiness=float("inf"), max_concurrency=1
    )
    run = play(options, server)
    waits = [record.started_s - record.due_s for record in run.records]
    assert waits == pytest.approx([0.0, 3.0, 6.0, 9.0, 12.0])
    assert [record.latency_s for record in run.records] == pytest.approx([4.0] * 5)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        (ServeOptions(duration=10, max_concurrency=2), 6),
        (ServeOptions(duration=10, request_rate=1.0, burstiness=float("inf")), 9),
        (ServeOptions(duration=10, max_concurrency=2, num_prompts=4), 4),
    ],
)
def test_a_duration_ends_the_sending_and_not_what_runs(options: ServeOptions, number: int) -> None:
    run = play(options, ScriptedServer())
    assert len(run.records) == number
    assert all(record.num_tokens == 4 for record in run.records)


def test_a_failed_request_is_kept_and_ends_nothing() -> None:
    """One without a token has failed, too."""
    server = ScriptedServer(fails=lambda index: "no room" if index == 1 else "")
    run = play(ServeOptions(num_prompts=3), server)
    assert sorted(record.error for record in run.records) == ["", "", "no room"]
    assert (run.num_failed, run.num_tokens) == (1, 8)
    failed = next(record for record in run.records if record.error)
    assert failed.latency_s == pytest.approx(4.0)
    [record] = play(ServeOptions(num_prompts=1), ScriptedServer(num_tokens=0)).records
    assert record.error == "the answer ended without a token"


def test_categories_take_turns_and_a_prompt_may_say_how_long_its_answer_is(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [f'{{"prompt": "{text}", "category": "{text[0]}"' for text in ("a1", "a2", "b1")]
    file.write_text(f'{lines[0]}, "max_tokens": 7}}\n{lines[1]}}}\n{lines[2]}}}\n', "utf-8")
    server = ScriptedServer()
    play(ServeOptions(prompts=file, max_tokens=9), server)
    asked = [(prompt.text, most) for _, prompt, most in server.asked]
    assert asked == [("a1", 7), ("b1", 9), ("a2", 9)]


def test_an_interrupted_load_keeps_what_was_over() -> None:
    """Those that run are cancelled and told of nowhere."""
    server = ScriptedServer()
    run = Load(ServeOptions(num_prompts=10, max_concurrency=2), server, {})

    async def interrupt() -> None:
        task = asyncio.create_task(run.measure())
        await asyncio.sleep(9.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtually(interrupt())
    assert len(run.records) == 4
    assert server.cancelled == 2
    assert (run.num_running, server.running) == (0, 0)
    assert run.duration_s == pytest.approx(9.5)


def test_warm_ups_are_not_measured_and_their_failure_ends_the_run() -> None:
    server = ScriptedServer()
    run = Load(ServeOptions(num_warmups=5, max_concurrency=2, num_prompts=1), server, {})
    run_virtually(run.warm_up())
    assert (len(server.asked), server.most_running, run.records) == (5, 2, [])
    server.fails = lambda _: "HTTP 401"
    with pytest.raises(Unavailable, match="a warm-up request failed: HTTP 401"):
        run_virtually(run.warm_up())


def test_a_bug_of_ours_is_no_failed_request() -> None:
    class Broken:
        async def answer(self, prompt: BenchPrompt, max_tokens: int, times: StreamTimes) -> Answer:
            raise InvariantError("a bug")

    run = Load(ServeOptions(num_prompts=3), Broken(), {})
    with pytest.raises(InvariantError, match="a bug"):
        run_virtually(run.measure())


def test_a_late_event_loop_is_noticed() -> None:
    """Which makes all times too long."""

    class Busy:
        async def answer(self, prompt: BenchPrompt, max_tokens: int, times: StreamTimes) -> Answer:
            await asyncio.sleep(0.06)
            time.sleep(0.15)  # noqa: ASYNC251 (a client that computes)
            times.chunk(1)
            await asyncio.sleep(0.05)
            return Answer(1, 1)

    run = Load(ServeOptions(num_prompts=1), Busy(), {})
    asyncio.run(run.measure())
    assert max(run.lags_s) > 0.1


def times(*chunks: tuple[float, int | None]) -> StreamTimes:
    """Of chunks with so many tokens, as they came."""
    clock = iter([at for at, _ in chunks])
    found = StreamTimes(lambda: next(clock))
    for _, number in chunks:
        found.chunk(number)
    return found


RECORD = Record(
    index=0, category="chat", due_s=0.0, started_s=1.0, ended_s=3.5,
    times=times((1.5, 1), (2.0, 4), (3.5, 2)), answer=Answer(10, 7),
)  # fmt: skip
SILENT = times((1.5, None), (2.0, None), (3.5, None))


def test_a_request_of_three_chunks() -> None:
    """TTFT to the first chunk; TPOT by the six tokens behind the first token; ITL by chunk."""
    assert RECORD.ttft_s == 0.5
    assert RECORD.latency_s == 2.5
    assert RECORD.tpot_s == pytest.approx(2.0 / 6)
    assert RECORD.itl_s == [0.5, 1.5]


def test_what_is_not_there_is_not_made_up() -> None:
    """One token has no TPOT and no ITL; without usage a chunk counts as a token; an answer without
    tokens has the time to its end."""
    one = replace(RECORD, times=times((1.5, 1)), answer=Answer(10, 1), ended_s=1.6)
    assert (one.tpot_s, one.itl_s) == (None, [])
    assert is_good(one, {"tpot": 0.0})
    silent = replace(RECORD, times=SILENT, answer=Answer(10))
    assert silent.num_tokens == 3
    assert silent.tpot_s == pytest.approx(1.0)
    assert replace(RECORD, times=times(), answer=Answer(10, 0)).ttft_s == 2.5


def test_a_spread_is_numpys_in_ms() -> None:
    values = [0.001, 0.002, 0.006, 0.100]
    found = spread("ttft", values, (50.0, 90.0, 99.9))
    assert list(found) == [
        "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms",
        "p50_ttft_ms", "p90_ttft_ms", "p99.9_ttft_ms",
    ]  # fmt: skip
    ms = [1.0, 2.0, 6.0, 100.0]
    assert found["mean_ttft_ms"] == pytest.approx(27.25)
    assert found["median_ttft_ms"] == pytest.approx(4.0)
    assert found["std_ttft_ms"] == pytest.approx(float(np.std(ms)))
    assert found["p90_ttft_ms"] == pytest.approx(6.0 + 0.7 * 94.0)
    assert set(spread("itl", [], (99.0,)).values()) == {None}


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({}, True),
        ({"ttft": 500.0}, True),
        ({"ttft": 499.9}, False),
        ({"ttft": 500.0, "tpot": 334.0}, True),
        ({"ttft": 500.0, "tpot": 333.0}, False),
        ({"e2el": 2500.0}, True),
        ({"e2el": 2499.0, "ttft": 9999.0}, False),
    ],
)
def test_a_good_request_meets_every_goal(goals: dict[str, float], good: bool) -> None:
    assert is_good(RECORD, goals) is good


def test_tokens_fall_into_the_seconds_in_which_they_came() -> None:
    """Since the first request was sent; a chunk weighs its tokens, or an even share of all."""
    assert tokens_by_time([RECORD]).tolist() == [1, 4, 2, 0]
    assert tokens_by_time([RECORD], 0.5).tolist() == [0, 1, 4, 0, 0, 2]
    shared = tokens_by_time([replace(RECORD, times=SILENT)])
    assert shared.tolist() == pytest.approx([7 / 3, 7 / 3, 7 / 3, 0])
    later = replace(RECORD, started_s=2.0, times=times((4.2, 3)), ended_s=4.2)
    assert tokens_by_time([RECORD, later]).tolist() == [1, 4, 2, 3, 0]
    assert tokens_by_time([]).tolist() == []


def test_concurrency_counts_half_open_intervals() -> None:
    """A request that ends as another begins does not meet it; two that begin together do."""
    first = replace(RECORD, started_s=0.0, ended_s=2.0)
    second = replace(RECORD, started_s=2.0, ended_s=3.0)
    third = replace(RECORD, started_s=2.0, ended_s=5.0)
    assert running([third, first, second]) == [(0.0, 1), (2.0, 2), (3.0, 1), (5.0, 0)]
    assert max(number for _, number in running([first, second])) == 1


def test_speculation_is_summed_over_those_who_told_of_it() -> None:
    told = replace(RECORD, answer=Answer(speculation=Speculation(10, 40, 20)))
    more = replace(RECORD, answer=Answer(speculation=Speculation(30, 40, 40)))
    assert speculation_values([told, RECORD, more]) == {
        "spec_decode_acceptance_rate": 75.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 40,
        "spec_decode_draft_tokens": 80,
        "spec_decode_accepted_tokens": 60,
    }
    assert set(speculation_values([RECORD]).values()) == {None}
    plain = speculation_values([replace(RECORD, answer=Answer(speculation=Speculation(7, 0, 0)))])
    assert plain["spec_decode_acceptance_rate"] is None
    assert plain["spec_decode_acceptance_length"] == 1.0


def test_rounds_are_means_over_all_of_them() -> None:
    def one(draft_ms: float, verify_ms: float, hit: bool = False) -> RoundReport:
        return RoundReport(0, (), 0, draft_ms, 0, 0, verify_ms, 0, look_ahead_hit=hit)

    records = [
        replace(RECORD, answer=Answer(rounds=(one(4.0, 10.0, hit=True),))),
        replace(RECORD, answer=Answer(rounds=(one(0.0, 20.0), one(0.0, 20.0), one(0.0, 10.0)))),
        RECORD,
    ]
    found = round_values(records)
    assert found["look_ahead_hit_rate"] == 0.25
    assert found["mean_round_draft_ms"] == 1.0
    assert found["mean_round_verify_ms"] == 15.0
    assert set(round_values([RECORD]).values()) == {None}
