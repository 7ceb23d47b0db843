"""Answers that came too late are counted, with bytes, also of replicas that have left."""

from __future__ import annotations

from typing import Any

from session_links import TOY, ScriptedLink, context_of, session

from coordinator.routing.replica_pool import ReplicaPool, SessionRoute
from outrider.messages import ProposalReply, ReplyKey, Resync, VerdictReply
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import NOTHING_SEALED, SealedProposal
from outrider.transport.link import LinkBytes

SESSION = "ab" * 16
TOKENS = SealedProposal((1, 2))


def verdict(round_index: int, session_id: str = SESSION, epoch: int = 1) -> VerdictReply:
    return VerdictReply(ReplyKey(session_id, epoch, round_index), Verdict((), (1,)), 3)


def proposal(
    round_index: int, tokens: SealedProposal = TOKENS, assumed: tuple[int, ...] = ()
) -> ProposalReply:
    return ProposalReply(ReplyKey(SESSION, 1, round_index), tokens, 3, 3, assumed=assumed)


async def test_what_comes_too_late_is_counted_and_nothing_else() -> None:
    link = ScriptedLink()
    pool = ReplicaPool("draft")
    pool.admit("d", link, TOY)
    route: SessionRoute[Any, Any] = SessionRoute(pool, context_of(session(name=SESSION)))
    route.begin(2)
    for answer in (
        proposal(2),
        proposal(3),
        proposal(1, NOTHING_SEALED),  # Of a prompt that was read: there is nothing to be late.
        proposal(1, assumed=(4,)),  # Pushed, for what did not come true.
        Resync(ReplyKey(SESSION, 1, 1), 0, 0),
    ):
        link.on_answer(answer)
    assert pool.num_stale == 0
    late = (proposal(1), verdict(0), verdict(2, epoch=2), proposal(2), verdict(5, "cd" * 16))
    for num, answer in enumerate(late, start=1):
        link.on_answer(answer)
        assert pool.num_stale == num
    route.close()
    link.on_answer(proposal(3, assumed=(4,)))
    assert pool.num_stale == 5
    link.on_answer(proposal(3))
    assert pool.num_stale == 6


async def test_sums_never_fall_when_a_replica_leaves() -> None:
    pool = ReplicaPool("target")
    links = {"a": ScriptedLink(), "b": ScriptedLink()}
    for number, (name, link) in enumerate(links.items(), start=1):
        link.num_bytes = LinkBytes(sent=10 * number, received=100 * number)
        pool.admit(name, link, TOY)
        link.on_answer(verdict(0))
    for left in ("", "a", "b"):
        if left:
            await pool.leave(left)
        assert (pool.num_bytes.sent, pool.num_bytes.received, pool.num_stale) == (30, 300, 2)


async def test_a_pool_is_full_when_all_seats_of_its_steps_are_taken() -> None:
    pool = ReplicaPool("target")
    assert pool.is_full  # There is no seat at all.
    pool.admit("a", ScriptedLink(), TOY)
    pool.admit("b", ScriptedLink(), TOY)
    for number in range(2 * TOY.max_num_seqs):
        assert not pool.is_full
        SessionRoute(pool, context_of(session((number,) * 40, name=f"{number:032x}")))
    assert pool.is_full
