"""A session has a new owner: everything that former owners still send is refused."""

import random
from typing import Any

from rounds import Player, Replica, make_head, session_name
from toy_engine import ToyEngine

from outrider.clock import run_virtually
from outrider.errors import StaleEpoch
from outrider.messages import DraftItem, Refused, VerifyItem
from outrider.speculation.proposal import Proposal, SealedProposal
from outrider.speculation.sampling_params import Rule, SamplingParams

NUM_STALE, PER_ROUND = 10_000, 500
EPOCH = 5
"""Epoch of the current owner; all before it are over."""
VOCAB = 8
PROMPT = (1, 2, 3)


class Pair:
    """A target and a draft, and a player of the current owner's rounds."""

    def __init__(self) -> None:
        self.target = Replica("target", ToyEngine(VOCAB, 1, max_model_len=256))
        self.draft = Replica("draft", ToyEngine(VOCAB, 2, max_model_len=256))
        links = [(one.link, one.listener) for one in (self.target, self.draft)]
        self.player = Player(PROMPT, Rule.COUPLED, SamplingParams(), *links, epoch=EPOCH)

    def held(self) -> list[Any]:
        """Both replicas' state of the sessions."""
        return [
            (one.service._filter._asked[session_name(1)][0], one.engine.held,
             one.engine.page_counts().num_free, one.engine.page_counts().num_evictable)
            for one in (self.target, self.draft)
        ]  # fmt: skip

    async def close(self) -> None:
        for one in (self.target, self.draft):
            await one.close()


def stale_items(
    tokens: list[int], drawn: random.Random, number: int
) -> tuple[list[VerifyItem], list[DraftItem]]:
    """Items of former owners, with the prefix as they knew it, or another."""
    verifies, drafts = [], []
    for _ in range(number):
        committed = [*tokens[: drawn.randint(3, len(tokens))], drawn.randrange(VOCAB)]
        head = make_head(
            committed,
            drawn.choice((0, len(committed) - 1, len(committed) - 1)),
            epoch=drawn.randint(1, EPOCH - 1),
            round_index=drawn.choice((0, 3, 1_000)),
            rule=Rule.COUPLED,
            prompt_length=len(PROMPT),
        )
        drafted = tuple(drawn.randrange(VOCAB) for _ in range(drawn.randint(0, 3)))
        run_ahead = 0 if drafted else drawn.choice((0, 4))
        verifies.append(VerifyItem(head, SealedProposal.of(Proposal(drafted)), run_ahead))
        drafts.append(DraftItem(head, 3, look_ahead=drawn.choice((0, 4))))
    return verifies, drafts


def test_items_of_older_epochs_change_nothing() -> None:
    """Target and draft refuse them all; the owner's rounds come out as without them."""
    run_virtually(main())


async def main() -> None:
    drawn = random.Random(2)
    undisturbed, pair = Pair(), Pair()
    for _ in range(NUM_STALE // PER_ROUND + 1):
        await undisturbed.player.play(3)
    rightful = pair.player
    await rightful.play(3)
    late = [one.connect() for one in (pair.target, pair.draft)]
    for begun in range(0, NUM_STALE, PER_ROUND):
        before = pair.held()
        for (link, _), some in zip(
            late, stale_items(rightful.tokens, drawn, PER_ROUND), strict=True
        ):
            for item in some:
                link.send(item)
        for _, listener in late:
            await listener.wait(begun + PER_ROUND)
        assert pair.held() == before
        await rightful.play(3)
    for _, listener in late:
        assert len(listener.answers) == NUM_STALE
        assert all(isinstance(one, Refused) for one in listener.answers)
        assert {one.code for one in listener.answers} == {StaleEpoch.grpc_code}
    assert rightful.tokens == undisturbed.player.tokens
    assert rightful.held == undisturbed.player.held
    assert [epoch for epoch, *_ in pair.held()] == [EPOCH, EPOCH]
    for each in (undisturbed, pair):
        await each.close()
