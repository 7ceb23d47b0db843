"""A target that drafts itself: what it proposes, and that a verdict does not suffer from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from models import tiny_config, tiny_heads, tiny_module, twin
from rounds import GREEDY, Listener, ask, make_head
from toy_engine import ToyEngine

from outrider.drafting.growing_rounds import RoundWanted
from outrider.engine.executor import InlineExecutor
from outrider.engine.interface import ModelInfo
from outrider.engine.paged_engine import PagedEngine
from outrider.engine.trained_heads import LoadedHeads
from outrider.errors import InvariantError
from outrider.messages import Refused, VerdictReply, VerifyItem
from outrider.speculation.decision import Outcome, decide
from outrider.speculation.drafting import draw_from_logits
from outrider.speculation.noise import RoundNoise
from outrider.speculation.proposal import NOTHING_SEALED, Proposal, SealedProposal
from outrider.speculation.reduced import ReducedVocabulary
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.transforms import TokenHistory
from outrider.wire.memory_link import MemoryLink
from target_service.self_drafting import HeadDrafter, NextRound
from target_service.service import TargetService

VOCAB, LENGTH = 24, 40
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
HEAD_IDS = tuple(range(0, VOCAB, 2))
NUM_HEADS = 3
SEED = 11
FLATTER = 0.03
"""Scales logits, so that what random heads draw is accepted at times."""
PENALISED = SamplingParams(temperature=0.9, presence_penalty=0.8, repetition_penalty=1.4)


@dataclass
class Target:
    """A target with heads, its module once more, and a link to it."""

    module: Any
    heads: LoadedHeads
    service: TargetService
    link: MemoryLink[Any, Any]
    heard: Listener

    async def verify(
        self,
        tokens: Sequence[int],
        proposal: SealedProposal,
        num_next: int,
        next_siblings: tuple[int, ...] = (),
        **head: Any,
    ) -> VerdictReply:
        item = VerifyItem(
            make_head(tokens, seed=SEED, prompt_length=len(PROMPT), **head),
            proposal,
            num_next_draft_tokens=num_next,
            next_siblings=next_siblings,
        )
        reply = await ask(self.link, self.heard, item)
        assert isinstance(reply, VerdictReply), reply
        return reply

    def expected(
        self, tokens: Sequence[int], rule: Rule, sampling: SamplingParams, num: int
    ) -> Proposal:
        """By the library's own pass over all committed tokens."""
        hidden = self.module.base_model(torch.tensor([tokens[:-1]])).last_hidden_state
        features, drafted = hidden[:, -1], [tokens[-1]]
        noise, q = RoundNoise(SEED, rule, len(tokens)), []
        for depth in range(min(num, NUM_HEADS)):
            features = self.heads.module.advance(depth, features, torch.tensor(drafted[-1:]))
            output = (*tokens[len(PROMPT) :], *drafted[1:])
            [(token_id, distribution)], _ = draw_from_logits(
                self.heads.module.logits(features), sampling, [noise], [depth],
                history=TokenHistory(PROMPT, output),
                vocabulary=ReducedVocabulary.of(HEAD_IDS),
            )  # fmt: skip
            drafted.append(token_id)
            q.append(distribution)
        return Proposal(tuple(drafted[1:]), tuple(q) if rule.needs_q else ())


def outcome_of(
    reply: VerdictReply, tokens: Sequence[int], proposal: SealedProposal, rule: Rule
) -> Outcome:
    noise = RoundNoise(SEED, rule, len(tokens))
    uniforms = noise.accept_uniforms(len(proposal), proposal.parents)
    return decide(reply.verdict, proposal.token_ids, rule, uniforms, proposal.parents)


@asynccontextmanager
async def running(drafter: Any = None) -> AsyncIterator[Target]:
    config = tiny_config("llama", VOCAB, LENGTH)
    config.tie_word_embeddings = False
    module = tiny_module(config, dtype=torch.float64)
    with torch.no_grad():
        module.lm_head.weight.mul_(FLATTER)
    original = twin(module)
    heads = tiny_heads(module, HEAD_IDS, NUM_HEADS)
    info = ModelInfo("tiny", VOCAB, LENGTH, "float64", (), "w", "t")
    engine = PagedEngine(module, info, draft_heads=heads)
    service = TargetService(
        engine,
        InlineExecutor(engine.take_step_seconds),
        max_num_seqs=8,
        self_drafter=drafter or HeadDrafter(heads),
    )
    link = MemoryLink(service)
    yield Target(original, heads, service, link, Listener(link))
    service.check_integrity()
    await link.close()
    await service.close()


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [
        (Rule.TOKEN, SamplingParams()),
        (Rule.BLOCK, SamplingParams(top_p=0.9)),
        (Rule.COUPLED, SamplingParams()),
        (Rule.GREEDY, GREEDY),
        (Rule.TOKEN, PENALISED),
        (Rule.COUPLED, PENALISED),
    ],
)
async def test_what_heads_propose_behind_each_outcome(rule: Rule, sampling: SamplingParams) -> None:
    """Round after round, with draft tokens accepted and refused: what the heads draw from the
    features of the token before the newest one, with the next round's noise."""
    async with running() as target:
        tokens, proposal = list(PROMPT), NOTHING_SEALED
        accepted = []
        for index in range(9):
            reply = await target.verify(
                tokens, proposal, num_next=4, rule=rule, sampling=sampling, round_index=index
            )
            outcome = outcome_of(reply, tokens, proposal, rule)
            accepted.append(outcome.num_accepted)
            tokens += outcome.token_ids
            proposal = reply.next_proposal
            assert proposal.open() == target.expected(tokens, rule, sampling, 4)
            assert 0 < len(proposal) <= NUM_HEADS
        # Two random heads seldom find the same token likeliest.
        assert rule is Rule.GREEDY or len(set(accepted)) > 1


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.COUPLED, Rule.GREEDY])
async def test_siblings_stand_beside_what_heads_draw(rule: Rule) -> None:
    """The spine is the chain's; beside it stand others, of which some are accepted in their turn,
    and the next proposal goes on from there."""
    sampling = GREEDY if rule is Rule.GREEDY else SamplingParams()
    async with running() as target:
        tokens, proposal, beside = list(PROMPT), NOTHING_SEALED, 0
        for index in range(9):
            reply = await target.verify(
                tokens, proposal, 2, rule=rule, sampling=sampling, round_index=index,
                next_siblings=(2, 1),
            )  # fmt: skip
            outcome = outcome_of(reply, tokens, proposal, rule)
            beside += any(place not in proposal.tree.spine for place in outcome.path)
            tokens += outcome.token_ids
            proposal = reply.next_proposal
            assert proposal.open().spine_ids == target.expected(tokens, rule, sampling, 2).token_ids
            assert proposal.parents == (-1, -1, -1, 0, 0)
        # Laws so flat as these accept nearly every first token under the rule that compares them.
        assert rule is not Rule.COUPLED or beside > 0


async def test_trees_go_with_neither_block_nor_penalties() -> None:
    async with running() as target:
        for rule, sampling in ((Rule.BLOCK, SamplingParams()), (Rule.TOKEN, PENALISED)):
            head = make_head(PROMPT, rule=rule, sampling=sampling)
            item = VerifyItem(head, num_next_draft_tokens=2, next_siblings=(1,))
            reply = await ask(target.link, target.heard, item)
            assert isinstance(reply, Refused)
            assert "next_siblings" in reply.message


async def test_rounds_of_several_sessions_are_drafted_for_together() -> None:
    """Some want a proposal and some do not, of different rules: each gets its own."""
    wants = {1: (Rule.TOKEN, 2), 2: (Rule.COUPLED, 0), 3: (Rule.COUPLED, 3), 4: (Rule.TOKEN, 1)}
    async with running() as target:
        items = [
            VerifyItem(
                make_head([*PROMPT, n], session=n, rule=rule, seed=SEED, prompt_length=len(PROMPT)),
                num_next_draft_tokens=num_next,
            )
            for n, (rule, num_next) in wants.items()
        ]
        for item in items:
            target.link.send(item)
        replies = {int(r.key.session_id, 16): r for r in await target.heard.wait(len(items))}
        for number, (rule, num_next) in wants.items():
            tokens = [*PROMPT, number, *replies[number].verdict.correction]
            found = replies[number].next_proposal.open()
            assert found == target.expected(tokens, rule, SamplingParams(), num_next)


async def test_no_more_is_proposed_than_fits() -> None:
    async with running() as target:
        for room, expected in ((3, 2), (2, 1), (1, 0)):
            tokens = [*PROMPT, *[5] * (LENGTH - len(PROMPT) - room)]
            reply = await target.verify(tokens, NOTHING_SEALED, num_next=3, session=room)
            assert len(reply.next_proposal) == expected


async def test_a_verdict_stands_without_a_proposal() -> None:
    """Whatever goes wrong in drafting costs speed alone."""

    class Broken:
        def propose(self, rounds: Sequence[NextRound]) -> list[Proposal]:
            raise RuntimeError("no memory")

    async with running() as target:
        expected = await target.verify(PROMPT, NOTHING_SEALED, num_next=3)
    async with running(Broken()) as target:
        reply = await target.verify(PROMPT, NOTHING_SEALED, num_next=3)
    assert reply.verdict == expected.verdict
    assert reply.next_proposal == NOTHING_SEALED


async def test_logits_that_cannot_be_drawn_from_end_a_proposal() -> None:
    """One session's; what it drew before is proposed, and others have all of theirs."""
    async with running() as target:
        drafter = HeadDrafter(target.heads)
        features = torch.randn(64, dtype=torch.float64)[: target.module.config.hidden_size]
        wanted = RoundWanted(
            1, 2, SamplingParams(), Rule.COUPLED, RoundNoise(1, Rule.COUPLED, 5), TokenHistory()
        )
        good = NextRound(features, wanted)
        bad = replace(good, features=features * float("nan"))
        with torch.inference_mode():
            [alone] = drafter.propose([good])
            assert drafter.propose([bad, good]) == [Proposal(), alone]
        assert len(alone) == 2


async def test_the_target_says_that_it_drafts() -> None:
    async with running() as target:
        assert (await target.link.describe(1.0)).drafts_itself
    with pytest.raises(InvariantError, match="shows its features"):
        TargetService(
            ToyEngine(), InlineExecutor(lambda: 0.0), max_num_seqs=1, self_drafter=HeadDrafter(
                LoadedHeads(target.heads.module, HEAD_IDS)
            ),
        )  # fmt: skip
