"""What a session sends to its draft, which answers it accepts, and what it does without them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from coordinator.draft_length.policy import RoundLength
from coordinator.routing.draft_client import RETRY_S, DraftClient, PushedProposals
from coordinator.routing.drafts import NextRoundRequest
from coordinator.routing.replica_pool import ReplicaPool, SessionRoute
from outrider.config.deployment import DraftConfig
from outrider.drafters.features import Features
from outrider.drafters.lookup import NgramDrafter
from outrider.errors import BadRequest, DeadlineExceeded, LinkLost, NotFound
from outrider.foundation.tokens import TokenSequence
from outrider.interfaces.messages import ProposalReply, ReplyKey, Resync, VerdictReply
from outrider.limits import SILENT_DRAFT_S
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState, Counters
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import EncodedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule
from tests.support.session_links import (
    ANSWER_S,
    CONFIG,
    NOISE,
    PROMPT,
    TOY,
    ScriptedLink,
    asked,
    context_of,
    draft_of,
    pool_of,
    proposal,
    refuse,
    session,
)

pytestmark = pytest.mark.virtual


def verdict(features: Features | None) -> VerdictReply:
    key = ReplyKey("0" * 32, 0, 0)
    return VerdictReply(key, Verdict((), (9,)), 0, features=features)


async def test_a_draft_that_reads_features_is_sent_what_it_lacks() -> None:
    """Until it can run all tokens, the look-up drafts: while the prompt's rows come with several
    verdicts, and after the draft has lost the session or was away."""

    def answer(item: Any) -> ProposalReply | Resync:
        nonlocal held
        if item.head.base_length > held:
            return Resync(item.head.key, held, one.tokens.digest(held))
        if item.features is not None:
            assert item.features.first <= max(0, held - 1)
            held = max(held, item.features.end + 1)
        num = item.num_draft_tokens if held == one.length else 0
        return replace(proposal(replace(item, num_draft_tokens=num)), cached_length=held)

    held, sources, wanted = 0, [], []
    link = ScriptedLink()
    link.description = replace(TOY, reads_features=True)
    one = session()
    draft = draft_of(link, one=one)
    draft.prefill(3)
    for index in range(18):
        link.script = [answer, answer]
        match index:
            case 6:
                held = 2
            case 9:
                link.script = [LinkLost("down")]
            case 12:
                await asyncio.sleep(RETRY_S)
        if index > 0:
            drafted = await draft.propose(index, asked(1), NOISE)
            await asyncio.sleep(0.001)  # What is not waited for comes before the next round.
            sources.append(drafted.source == "replica")
            assert drafted.num_asked == (1 if sources[-1] else 0)
        first = draft.next_round_request(RoundLength(1, 0, next_max=1)).features_from
        wanted.append(first)
        features = None
        if first is not None and first < one.length:
            features = Features(first, 1, bytes(2 * (min(one.length, first + 3) - first)))
        draft.on_verdict(verdict(features))
        draft.settle(one.length)
        one.decide((9,), Counters())
    assert draft.next_round_request(RoundLength(1, 0)) == NextRoundRequest()
    sent = [item.features and (item.features.first, item.features.end) for item in link.sent]
    assert wanted == [0, 3, 5, 6, 7, 8, 1, 4, 7, *[None] * 3, 7, 10, 13, 16, 19, 20]
    assert sources == [False, *[True] * 4, *[False] * 10, True, True]
    assert sent == [
        (0, 3),
        (3, 5),
        (5, 6),
        (6, 7),
        (7, 8),
        (8, 9),
        (1, 4),
        (4, 7),
        (7, 10),
        None,
        (7, 10),
        (10, 13),
        (13, 16),
        (16, 19),
        (19, 20),
    ]


def holding(*held: int | None) -> list[Any]:
    """Answers to feeds, by what the draft holds then; None = it does not know the session."""

    def answer(number: int | None, item: Any) -> ProposalReply | Resync:
        if number is None:
            return Resync(item.head.key, 0, 0)
        return replace(proposal(replace(item, num_draft_tokens=0)), cached_length=number)

    return [partial(answer, number) for number in held]


def reading_draft(*links: ScriptedLink) -> tuple[DraftClient, Session]:
    """A draft that reads features, of a session too long for the rows of a few verdicts."""
    for link in links:
        link.description = replace(TOY, reads_features=True)
    one = session(tuple(range(40)))
    return draft_of(*links, one=one), one


async def feed(draft: DraftClient, one: Session, index: int) -> int | None:
    """Plays a round whose verdict brings three rows. Returns where they begin."""
    assert (await draft.propose(index, asked(1), NOISE)).num_asked == 0
    first = draft.next_round_request(RoundLength(1, 0, next_max=1)).features_from
    draft.on_verdict(verdict(None if first is None else Features(first, 1, bytes(6))))
    draft.settle(one.length)
    one.decide((9,), Counters())
    await asyncio.sleep(0.001)
    return first


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ((4, 7, 10, 13), [0, 3, 6, 9, 12]),
        ((36, 39), [0, 3, 35, 38]),  # It found pages that other sessions left.
        ((4, None, 4, 7), [0, 3, 6, 0, 3]),
        ((0, 0), [0, 3, 0, 3, None, None]),  # It can hold nothing, so feeding pauses.
    ],
)
async def test_a_draft_says_what_it_holds_after_a_feed(
    held: tuple[int | None, ...], wanted: list[int | None]
) -> None:
    link = ScriptedLink(*holding(*held))
    draft, one = reading_draft(link)
    assert [await feed(draft, one, index) for index in range(len(wanted))] == wanted


async def test_a_draft_is_fed_again_once_it_has_answered() -> None:
    link = ScriptedLink()
    draft, one = reading_draft(link)
    assert [await feed(draft, one, index) for index in range(4)] == [0, 3, None, None]
    assert len(link.sent) == 1
    link.on_answer(holding(4)[0](link.sent[0]))
    assert await feed(draft, one, 4) == 6
    assert [item.features.first for item in link.sent] == [0, 3]
    # Without an answer, it is fed again after a while.
    await feed(draft, one, 5)
    await asyncio.sleep(RETRY_S)
    await feed(draft, one, 6)
    assert len(link.sent) == 3


async def test_a_feed_that_is_not_sent_says_nothing_of_the_next_draft() -> None:
    first, second = ScriptedLink(LinkLost("gone")), ScriptedLink(*holding(4))
    draft, one = reading_draft(first, second)
    assert [await feed(draft, one, index) for index in range(3)] == [0, 0, 3]
    assert [item.features.first for item in second.sent] == [0]


async def test_rows_of_one_head_are_not_sent_to_another() -> None:
    """After a verdict, the session's target and draft are replaced."""
    before, after = (
        replace(TOY, shows_features=True, reads_features=True, features=name) for name in "ab"
    )
    targets, second, one = pool_of(ScriptedLink()), ScriptedLink(proposal), session()
    target = targets.replicas["r0"]
    target.description = before
    drafts = ReplicaPool("draft", targets)
    drafts.admit("r0", ScriptedLink(), before)
    drafts.admit("r1", second, after)
    SessionRoute[Any, Any](targets, context_of(one))
    draft = draft_of(pool=drafts, one=one)
    rows = Features(0, 1, bytes(2 * (one.length - 1)))
    draft.on_verdict(verdict(rows))
    target.description = after
    for index in (1, 2):
        assert (await draft.propose(index, asked(1), NOISE)).source == "fallback"
    assert (draft.cache_state, second.sent) == (CacheState("r1", 0), [])
    draft.on_verdict(verdict(rows))
    assert (await draft.propose(3, asked(1), NOISE)).source == "replica"


async def test_a_draft_that_was_asked_and_lost_counts_as_asked() -> None:
    """Also if the next one lacks features."""
    first = ScriptedLink(*holding(4))
    draft, one = reading_draft(first, ScriptedLink())
    await feed(draft, one, 0)
    await feed(draft, one, 1)
    draft.on_verdict(verdict(Features(3, 1, bytes(2 * (one.length - 4)))))
    asyncio.get_running_loop().call_later(0.1, lambda: first.on_lost(LinkLost("gone")))
    drafted = await draft.propose(2, asked(3), NOISE)
    assert (drafted.source, drafted.num_asked) == ("fallback", 3)
    assert drafted.seconds == pytest.approx(0.1)
    assert draft.cache_state == CacheState("r1", 0)


async def test_a_silent_draft_costs_one_wait_and_is_used_again_when_it_answers() -> None:
    """Nothing is learned from the look-up's proposals."""
    link = ScriptedLink()
    draft = draft_of(link)
    loop = asyncio.get_running_loop()
    drafted = await draft.propose(1, asked(3, draft_budget_s=0.02), NOISE)
    assert (drafted.source != "fallback", drafted.num_asked) == (False, 0)
    assert loop.time() == drafted.seconds == pytest.approx(0.02 + SILENT_DRAFT_S)
    for index in (2, 3):
        assert (await draft.propose(index, asked(3), NOISE)).proposal.token_ids == (1,)
    assert loop.time() == drafted.seconds
    link.on_answer(proposal(link.sent[0]))  # Too late to be used, but a sign of life.
    link.script = [proposal]
    assert (await draft.propose(4, asked(3), NOISE)).source != "fallback"


async def test_an_absent_draft_is_probed_without_waiting() -> None:
    link = ScriptedLink(LinkLost("down"))
    draft = draft_of(link)
    assert (await draft.propose(1, asked(3), NOISE)).source == "fallback"
    assert (await draft.propose(2, asked(3), NOISE)).source == "fallback"
    assert len(link.sent) == 1
    await asyncio.sleep(RETRY_S)
    link.script = [proposal, proposal]
    assert (await draft.propose(3, asked(3), NOISE)).source == "fallback"
    assert asyncio.get_running_loop().time() == RETRY_S
    await asyncio.sleep(0.01)
    assert (await draft.propose(4, asked(3), NOISE)).source != "fallback"


def out_of_time(item: Any, num_tokens: int = 0) -> ProposalReply:
    length = item.head.committed_length
    tokens = EncodedProposal(tuple(range(num_tokens)))
    return ProposalReply(item.head.key, tokens, length, length, out_of_time=True)


async def test_a_draft_is_told_the_time_that_is_left() -> None:
    """The least that request, settings and length control allow, minus the time of a resync."""
    link = ScriptedLink(lambda item: Resync(item.head.key, 0, 0), proposal, proposal)
    on_sent = link.send

    def send(item: Any) -> None:
        on_sent(item)
        asyncio.get_running_loop()._virtual.wait(0.1)  # type: ignore[attr-defined] # On the way.

    link.send = send  # type: ignore[method-assign]
    draft = draft_of(link)
    await draft.propose(1, asked(3), NOISE)
    await draft.propose(2, asked(3, draft_budget_s=0.02), NOISE)
    assert [item.budget_us for item in link.sent] == [500_000, 400_000, 20_000]
    for deadline_ms, expected_us in ((200, 200_000), (900, 500_000)):
        other = ScriptedLink(proposal)
        await draft_of(other, draft_deadline_ms=deadline_ms).propose(1, asked(3), NOISE)
        assert other.sent[0].budget_us == expected_us


async def test_a_late_proposal_is_used() -> None:
    """How long a step takes may depend on the tokens drawn in it, also in other sessions."""
    link = ScriptedLink()
    draft = draft_of(link)
    loop = asyncio.get_running_loop()
    loop.call_later(ANSWER_S + 3.0, lambda: link.on_answer(out_of_time(link.sent[0], 2)))
    drafted = await draft.propose(1, asked(3), NOISE)
    assert (drafted.source != "fallback", drafted.proposal.token_ids) == (True, (0, 1))


async def test_a_round_that_is_not_timed_waits_for_all_its_tokens() -> None:
    """Their time may depend on its own random numbers. A lost replica is not waited for."""
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


async def test_a_round_that_is_not_timed_has_no_look_ahead() -> None:
    """How much was drafted ahead in time may depend on its own random numbers."""
    link, one = ScriptedLink(None, proposal), session()
    draft = draft_of(link, one=one, config=replace(CONFIG, look_ahead=6))
    draft.prefill(3)
    link.on_answer(pushed(1, 4, (9,)))
    one.decide((9,), Counters())
    drafted = await draft.propose(1, asked(4, is_timed=False), NOISE)
    assert (drafted.ahead, len(drafted.proposal)) == (False, 4)
    assert [item.look_ahead for item in link.sent] == [6, 0]


async def test_a_round_that_is_not_timed_waits_for_no_hidden_states() -> None:
    """Whether they have arrived may depend on its own random numbers, so the look-up drafts."""
    link = ScriptedLink()
    draft, _ = reading_draft(link)
    length = asked(1, next_max=1, is_timed=False)
    assert draft.next_round_request(length) == NextRoundRequest()
    draft.on_verdict(verdict(Features(0, 1, bytes(2 * 40))))
    assert (await draft.propose(1, length, NOISE)).source == "fallback"
    assert not link.sent


async def test_a_proposal_whose_time_ran_out_is_used_as_far_as_it_goes() -> None:
    """Drawn tokens are never dropped. Without any, a look-up fills in for this round."""
    draft = draft_of(ScriptedLink(lambda item: out_of_time(item, 2), out_of_time, proposal))
    short = await draft.propose(1, asked(3), NOISE)
    assert (short.source, short.proposal.token_ids, short.num_asked) == ("replica", (0, 1), 2)
    none = await draft.propose(2, asked(3), NOISE)
    assert (none.source, none.proposal.token_ids, none.num_asked) == ("fallback", (1,), 0)
    assert (await draft.propose(3, asked(3), NOISE)).source != "fallback"


async def test_a_draft_without_time_for_a_first_token_is_asked_again_once_it_is_ready() -> None:
    link = ScriptedLink(refuse(DeadlineExceeded("its time ran out")))
    draft = draft_of(link)
    drafted = await draft.propose(1, asked(3), NOISE)
    assert (drafted.source, drafted.num_asked) == ("fallback", 0)
    assert (await draft.propose(2, asked(3), NOISE)).source == "fallback"
    assert (asyncio.get_running_loop().time(), len(link.sent)) == (0.0, 1)
    link.on_answer(out_of_time(link.sent[0]))
    link.script = [proposal]
    assert (await draft.propose(3, asked(3), NOISE)).source != "fallback"


def tokens(*token_ids: int) -> Any:
    """An answer with these tokens."""

    def answer(item: Any) -> ProposalReply:
        length = item.head.committed_length
        return ProposalReply(item.head.key, EncodedProposal(token_ids), length, length + 1)

    return answer


@pytest.mark.parametrize(
    ("answer", "rule", "used"),
    [
        (tokens(1, 2, 2), Rule.GREEDY, (1, 2, 2)),
        (tokens(1), Rule.GREEDY, (1,)),
        (tokens(1, 2, 3, 4), Rule.GREEDY, None),  # More than were asked for.
        (tokens(1, 2, 2), Rule.TOKEN, None),  # Without q.
        (refuse(NotFound("who?")), Rule.GREEDY, None),
        (refuse(BadRequest("x", "y")), Rule.GREEDY, None),
    ],
)
async def test_the_look_up_replaces_a_proposal_that_cannot_be_used(
    answer: Any, rule: Rule, used: tuple[int, ...] | None
) -> None:
    draft = draft_of(ScriptedLink(answer), one=session(rule=rule))
    drafted = await draft.propose(1, asked(3), RoundNoise(3, rule, len(PROMPT)))
    assert (drafted.source == "fallback") is (used is None)
    assert drafted.proposal.token_ids == (used or (1,))


def pushed(
    round_index: int,
    base: int,
    assumed: tuple[int, ...],
    tokens: tuple[int, ...] = (1, 2, 3),
    q: bytes = b"",
) -> ProposalReply:
    return ProposalReply(
        ReplyKey("0" * 32, 1, round_index),
        EncodedProposal(tokens, q),
        base,
        base + len(assumed) - 1,
        assumed=assumed,
    )


def test_the_proposal_for_the_real_outcome_is_picked() -> None:
    kept = PushedProposals()
    for assumed in ((9,), (8, 9), (8, 7)):
        kept.put(pushed(1, 4, assumed))
    assert len(kept._kept) == 3
    assert kept.begin(1, TokenSequence((*PROMPT, 8, 9))).assumed == (8, 9)
    for index in (0, 1, 3):
        kept.put(pushed(index, 4, (9,)))
    assert len(kept._kept) == 0
    kept.put(pushed(2, 6, (5,)))
    assert kept.begin(2, TokenSequence((*PROMPT, 8, 9, 4))) is None


def test_kept_proposals_are_bounded_and_the_first_for_an_outcome_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.limits.LOOK_AHEAD_BYTES_MAX", 100)
    kept = PushedProposals()
    kept.put(pushed(1, 4, (9,), q=b"x" * 50))
    kept.put(pushed(1, 4, (9,), tokens=(4,), q=b""))
    kept.put(pushed(1, 4, (8,), q=b"x" * 50))
    assert len(kept._kept) == 1
    assert kept.begin(1, TokenSequence((*PROMPT, 9))).proposal.token_ids == (1, 2, 3)


async def test_after_a_hit_the_draft_is_told_without_a_wait() -> None:
    link = ScriptedLink()
    one = session()
    draft = draft_of(link, one=one, config=replace(CONFIG, look_ahead=6))
    draft.prefill(3)
    link.on_answer(pushed(1, 4, (9,)))
    one.decide((9,), Counters())
    drafted = await draft.propose(1, asked(2), NOISE)
    assert (drafted.proposal.token_ids, drafted.ahead, drafted.source) == ((1, 2), True, "replica")
    await asyncio.sleep(0)  # In this turn the message to the target is written.
    assert len(link.sent) == 1
    await asyncio.sleep(0)
    assert len(link.sent) == 2
    draft.settle(5)
    link.on_answer(pushed(2, 5, (1, 7)))
    one.decide((1, 7), Counters())
    assert (await draft.propose(2, asked(3), NOISE)).ahead
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    prefill, first, second = link.sent
    assert (prefill.held, prefill.num_draft_tokens, prefill.look_ahead) == ((), 3, 6)
    # It has the prompt, and was told its proposal as it was cut.
    assert (first.held, first.head.base_length, first.head.append) == ((1, 2), 4, (9,))
    assert (second.held, second.head.base_length, second.head.append) == ((1, 2, 3), 6, (7,))


@pytest.mark.parametrize(
    ("look_ahead", "wanted", "pushes", "answered", "drafted_for"),
    [
        (6, 1, True, (), 1),
        (6, 5, True, (), 2),  # A hit says nothing about tokens that it was not to have.
        (6, 5, False, (1, 2), 2),  # The length looked ahead for: it may be just that.
        (6, 5, False, (1, 2, 3), 5),
        (6, 5, False, (), 5),
        (0, 5, False, (1, 2), 5),
    ],
)
async def test_rounds_learn_from_the_k_that_a_proposal_was_drafted_for(
    look_ahead: int, wanted: int, pushes: bool, answered: tuple[int, ...], drafted_for: int
) -> None:
    """After a round of K = 2, for which the draft looked ahead."""
    link, one = ScriptedLink(None, tokens(*answered)), session()
    draft = draft_of(link, one=one, config=replace(CONFIG, look_ahead=look_ahead))
    draft.prefill(2)
    if pushes:
        link.on_answer(pushed(1, 4, (9,), tokens=(1, 2)))
    one.decide((9,), Counters())
    found = await draft.propose(1, asked(wanted), NOISE)
    assert (found.ahead, found.num_asked) == (pushes, drafted_for)
    prefill, *later = link.sent
    assert (prefill.num_draft_tokens, prefill.head.append) == (2 if look_ahead else 0, PROMPT)
    if not pushes:
        assert (later[0].held, later[0].head.base_length, later[0].head.append) == (None, 4, (9,))


REPEATS = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6)
NEW = (5, 6, 7, 8, 9, 1, 2, 3)
MODEL_TOKENS = 2


def hybrid_of(
    prompt: tuple[int, ...], *links: ScriptedLink, seed: int = 1, look_ahead: int = 0
) -> tuple[DraftClient, Session]:
    """A hybrid: a look-up that goes first if it is confident, and a draft."""
    hybrid = DraftConfig(
        model="hybrid:ngram,some/model", hybrid_min_score=0.7, hybrid_model_tokens=MODEL_TOKENS
    )
    config = replace(CONFIG, lookup=hybrid, look_ahead=look_ahead)
    one = session(prompt, seed=seed)
    return draft_of(*links, one=one, config=config, lookup=NgramDrafter()), one


async def test_a_confident_look_up_replaces_the_model_which_reads_its_tokens_later() -> None:
    """In the next round the model draws up to its limit, but the whole K counts as asked for."""
    link = ScriptedLink(proposal)
    draft, one = hybrid_of(REPEATS, link)
    copied = await draft.propose(1, asked(5), NOISE)
    assert (copied.proposal.token_ids, copied.num_asked) == ((7, 8, 9, 5, 6), 5)
    assert (copied.source, link.sent) == ("local", [])
    one.decide((7, 8, 1), Counters())
    drawn = await draft.propose(2, asked(5), NOISE)
    assert (drawn.source, len(drawn.proposal), drawn.num_asked) == ("replica", MODEL_TOKENS, 5)
    assert [item.head.append for item in link.sent] == [(*REPEATS, 7, 8, 1)]


async def test_whether_a_look_up_goes_first_does_not_depend_on_the_noise() -> None:
    for text, source in ((REPEATS, "local"), (NEW, "replica")):
        for seed in range(1, 9):
            draft, one = hybrid_of(text, ScriptedLink(proposal), seed=seed)
            noise = RoundNoise(seed, Rule.GREEDY, one.length)
            assert (await draft.propose(1, asked(4), noise)).source == source


async def test_the_replica_drafts_ahead_while_a_look_up_is_verified() -> None:
    """Its proposal is used in the next round, unless the look-up is confident again."""
    for assumed, source in (((7, 1), "replica"), ((7, 8), "local")):
        link = ScriptedLink()
        draft, one = hybrid_of(REPEATS, link, look_ahead=16)
        await draft.propose(1, asked(4), NOISE)
        await asyncio.sleep(0.01)
        assert (link.sent[0].held, link.sent[0].num_draft_tokens) == ((7, 8, 9, 5), MODEL_TOKENS)
        link.on_answer(pushed(2, len(REPEATS), assumed, tokens=(3, 4)))
        one.decide(assumed, Counters())
        found = await draft.propose(2, asked(4), NOISE)
        assert (found.source, found.ahead) == (source, source == "replica")


@pytest.mark.parametrize("prompt", [(1, 2, 3, 1), NEW])
async def test_a_look_up_replaces_the_proposal_of_a_lost_replica(
    prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is, even if empty: it is made once, and the model's limit does not apply."""
    guess = Mock(wraps=NgramDrafter().guess)
    monkeypatch.setattr(NgramDrafter, "guess", guess)
    draft, _ = hybrid_of(prompt, ScriptedLink(LinkLost("gone")))
    draft._confident = 99.0
    drafted = await draft.propose(1, asked(5), NOISE)
    assert drafted.proposal.token_ids == (() if prompt is NEW else (2, 3, 1))
    assert (drafted.source, guess.call_count) == ("fallback", 1)
