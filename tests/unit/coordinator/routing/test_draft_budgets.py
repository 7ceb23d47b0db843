"""The time that a round gives its draft, as the coordinator says it and takes the answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from session_links import ANSWER_S, NOISE, RETRY_S, ScriptedLink, asked, draft_of, proposal, refuse
from virtual_time import virtually

from outrider.errors import DeadlineExceeded, LinkLost
from outrider.messages import ProposalReply, Resync
from outrider.sessions.store import CacheState
from outrider.speculation.proposal import SealedProposal


def out_of_time(item: Any, num_tokens: int = 0) -> ProposalReply:
    length = item.head.committed_length
    tokens = SealedProposal(tuple(range(num_tokens)))
    return ProposalReply(item.head.key, tokens, length, length, out_of_time=True)


@virtually
async def test_a_draft_is_told_the_time_that_is_left() -> None:
    """Less what a resync has taken; the least of what a request, the settings and the length
    control allow."""

    link = ScriptedLink(lambda item: Resync(item.head.key, 0, 0), proposal, proposal)
    on_sent = link.send

    def send(item: Any) -> None:
        on_sent(item)
        loop: Any = asyncio.get_running_loop()
        loop.wait(0.1)  # On the way.

    link.send = send  # type: ignore[method-assign]
    draft = draft_of(link)
    await draft.propose(1, asked(3), NOISE)
    await draft.propose(2, asked(3, draft_budget_s=0.02), NOISE)
    assert [item.budget_us for item in link.sent] == [500_000, 400_000, 20_000]


@pytest.mark.parametrize(
    ("deadline_ms", "expected_us"), [(None, 500_000), (200, 200_000), (900, 500_000)]
)
@virtually
async def test_a_request_gives_its_drafts_no_more_time_than_the_settings(
    deadline_ms: int | None, expected_us: int
) -> None:
    link = ScriptedLink(proposal)
    await draft_of(link, draft_deadline_ms=deadline_ms).propose(1, asked(3), NOISE)
    assert link.sent[0].budget_us == expected_us


@virtually
async def test_a_probe_has_a_bound_as_any_question_has() -> None:
    """What it asks is drafted beside what others wait for."""
    link = ScriptedLink(LinkLost("down"), proposal)
    draft = draft_of(link)
    await draft.propose(1, asked(3), NOISE)
    await asyncio.sleep(RETRY_S)
    await draft.propose(2, asked(3), NOISE)
    assert [item.budget_us for item in link.sent] == [500_000, 500_000]


@pytest.mark.parametrize("late_s", [0.1, 3.0])
@virtually
async def test_a_proposal_that_comes_behind_its_time_is_used(late_s: float) -> None:
    """How long a step lasts may depend on the tokens that are drawn in it, of others, too."""
    link = ScriptedLink()
    draft = draft_of(link)
    loop = asyncio.get_running_loop()
    at_s = ANSWER_S + late_s
    loop.call_later(at_s, lambda: link.on_answer(out_of_time(link.sent[0], 2)))
    drafted = await draft.propose(1, asked(3), NOISE)
    assert (drafted.source != "fallback", drafted.proposal.token_ids) == (True, (0, 1))


@virtually
async def test_a_round_that_is_not_timed_has_all_its_tokens_however_late() -> None:
    """What it waits for may depend on its own numbers. It goes on without a replica that is lost
    alone."""
    link = ScriptedLink()
    draft = draft_of(link)
    loop = asyncio.get_running_loop()
    loop.call_later(20.0, lambda: link.on_answer(proposal(link.sent[0])))
    drafted = await draft.propose(1, asked(3, draft_budget_s=0.02, is_timed=False), NOISE)
    assert (drafted.source != "fallback", len(drafted.proposal), loop.time()) == (True, 3, 20.0)
    loop.call_later(1.0, lambda: link.on_lost(LinkLost("gone")))
    assert (await draft.propose(2, asked(3, is_timed=False), NOISE)).source == "fallback"
    assert loop.time() == 21.0
    await asyncio.sleep(RETRY_S)
    await draft.propose(3, asked(3, is_timed=False), NOISE)
    assert [item.budget_us for item in link.sent] == [0, 0, 0]


@virtually
async def test_a_proposal_whose_time_ran_out_is_used_as_far_as_it_goes() -> None:
    """Drawn tokens are never dropped. Of one without any a look-up fills in, and the draft is asked
    for the next round."""
    draft = draft_of(ScriptedLink(lambda item: out_of_time(item, 2), out_of_time, proposal))
    short = await draft.propose(1, asked(3), NOISE)
    assert (short.source != "fallback", short.proposal.token_ids, short.num_asked) == (
        True,
        (0, 1),
        2,
    )
    none = await draft.propose(2, asked(3), NOISE)
    assert (none.source != "fallback", none.proposal.token_ids, none.num_asked) == (
        False,
        (1,),
        0,
    )
    assert (await draft.propose(3, asked(3), NOISE)).source != "fallback"


@virtually
async def test_an_answer_without_time_says_how_much_the_draft_holds() -> None:
    """Else the next question would name a prefix that it lacks."""
    draft = draft_of(
        ScriptedLink(lambda item: replace(out_of_time(item), cached_length=1), proposal)
    )
    await draft.propose(1, asked(3), NOISE)
    draft.settle(3)
    assert draft.cache_state == CacheState("r0", 1)


@virtually
async def test_a_draft_without_time_for_a_first_token_is_waited_for_again_when_it_is_ready() -> (
    None
):
    """It says so at once, and answers once more when it has read what it lacked."""
    link = ScriptedLink(refuse(DeadlineExceeded("its time ran out")))
    draft = draft_of(link)
    loop = asyncio.get_running_loop()
    drafted = await draft.propose(1, asked(3), NOISE)
    assert (drafted.source != "fallback", drafted.num_asked) == (False, 0)
    assert (await draft.propose(2, asked(3), NOISE)).source == "fallback"
    assert (loop.time(), len(link.sent)) == (0.0, 1)
    link.on_answer(out_of_time(link.sent[0]))
    link.script = [proposal]
    assert (await draft.propose(3, asked(3), NOISE)).source != "fallback"
