"""What a coordinator believes of what a draft sends."""

from __future__ import annotations

from typing import Any

import pytest
from session_links import (
    NOISE,
    PATIENCE,
    PROMPT,
    ScriptedLink,
    SessionLookup,
    berth,
    proposal,
    with_draft,
)
from virtual_time import virtually

from coordinator.routing.draft_client import DraftClient
from coordinator.routing.target_client import HeaderWriter
from outrider.messages import ProposalReply
from outrider.sessions.state import Session
from outrider.sessions.store import SessionRecord
from outrider.speculation.proposal import SealedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams


def test_a_draft_that_sends_more_than_was_asked_for_is_not_believed() -> None:
    async def test(draft: DraftClient, one: Session) -> None:
        assert (await draft.propose(1, 3, NOISE)).source == "fallback"

    def too_long(item: Any) -> ProposalReply:
        return ProposalReply(item.head.key, SealedProposal((1, 2, 3, 4)), 4, 8)

    with_draft(ScriptedLink(too_long), test)


@pytest.mark.parametrize(
    ("token_ids", "parents", "siblings"),
    [
        ((1, 2), (-1, -1), ()),
        ((1, 2, 3), (-1, -1, -1), (1,)),
        ((1, 2, 3), (-1, 0, 0), (1,)),
        ((1, 1), (-1, -1), (1,)),
        ((1, 2), (-1, 5), (1,)),
    ],
)
def test_a_tree_that_was_not_asked_for_is_not_believed(
    token_ids: tuple[int, ...], parents: tuple[int, ...], siblings: tuple[int, ...]
) -> None:
    """The target would refuse it, and the request would end."""

    async def test(draft: DraftClient, one: Session) -> None:
        drafted = await draft.propose(1, 3, NOISE, siblings)
        assert drafted.source == "fallback"

    def tree(item: Any) -> ProposalReply:
        assert item.siblings == siblings
        length = item.head.committed_length
        return ProposalReply(
            item.head.key, SealedProposal(token_ids, b"", parents), length, length + 1
        )

    with_draft(ScriptedLink(tree), test)


def test_a_tree_that_was_asked_for_is_passed_on() -> None:
    async def test(draft: DraftClient, one: Session) -> None:
        drafted = await draft.propose(1, 3, NOISE, (1, 1))
        assert drafted.source != "fallback"
        assert drafted.siblings == (1, 1)
        assert drafted.proposal.parents == (-1, -1, 0)

    def tree(item: Any) -> ProposalReply:
        sealed = SealedProposal((1, 2, 3), b"", (-1, -1, 0))
        length = item.head.committed_length
        return ProposalReply(item.head.key, sealed, length, length + 1)

    with_draft(ScriptedLink(tree), test)


@virtually
async def test_a_proposal_without_its_q_is_not_passed_on() -> None:
    """Under the token rule the target would refuse it, and the user would be blamed."""
    link = ScriptedLink(proposal)
    new = SessionRecord.new("0" * 32, "", "me", 3, Rule.TOKEN, "{}", PROMPT)
    writer = HeaderWriter(Session(new), SamplingParams(), deadline=1000.0)
    draft = DraftClient(berth(link), writer, PATIENCE, SessionLookup())
    drafted = await draft.propose(1, 3, RoundNoise(3, Rule.TOKEN, len(PROMPT)))
    assert drafted.source == "fallback"
