"""The turns of sides, their results, and requests by gRPC."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.bench.clients import GrpcClient
from outrider.bench.measurement import Completion, Contestant, bench_request, measure
from outrider.bench.prompts import WARM_UP_PROMPTS, BenchPrompt
from outrider.errors import OutriderError, Unavailable
from outrider.interfaces.request import (
    ChatMessage,
    Event,
    Finished,
    GenerateRequest,
    Metrics,
    Tokens,
    Usage,
)
from outrider.limits import SEED_MAX
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule
from tests.support.bench_sides import ScriptedSide

pytestmark = pytest.mark.virtual
PROMPTS = tuple(BenchPrompt(f"p{index}", "a") for index in range(5))
WARM_UPS = tuple(prompt.text for prompt in WARM_UP_PROMPTS)


def pair(side: ScriptedSide, concurrency: int = 1, seed: int = 0) -> list[Contestant]:
    plain = bench_request("", 64, rule=Rule.GREEDY, seed=seed, num_draft_tokens=0)
    return [
        Contestant("plain", side, plain, concurrency),
        Contestant("speculative", side, replace(plain, num_draft_tokens=8), concurrency),
    ]


async def test_a_pair_is_decoded_back_to_back_in_alternating_order() -> None:
    """Two warm-up prompts come first. Both sides use the same seed for a prompt."""
    side = ScriptedSide(lambda request: (10, 1.0 if request.num_draft_tokens else 2.0))
    results = await measure(PROMPTS[:3], pair(side, seed=SEED_MAX), print)
    seeds = [found.seed for found in side.calls]
    assert seeds == [SEED_MAX - 1, SEED_MAX - 2] * 2 + [SEED_MAX, SEED_MAX, 0, 0, 1, 1]
    assert [found.max_tokens for found in side.calls] == [32] * 4 + [64] * 6
    assert side.log == [
        *((text, kind) for kind in ("plain", "drafted") for text in WARM_UPS),
        ("p0", "plain"),
        ("p0", "drafted"),
        ("p1", "drafted"),
        ("p1", "plain"),
        ("p2", "plain"),
        ("p2", "drafted"),
    ]
    assert [results[name].seconds for name in ("plain", "speculative")] == [6.0, 3.0]
    assert {len(result.completions) for result in results.values()} == {3}
    assert side.most_running == 1


async def test_several_at_a_time_are_bounded_keep_their_order_and_share_wall_time() -> None:
    """Later prompts end sooner here. Each side comes first for every second prompt."""
    side = ScriptedSide(
        lambda request: (
            (10 + int(request.prompt[1:]), 9.0) if request.prompt[0] == "p" else (1, 1.0)
        )
    )
    results = await measure(PROMPTS, pair(side, concurrency=3), print)
    assert side.most_running == 3
    for result in results.values():
        assert [len(done.token_ids) for done in result.completions] == [10, 11, 12, 13, 14]
        # There are two turns, of 3 and of 2 prompts that run at the same time.
        assert result.seconds == 18.0
        assert [turn.num_tokens for turn in result.turns] == [36, 24]
    log = [(text, kind) for text, kind in side.log if text[0] == "p"]
    assert [kind for _, kind in log] == ["plain"] * 3 + ["drafted"] * 5 + ["plain"] * 2
    assert [text for text, _ in log] == ["p0", "p2", "p4"] * 2 + ["p1", "p3"] * 2


async def test_with_many_prompts_a_turn_has_two_for_each_request_that_runs() -> None:
    prompts = tuple(BenchPrompt(f"p{index}", "a") for index in range(13))
    side = ScriptedSide(lambda request: (10, 1.0))
    results = await measure(prompts, pair(side, concurrency=2), print)
    for result in results.values():
        assert [turn.num_tokens for turn in result.turns] == [50, 40, 40]
        assert [turn.seconds for turn in result.turns] == [3.0, 2.0, 2.0]


@pytest.mark.parametrize(("time_s", "num"), [(0.0, 1), (5.9, 1), (6.1, 2), (7.0, 3), (99.0, 5)])
async def test_no_turn_begins_that_would_end_too_late(time_s: float, num: int) -> None:
    """The warm-up takes 4 s. A repetition takes 1 s, and the second one 0.5 s. Each is expected to
    take as long as the longest before it."""
    side = ScriptedSide(
        lambda request: (
            10,
            0.25 if request.prompt == "p1" else 0.5 if request.prompt[0] == "p" else 1.0,
        )
    )
    ends_s = asyncio.get_running_loop().time() + time_s
    lines: list[str] = []
    results = await measure(PROMPTS, pair(side), lines.append, ends_s=ends_s)
    assert {len(found.completions) for found in results.values()} == {num}
    assert (f"the time is up after {num} of 5 repetitions" in lines) == (num < 5)


@pytest.mark.parametrize(
    ("time_s", "num", "lasts_s"),
    [(0.5, 0, 2.0), (4.5, 0, 5.0), (5.5, 1, 6.0), (6.0, 1, 6.0), (6.5, 1, 7.0), (7.5, 2, 8.0)],
)
async def test_a_repetition_is_omitted_if_the_time_is_up_before_it_ends(
    time_s: float, num: int, lasts_s: float
) -> None:
    """The warm-up of each side takes 2 s, and each turn 1 s. A turn that has begun may end."""
    side = ScriptedSide(lambda request: (10, 1.0))
    clock = asyncio.get_running_loop().time
    began_s, lines = clock(), list[str]()
    results = await measure(PROMPTS, pair(side), lines.append, up_s=began_s + time_s)
    assert clock() - began_s == lasts_s
    assert [len(found.turns) for found in results.values()] == ([num] * 2 if num else [])
    assert lines[-1] == f"the time is up after {num} of 5 repetitions"


@pytest.mark.parametrize(("hanging", "ends_s"), [(WARM_UPS[0], 200.0), ("p0", 200.0), ("p0", 3.0)])
async def test_a_side_that_hangs_is_late(hanging: str, ends_s: float) -> None:
    """Its time is that of the level, and 120 s more. Other sides go on."""

    def script(request: GenerateRequest) -> tuple[int, float]:
        return 10, 1e5 if request.num_draft_tokens and request.prompt == hanging else 1.0

    clock, dropped = asyncio.get_running_loop().time, list[tuple[str, float]]()
    began_s = clock()

    def drops(name: str, error: OutriderError) -> bool:
        dropped.append((f"{name}: {error.message}", clock() - began_s))
        return True

    results = await measure(
        PROMPTS[:1], pair(ScriptedSide(script)), print, drops, ends_s=began_s + ends_s
    )
    why = "speculative did not end its turn in the time of the benchmark"
    assert dropped == [(f"speculative: {why}", max(ends_s, 5.0) + 120.0)]
    assert list(results) == ["plain"]
    with pytest.raises(Unavailable, match=why):
        await measure(PROMPTS[:1], pair(ScriptedSide(script)), print, ends_s=clock())


async def test_a_side_that_is_warm_is_not_warmed_up() -> None:
    side = ScriptedSide(lambda request: (10, 1.0))
    plain, drafted = pair(side)
    await measure(PROMPTS[:1], [plain, replace(drafted, is_warm=True)], print)
    assert [kind for text, kind in side.log if text in WARM_UPS] == ["plain"] * len(WARM_UPS)


async def test_a_library_that_takes_all_prompts_of_a_turn_is_timed_by_the_last() -> None:
    """The side decodes one prompt after the other. Its times count from the start of the first."""

    class Library(ScriptedSide):
        async def generate_all(
            self, requests: Sequence[GenerateRequest], concurrency: int
        ) -> list[Completion]:
            return [Completion((1,), 0.0, 2.0 * place) for place, _ in enumerate(requests, start=1)]

    side = ScriptedSide(lambda request: (1, 1.0))
    sides = pair(side, concurrency=2)
    library = Contestant("library", Library(side.script), sides[0].request, 1)
    results = await measure(PROMPTS, [*sides, library], print)
    assert results["library"].seconds == 2.0 * len(PROMPTS)


@pytest.mark.parametrize("failing", [WARM_UPS[1], "p2"])
async def test_a_side_that_may_fail_is_left_out(failing: str) -> None:
    def script(request: GenerateRequest) -> tuple[int, float]:
        if request.prompt == failing and request.num_draft_tokens:
            raise Unavailable("the library broke")
        return 10, 1.0

    dropped: list[str] = []

    def drops(name: str, error: OutriderError) -> bool:
        dropped.append(f"{name}: {error.message}")
        return True

    results = await measure(PROMPTS, pair(ScriptedSide(script)), print, drops)
    assert dropped == ["speculative: the library broke"]
    assert list(results) == ["plain"]
    assert len(results["plain"].completions) == len(PROMPTS)


class RecordingClient:
    """Replaces `outrider.client.Client`."""

    def __init__(self, finish_reason: FinishReason = FinishReason.LENGTH) -> None:
        self.finish_reason = finish_reason
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        await asyncio.sleep(0.5)
        yield Tokens(0, (5, 6), "", (Origin.BONUS,) * 2, ())
        await asyncio.sleep(0.25)
        yield Tokens(2, (7,), "", (Origin.BONUS,), ())
        yield Finished(self.finish_reason, Usage(4, 3), Metrics(2, 9, 1, 1.5, 3.0, 100.0))


@pytest.mark.parametrize("raw", [False, True])
async def test_a_request_is_sent_as_a_chat_unless_raw(raw: bool) -> None:
    asked = bench_request("Hello.", 33, 0.5, rule=Rule.BLOCK, seed=4, num_draft_tokens=8)
    client: Any = RecordingClient()
    done = await GrpcClient(client, raw=raw).generate(asked)
    chat = replace(asked, prompt=(ChatMessage("user", "Hello."),))
    assert client.requests == [asked if raw else chat]
    assert (done.token_ids, done.prompt_tokens) == ((5, 6, 7), 4)
    assert (done.num_rounds, done.num_draft_tokens, done.num_accepted_draft_tokens) == (2, 9, 1)
    assert (*done.chunk_s, done.seconds) == pytest.approx((0.5, 0.75, 0.75))
    client = RecordingClient(FinishReason.DEADLINE)
    with pytest.raises(Unavailable, match="deadline"):
        await GrpcClient(client, raw=True).generate(asked)
