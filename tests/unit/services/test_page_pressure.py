"""Both services on engines with few pages: long prompts in parts, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rounds import GREEDY, PATIENCE_S, Listener, ask, make_head, session_name
from toy_engine import ToyEngine

from draft_service.service import DraftService
from outrider.clock import run_virtually
from outrider.errors import error_from_code
from outrider.limits import SILENT_SESSION_MS
from outrider.messages import (
    DraftItem,
    ProposalReply,
    Refused,
    Resync,
    VerdictReply,
    VerifyItem,
)
from outrider.replica.scheduler import InlineExecutor
from outrider.speculation.proposal import SealedProposal
from outrider.speculation.sampling_params import Rule
from outrider.transport.link import MemoryLink
from target_service.service import TargetService

PROMPT = (1, 2, 3)
STEP_S = 0.01


class Setting:
    """A service over a toy engine, and links to it."""

    def __init__(
        self,
        role: str,
        engine: ToyEngine,
        max_num_batched_tokens: int = 512,
        step_s: float = STEP_S,
    ) -> None:
        self.engine = engine
        make: Any = TargetService if role == "target" else DraftService.with_model
        self.service: Any = make(
            engine,
            InlineExecutor(lambda: step_s),
            max_num_seqs=8,
            max_num_batched_tokens=max_num_batched_tokens,
        )

    def connect(self) -> tuple[MemoryLink[Any, Any], Listener]:
        link: MemoryLink[Any, Any] = MemoryLink(self.service)
        return link, Listener(link)

    async def close(self) -> None:
        """Checks that nobody has left anything behind."""
        self.service.check_integrity()
        self.engine.check_integrity()
        await self.service.close()


class Writer:
    """Writes one session greedily, as a coordinator would: follows `Resync`, repeats what was
    refused for want of room, and releases the session at its end."""

    def __init__(self, at: Setting, session: int, prompt: Sequence[int], num_tokens: int) -> None:
        self._at = at
        self._session = session
        self._num_tokens = num_tokens
        self._random = random.Random(session)
        self.tokens = list(prompt)
        self.num_resyncs = 0
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
                self.num_resyncs += 1
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

    def cancel(self) -> None:
        """Nobody wants the text any more: the session is released, or its stream is gone."""
        if self._random.random() < 0.5:
            self._link.release(session_name(self._session), 1)
        else:
            self._link.sever(ConnectionError("cut"))


def written_alone(prompt: Sequence[int], num_tokens: int) -> list[int]:
    async def main() -> list[int]:
        at = Setting("target", ToyEngine())
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
        at = Setting("target", ToyEngine(num_pages=draw.randint(16, 20)), 64)
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


def test_every_page_comes_back_after_a_thousand_sessions() -> None:
    """Many at a time on few pages, so that some are preempted. Nearly half are cancelled: as they
    wait, amid their prompt, or between rounds."""
    draw = random.Random(11)
    num_cancelled = 0

    async def live(at: Setting, number: int) -> None:
        nonlocal num_cancelled
        prompt = [draw.randrange(2) for _ in range(draw.choice((2, 5, 20, 45, 60)))]
        num_tokens, cancel_at = draw.randint(1, 6), draw.choice((None, draw.uniform(0, 0.3)))
        await asyncio.sleep(draw.uniform(0, 20.0))
        writer = Writer(at, number, prompt[: 63 - num_tokens], num_tokens)
        try:
            async with asyncio.timeout(cancel_at):
                await writer.write()
        except TimeoutError:
            num_cancelled += 1
            writer.cancel()

    async def main() -> Setting:
        at = Setting("target", ToyEngine(num_pages=24), 64)
        await asyncio.gather(*(live(at, number) for number in range(1, 1001)))
        await asyncio.sleep(0.1)
        counts = at.engine.page_counts()
        assert counts.num_free + counts.num_evictable == counts.num_pages
        whole = make_head([1] * 64, session=1001)
        assert isinstance(await ask(*at.connect(), VerifyItem(whole)), VerdictReply)
        await at.close()
        return at

    at = run_virtually(main())
    assert num_cancelled > 300
    assert at.service._worker.figures.num_preemptions > 100


async def test_a_long_prompt_is_run_beside_rounds_and_answered_once() -> None:
    """150 tokens in steps of 64, two of which another session shares: the same verdict as in one
    step."""
    prompt = [(7 * i) % 8 for i in range(150)]
    whole = Setting("target", ToyEngine(max_model_len=200))
    parted = Setting("target", ToyEngine(max_model_len=200), 64)
    item = VerifyItem(make_head(prompt), SealedProposal((4, 5)))
    expected = await ask(*whole.connect(), item)
    link, listener = parted.connect()
    link.send(item)
    tokens = list(PROMPT)
    for round_index in range(3):
        other = make_head(tokens, len(tokens) - 1 if round_index else 0, session=2,
                          round_index=round_index)  # fmt: skip
        answer = await ask(link, listener, VerifyItem(other))
        if answer.key.session_id == session_name(2):
            tokens.append(answer.verdict.correction[0])
    answers = await listener.wait(4)
    (mine,) = [answer for answer in answers if answer.key.session_id == session_name(1)]
    assert mine.verdict == expected.verdict
    assert mine.cached_length == 152
    assert max(map(sum, parted.engine.counts)) <= 64
    assert sum(len(batch) == 2 for batch in parted.engine.batches) >= 2
    assert sum(map(sum, parted.engine.counts)) == 152 + 5
    for setting in (whole, parted):
        await setting.close()


async def test_a_release_amid_a_prompt_frees_its_pages_within_a_step() -> None:
    at = Setting("target", ToyEngine(max_model_len=400), 64)
    link, listener = at.connect()
    link.send(VerifyItem(make_head([1] * 300)))
    while not at.engine.batches:
        await asyncio.sleep(STEP_S / 10)
    link.release(session_name(1), 1)
    (answer,) = await listener.wait(1)
    assert isinstance(answer, Refused)
    await asyncio.sleep(2 * STEP_S)
    assert at.engine.length(session_name(1)) == 0
    assert len(at.engine.batches) <= 2
    await at.close()


async def test_a_stream_that_closes_amid_a_prompt_leaves_its_pages_to_others() -> None:
    """Within a step, and without a release."""
    at = Setting("target", ToyEngine(max_model_len=400), 64)
    link, listener = at.connect()
    link.send(VerifyItem(make_head([1] * 300)))
    while not at.engine.batches:
        await asyncio.sleep(STEP_S / 10)
    link.sever(ConnectionError("cut"))
    await listener.wait(num_lost=1)
    await asyncio.sleep(3 * STEP_S)
    counts = at.engine.page_counts()
    assert counts.num_free + counts.num_evictable == counts.num_pages
    assert at.engine.length(session_name(1)) > 0
    await at.close()


async def test_a_second_request_runs_only_what_its_prefix_does_not_share() -> None:
    """Of 40 tokens the first 36, nine whole pages, are there, as soon as the first request's step
    has run and also after its end; of another tenant none is."""
    at = Setting("target", ToyEngine())
    link, listener = at.connect()
    shared = [(3 * i) % 8 for i in range(36)]
    await ask(link, listener, VerifyItem(make_head([*shared, 1, 2, 3, 4])))
    await ask(link, listener, VerifyItem(make_head([*shared, 5, 6, 7, 0], session=2)))
    link.release(session_name(1), 1)
    link.release(session_name(2), 1)
    reply = await ask(link, listener, VerifyItem(make_head([*shared, 6, 6, 6, 6], session=3)))
    assert isinstance(reply, VerdictReply)
    head = replace(make_head([*shared, 6, 6, 6, 6], session=4), tenant="another")
    await ask(link, listener, VerifyItem(head))
    assert at.engine.counts == [[40], [4], [4], [40]]
    await at.close()


def test_a_session_that_fell_silent_keeps_its_pages_from_nobody() -> None:
    """Its release was lost. Whoever needs its pages waits for as long as silence is patience, and
    not longer; it is asked for what it lacks when it comes back."""

    async def main() -> None:
        at = Setting("target", ToyEngine(num_pages=4))
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


def test_a_silent_sessions_pages_are_found_while_others_go_on() -> None:
    """Two younger sessions play their rounds in turn, so that no step comes to nothing."""

    async def play(at: Setting, session: int, until: Listener) -> int:
        link, listener = at.connect()
        num_rounds = 0
        while not until.answers:
            head = make_head((3, 3), min(1, num_rounds), session=session, round_index=num_rounds)
            assert isinstance(await ask(link, listener, VerifyItem(head)), VerdictReply)
            num_rounds += 1
        return num_rounds

    async def main() -> None:
        at = Setting("target", ToyEngine(num_pages=6))
        await ask(*at.connect(), VerifyItem(make_head([1] * 10)))
        link, waiting = at.connect()
        start = asyncio.get_running_loop().time()
        link.send(VerifyItem(make_head([2] * 16, session=2)))
        first = asyncio.create_task(play(at, 3, waiting))
        await asyncio.sleep(1.5 * STEP_S)
        async with asyncio.timeout(PATIENCE_S):
            num_rounds = await play(at, 4, waiting) + await first
        waited_s = asyncio.get_running_loop().time() - start
        assert isinstance(waiting.answers[0], VerdictReply)
        assert 0.95 <= waited_s / (SILENT_SESSION_MS / 1e3) < 1.2
        assert num_rounds > 0.95 * waited_s / STEP_S
        await at.close()

    run_virtually(main())


def test_a_silent_sessions_pages_are_found_for_a_draft() -> None:
    """Which makes nobody wait: the younger session's rounds go on, and are drafted for once the
    older one has said nothing for long."""

    async def main() -> None:
        at = Setting("draft", ToyEngine(num_pages=4))
        link, listener = at.connect()
        await ask(link, listener, DraftItem(make_head([1] * 9), 3))
        start, num_drafted = asyncio.get_running_loop().time(), []
        while not any(num_drafted) and len(num_drafted) < 100:
            head = make_head([2] * 7, session=2, round_index=len(num_drafted))
            num_drafted.append(len((await ask(link, listener, DraftItem(head, 3))).proposal))
            await asyncio.sleep(0.1)
        waited_s = asyncio.get_running_loop().time() - start
        assert num_drafted[-1] == 3
        assert 0.95 <= waited_s / (SILENT_SESSION_MS / 1e3) < 1.3
        await at.close()

    run_virtually(main())


def test_a_session_that_was_just_answered_is_not_silent() -> None:
    """Its rounds last longer than silence is patience, but after each answer it speaks in time: so
    the session that waits for its pages does not get them."""

    async def main() -> None:
        at = Setting("target", ToyEngine(num_pages=4), step_s=0.6 * SILENT_SESSION_MS / 1e3)
        link, listener = at.connect()
        tokens = [1] * 5
        link.send(VerifyItem(make_head(tokens)))
        await asyncio.sleep(0.1)
        other, unanswered = at.connect()
        other.send(VerifyItem(make_head([2] * 10, session=2)))
        for round_index in range(1, 5):
            answer = (await listener.wait(round_index))[-1]
            assert isinstance(answer, VerdictReply)
            tokens.append(answer.verdict.correction[0])
            await asyncio.sleep(0.7 * SILENT_SESSION_MS / 1e3)
            link.send(VerifyItem(make_head(tokens, len(tokens) - 1, round_index=round_index)))
        assert unanswered.answers == []
        await at.close()

    run_virtually(main())


async def test_a_draft_that_finds_no_pages_proposes_nothing_and_delays_nobody() -> None:
    """The older session keeps drafting; the younger's rounds go on without; when the older has
    gone, the younger is drafted for again."""
    at = Setting("draft", ToyEngine(num_pages=4))
    link, listener = at.connect()
    first = await ask(link, listener, DraftItem(make_head([1] * 9), 3))
    assert len(first.proposal) == 3
    none = await ask(link, listener, DraftItem(make_head([2] * 7, session=2), 3))
    assert (none.proposal, none.base_length, none.cached_length) == (SealedProposal(()), 7, 0)
    link.release(session_name(1), 1)
    again = await ask(link, listener, DraftItem(make_head([2] * 8, session=2, round_index=1), 3))
    assert len(again.proposal) == 3
    await at.close()


async def test_an_older_session_has_room_for_all_that_it_drafts() -> None:
    """Of its 4 draft tokens 3 are run: they take a page, which the younger session loses."""
    at = Setting("draft", ToyEngine(num_pages=4))
    link, listener = at.connect()
    await ask(link, listener, DraftItem(make_head([1] * 8), 0))
    await ask(link, listener, DraftItem(make_head([2] * 8, session=2), 0))
    reply = await ask(link, listener, DraftItem(make_head([1] * 8, 7, round_index=1), 4))
    assert len(reply.proposal) == 4
    assert at.engine.length(session_name(2)) == 0
    await at.close()


async def test_a_drafts_long_prompt_is_run_in_parts_and_drafts_the_same() -> None:
    prompt = [(5 * i) % 8 for i in range(150)]
    replies = []
    for max_tokens in (512, 64):
        at = Setting("draft", ToyEngine(max_model_len=200), max_tokens)
        replies.append(await ask(*at.connect(), DraftItem(make_head(prompt), 4)))
        assert max(map(sum, at.engine.counts)) <= max_tokens
        await at.close()
    assert replies[0].proposal == replies[1].proposal
    assert len(replies[0].proposal) == 4


async def test_a_draft_that_cannot_read_a_part_proposes_nothing() -> None:
    """Token 9 stands far behind the first part, and is not in the draft's vocabulary of 8."""
    at = Setting("draft", ToyEngine(max_model_len=400), 64)
    async with asyncio.timeout(PATIENCE_S):
        reply = await ask(*at.connect(), DraftItem(make_head([*[1] * 150, 9, *[1] * 150]), 4))
    assert isinstance(reply, ProposalReply)
    assert len(reply.proposal) == 0
    await at.close()


async def test_what_can_never_fit_is_refused_at_once() -> None:
    at = Setting("target", ToyEngine(max_model_len=16, num_pages=4))
    over = await ask(*at.connect(), VerifyItem(make_head([1] * 17)))
    assert isinstance(over, Refused)
    error = error_from_code(over.code, over.message)
    assert error.message.startswith("head.append: 17 committed")
    assert "16" in error.message
    await at.close()
