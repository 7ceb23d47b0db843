"""When requests of `bench serve` are sent, what is kept of them, and the figures from that."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measurement import BenchClient, Completion, Decoding
from benchmarks.prompts import BenchPrompt
from benchmarks.serve import (
    Load,
    Record,
    ServeOptions,
    arrival_times,
    is_good,
    measure,
    report,
    spread,
)
from outrider.clock import run_virtually
from outrider.errors import Unavailable

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


class ScriptedServer(BenchClient):
    """Answers four tokens, one a second, unless the script says an error."""

    def __init__(self, fails: Callable[[int], str] = lambda _: "") -> None:
        self.fails = fails
        self.asked: list[tuple[float, BenchPrompt, int]] = []
        self.running = self.most_running = 0

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        error, started_s = self.fails(len(self.asked)), asyncio.get_running_loop().time()
        self.asked.append((started_s, prompt, decoding.max_tokens))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(4.0)
        self.running -= 1
        if error:
            raise Unavailable(error)
        return Completion((1, 2, 3, 4), started_s, 4.0, chunk_s=(1.0, 2.0, 3.0, 4.0))


def play(options: ServeOptions, server: ScriptedServer) -> Load:
    found: list[Load] = []

    async def run() -> None:
        found.append(await measure(options, server, lambda line: None))

    run_virtually(run())
    return found[0]


def test_without_a_rate_all_come_at_once() -> None:
    server = ScriptedServer()
    load = play(ServeOptions(num_prompts=100), server)
    assert [at for at, _, _ in server.asked] == [0.0] * 100
    assert server.most_running == load.most_running == 100
    assert load.duration_s == pytest.approx(4.0)
    assert len({prompt.text for _, prompt, _ in server.asked}) == 48


def test_a_rate_sends_at_its_own_times_whoever_is_answered() -> None:
    server = ScriptedServer()
    load = play(ServeOptions(num_prompts=30, request_rate=2.0, burstiness=0.5, seed=4), server)
    due = list(islice(arrival_times(2.0, 0.5, 4), 30))
    assert [at for at, _, _ in server.asked] == pytest.approx(due)
    assert [record.due_s for record in load.records] == pytest.approx(due)
    assert server.most_running > 4


def test_a_fixed_concurrency_is_kept_full_and_never_passed() -> None:
    server = ScriptedServer()
    load = play(ServeOptions(num_prompts=10, max_concurrency=3), server)
    assert server.most_running == 3
    assert load.duration_s == pytest.approx(16.0)
    assert all(record.due_s == record.started_s for record in load.records)


def test_what_a_rate_holds_back_waits_outside_of_its_latency() -> None:
    """One a second, and each takes four: the i-th waits 3 i seconds here, and takes four."""
    options = ServeOptions(num_prompts=5, request_rate=1.0, burstiness=math.inf, max_concurrency=1)
    load = play(options, ScriptedServer())
    waits = [record.started_s - record.due_s for record in load.records]
    assert waits == pytest.approx([0.0, 3.0, 6.0, 9.0, 12.0])
    found = report(options, options.settings("b", "s", "m"), load).values
    assert (found["mean_client_queue_time_ms"], found["mean_e2el_ms"]) == pytest.approx((6e3, 4e3))


@pytest.mark.parametrize(
    ("options", "number"),
    [
        (ServeOptions(duration=10, max_concurrency=2), 6),
        (ServeOptions(duration=10, request_rate=1.0, burstiness=math.inf), 9),
        (ServeOptions(duration=10, max_concurrency=2, num_prompts=4), 4),
    ],
)
def test_a_duration_ends_the_sending_and_not_what_runs(options: ServeOptions, number: int) -> None:
    assert len(play(options, ScriptedServer()).completed) == number


def test_a_failed_request_is_counted_and_ends_nothing() -> None:
    server = ScriptedServer(fails=lambda index: "no room" if index == 1 else "")
    load = play(ServeOptions(num_prompts=3), server)
    assert (len(load.completed), load.errors) == (2, {"no room": 1})


def test_a_prompt_may_say_how_long_its_answer_is(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 7}\n{"prompt": "b"}\n', "utf-8")
    server = ScriptedServer()
    play(ServeOptions(prompts=file, max_tokens=9), server)
    assert {prompt.text: most for _, prompt, most in server.asked} == {"a": 7, "b": 9}


def test_a_late_event_loop_is_noticed() -> None:
    """Which makes all times too long."""

    class Busy(ScriptedServer):
        async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
            await asyncio.sleep(0.06)
            time.sleep(0.15)  # noqa: ASYNC251 (a client that computes)
            await asyncio.sleep(0.05)
            return Completion((1,), 0.0, 0.26, chunk_s=(0.2,))

    options = ServeOptions(num_prompts=1)
    load = asyncio.run(measure(options, Busy(), lambda line: None))
    assert max(load.lags_s) > 0.1
    assert "ms late itself" in report(options, options.settings("b", "s", "m"), load).warnings[0]


ANSWER = Completion(
    (), 0.0, 2.5, num_rounds=4, num_draft_tokens=8, num_accepted_draft_tokens=6,
    chunk_s=(0.5, 1.0, 2.5), prompt_tokens=10, counted_tokens=7,
)  # fmt: skip
ONE = Completion((), 0.0, 0.6, chunk_s=(0.5,), counted_tokens=1)
"""Has no TPOT and no ITL."""


def test_the_figures_of_a_load() -> None:
    """TTFT to the first chunk; TPOT by the six tokens behind the first one; ITL by chunk; tokens
    are shared out evenly over chunks, which come at 1.5, 2 and 3.5 s."""
    options = ServeOptions(goodput=(("tpot", 334.0),))
    records = [Record(1.0, 1.0, ANSWER), Record(1.0, 4.0, ONE), Record(0.0, 0.0, "no room")]
    load = Load(5.0, 2, records, [0.001])
    found = report(options, options.settings("openai", "h:1", "m"), load)
    values = found.values
    assert (values["completed"], values["failed"]) == (2, 1)
    assert (values["total_input_tokens"], values["total_output_tokens"]) == (10, 8)
    assert (values["request_throughput"], values["request_goodput"]) == (0.4, 0.4)
    assert (values["output_throughput"], values["total_token_throughput"]) == (1.6, 3.6)
    assert values["max_output_tokens_per_s"] == pytest.approx(7 / 3)
    assert values["mean_ttft_ms"] == 500.0
    assert values["mean_tpot_ms"] == pytest.approx(2000 / 6)
    assert values["mean_itl_ms"] == pytest.approx(1000.0)
    assert values["median_e2el_ms"] == pytest.approx(1550.0)
    assert values["spec_decode_acceptance_rate"] == 75.0
    assert values["spec_decode_acceptance_length"] == 2.5
    assert values["mean_client_queue_time_ms"] is None
    assert values["client_lag_p99_ms"] == 1.0
    assert (values["backend"], values["request_rate"]) == ("openai", "inf")
    assert found.warnings == ["warning: 1 of 3 requests failed: 1x no room"]


def test_a_spread_is_numpys_in_ms() -> None:
    ms = [1.0, 2.0, 6.0, 100.0]
    assert spread("ttft", ms) == pytest.approx({
        "mean_ttft_ms": 27.25, "median_ttft_ms": 4.0, "std_ttft_ms": float(np.std(ms)),
        "p99_ttft_ms": 6.0 + 0.97 * 94.0,
    })  # fmt: skip
    assert set(spread("itl", []).values()) == {None}


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({}, True),
        ({"ttft": 500.0, "tpot": 334.0}, True),
        ({"ttft": 499.9}, False),
        ({"ttft": 500.0, "tpot": 333.0}, False),
        ({"e2el": 2499.0, "ttft": 9999.0}, False),
    ],
)
def test_a_good_request_meets_every_goal(goals: dict[str, float], good: bool) -> None:
    assert is_good(ANSWER, goals) is good
    assert is_good(ONE, {"tpot": 0.0})
