"""The coordinator's side of looking ahead: what it keeps of what a draft pushes, and picks."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from session_links import (
    CONFIG,
    NOISE,
    PROMPT,
    ScriptedLink,
    asked,
    draft_of,
    proposal,
    session,
)
from virtual_time import virtually

from coordinator.routing.draft_client import PushedProposals
from outrider.errors import LinkLost
from outrider.messages import ProposalReply, ReplyKey
from outrider.sessions.store import Counters
from outrider.speculation.proposal import DraftDistribution, Proposal, SealedProposal
from outrider.tokens import TokenSequence

BYTES = 10_000
Q = (DraftDistribution((3, 4), (2**15, 2**15)), None, DraftDistribution((1, 2), (2**15, 2**15)))


def pushed(
    round_index: int, base: int, assumed: tuple[int, ...], tokens: tuple[int, ...] = (1, 2, 3),
    q: bytes = b"",
) -> ProposalReply:  # fmt: skip
    return ProposalReply(
        ReplyKey("0" * 32, 1, round_index),
        SealedProposal(tokens, q),
        base,
        base + len(assumed) - 1,
        assumed=assumed,
    )


def test_the_one_that_comes_true_is_picked() -> None:
    kept = PushedProposals(BYTES)
    for assumed in ((9,), (8, 9), (8, 7)):
        kept.put(pushed(1, 4, assumed))
    assert len(kept) == 3
    found = kept.begin(1, TokenSequence((*PROMPT, 8, 9)))
    assert found is not None
    assert found.assumed == (8, 9)
    assert len(kept) == 0
    kept.put(pushed(2, 6, (5,)))
    assert kept.begin(2, TokenSequence((*PROMPT, 8, 9, 4))) is None


@pytest.mark.parametrize("late", [0, 1, 3])
def test_of_other_rounds_nothing_is_kept(late: int) -> None:
    kept = PushedProposals(BYTES)
    kept.begin(1, TokenSequence(PROMPT))
    kept.put(pushed(late, 4, (9,)))
    assert len(kept) == 0


def test_what_is_kept_is_bounded_and_the_first_of_equals_stays() -> None:
    kept = PushedProposals(100)
    kept.put(pushed(1, 4, (9,), q=b"x" * 50))
    kept.put(pushed(1, 4, (9,), tokens=(4,), q=b""))
    kept.put(pushed(1, 4, (8,), q=b"x" * 50))
    assert len(kept) == 1
    found = kept.begin(1, TokenSequence((*PROMPT, 9)))
    assert found is not None
    assert found.proposal.token_ids == (1, 2, 3)


def test_a_proposal_is_cut_with_its_q() -> None:
    whole = Proposal((3, 9, 2), Q)
    for count in range(5):
        cut = SealedProposal.of(whole).cut(count)
        assert cut.open() == Proposal(whole.token_ids[:count], whole.q[:count])
    assert SealedProposal((1, 2, 3)).cut(2) == SealedProposal((1, 2))


@virtually
async def test_a_hit_waits_for_nothing_and_tells_the_draft_afterwards() -> None:
    link = ScriptedLink()
    one = session()
    draft = draft_of(link, one=one, config=replace(CONFIG, look_ahead=6))
    draft.prefill(0, 3)
    link.on_answer(pushed(1, 4, (9,)))
    one.decide((9,), Counters())
    drafted = await draft.propose(1, asked(2), NOISE)
    assert (drafted.proposal.token_ids, drafted.ahead, drafted.source != "fallback") == (
        (1, 2), True, True,
    )  # fmt: skip
    await asyncio.sleep(0)  # Whoever writes the verification to its stream has this turn.
    assert len(link.sent) == 1
    await asyncio.sleep(0)
    assert len(link.sent) == 2
    draft.settle(5)
    link.on_answer(pushed(2, 5, (1, 7)))
    one.decide((1, 7), Counters())
    assert (await draft.propose(2, asked(3), NOISE)).ahead
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    prefill, first, second = link.sent
    assert (prefill.held, prefill.num_draft_tokens, prefill.look_ahead) == ((), 3, 6)
    # It has the prompt, and was told of what it proposed as far as that was cut.
    assert (first.held, first.head.base_length, first.head.append) == ((1, 2), 4, (9,))
    assert (second.held, second.head.base_length, second.head.append) == ((1, 2, 3), 6, (7,))


@virtually
async def test_a_miss_asks_and_learns_nothing_of_the_others() -> None:
    link = ScriptedLink(None, proposal)
    one = session()
    draft = draft_of(link, one=one, config=replace(CONFIG, look_ahead=6))
    draft.prefill(0, 3)
    link.on_answer(pushed(1, 4, (8,)))
    one.decide((9,), Counters())
    drafted = await draft.propose(1, asked(3), NOISE)
    assert (drafted.proposal.token_ids, drafted.ahead) == ((0, 1, 2), False)
    assert link.sent[1].held is None


@virtually
async def test_a_push_that_crosses_the_question_answers_it() -> None:
    """The answer that follows is the same, and is dropped; so is a push of another outcome. It is
    not stale, also when its round is over; a third one would be."""
    link = ScriptedLink()
    one = session()
    draft = draft_of(link, one=one, config=replace(CONFIG, look_ahead=6))
    draft.prefill(0, 3)
    one.decide((9,), Counters())
    loop = asyncio.get_running_loop()
    loop.call_later(0.1, link.on_answer, pushed(1, 4, (8,), tokens=(5, 5, 5)))
    loop.call_later(0.2, link.on_answer, pushed(1, 4, (9,)))
    drafted = await draft.propose(1, asked(2), NOISE)
    assert loop.time() == pytest.approx(0.2)
    assert (drafted.proposal.token_ids, drafted.source != "fallback") == ((1, 2), True)
    draft.settle(5)
    link.on_answer(pushed(2, 5, (7,)))
    one.decide((7,), Counters())
    assert (await draft.propose(2, asked(3), NOISE)).ahead
    link.on_answer(proposal(link.sent[1]))
    assert draft._route._pool.num_stale == 0
    link.on_answer(proposal(link.sent[1]))
    assert draft._route._pool.num_stale == 1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    one.decide((1,), Counters())
    loop.call_later(0.1, link.on_answer, pushed(3, 6, (1,)))
    await draft.propose(3, asked(2), NOISE)
    link.on_answer(proposal(link.sent[-1]))
    assert draft._route._pool.num_stale == 1
    draft.close()


@virtually
async def test_a_hit_stands_though_the_draft_has_gone() -> None:
    link = ScriptedLink(None, LinkLost("down"))
    one = session()
    draft = draft_of(link, one=one, config=replace(CONFIG, look_ahead=6))
    draft.prefill(0, 3)
    link.on_answer(pushed(1, 4, (9,)))
    one.decide((9,), Counters())
    assert (await draft.propose(1, asked(3), NOISE)).ahead
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    one.decide((4,), Counters())
    drafted = await draft.propose(2, asked(3), NOISE)
    assert drafted.source == "fallback"
