"""Proposals that a step leaves unended, because the time of one drafted beside them is over."""

from __future__ import annotations

from typing import Any

from rounds import make_head, session_name
from toy_engine import ToyEngine

from draft_service.model_drafter import ModelDrafter
from draft_service.worker import Proposer
from outrider.drafters.drafter import DraftDeadline
from outrider.messages import DraftItem, ProposalReply, Refused
from outrider.replica.step_request import Unfinished
from outrider.replica.token_budget import TokenBudget
from outrider.speculation.sampling_params import Rule

PROMPT, SHORT, LONG, FRESH = (1, 2, 3), 1, 2, 3
PASS_S, DEADLINE_S = 0.1, 0.25
NUM_DRAWN = 3
"""Tokens that are drawn until then."""


def item(session: int, num_tokens: int, **fields: Any) -> DraftItem:
    return DraftItem(make_head(PROMPT, session=session, rule=Rule.TOKEN), num_tokens, **fields)


class Draft:
    """A draft behind a step that has ended for one of two sessions."""

    def __init__(self) -> None:
        self.engine = ToyEngine(pass_s=PASS_S)
        self.proposer = Proposer(ModelDrafter(self.engine), TokenBudget(512, 8))
        deadline = DraftDeadline(DEADLINE_S, lambda: self.engine.stated_seconds)
        self.long = item(LONG, 16)
        found = self.proposer.step([item(SHORT, 8, deadline=deadline), self.long])
        assert isinstance(found[0], ProposalReply)
        assert (len(found[0].proposal), found[0].out_of_time) == (NUM_DRAWN, True)
        assert found[1] is Unfinished.CONTINUES
        self.proposer.check_integrity()

    def step(self, *items: DraftItem) -> list[Any]:
        found = self.proposer.step(items)
        self.proposer.check_integrity()
        return found


def whole() -> tuple[int, ...]:
    """What the long proposal is without another one beside it."""
    engine = ToyEngine()
    proposer = Proposer(ModelDrafter(engine), TokenBudget(512, 8))
    [reply] = proposer.step([item(LONG, 16)])
    assert isinstance(reply, ProposalReply)
    return reply.proposal.token_ids


def test_it_goes_on_with_what_it_has_drawn() -> None:
    """Beside new ones, and runs nothing twice."""
    draft = Draft()
    reply, fresh = draft.step(draft.long, item(FRESH, 2))
    assert reply.proposal.token_ids == whole()
    assert fresh.proposal.token_ids == whole()[:2]
    num_run = sum(
        count
        for names, counts in zip(draft.engine.batches, draft.engine.counts, strict=True)
        for name, count in zip(names, counts, strict=True)
        if name == session_name(LONG)
    )
    assert num_run == len(PROMPT) + 15


def test_a_crash_leaves_what_was_drawn_proposed() -> None:
    """Even in the first pass of its next step: the failure may be due to the last token."""
    draft = Draft()
    draft.engine.crash = RuntimeError("no memory")
    reply, fresh = draft.step(draft.long, item(FRESH, 2))
    assert reply.proposal.token_ids == whole()[:NUM_DRAWN]
    assert isinstance(fresh, Refused)
    [again] = draft.step(item(FRESH, 2))
    assert again.proposal.token_ids == whole()[:2]
