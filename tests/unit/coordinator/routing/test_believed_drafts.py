"""What a coordinator believes of what a draft sends."""

from __future__ import annotations

from typing import Any

import pytest
from session_links import NOISE, PROMPT, ScriptedLink, asked, draft_of, proposal, session
from virtual_time import virtually

from outrider.messages import ProposalReply
from outrider.speculation.proposal import SealedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule


@virtually
async def test_a_draft_that_sends_more_than_was_asked_for_is_not_believed() -> None:
    def too_long(item: Any) -> ProposalReply:
        return ProposalReply(item.head.key, SealedProposal((1, 2, 3, 4)), 4, 8)

    draft = draft_of(ScriptedLink(too_long))
    assert (await draft.propose(1, asked(3), NOISE)).source == "fallback"


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
@virtually
async def test_a_tree_that_was_not_asked_for_is_not_believed(
    token_ids: tuple[int, ...], parents: tuple[int, ...], siblings: tuple[int, ...]
) -> None:
    """The target would refuse it, and the request would end."""

    def tree(item: Any) -> ProposalReply:
        assert item.siblings == siblings
        length = item.head.committed_length
        return ProposalReply(
            item.head.key, SealedProposal(token_ids, b"", parents), length, length + 1
        )

    draft = draft_of(ScriptedLink(tree))
    drafted = await draft.propose(1, asked(3, siblings), NOISE)
    assert drafted.source == "fallback"


@virtually
async def test_a_tree_that_was_asked_for_is_passed_on() -> None:
    def tree(item: Any) -> ProposalReply:
        sealed = SealedProposal((1, 2, 3), b"", (-1, -1, 0))
        length = item.head.committed_length
        return ProposalReply(item.head.key, sealed, length, length + 1)

    draft = draft_of(ScriptedLink(tree))
    drafted = await draft.propose(1, asked(3, (1, 1)), NOISE)
    assert drafted.source != "fallback"
    assert drafted.siblings == (1, 1)
    assert drafted.proposal.parents == (-1, -1, 0)


@virtually
async def test_a_proposal_without_its_q_is_not_passed_on() -> None:
    """Under the token rule the target would refuse it, and the user would be blamed."""
    link = ScriptedLink(proposal)
    draft = draft_of(link, one=session(rule=Rule.TOKEN))
    drafted = await draft.propose(1, asked(3), RoundNoise(3, Rule.TOKEN, len(PROMPT)))
    assert drafted.source == "fallback"
