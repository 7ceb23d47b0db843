"""Both services on engines with few pages: long prompts in parts, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from rounds import GREEDY, Replica, ask, make_head, session_name
from toy_engine import ToyEngine

from outrider.clock import run_virtually
from outrider.errors import error_from_code
from outrider.limits import SILENT_SESSION_MS
from outrider.messages import (
    DraftItem,
    Refused,
    Resync,
    VerdictReply,
    VerifyItem,
)
from outrider.speculation.proposal import SealedProposal
from outrider.speculation.sampling_params import Rule

PROMPT = (1, 2, 3)
STEP_S = 0.01


def replica(role: str, engine: ToyEngine, max_num_batched_tokens: int = 512) -> Replica:
    return Replica(
        role, engine, STEP_S, max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens
    )


class Writer:
    """Writes one session greedily, as a coordinator would: follows `Resync`, repeats what was
    refused for want of room, and releases the session at its end."""

    def __init__(self, at: Replica, session: int, prompt: Sequence[int], num_tokens: int) -> None:
        self._at = at
        self._session = session
        self._num_tokens = num_tokens
        self._random = random.Random(session)
        self.tokens = list(prompt)
        self._link, self._listener = at.connect()

    async def write(self) -> list[int]:
        link, listener = self._link, self._listener
        held, round_index = 0, 0
        end = len(self.tokens) + self._num_tokens
        while len(self.tokens) < end:
            head = make_head(
                self.tokens, held, session=self._session, round_index=round_index,
                rule=Rule.GREEDY, sampling=GREEDY,
            )  # fmt: skip
            drafted = tuple(self._random.randrange(8) for _ in range(self._random.randint(0, 3)))
            drafted = drafted[: end - len(self.tokens) - 1]
            answer = await ask(link, listener, VerifyItem(head, SealedProposal(drafted)))
            if isinstance(answer, Resync):
                held = answer.cached_length
                continue
            assert isinstance(answer, VerdictReply), answer
            verdict = answer.verdict
            num = next((i for i, p in enumerate(verdict.accept_probability) if p < 1), len(drafted))
            held = min(len(self.tokens) + num, answer.cached_length)
            self.tokens += [*drafted[:num], verdict.correction[num]]
            round_index += 1
            if self._random.random() < 0.2:
                await asyncio.sleep(self._random.expovariate(20))
        link.release(session_name(self._session), 1)
        return self.tokens


def written_alone(prompt: Sequence[int], num_tokens: int) -> list[int]:
    async def main() -> list[int]:
        at = replica("target", ToyEngine())
        tokens = await Writer(at, 1, prompt, num_tokens).write()
        await at.close()
        return tokens

    return run_virtually(main())


def run_load(seed: int) -> int:
    """4 to 14 sessions on a pool that holds the longest of them and little more. Each text is what
    the session would have got alone, and at the end every page is back. How many were preempted."""
    draw = random.Random(seed)
    loads = [
        (tuple(draw.randrange(8) for _ in range(draw.choice((2, 5, 20, 45)))), draw.randint(1, 15))
        for _ in range(draw.randint(4, 14))
    ]

    async def main() -> tuple[list[list[int]], int]:
        at = replica("target", ToyEngine(num_pages=draw.randint(16, 20)), 64)
        writers = [
            Writer(at, number, prompt, num_tokens)
            for number, (prompt, num_tokens) in enumerate(loads, start=1)
        ]

        async def after(writer: Writer, delay_s: float) -> list[int]:
            await asyncio.sleep(delay_s)
            return await writer.write()

        async with asyncio.timeout(100.0):  # Virtual: some 10,000 steps.
            texts = await asyncio.gather(
                *(after(writer, draw.uniform(0, 0.2)) for writer in writers)
            )
        await asyncio.sleep(0.1)
        counts = at.engine.page_counts()
        assert counts.num_free + counts.num_evictable == counts.num_pages
        await at.close()
        return texts, at.service._worker.figures.num_preemptions

    texts, num_preemptions = run_virtually(main())
    assert texts == [written_alone(prompt, num_tokens) for prompt, num_tokens in loads]
    return num_preemptions


def test_random_loads_on_a_tiny_pool_end_with_every_session_done() -> None:
    """Seeds 0..29: no deadlock and no livelock, though sessions are preempted again and again."""
    preemptions = {seed: run_load(seed) for seed in range(30)}
    assert sum(preemptions.values()) > 100, preemptions


def test_a_session_that_fell_silent_keeps_its_pages_from_nobody() -> None:
    """Its release was lost. Whoever needs its pages waits for as long as silence is patience, and
    not longer; it is asked for what it lacks when it comes back."""

    async def main() -> None:
        at = replica("target", ToyEngine(num_pages=4))
        link, listener = at.connect()
        await ask(link, listener, VerifyItem(make_head([1] * 10)))
        start = asyncio.get_running_loop().time()
        answer = await ask(link, listener, VerifyItem(make_head([2] * 10, session=2)))
        waited_s = asyncio.get_running_loop().time() - start
        assert isinstance(answer, VerdictReply)
        assert 1.0 <= waited_s / (SILENT_SESSION_MS / 1e3) < 1.2
        link.release(session_name(2), 1)
        back = await ask(link, listener, VerifyItem(make_head([1] * 11, 10, round_index=1)))
        assert isinstance(back, Resync)
        await at.close()

    run_virtually(main())


async def test_a_draft_that_finds_no_pages_proposes_nothing_and_delays_nobody() -> None:
    """The older session keeps drafting; the younger's rounds go on without; when the older has
    gone, the younger is drafted for again."""
    at = replica("draft", ToyEngine(num_pages=4))
    link, listener = at.connect()
    first = await ask(link, listener, DraftItem(make_head([1] * 9), 3))
    assert len(first.proposal) == 3
    none = await ask(link, listener, DraftItem(make_head([2] * 7, session=2), 3))
    assert (none.proposal, none.base_length, none.cached_length) == (SealedProposal(()), 7, 0)
    link.release(session_name(1), 1)
    again = await ask(link, listener, DraftItem(make_head([2] * 8, session=2, round_index=1), 3))
    assert len(again.proposal) == 3
    await at.close()


async def test_a_drafts_long_prompt_is_run_in_parts_and_drafts_the_same() -> None:
    prompt = [(5 * i) % 8 for i in range(150)]
    replies = []
    for max_tokens in (512, 64):
        at = replica("draft", ToyEngine(max_model_len=200), max_tokens)
        replies.append(await ask(*at.connect(), DraftItem(make_head(prompt), 4)))
        assert max(map(sum, at.engine.counts)) <= max_tokens
        await at.close()
    assert replies[0].proposal == replies[1].proposal
    assert len(replies[0].proposal) == 4


async def test_what_can_never_fit_is_refused_at_once() -> None:
    at = replica("target", ToyEngine(max_model_len=16, num_pages=4))
    over = await ask(*at.connect(), VerifyItem(make_head([1] * 17)))
    assert isinstance(over, Refused)
    error = error_from_code(over.code, over.message)
    assert error.message.startswith("head.append: 17 committed")
    assert "16" in error.message
    await at.close()
