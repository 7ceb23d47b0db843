"""A session has a new owner: whatever the ones before it still send is refused, however much."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from rounds import Listener, Player, make_head, session_name
from toy_engine import ToyEngine

from draft_service.service import DraftService
from outrider.errors import StaleEpoch
from outrider.messages import DraftItem, Refused, VerifyItem
from outrider.replica.executors import InlineExecutor
from outrider.speculation.proposal import Proposal, SealedProposal
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.codec import DRAFT, VERIFY
from outrider.transport.grpc_link import draft_link, target_link
from outrider.transport.link import Link
from outrider.transport.server import RpcServer
from outrider.transport.stream_server import ReplicaServicer
from target_service.service import TargetService

pytestmark = pytest.mark.xdist_group("redis")

NUM_STALE, PER_ROUND = 10_000, 500
EPOCH = 5
"""Of the rightful owner; all before it are over."""
VOCAB = 8
PROMPT = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft, and links of the rightful owner and of a late one to both."""

    target: TargetService
    draft: DraftService
    owned: tuple[Link, Link]
    late: tuple[Link, Link]

    def held(self) -> dict[str, Any]:
        """What either has of the sessions."""
        found: dict[str, Any] = {}
        for role, service in (("target", self.target), ("draft", self.draft)):
            worker: Any = service._worker
            counts = worker._table._engine.page_counts()
            found[role] = (
                service._filter._asked[session_name(1)][0],
                worker._table._engine.held,
                (counts.num_free, counts.num_evictable),
            )
        return found


async def start_pair(exits: AsyncExitStack) -> Pair:
    engines = [ToyEngine(VOCAB, salt, max_model_len=256) for salt in (1, 2)]
    executors = [InlineExecutor(engine.take_step_seconds) for engine in engines]
    target = TargetService(engines[0], executors[0], max_num_seqs=16)
    draft = DraftService.with_model(engines[1], executors[1], max_num_seqs=16)
    for service in (target, draft):
        exits.push_async_callback(service.close)
        exits.callback(service.check_integrity)
    servers = [
        RpcServer([servicer.grpc_service])
        for servicer in (ReplicaServicer(target, VERIFY), ReplicaServicer(draft, DRAFT))
    ]
    for server in servers:
        await server.start()
        exits.push_async_callback(server.stop)
    links: list[Any] = [
        make(one.address)
        for _ in range(2)
        for make, one in zip((target_link, draft_link), servers, strict=True)
    ]
    for link in links:
        exits.push_async_callback(link.close)
    return Pair(target, draft, (links[0], links[1]), (links[2], links[3]))


def stale_items(
    tokens: list[int], drawn: random.Random, number: int
) -> tuple[list[VerifyItem], list[DraftItem]]:
    """Of coordinators that have had the session: as far as they knew it, or on another way."""
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


def player(pair: Pair) -> Player:
    target, draft = [(link, Listener(link)) for link in pair.owned]
    return Player(PROMPT, Rule.COUPLED, SamplingParams(), target, draft, epoch=EPOCH)


async def test_items_of_older_epochs_change_nothing() -> None:
    """Target and draft refuse them all; the owner's rounds come out as if nobody had sent any."""
    drawn = random.Random(2)
    async with AsyncExitStack() as exits:
        undisturbed = player(await start_pair(exits))
        for _ in range(NUM_STALE // PER_ROUND + 1):
            await undisturbed.play(3)
        pair = await start_pair(exits)
        rightful = player(pair)
        await rightful.play(3)
        late = [(link, Listener(link)) for link in pair.late]
        for begun in range(0, NUM_STALE, PER_ROUND):
            before = pair.held()
            items: Any = stale_items(rightful.tokens, drawn, PER_ROUND)
            for (link, _), some in zip(late, items, strict=True):
                for item in some:
                    link.send(item)
            if begun % (2 * PER_ROUND) == 0:
                for _, listener in late:
                    await listener.wait(begun + PER_ROUND)
                assert pair.held() == before
            await rightful.play(3)
        for _, listener in late:
            answers = await listener.wait(NUM_STALE)
            assert len(answers) == NUM_STALE
            assert all(isinstance(one, Refused) for one in answers)
            assert {one.code for one in answers} == {StaleEpoch.grpc_code}
        assert rightful.tokens == undisturbed.tokens
        assert rightful.held == undisturbed.held
        assert pair.held()["target"][0] == pair.held()["draft"][0] == EPOCH
