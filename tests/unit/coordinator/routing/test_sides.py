import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from session_links import (
    ANSWER_S,
    NOISE,
    PROMPT,
    RETRY_S,
    TOY,
    ScriptedLink,
    asked,
    draft_of,
    proposal,
    refuse,
    session,
    target_of,
    verdict,
    with_target,
)
from virtual_time import virtually

from coordinator.draft_length.policy import RoundLength
from coordinator.routing.drafts import NextWanted
from coordinator.routing.target_client import TargetClient
from outrider.errors import (
    BadRequest,
    DataLoss,
    InvariantError,
    LinkLost,
    NotFound,
    OutriderError,
    StaleEpoch,
    Unavailable,
)
from outrider.hidden_states import Features
from outrider.limits import SILENT_DRAFT_S
from outrider.messages import ReplyKey, Resync, VerdictReply
from outrider.replica.step_request import CANCELLED_CODE
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState, Counters
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import (
    NOTHING_SEALED,
    DraftDistribution,
    Proposal,
    SealedProposal,
)
from outrider.speculation.sampling_params import Rule
from outrider.telemetry.observer import RequestObserver


@virtually
async def test_what_the_target_lacks_is_sent_and_what_it_holds_is_not() -> None:
    link = ScriptedLink(verdict, verdict)
    one = session()
    target = target_of(link, one=one)
    reply = await target.verify(0, NOTHING_SEALED)
    target.settle(reply, one.length)
    one.decide((9,), Counters())
    await target.verify(1, SealedProposal((1, 2)))
    assert target.cache_state == CacheState("r0", 4)
    first, second = (item.head for item in link.sent)
    assert (first.base_length, first.append) == (0, PROMPT)
    assert (second.base_length, second.append) == (4, (9,))


@virtually
async def test_a_target_that_was_asked_twice_in_vain_is_left_for_another() -> None:
    """Its stream stands, but its steps may hang."""
    hanging, other = ScriptedLink(), ScriptedLink(verdict)
    one = session()
    target = target_of(hanging, other, one=one)
    reply = await target.verify(0, NOTHING_SEALED)
    assert asyncio.get_running_loop().time() == pytest.approx(3.0)
    target.settle(reply, one.length)
    assert target.cache_state.replica == "r1"
    assert len(hanging.sent) == 2
    assert [item.head.base_length for item in other.sent] == [0]


@virtually
async def test_a_resync_is_answered_with_what_the_replica_lacks() -> None:
    def resync(length: int, digest_of: tuple[int, ...]) -> Callable[[Any], Resync]:
        digest = session(digest_of).tokens.digest()
        return lambda item: Resync(item.head.key, length, digest)

    link = ScriptedLink(resync(2, PROMPT[:2]), resync(3, (4, 4, 4)), verdict)
    target = target_of(link)
    await target.verify(0, NOTHING_SEALED)
    assert [item.head.base_length for item in link.sent] == [0, 2, 0]


def test_a_target_that_cannot_be_reached_is_given_up_in_time() -> None:
    link = ScriptedLink(*[LinkLost("down")] * 50)

    async def test(target: TargetClient, one: Session) -> float:
        with pytest.raises(Unavailable, match="no target can be reached"):
            await target.verify(0, NOTHING_SEALED)
        return asyncio.get_running_loop().time()

    assert 4.0 <= with_target(link, test) <= 6.0


@pytest.mark.parametrize(
    ("refusal", "becomes"),
    [
        (StaleEpoch("over"), StaleEpoch),
        (InvariantError("NaN"), OutriderError),
        # The user's fields were checked long before; a bad message is our own doing.
        (BadRequest("append[0]", "too large"), InvariantError),
        # A store that lost its tail may give an epoch twice; the target has seen it end.
        (SimpleNamespace(grpc_code=CANCELLED_CODE, message="released"), DataLoss),
    ],
)
@virtually
async def test_a_refusal_ends_the_request(refusal: Any, becomes: type[OutriderError]) -> None:
    target = target_of(ScriptedLink(refuse(refusal)))
    with pytest.raises(becomes) as caught:
        await target.verify(0, NOTHING_SEALED)
    assert caught.value.grpc_code == becomes.grpc_code


def test_a_stream_that_breaks_between_two_rounds_is_asked_anew_at_once() -> None:
    """The target was decoding ahead; what it would have sent is lost with the stream."""
    link = ScriptedLink(verdict, verdict)

    async def test(target: TargetClient, one: Session) -> float:
        reply = await target.verify(0, NOTHING_SEALED, 8)
        target.settle(reply, one.length)
        one.decide((9,), Counters())
        link.on_lost(LinkLost("keepalive"))
        await target.verify(1, NOTHING_SEALED, 8)
        return asyncio.get_running_loop().time()

    assert with_target(link, test) < 0.01
    assert len(link.sent) == 2


def test_a_target_that_decodes_ahead_is_asked_again_at_half_its_allowance() -> None:
    link = ScriptedLink()

    async def test(target: TargetClient, one: Session) -> list[int]:
        asked = []
        for index in range(10):
            sent = len(link.sent)
            link.script = [None]
            task = asyncio.create_task(target.verify(index, NOTHING_SEALED, 8))
            await asyncio.sleep(0.01)
            if len(link.sent) > sent:
                asked.append(index)
            key = link.sent[-1].head.key
            answer = VerdictReply(type(key)(key.session_id, 1, index), Verdict((), (9,)), 0)
            link.on_answer(answer)
            target.settle(await task, one.length)
            one.decide((9,), Counters())
        return asked

    assert with_target(link, test) == [0, 5]


@virtually
async def test_the_first_verdict_of_a_round_wins_and_stale_ones_are_dropped() -> None:
    link = ScriptedLink(verdict)
    one = session()
    target = target_of(link, one=one)
    reply = await target.verify(0, NOTHING_SEALED)
    target.settle(reply, one.length)
    one.decide((9,), Counters())
    link.script = [None]
    task = asyncio.create_task(target.verify(1, NOTHING_SEALED))
    await asyncio.sleep(0.01)
    stale, item = link.sent
    link.on_answer(verdict(stale, correction=1))
    link.on_answer(verdict(item, correction=2))
    link.on_answer(verdict(item, correction=3))
    assert (await task).verdict.correction == (2,)


@virtually
async def test_a_draft_reads_the_prompt_once() -> None:
    link = ScriptedLink(proposal, proposal)
    one = session()
    draft = draft_of(link, one=one)
    draft.prefill(0, 3)
    one.decide((9,), Counters())
    drafted = await draft.propose(1, asked(3), NOISE)
    assert drafted.source != "fallback"
    assert drafted.proposal.token_ids == (0, 1, 2)
    prefill, item = link.sent
    assert (prefill.num_draft_tokens, prefill.head.append) == (0, PROMPT)
    assert (item.head.base_length, item.head.append) == (4, (9,))


@virtually
async def test_a_draft_that_reads_features_is_sent_what_it_lacks() -> None:
    """What it has not answered to; all that are kept where it asks for a resync."""

    def resync(item: Any) -> Resync:
        return Resync(item.head.key, 0, 0)

    def shown(place: int) -> VerdictReply:
        key = ReplyKey("0" * 32, 0, 0)
        features = Features(place, 1, bytes([place, 0]))
        return VerdictReply(key, Verdict((), (9,)), 0, features=features)

    link = ScriptedLink(proposal, proposal, resync, proposal, LinkLost("down"), None)
    link.description = replace(TOY, reads_features=True)
    one = session()
    draft = draft_of(link, one=one)
    wanted = draft.next_wanted(RoundLength(2, 0), 9)
    assert wanted == NextWanted(features=True)
    for index in range(5):
        await draft.propose(index, asked(1), NOISE)
        draft.hear(shown(3 + index))
        one.decide((9,), Counters())
        draft.settle(one.length)
    await asyncio.sleep(RETRY_S)
    await draft.propose(5, asked(1), NOISE)
    sent = [item.features and (item.features.first, item.features.end) for item in link.sent]
    assert sent == [None, (3, 4), (4, 5), (3, 5), (5, 6), (5, 8)]


@pytest.mark.parametrize("draft_budget_s", [math.inf, 0.02])
@virtually
async def test_a_silent_draft_costs_one_wait_and_is_used_again_when_it_answers(
    draft_budget_s: float,
) -> None:
    """It is waited for beyond the time that it has, as a healthy one would have answered by then.
    Of what somebody else proposes nothing is learned."""
    link = ScriptedLink()
    draft = draft_of(link)
    loop = asyncio.get_running_loop()
    drafted = await draft.propose(1, asked(3, draft_budget_s=draft_budget_s), NOISE)
    assert (drafted.source != "fallback", drafted.num_asked) == (False, 0)
    waited_s = min(draft_budget_s, ANSWER_S) + SILENT_DRAFT_S
    assert loop.time() == drafted.seconds == pytest.approx(waited_s)
    for index in (2, 3):
        assert (await draft.propose(index, asked(3), NOISE)).proposal.token_ids == (1,)
    assert loop.time() == drafted.seconds
    link.on_answer(proposal(link.sent[0]))  # Late, and of no use but as a sign of life.
    link.script = [proposal]
    assert (await draft.propose(4, asked(3), NOISE)).source != "fallback"


@virtually
async def test_an_absent_draft_is_probed_without_waiting() -> None:
    link = ScriptedLink(LinkLost("down"))
    draft = draft_of(link)
    loop = asyncio.get_running_loop()
    assert (await draft.propose(1, asked(3), NOISE)).source == "fallback"
    assert (await draft.propose(2, asked(3), NOISE)).source == "fallback"
    assert len(link.sent) == 1
    await asyncio.sleep(RETRY_S)
    start = loop.time()
    link.script = [proposal, proposal]
    assert (await draft.propose(3, asked(3), NOISE)).source == "fallback"
    assert loop.time() == start
    await asyncio.sleep(0.01)
    assert (await draft.propose(4, asked(3), NOISE)).source != "fallback"


@pytest.mark.parametrize("error", [NotFound("who?"), BadRequest("x", "y")])
@virtually
async def test_a_draft_that_refuses_harms_nobody(error: Any) -> None:
    draft = draft_of(ScriptedLink(refuse(error)))
    assert (await draft.propose(1, asked(3), NOISE)).source == "fallback"


class Unreadable(RequestObserver):
    """Counts the proposals that the target could not read."""

    num = 0

    def count(self, name: str) -> None:
        self.num += name == "unreadable_proposals"


READABLE = SealedProposal.of(Proposal((1,), (DraftDistribution((1, 2), (2**15, 2**15)),)))


def opened(item: Any) -> Any:
    """What a target answers that reads q."""
    try:
        item.proposal.open()
    except BadRequest as error:
        return refuse(error)(item)
    return verdict(item)


@pytest.mark.parametrize(
    ("q", "num_verified", "is_broken"),
    [(READABLE.q, 1, False), (b"?", 0, False), (READABLE.q * 3, 0, True)],
)
@virtually
async def test_a_proposal_is_verified_as_far_as_its_q_is_readable(
    q: bytes, num_verified: int, is_broken: bool
) -> None:
    """The rest counts as not proposed. The first sending is asked again
    before its refusal comes: the second refusal is not about what was sent since."""
    proposal = SealedProposal((1, 2), q)
    link = ScriptedLink(None, opened)
    seen = Unreadable()
    one = session(rule=Rule.TOKEN)
    target = target_of(link, one=one, observer=seen)
    loop = asyncio.get_running_loop()
    loop.call_later(1.5, lambda: link.on_answer(opened(link.sent[0])))
    loop.call_later(1.6, lambda: link.on_answer(verdict(link.sent[-1])))
    reply = await target.verify(1, proposal)
    assert reply.verdict.accept_probability == (1.0,) * num_verified
    assert reply.verdict.correction == (9,) * (num_verified + 1)
    assert target.verified.token_ids == (1, 2)[:num_verified]
    assert target.found_broken_draft is is_broken
    assert [len(item.proposal) for item in link.sent] == [2, 2, num_verified]
    assert seen.num == 1


@virtually
async def test_a_q_that_the_target_alone_cannot_read_is_given_up() -> None:
    """It can be read here, so nothing is cut; the target refuses it each time."""
    proposal = SealedProposal((1,), READABLE.q)

    def only_nothing(item: Any) -> Any:
        return refuse(BadRequest("proposal.q", "?"))(item) if item.proposal else verdict(item)

    link = ScriptedLink(*[only_nothing] * 9)
    seen = Unreadable()
    target = target_of(link, one=session(rule=Rule.TOKEN), observer=seen)
    async with asyncio.timeout(20):
        reply = await target.verify(1, proposal)
    assert reply.verdict.correction == (9,)
    assert not target.verified
    assert target.found_broken_draft
    assert [len(item.proposal) for item in link.sent] == [1, 1, 0]
    assert seen.num == 1


@virtually
async def test_a_rule_that_does_not_look_at_q_keeps_the_tokens() -> None:
    link = ScriptedLink(opened, opened)
    target = target_of(link)
    reply = await target.verify(1, SealedProposal((1, 2), b"?"))
    assert reply.verdict.accept_probability == (1.0, 1.0)
    assert not target.found_broken_draft
