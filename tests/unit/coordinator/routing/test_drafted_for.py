"""For which K a proposal was drafted where the draft looks ahead: its rounds learn from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from session_links import CONFIG, NOISE, ScriptedLink, asked, draft_of, session
from test_pushed_proposals import pushed

from coordinator.routing.drafts import Drafted
from outrider.clock import run_virtually
from outrider.messages import ProposalReply
from outrider.sessions.store import Counters
from outrider.speculation.proposal import SealedProposal


def answer(*token_ids: int) -> Callable[[Any], ProposalReply]:
    """A draft's answer to whatever it is asked."""

    def write(item: Any) -> ProposalReply:
        length = item.head.committed_length
        return ProposalReply(item.head.key, SealedProposal(token_ids), length, length)

    return write


def second_round(
    num_draft_tokens: int, *, link: ScriptedLink, ahead: tuple[int, ...] = (), look_ahead: int = 6
) -> Drafted:
    """A round behind one of K = 2, after which (9,) was committed; `ahead` was pushed for it."""

    async def main() -> Drafted:
        one = session()
        draft = draft_of(link, one=one, config=replace(CONFIG, look_ahead=look_ahead))
        draft.prefill(0, 2)
        if ahead:
            link.on_answer(pushed(1, 4, (9,), tokens=ahead))
        one.decide((9,), Counters())
        found = await draft.propose(1, asked(num_draft_tokens), NOISE)
        await asyncio.sleep(0)
        return found

    return run_virtually(main())


@pytest.mark.parametrize(("wanted", "drafted_for"), [(1, 1), (2, 2), (5, 2)])
def test_a_hit_was_drafted_for_the_k_of_the_round_before(wanted: int, drafted_for: int) -> None:
    """It says nothing of tokens that it was not to have."""
    found = second_round(wanted, link=ScriptedLink(), ahead=(1, 2))
    assert found.ahead
    assert found.num_asked == drafted_for


@pytest.mark.parametrize(
    ("tokens", "drafted_for"), [((1, 2), 2), ((1,), 5), ((1, 2, 3), 5), ((), 5)]
)
def test_an_answer_of_just_what_was_looked_ahead_for_may_be_such_a_one(
    tokens: tuple[int, ...], drafted_for: int
) -> None:
    """Of any other length it is as long as the drafter had it, for what is asked now."""
    found = second_round(5, link=ScriptedLink(None, answer(*tokens)))
    assert found.num_asked == drafted_for


def test_a_draft_that_does_not_look_ahead_drafts_for_what_is_asked() -> None:
    found = second_round(5, link=ScriptedLink(None, answer(1, 2)), look_ahead=0)
    assert found.num_asked == 5
