"""The load generator of `bench overhead`'s queueing half: verify rounds straight to one target.

Two sessions ask again as soon as they are answered, so that the target's steps follow each other
without a pause; two more, the probes, ask at random times, and only theirs are measured. What is
asked when a step ends would always find the target at the same place.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.errors import Unavailable
from outrider.messages import RoundHead, VerdictReply, VerifyAnswer, VerifyItem
from outrider.speculation.proposal import SealedProposal
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.tokens import EMPTY_DIGEST, TokenSequence
from outrider.transport.grpc_link import target_link
from outrider.transport.link import Link

from .measurement import Progress
from .overhead_canned import canned_proposal
from .overhead_clocks import now_ns
from .role_process import RoleProcess

NUM_BACKGROUND: Final = 2
NUM_PROBES: Final = 2
"""Sessions of each kind."""
PREFIX_TOKENS: Final = 64
"""Held by every session; each round appends one more and is then thrown away."""
NUM_DRAFT_TOKENS: Final = 8
WARM_UP_ANSWERS: Final = 8
"""Of each session, not measured."""
PAUSE_S_MAX: Final = 0.05
"""A probe asks again after a time between 0 and this: more than a step."""
ANSWER_TIMEOUT_S: Final = 60.0
DESCRIBE_TIMEOUT_S: Final = 60.0
_PARAMS: Final = SamplingParams(temperature=1.0)
_TOKEN_ID: Final = 7


@dataclass(frozen=True, slots=True)
class QueueTimes:
    """What the probes saw, ms; one entry a probe."""

    receive_to_queue_ms: tuple[float, ...]
    """From the sender's stamp to the place in the target's queue."""
    verdict_to_wire_ms: tuple[float, ...]
    """From the end of the step, on its thread, to the decoded answer in the sender's process."""
    step_ms: tuple[float, ...]


class Asker:
    """One session that asks the same target for verdicts, one at a time."""

    def __init__(
        self, index: int, link: Link[VerifyItem, VerifyAnswer], proposal: SealedProposal
    ) -> None:
        self.session_id = f"{index:032x}"
        self._link = link
        self._proposal = proposal
        self._prefix = TokenSequence(tuple(range(1, PREFIX_TOKENS + 1)))
        self._held = 0
        self._round = 0
        self.sent_ns: dict[int, int] = {}
        self.heard_ns: dict[int, int] = {}
        self.step_ms: dict[int, float] = {}
        self._waiter: asyncio.Future[VerifyAnswer] | None = None

    def hear(self, answer: VerifyAnswer) -> None:
        """An answer to this session."""
        self.heard_ns[answer.key.round] = now_ns()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(answer)

    async def ask(self) -> None:
        """One round. Raises `Unavailable` where the target does not give a verdict."""
        self._round += 1
        self._waiter = asyncio.get_running_loop().create_future()
        item = self._item()
        self.sent_ns[self._round] = now_ns()
        self._link.send(item)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = await self._waiter
        if not isinstance(answer, VerdictReply):
            raise Unavailable(f"the target gave no verdict but {answer}")
        self.step_ms[self._round] = answer.compute_ms
        self._held = PREFIX_TOKENS

    def _item(self) -> VerifyItem:
        held = self._held
        head = RoundHead(
            session_id=self.session_id,
            tenant="",
            epoch=1,
            round=self._round,
            base_length=held,
            prefix_digest=self._prefix.digest(held) if held else EMPTY_DIGEST,
            append=(*self._prefix.since(held), _TOKEN_ID),
            prompt_length=PREFIX_TOKENS,
            rule=Rule.TOKEN,
            seed=self._round,
            sampling=_PARAMS,
            sampling_hash=_PARAMS.hash(),
        )
        return VerifyItem(head, self._proposal)


async def generate_load(process: RoleProcess, num_probes: int, progress: Progress) -> QueueTimes:
    """Measures `num_probes` messages to the target in `process`."""
    link = target_link(process.address)
    try:
        vocab_size = (await link.describe(DESCRIBE_TIMEOUT_S)).vocab_size
        proposal = canned_proposal(NUM_DRAFT_TOKENS, vocab_size)
        askers = [Asker(i, link, proposal) for i in range(1, NUM_BACKGROUND + NUM_PROBES + 1)]
        by_id = {asker.session_id: asker for asker in askers}
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_lost(error: Exception) -> None:
            if not lost.done():
                lost.set_exception(error)

        link.listen(lambda answer: by_id[answer.key.session_id].hear(answer), on_lost)
        background, probes = askers[:NUM_BACKGROUND], askers[NUM_BACKGROUND:]
        await _run(background, probes, num_probes, lost, progress)
        stamps = await process.seen()
    finally:
        await link.close()
    return _join(probes, stamps)


async def _run(
    background: Sequence[Asker],
    probes: Sequence[Asker],
    num_probes: int,
    lost: asyncio.Future[None],
    progress: Progress,
) -> None:
    """Ends when the probes have asked often enough; raises what any session or the link does."""
    for asker in (*background, *probes):
        await asker.ask()  # The prefix: a longer step, and none that is measured.
    each = -(-num_probes // len(probes)) + WARM_UP_ANSWERS
    busy = [asyncio.ensure_future(_ask_forever(asker)) for asker in background]
    asking = [
        asyncio.ensure_future(_probe(asker, index, each, progress))
        for index, asker in enumerate(probes)
    ]
    finished = asyncio.gather(*asking)
    waiting: list[asyncio.Future[Any]] = [finished, lost, *busy]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in (lost, *busy):
            if task.done():
                task.result()
        await finished
    finally:
        lost.cancel()
        for task in (*busy, *asking):
            task.cancel()
        await asyncio.gather(*busy, *asking, return_exceptions=True)


async def _ask_forever(asker: Asker) -> None:
    while True:
        await asker.ask()


async def _probe(asker: Asker, index: int, number: int, progress: Progress) -> None:
    pauses = random.Random(index)  # noqa: S311 (times, not secrecy)
    for done in range(number):
        if index == 0 and done % 50 == 0:
            progress(f"probe {done} of {number}")
        await asyncio.sleep(pauses.uniform(0.0, PAUSE_S_MAX))
        await asker.ask()


def _join(probes: Sequence[Asker], stamps: dict[str, Any]) -> QueueTimes:
    """The probes' own stamps with those of the target's process."""
    queued = {(session_id, index): ns for session_id, index, ns in stamps["queued_ns"]}
    judged = {(session_id, index): ns for session_id, index, ns in stamps["judged_ns"]}
    received, answered, steps = [], [], []
    for asker in probes:
        for index, sent in asker.sent_ns.items():
            if index <= WARM_UP_ANSWERS + 1:
                continue
            key = (asker.session_id, index)
            received.append((queued[key] - sent) / 1e6)
            answered.append((asker.heard_ns[index] - judged[key]) / 1e6)
            steps.append(asker.step_ms[index])
    return QueueTimes(tuple(received), tuple(answered), tuple(steps))
