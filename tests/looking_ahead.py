"""A draft service that looks ahead over a toy engine, and what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rounds import GREEDY, Replica, make_head
from test_draft_service import expected_proposal
from toy_engine import ToyEngine

from outrider.messages import DraftItem, ProposalReply
from outrider.speculation.sampling_params import Rule, SamplingParams

PROMPT = (1, 2, 3)
PLAIN = SamplingParams(temperature=0.9)


class Draft(Replica):
    """One over a toy engine, and a link to it."""

    def __init__(self, engine: ToyEngine | None = None, **options: Any) -> None:
        super().__init__("draft", engine or ToyEngine(salt=2, max_model_len=256), **options)

    async def send(self, *items: DraftItem) -> list[ProposalReply]:
        """What is heard until nothing is left to do."""
        before = len(self.listener.answers)
        for item in items:
            self.link.send(item)
        await self.settled()
        return self.listener.answers[before:]

    async def settled(self) -> None:
        """Until what was sent has been done."""
        for _ in range(5):  # It is on its way for some turns of the loop.
            await asyncio.sleep(0)
            await self.service.drain()


def item(
    tokens: Sequence[int],
    base_length: int = 0,
    *,
    rule: Rule = Rule.TOKEN,
    count: int = 3,
    look_ahead: int = 8,
    held: tuple[int, ...] | None = None,
    **head: Any,
) -> DraftItem:
    sampling = head.pop("sampling", GREEDY if rule is Rule.GREEDY else PLAIN)
    made = make_head(tokens, base_length, rule=rule, sampling=sampling, **head)
    return DraftItem(made, count, look_ahead, held)


def check_pushed(pushed: Sequence[ProposalReply], prefix: Sequence[int], rule: Rule) -> None:
    """Each is what the draft would propose after what it assumes; no two assume the same."""
    sampling = GREEDY if rule is Rule.GREEDY else PLAIN
    for reply in pushed:
        assert reply.base_length == len(prefix)
        assert reply.cached_length == len(prefix) + len(reply.assumed) - 1
        assumed = (*prefix, *reply.assumed)
        tokens, q = expected_proposal(assumed, len(reply.proposal), rule, sampling, 1)
        assert list(reply.proposal.token_ids) == tokens
        assert list(reply.proposal.open().q) == (q if rule.needs_q else [])
    assert len({reply.assumed for reply in pushed}) == len(pushed)
