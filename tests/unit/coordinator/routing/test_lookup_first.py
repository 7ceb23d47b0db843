"""A look-up that goes before the model of a draft replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rounds import SeverableLink
from session_links import asked, context_of, session
from toy_engine import ToyEngine
from virtual_time import virtually

from coordinator.routing.draft_client import DraftClient
from coordinator.routing.drafts import Drafted, SessionLookup
from coordinator.routing.replica_pool import ReplicaPool
from draft_service.service import DraftService
from outrider.config import CoordinatorConfig, DraftConfig
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import Guess, NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.errors import LinkLost
from outrider.messages import DraftAnswer, DraftItem, ProposalReply
from outrider.replica.scheduler import InlineExecutor
from outrider.sessions.store import Counters
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

MODEL_TOKENS = 2
HYBRID = DraftConfig(
    model="hybrid:ngram,some/model", hybrid_min_score=0.7, hybrid_model_tokens=MODEL_TOKENS
)
CONFIG = CoordinatorConfig(draft_timeout_ms=10_000, lookup=HYBRID)
PLAIN = SamplingParams()
REPEATS = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6)
NEW = (5, 6, 7, 8, 9, 1, 2, 3)


class Link(SeverableLink[DraftItem, DraftAnswer]):
    """Remembers what was pushed."""

    def listen(self, on_answer: Any, on_lost: Any) -> None:
        self.pushed: list[ProposalReply] = []

        def heard(answer: DraftAnswer) -> None:
            if isinstance(answer, ProposalReply) and answer.assumed:
                self.pushed.append(answer)
            on_answer(answer)

        super().listen(heard, on_lost)


class Side:
    """The draft's side of one session, with a replica over a toy engine."""

    def __init__(
        self, prompt: tuple[int, ...], seed: int = 1, look_ahead: int = 0,
        lookup: Callable[[], Any] = NgramDrafter,
    ) -> None:  # fmt: skip
        self.engine = ToyEngine(vocab_size=16, salt=2)
        executor = InlineExecutor(self.engine.take_step_seconds)
        self.service = DraftService.with_model(self.engine, executor, max_num_seqs=8)
        pool = ReplicaPool("draft")
        self.link = Link(self.service)
        pool.admit("r0", self.link, self.service.describe())
        self.session = session(prompt, Rule.TOKEN, seed=seed)
        self.side = DraftClient(
            pool, context_of(self.session), SessionLookup(lookup(), self.session, PLAIN),
            replace(CONFIG, look_ahead=look_ahead),
        )  # fmt: skip
        self.round_index = 0

    async def propose(self, num_draft_tokens: int, *committed: int) -> Drafted:
        """Of the next round, which begins behind these tokens."""
        if committed:
            self.session.decide(committed, Counters(0, 0, 0))
        self.round_index += 1
        noise = RoundNoise(self.session.record.seed, Rule.TOKEN, self.session.length)
        drafted = await self.side.propose(self.round_index, asked(num_draft_tokens), noise)
        await asyncio.sleep(1)
        self.side.settle(self.session.length)
        return drafted

    async def close(self) -> None:
        self.side.close()
        await self.service.drain()
        self.service.check_integrity()
        await self.service.close()


@virtually
async def test_a_confident_look_up_spares_the_model_which_reads_what_it_missed_later() -> None:
    """A repetition is continued without a message, as long as is asked for. The next round reads
    what was committed meanwhile, and draws as much as the model may; it counts as asked for the
    whole."""
    side = Side(REPEATS)
    copied = await side.propose(5)
    assert copied.proposal.token_ids == (7, 8, 9, 5, 6)
    assert copied.proposal.open().q == (None,) * 5
    assert (copied.source != "fallback", copied.num_asked, side.engine.batches) == (True, 5, [])
    drawn = await side.propose(5, 7, 8, 1)
    assert (drawn.source != "fallback", len(drawn.proposal), drawn.num_asked) == (
        True,
        MODEL_TOKENS,
        5,
    )
    assert None not in drawn.proposal.open().q
    assert side.engine.counts == [[len(REPEATS) + 3], [1]]
    await side.close()


@virtually
async def test_the_choice_is_made_before_the_model_draws() -> None:
    """It is the same under every seed."""
    for text, is_sure in ((REPEATS, True), (NEW, False)):
        found = set()
        for seed in range(1, 33):
            side = Side(text, seed)
            drafted = await side.propose(4)
            found.add((len(side.engine.batches), len(drafted.proposal)))
            await side.close()
        assert found == ({(0, 4)} if is_sure else {(MODEL_TOKENS, MODEL_TOKENS)})


@pytest.mark.parametrize("lookup", [NgramDrafter, SuffixDrafter])
@virtually
async def test_the_replica_looks_ahead_of_a_round_that_was_looked_up(
    lookup: Callable[[], Any],
) -> None:
    """What it has pushed for the outcome that comes true is there when the next round begins,
    unless the look-up is confident again."""
    first = Side(REPEATS, look_ahead=16, lookup=lookup)
    assert (await first.propose(4)).proposal.token_ids == (7, 8, 9, 5)
    pushed = first.link.pushed
    await first.close()
    num_copied = 0
    for reply in pushed:
        side = Side(REPEATS, look_ahead=16, lookup=lookup)
        await side.propose(4)
        drafted = await side.propose(4, *reply.assumed)
        if not drafted.ahead:
            num_copied += 1
            assert drafted.proposal.open().q == (None,) * len(drafted.proposal)
        else:
            assert drafted.proposal == reply.proposal
            assert len(drafted.proposal) == MODEL_TOKENS
        await side.close()
    assert 0 < num_copied < len(pushed)


@pytest.mark.parametrize(("text", "guessed"), [(REPEATS, (7, 8, 9, 5, 6)), (NEW, ())])
@virtually
async def test_a_guess_goes_in_the_place_of_a_lost_replica(
    text: tuple[int, ...], guessed: tuple[int, ...]
) -> None:
    """As it is, whole or empty: it is made once, and the bound of the model does not apply."""

    class Lookup(NgramDrafter):
        num_guesses = 0

        def guess(self, request: DraftRequest) -> Guess:
            Lookup.num_guesses += 1
            return replace(super().guess(request), score=0.0)

    side = Side(text, lookup=Lookup)
    side.link.sever(LinkLost("gone"), reachable=False)
    drafted = await side.propose(5)
    assert drafted.proposal.token_ids == guessed
    assert (drafted.source != "fallback", Lookup.num_guesses) == (False, 1)
    await side.close()
