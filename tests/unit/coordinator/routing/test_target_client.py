"""What a session sends to its target, and what it does with the answers."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from coordinator.routing.drafts import LookupRequest, NextRoundRequest
from coordinator.routing.target_client import ANSWER_S, MISMATCHES_MAX
from outrider import errors
from outrider.foundation.refusals import REFUSALS
from outrider.interfaces.messages import Prefix, Resync, VerdictReply, VerifyItem
from outrider.replica.step_request import CANCELLED_CODE
from outrider.sessions.state import Session
from outrider.sessions.store import Counters
from outrider.speculation.proposal import DraftDistribution, EncodedProposal, Proposal
from outrider.speculation.sampling_params import Rule
from outrider.telemetry.observer import SILENT
from tests.support.session_links import (
    PROMPT,
    TOY,
    ScriptedLink,
    later,
    play,
    refuse,
    session,
    target_of,
    verdict,
)

pytestmark = pytest.mark.virtual


async def test_a_session_leaves_a_target_that_did_not_answer_twice() -> None:
    hanging, other = ScriptedLink(), ScriptedLink(verdict)
    target = target_of(hanging, other)
    await target.verify(0, EncodedProposal())
    assert asyncio.get_running_loop().time() == pytest.approx(3 * ANSWER_S)
    assert (target.cache_state.replica, len(hanging.sent)) == ("r1", 2)
    assert [item.head.base_length for item in other.sent] == [0]


async def test_a_resync_is_answered_with_what_the_replica_lacks() -> None:
    def resync(length: int, digest_of: tuple[int, ...]) -> Callable[[Any], Resync]:
        digest = session(digest_of).tokens.digest()
        return lambda item: Resync(item.head.key, length, digest)

    link = ScriptedLink(resync(2, PROMPT[:2]), resync(3, (4, 4, 4)), verdict)
    target = target_of(link)
    await target.verify(0, EncodedProposal())
    assert [item.head.base_length for item in link.sent] == [0, 2, 0]


@pytest.mark.parametrize(
    ("refusal", "becomes"),
    [
        (errors.StaleEpoch("over"), errors.StaleEpoch),
        (errors.InvariantError("NaN"), errors.OutriderError),
        # The user's fields were checked before, so a bad message is our fault.
        (errors.BadRequest("append[0]", "too large"), errors.InvariantError),
        # A store that lost its last writes may give an epoch twice.
        (SimpleNamespace(grpc_code=CANCELLED_CODE, message="released"), errors.DataLoss),
    ],
)
async def test_a_refusal_ends_the_request(
    refusal: Any, becomes: type[errors.OutriderError]
) -> None:
    target = target_of(ScriptedLink(refuse(refusal)))
    with pytest.raises(becomes) as caught:
        await target.verify(0, EncodedProposal())
    assert caught.value.grpc_code == becomes.grpc_code


async def test_a_request_that_a_target_refuses_for_a_while_counts_once() -> None:
    before = REFUSALS["replica"]
    target = target_of(ScriptedLink(*[refuse(errors.Overloaded("full"))] * 3, verdict))
    await target.verify(0, EncodedProposal())
    assert REFUSALS["replica"] == before + 1


async def test_after_a_stream_broke_between_two_rounds_the_target_is_asked_at_once() -> None:
    """The target was running ahead; its verdicts are lost with the stream."""
    link, one = ScriptedLink(verdict, verdict), session()
    target = target_of(link, one=one)
    await play(target, one, 0, 8)
    link.on_lost(errors.LinkLost("keepalive"))
    await play(target, one, 1, 8)
    assert asyncio.get_running_loop().time() < 0.01
    assert len(link.sent) == 2


async def second_round(one: Session, run_ahead: int = 0) -> tuple[Any, ...]:
    """The session's link and target, and the verdict of its second round, which the link awaits."""
    link = ScriptedLink(verdict)
    target = target_of(link, one=one)
    await play(target, one, 0)
    link.script = [None]
    task = asyncio.create_task(target.verify(1, EncodedProposal(), run_ahead))
    await asyncio.sleep(0.01)
    return link, target, task


async def test_the_first_verdict_of_a_round_wins_and_stale_ones_are_dropped() -> None:
    link, _, task = await second_round(session())
    stale, item = link.sent
    link.on_answer(verdict(stale, correction=1))
    link.on_answer(verdict(item, correction=2))
    link.on_answer(verdict(item, correction=3))
    assert (await task).verdict.correction == (2,)


async def test_a_round_that_the_target_ran_ahead_to_was_not_asked_for() -> None:
    one = session()
    link, target, task = await second_round(one, run_ahead=2)
    [_, item] = link.sent
    link.on_answer(verdict(item, correction=2))
    await task
    assert target.was_asked
    one.decide((2,), Counters())
    link.on_answer(verdict(later(item, 2, 2), correction=3))
    await target.verify(2, EncodedProposal(), run_ahead=1)
    assert (target.was_asked, len(link.sent)) == (False, 2)


async def test_the_verdicts_of_rounds_that_the_target_may_run_ahead_are_taken_in_order() -> None:
    one = session()
    link, target, task = await second_round(one, run_ahead=2)
    [_, item] = link.sent

    def answer(number: int) -> None:
        link.on_answer(verdict(later(item, number, *range(1, number)), correction=number))

    answer(1)
    await task
    one.decide((1,), Counters())
    assert target.take_ahead() is None, "it has not arrived"
    for number in (4, 2, 3):  # Nobody asked for round 4.
        answer(number)
    for number in (2, 3):
        taken = target.take_ahead()
        assert taken is not None
        assert taken.verdict.correction == (number,)
        one.decide((number,), Counters())
    assert target.take_ahead() is None
    assert (target.was_asked, len(link.sent)) == (False, 2)


@pytest.mark.parametrize("is_taken", [False, True])
async def test_verdicts_after_other_tokens_are_dropped_and_nothing_runs_ahead_any_more(
    is_taken: bool,
) -> None:
    """The target has taken another token for the outcome of round 1 than the coordinator."""
    one = session()
    link, target, task = await second_round(one, run_ahead=4)
    [_, item] = link.sent
    link.on_answer(verdict(item, correction=2))
    await task
    one.decide((2,), Counters())
    for number in (2, 3):
        link.on_answer(verdict(later(item, number, *[5] * (number - 1)), correction=5))
    seen = Mock(SILENT)
    target.context = replace(target.context, observer=seen)
    if is_taken:
        assert target.take_ahead() is None
    link.script = [lambda asked: verdict(asked, correction=7)]
    reply = await target.verify(2, EncodedProposal(), run_ahead=4)
    assert reply.verdict.correction == (7,)
    assert link.sent[-1].run_ahead == 0
    assert link.sent[-1].head.round > 2 + 4  # So the target's later verdicts match no round.
    assert seen.count.mock_calls.count(call("verdict_mismatches")) == 1
    one.decide((7,), Counters())
    link.script = [lambda asked: verdict(asked, correction=8)]
    await target.verify(3, EncodedProposal(), run_ahead=4)
    assert link.sent[-1].run_ahead == 0


OTHERS: Any = [lambda item: verdict(later(item, item.head.round, 5))] * MISMATCHES_MAX


async def test_a_session_leaves_a_target_whose_verdicts_are_all_on_other_tokens() -> None:
    """Such a target is one of an old version, which states no lengths and digests."""
    one = session()
    links = [ScriptedLink(*OTHERS), ScriptedLink(verdict, verdict)]
    target = target_of(*links, one=one)
    await play(target, one, 0)
    assert (target.replica, len(links[0].sent)) == ("r1", MISMATCHES_MAX)
    target._replica.leaving = True  # type: ignore[union-attr]
    await play(target, one, 1)
    assert target.replica == "r1"


async def test_a_session_fails_if_the_verdicts_of_all_targets_are_on_other_tokens() -> None:
    links = [ScriptedLink(*OTHERS) for _ in range(2)]
    with pytest.raises(errors.InvariantError, match="other tokens"):
        await target_of(*links).verify(0, EncodedProposal())
    assert [len(link.sent) for link in links] == [MISMATCHES_MAX] * 2


async def test_the_last_target_of_a_session_alone_may_learn_from_it() -> None:
    one, learned = session(), Prefix(3, 7)
    links = [ScriptedLink(verdict, errors.LinkLost("gone")), ScriptedLink(verdict)]
    target = target_of(*links, one=one)
    for index in range(2):
        await play(target, one, index)
    target.close(learned)
    assert [link.learned for link in links] == [[None], [learned]]


async def test_rounds_for_a_look_up_do_not_run_ahead_on_a_target_without_one() -> None:
    """The session has moved there while it asked."""
    asked: dict[str, Any] = {"run_ahead": 4, "num_tokens_left": 9}
    links = [ScriptedLink(verdict), ScriptedLink(errors.LinkLost("gone")), ScriptedLink(verdict)]
    for link, looks_up in zip(links, (True, True, False), strict=True):
        link.description = replace(TOY, looks_up=looks_up)
    for first, others in ((0, links[:1]), (1, links[1:])):
        target = target_of(*others, one=session(name=str(first)))
        await target.verify(0, EncodedProposal(), lookup=LookupRequest(3), **asked)
    assert [link.sent[0].run_ahead for link in links] == [4, 4, 0]


async def test_the_tokens_of_the_targets_look_up_are_those_that_the_verdict_is_about() -> None:
    one = session()

    def looked_up(item: VerifyItem) -> VerdictReply:
        assert (item.num_lookup_tokens, item.lookup_min_chance) == (3, 0.25)
        assert (item.num_tokens_left, item.ignores_eos) == (9, True)
        judged = verdict(replace(item, proposal=EncodedProposal((4, 5))))
        return replace(judged, looked_up=(4, 5))

    target = target_of(ScriptedLink(looked_up), one=one, ignore_eos=True)
    request = LookupRequest(3, 0.25)
    await target.verify(0, EncodedProposal(), num_tokens_left=9, lookup=request)
    assert target.verified.token_ids == (4, 5)


HEAD = NextRoundRequest(3)
"""The target's head drafts three tokens for each next round."""


class HeadRounds:
    """A session whose target has a head. Each verdict accepts all draft tokens, adds token 9, and
    brings three tokens for the next round."""

    def __init__(self) -> None:
        self.one, self.seen = session(), Mock(wraps=SILENT)
        self.link = ScriptedLink(lambda item: self.judged(item))
        self.target = target_of(self.link, one=self.one, observer=self.seen)
        self.brought = EncodedProposal()
        """Of the newest verdict that was taken."""
        self.left = 40

    def judged(self, item: VerifyItem, drafted: int = 3) -> VerdictReply:
        """The verdict on an item, which brings so many tokens."""
        round_index = item.head.round
        proposal = EncodedProposal((round_index, 4, 5)[:drafted])
        return replace(verdict(item), next_proposal=proposal)

    async def play(self, index: int, run_ahead: int = 6, **fields: Any) -> VerdictReply:
        """A round by the decode loop, with the proposal of the verdict before."""
        wanted = fields.pop("wanted", HEAD)
        given = fields.pop("proposal", self.brought.cut(self.left - 1))
        reply = await self.target.verify(index, given, run_ahead, wanted, num_tokens_left=self.left)
        self.take(reply)
        return reply

    def take(self, reply: VerdictReply) -> None:
        """Decides a round."""
        tokens = (*self.target.verified.token_ids, 9)
        self.brought = reply.next_proposal
        self.left -= len(tokens)
        self.one.decide(tokens, Counters())

    def run_ahead(self, num: int, drafted: int = 3) -> None:
        """Lets the target answer rounds after the newest item, which was decided. Their verdicts
        arrive together. The last one brings so many tokens."""
        item, proposal, left = self.link.sent[-1], self.brought, self.left
        added = self.one.tokens.since(item.head.committed_length)
        for index in range(1, num + 1):
            ahead = later(item, item.head.round + index, *added)
            ahead = replace(ahead, proposal=proposal.cut(left - 1))
            reply = self.judged(ahead, drafted if index == num else 3)
            self.link.on_answer(reply)
            outcome = (*ahead.proposal.token_ids, 9)
            added, left, proposal = (*added, *outcome), left - len(outcome), reply.next_proposal


async def test_proposals_of_rounds_that_a_head_runs_ahead_are_those_of_the_verdicts_before() -> (
    None
):
    """The target answers four rounds. The last of their proposals is cut to the room that the
    completion has left."""
    rounds = HeadRounds()
    await rounds.play(0)
    rounds.left = 14
    rounds.run_ahead(4)
    found = []
    while (reply := rounds.target.take_ahead(rounds.left)) is not None:
        found.append(rounds.target.verified.token_ids)
        rounds.take(reply)
    assert found == [(0, 4, 5), (1, 4, 5), (2, 4, 5), (3,)]
    assert (len(rounds.link.sent), rounds.target.was_asked) == (1, False)


async def test_more_rounds_of_a_head_are_asked_for_with_the_proposal_that_it_runs() -> None:
    rounds = HeadRounds()
    await rounds.play(0)
    rounds.run_ahead(4)
    for index in range(1, 5):
        await rounds.play(index)
        assert rounds.target.was_asked is (index == 4)
    assert rounds.link.sent[-1].proposal.token_ids == (3, 4, 5)
    assert rounds.link.sent[-1].num_next_draft_tokens == 3


@pytest.mark.parametrize("is_plain", [False, True])
async def test_rounds_with_other_drafts_are_asked_for_when_those_ahead_have_run(
    is_plain: bool,
) -> None:
    """The target runs three rounds ahead, and then another K is planned."""
    rounds = HeadRounds()
    if is_plain:
        rounds.judged = lambda item, drafted=0: verdict(item)  # type: ignore[method-assign]
    before, after = NextRoundRequest(0 if is_plain else 3), NextRoundRequest(2)
    await rounds.play(0, 3, wanted=before)
    for index in range(1, 5):
        rounds.link.script = [lambda item: rounds.judged(item)]
        if index == 1:
            rounds.run_ahead(3)
        await rounds.play(index, 3, wanted=before if index < 3 else after)
    assert [item.head.round for item in rounds.link.sent] == [0, 4]
    assert rounds.link.sent[-1].num_next_draft_tokens == 2


async def test_after_a_verdict_without_a_proposal_the_target_is_asked() -> None:
    """Here with the tokens of a look-up."""
    rounds = HeadRounds()
    await rounds.play(0)
    rounds.run_ahead(1, drafted=0)
    reply = rounds.target.take_ahead(rounds.left)
    assert reply is not None
    rounds.take(reply)
    assert rounds.target.take_ahead(rounds.left) is None
    for proposal in (EncodedProposal(), EncodedProposal((7, 7))):
        rounds.link.script = [lambda item: rounds.judged(item, drafted=0)]
        await rounds.play(2 + len(proposal), proposal=proposal)
        assert rounds.target.was_asked
        assert rounds.link.sent[-1].proposal == proposal
    assert asyncio.get_running_loop().time() < ANSWER_S


async def test_a_round_of_a_head_is_asked_for_if_another_proposal_replaces_the_heads() -> None:
    rounds = HeadRounds()
    await rounds.play(0)
    rounds.link.script = [lambda item: rounds.judged(item)]
    await rounds.play(1, proposal=EncodedProposal((7, 7)))
    assert rounds.target.verified.token_ids == (7, 7)
    assert asyncio.get_running_loop().time() < ANSWER_S


@pytest.mark.parametrize("is_taken", [False, True])
async def test_a_verdict_on_another_proposal_than_the_last_one_stated_is_dropped(
    is_taken: bool,
) -> None:
    """With all behind it; nothing runs ahead in this session any more."""
    rounds = HeadRounds()
    await rounds.play(0)
    proposal, rounds.brought = rounds.brought, EncodedProposal((0, 4, 6))
    rounds.run_ahead(3)
    rounds.brought = proposal
    if is_taken:
        assert rounds.target.take_ahead(rounds.left) is None
    rounds.link.script = [lambda item: rounds.judged(item)]
    await rounds.play(1)
    assert rounds.target.verified == proposal
    assert rounds.seen.count.mock_calls.count(call("verdict_mismatches")) == 1
    assert rounds.link.sent[-1].head.round > 1 + 6
    assert [item.run_ahead for item in rounds.link.sent] == [6, 0]
    assert rounds.target.take_ahead(rounds.left) is None


async def test_a_head_whose_q_cannot_be_read_runs_no_round_ahead() -> None:
    """The caller stops using it. The target must not draft the round after it once more."""

    def opened(item: VerifyItem) -> Any:
        is_refused = bool(item.proposal)
        return refuse(errors.BadRequest("proposal.q", "?"))(item) if is_refused else verdict(item)

    link = ScriptedLink(*[opened] * 3)
    target = target_of(link, one=session(rule=Rule.TOKEN))
    await target.verify(1, EncodedProposal((1, 1), b"?"), 6, HEAD)
    assert [item.run_ahead for item in link.sent] == [6, 0]


READABLE = EncodedProposal.of(Proposal((1,), (DraftDistribution((1, 2), (2**15, 2**15)),)))


@pytest.mark.parametrize(
    ("q", "verified", "num_refused"),
    [
        (READABLE.q, (1,), 1),  # The second q is missing. The first may be used.
        (b"?", (), 1),
        (READABLE.q * 2, (), 1),  # The coordinator can read all of q.
        (READABLE.q, (), math.inf),  # The target cannot read the first q either.
    ],
)
async def test_a_proposal_is_verified_as_far_as_its_q_can_be_read(
    q: bytes, verified: tuple[int, ...], num_refused: float
) -> None:
    """The first message is repeated before its refusal comes, so the refusal comes twice."""

    def opened(item: Any) -> Any:
        is_refused = len(item.proposal) > 1 or (item.proposal and num_refused > 1)
        return refuse(errors.BadRequest("proposal.q", "?"))(item) if is_refused else verdict(item)

    link, seen = ScriptedLink(None, opened), Mock(wraps=SILENT)
    target = target_of(link, one=session(rule=Rule.TOKEN), observer=seen)
    loop = asyncio.get_running_loop()
    loop.call_later(1.5 * ANSWER_S, lambda: link.on_answer(opened(link.sent[0])))
    for wait in (1.6, 5.0, 9.0):
        loop.call_later(wait * ANSWER_S, lambda: link.on_answer(opened(link.sent[-1])))
    reply = await target.verify(1, EncodedProposal((1, 1), q))
    assert reply.verdict.correction == (9,) * (len(verified) + 1)
    assert target.verified.token_ids == verified
    assert len(link.sent[-1].proposal) == len(verified)
    num_counted = seen.count.mock_calls.count(call("unreadable_proposals"))
    assert num_counted == (2 if num_refused > 1 else 1)
