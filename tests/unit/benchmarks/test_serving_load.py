"""When requests are sent and what is kept of them, on a virtual clock and without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice

import pytest

from benchmarks.prompts import BenchPrompt
from benchmarks.serving import ServingOptions
from benchmarks.serving_arrivals import arrival_times
from benchmarks.serving_load import ServingRun
from benchmarks.serving_records import Answer, Heard, RequestFailed
from outrider.clock import run_virtually
from outrider.errors import InvariantError, Unavailable


class ScriptedServer:
    """Answers `num_tokens` tokens, one a second, unless the script says an error."""

    def __init__(self, num_tokens: int = 4, fails: Callable[[int], str] = lambda _: "") -> None:
        self.num_tokens = num_tokens
        self.fails = fails
        self.asked: list[tuple[float, BenchPrompt, int]] = []
        self.running = self.most_running = self.cancelled = 0

    async def answer(self, prompt: BenchPrompt, max_tokens: int, heard: Heard) -> Answer:
        error = self.fails(len(self.asked))
        self.asked.append((asyncio.get_running_loop().time(), prompt, max_tokens))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(self.num_tokens):
                await asyncio.sleep(1.0)
                heard.chunk(1)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if error:
            raise RequestFailed(error)
        return Answer(3, self.num_tokens)


def play(options: ServingOptions, server: ScriptedServer) -> ServingRun:
    run = ServingRun(options, server)
    run_virtually(run.measure())
    return run


def test_without_a_rate_all_come_at_once() -> None:
    server = ScriptedServer()
    run = play(ServingOptions(num_prompts=100), server)
    assert [at for at, _, _ in server.asked] == [0.0] * 100
    assert server.most_running == 100
    assert run.duration_s == pytest.approx(4.0)
    assert len({prompt.text for _, prompt, _ in server.asked}) == 48
    record = run.records[0]
    assert record.chunk_s.tolist() == pytest.approx([1.0, 2.0, 3.0, 4.0])  # type: ignore[attr-defined]
    assert (record.input_tokens, record.output_tokens, record.error) == (3, 4, "")


def test_a_rate_sends_at_its_own_times_whoever_is_answered() -> None:
    server = ScriptedServer()
    options = ServingOptions(num_prompts=30, request_rate=2.0, burstiness=0.5, seed=4)
    run = play(options, server)
    due = list(islice(arrival_times(2.0, 0.5, 4), 30))
    assert [at for at, _, _ in server.asked] == pytest.approx(due)
    assert [record.due_s for record in run.records] == pytest.approx(due)
    assert server.most_running > 4


def test_a_fixed_concurrency_is_kept_full_and_never_passed() -> None:
    server = ScriptedServer()
    run = play(ServingOptions(num_prompts=10, max_concurrency=3), server)
    assert server.most_running == 3
    assert run.duration_s == pytest.approx(16.0)
    assert all(record.due_s == record.started_s for record in run.records)


def test_what_a_rate_holds_back_waits_outside_of_its_latency() -> None:
    """One a second, and each takes four: the i-th waits 3 i seconds here, and takes four."""
    server = ScriptedServer()
    options = ServingOptions(
        num_prompts=5, request_rate=1.0, burstiness=float("inf"), max_concurrency=1
    )
    run = play(options, server)
    waits = [record.started_s - record.due_s for record in run.records]
    assert waits == pytest.approx([0.0, 3.0, 6.0, 9.0, 12.0])
    assert [record.latency_s for record in run.records] == pytest.approx([4.0] * 5)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        (ServingOptions(duration=10, max_concurrency=2), 6),
        (ServingOptions(duration=10, request_rate=1.0, burstiness=float("inf")), 9),
        (ServingOptions(duration=10, max_concurrency=2, num_prompts=4), 4),
    ],
)
def test_a_duration_ends_the_sending_and_not_what_runs(
    options: ServingOptions, number: int
) -> None:
    run = play(options, ScriptedServer())
    assert len(run.records) == number
    assert all(record.num_tokens == 4 for record in run.records)


def test_a_failed_request_is_kept_and_ends_nothing() -> None:
    server = ScriptedServer(fails=lambda index: "no room" if index == 1 else "")
    run = play(ServingOptions(num_prompts=3), server)
    assert sorted(record.error for record in run.records) == ["", "", "no room"]
    assert (run.num_failed, run.num_tokens) == (1, 8)
    failed = next(record for record in run.records if record.error)
    assert failed.latency_s == pytest.approx(4.0)


def test_an_answer_without_a_token_has_failed() -> None:
    [record] = play(ServingOptions(num_prompts=1), ScriptedServer(num_tokens=0)).records
    assert record.error == "the answer ended without a token"


def test_a_prompt_may_say_how_long_its_answer_is(tmp_path: object) -> None:
    file = tmp_path / "prompts.jsonl"  # type: ignore[operator]
    file.write_text('{"prompt": "a", "max_tokens": 7}\n{"prompt": "b"}\n', "utf-8")
    server = ScriptedServer()
    play(ServingOptions(prompts=file, max_tokens=9), server)
    assert [(prompt.text, most) for _, prompt, most in server.asked] == [("a", 7), ("b", 9)]


def test_an_interrupted_load_keeps_what_was_over() -> None:
    """Those that run are cancelled and told of nowhere."""
    server = ScriptedServer()
    run = ServingRun(ServingOptions(num_prompts=10, max_concurrency=2), server)

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
    run = ServingRun(ServingOptions(num_warmups=5, max_concurrency=2, num_prompts=1), server)
    run_virtually(run.warm_up())
    assert (len(server.asked), server.most_running, run.records) == (5, 2, [])
    broken = ServingRun(ServingOptions(num_warmups=1), ScriptedServer(fails=lambda _: "HTTP 401"))
    with pytest.raises(Unavailable, match="a warm-up request failed: HTTP 401"):
        run_virtually(broken.warm_up())


def test_a_bug_of_ours_is_no_failed_request() -> None:
    class Broken:
        async def answer(self, prompt: BenchPrompt, max_tokens: int, heard: Heard) -> Answer:
            raise InvariantError("a bug")

    run = ServingRun(ServingOptions(num_prompts=3), Broken())
    with pytest.raises(InvariantError, match="a bug"):
        run_virtually(run.measure())


def test_a_late_event_loop_is_noticed() -> None:
    """Which makes all times too long."""
    import time

    class Busy:
        async def answer(self, prompt: BenchPrompt, max_tokens: int, heard: Heard) -> Answer:
            await asyncio.sleep(0.06)
            time.sleep(0.15)  # noqa: ASYNC251 (a client that computes)
            heard.chunk(1)
            await asyncio.sleep(0.05)
            return Answer(1, 1)

    run = ServingRun(ServingOptions(num_prompts=1), Busy())
    asyncio.run(run.measure())
    assert max(run.lags_s) > 0.1
