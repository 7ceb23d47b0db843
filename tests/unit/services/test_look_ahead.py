"""The draft service works out what has not happened yet: what it pushes, when, and what it costs
those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch
from rounds import GREEDY, Listener, make_head, session_name
from test_draft_service import expected_proposal
from toy_engine import ToyEngine

from draft_service import proposing
from draft_service.model_drafter import Branch, ModelDrafter
from draft_service.service import DraftService
from outrider.drafting.drafter import DraftRequest
from outrider.drafting.lookup import LookupDrafter
from outrider.drafting.ngram import NgramDrafter
from outrider.drafting.suffix import SuffixDrafter
from outrider.engine.executor import InlineExecutor
from outrider.engine.interface import SequenceStep
from outrider.errors import BadRequest, OutOfPages
from outrider.messages import DraftAnswer, DraftItem, ProposalReply, Refused, Resync
from outrider.speculation.noise import RoundNoise
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.wire.memory_link import MemoryLink

PROMPT = (1, 2, 3)
PLAIN = SamplingParams(temperature=0.9)


class Draft:
    """One over a toy engine, and a link to it."""

    def __init__(self, engine: ToyEngine | None = None, **options: Any) -> None:
        self.engine = engine or ToyEngine(salt=2, max_model_len=256)
        self.executor = InlineExecutor(self.engine.take_step_seconds)
        self.service = DraftService.with_model(
            self.engine, self.executor, max_num_seqs=64, **options
        )
        self.link: MemoryLink[DraftItem, DraftAnswer] = MemoryLink(self.service)
        self.listener = Listener(self.link)

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


@pytest.fixture
async def draft() -> AsyncIterator[Draft]:
    made = Draft()
    yield made
    made.service.check_integrity()
    await made.service.close()


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


@pytest.mark.parametrize("rule", list(Rule))
async def test_what_is_pushed_is_what_would_be_proposed(draft: Draft, rule: Rule) -> None:
    """Under every rule, q included; for the round behind the one that was asked for. Some assume
    that all draft tokens pass, some that one is refused."""
    asked = item(PROMPT, rule=rule)
    answer, *pushed = await draft.send(asked)
    sampling = GREEDY if rule is Rule.GREEDY else PLAIN
    expected, _ = expected_proposal(PROMPT, 3, rule, sampling, 1)
    assert (list(answer.proposal.token_ids), answer.assumed) == (expected, ())
    assert len(pushed) == 8
    check_pushed(pushed, PROMPT, rule)
    assert {reply.key.round for reply in pushed} == {1}
    accepted = {len(reply.assumed) - 1 for reply in pushed}
    assert {0, 3} <= accepted
    for reply in pushed:
        assert list(reply.assumed[:-1]) == expected[: len(reply.assumed) - 1]
        refused = expected[len(reply.assumed) - 1 :][:1]
        assert [reply.assumed[-1]] != refused


async def test_a_prompt_without_a_proposal_is_looked_ahead_of(draft: Draft) -> None:
    """Nobody waits for an answer: none comes but what is pushed for the first token."""
    pushed = await draft.send(item(PROMPT, held=()))
    assert len(pushed) == 8
    assert all(len(reply.assumed) == 1 for reply in pushed)
    check_pushed(pushed, PROMPT, Rule.TOKEN)


async def test_a_round_goes_on_from_the_proposal_that_is_held(draft: Draft) -> None:
    _, *pushed = await draft.send(item(PROMPT))
    chosen = pushed[2]
    committed = (*PROMPT, *chosen.assumed)
    held = chosen.proposal.token_ids
    num_passes = len(draft.engine.batches)
    next_ones = await draft.send(item(committed, chosen.cached_length, round_index=1, held=held))
    check_pushed(next_ones, committed, Rule.TOKEN)
    assert len(next_ones) == 8
    assert {reply.key.round for reply in next_ones} == {2}
    # One pass reads the proposal, and each draft token of all outcomes takes one.
    assert len(draft.engine.batches) - num_passes == 1 + 3


async def test_an_outcome_that_is_known_is_answered_before_anything_runs(draft: Draft) -> None:
    """As when the push has crossed the question on its way."""
    _, *pushed = await draft.send(item(PROMPT))
    chosen = pushed[1]
    committed = (*PROMPT, *chosen.assumed)
    num_passes = len(draft.engine.batches)
    draft.link.send(item(committed, chosen.cached_length, round_index=1))
    answer = (await draft.listener.wait(10))[9]
    assert len(draft.engine.batches) <= num_passes + 2  # The step that reads it comes after it.
    assert answer.proposal == chosen.proposal
    assert (answer.key.round, answer.base_length, answer.assumed) == (1, len(committed), ())
    await draft.settled()
    check_pushed(draft.listener.answers[10:], committed, Rule.TOKEN)


async def test_an_outcome_that_is_half_drafted_is_not_begun_anew(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody waits for any more ends; what the question is about goes on."""
    monkeypatch.setattr(proposing, "PASSES_MAX", 1)
    draft.link.send(item(PROMPT, count=6))
    [answer] = await draft.listener.wait(1)
    while len(draft.engine.batches[-1]) < 8:  # until the outcomes have had their first pass
        await asyncio.sleep(0)
    tokens = answer.proposal.token_ids
    [begun] = [name for name in draft.engine.batches[-1] if name.endswith("/0")]
    outcome = draft.engine.held[begun][len(PROMPT) :]
    committed = (*PROMPT, *outcome)
    num_passes = len(draft.engine.batches)
    draft.link.send(item(committed, len(PROMPT), round_index=1, count=6))
    late = (await draft.listener.wait(2))[1]
    passes = draft.engine.batches[num_passes:]
    assert sum(session_name(1) in batch for batch in passes) <= 1  # It is read, and not drafted.
    assert [begun] in passes
    expected, _ = expected_proposal(committed, 6, Rule.TOKEN, PLAIN, 1)
    assert list(late.proposal.token_ids) == expected
    assert tokens[: len(outcome) - 1] == tuple(outcome[:-1])
    await draft.settled()


async def test_an_outcome_with_half_of_its_tokens_is_answered_as_it_is(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass follows for it, though it has come true late."""
    monkeypatch.setattr(proposing, "PASSES_MAX", 1)
    _, *pushed = await draft.send(item(PROMPT))
    outcome = pushed[0].assumed
    draft.link.send(item(PROMPT, session=2, count=6))
    await draft.listener.wait(len(draft.listener.answers) + 1)
    name = f"{session_name(2)}/"
    while sum(any(one.startswith(name) for one in batch) for batch in draft.engine.batches) < 4:
        await asyncio.sleep(0)
    num_heard, num_passes = len(draft.listener.answers), len(draft.engine.batches)
    draft.link.send(item((*PROMPT, *outcome), len(PROMPT), session=2, round_index=1, count=6))
    late = (await draft.listener.wait(num_heard + 1))[num_heard]
    assert 3 <= len(late.proposal) < 6
    assert len(draft.engine.batches) <= num_passes + 1
    expected, _ = expected_proposal((*PROMPT, *outcome), len(late.proposal), Rule.TOKEN, PLAIN, 1)
    assert list(late.proposal.token_ids) == expected
    await draft.settled()


async def test_two_passes_share_a_step_while_nothing_comes(draft: Draft) -> None:
    """Where somebody waits, or has come, it is one."""
    num_steps = 0

    def counted(step: Callable[[], Any]) -> Any:
        nonlocal num_steps
        num_steps += 1
        return run(step)

    run = draft.executor.run
    draft.executor.run = counted  # type: ignore[method-assign]
    await draft.send(item(PROMPT, held=(), count=8))
    assert len(draft.engine.batches) == 9
    assert num_steps == 5
    await draft.send(item((*PROMPT, 0, 0), session=3, count=6, look_ahead=0))
    assert num_steps == 6


async def test_a_round_may_want_fewer_tokens_than_were_drafted_for_it(draft: Draft) -> None:
    """As at the end of a completion: of what is known, and of what is half drafted."""
    _, *pushed = await draft.send(item(PROMPT))
    committed = (*PROMPT, *pushed[0].assumed)
    known, *_ = await draft.send(item(committed, len(PROMPT) - 1, round_index=1, count=2))
    assert known.proposal == pushed[0].proposal.cut(2)
    draft.link.send(item(PROMPT, session=2, count=6))
    await draft.listener.wait(len(draft.listener.answers) + 1)
    while len(draft.engine.batches[-1]) < 8:
        await asyncio.sleep(0)
    begun = draft.engine.held[draft.engine.batches[-1][0]]
    late, *_ = await draft.send(item(begun, len(PROMPT) - 1, session=2, round_index=1, count=2))
    expected, _ = expected_proposal(begun, 2, Rule.TOKEN, PLAIN, 1)
    assert list(late.proposal.token_ids) == expected


async def test_what_came_otherwise_is_drafted_as_ever(draft: Draft) -> None:
    answer, *pushed = await draft.send(item(PROMPT))
    assumed = {reply.assumed for reply in pushed}
    outcome = next(
        (*answer.proposal.token_ids[:n], token)
        for n in range(4)
        for token in range(8)
        if (*answer.proposal.token_ids[:n], token) not in assumed
    )
    committed = (*PROMPT, *outcome)
    late, *next_ones = await draft.send(item(committed, len(PROMPT) - 1, round_index=1))
    expected, _ = expected_proposal(committed, 3, Rule.TOKEN, PLAIN, 1)
    assert list(late.proposal.token_ids) == expected
    check_pushed(next_ones, committed, Rule.TOKEN)


async def test_a_miss_costs_the_others_nothing(draft: Draft) -> None:
    """What one session waits for is drafted in the passes in which another's outcomes grow."""
    await draft.send(item(PROMPT, session=2, held=(), look_ahead=1))
    num_passes = len(draft.engine.batches)
    draft.link.send(item(PROMPT, session=1, held=()))
    draft.link.send(item((*PROMPT, 5), session=2, round_index=1))
    await draft.settled()
    names = [set(batch) for batch in draft.engine.batches[num_passes:]]
    assert session_name(2) in names[1]
    assert any(name.startswith(f"{session_name(1)}/") for name in names[1])


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.COUPLED])
@pytest.mark.parametrize("lookup", [NgramDrafter, SuffixDrafter])
async def test_a_hybrid_copies_for_some_outcomes_and_drafts_for_others(
    rule: Rule, lookup: Callable[[], LookupDrafter]
) -> None:
    """Each pushed proposal is what the hybrid would propose after what it assumes; of what was
    assumed nothing is left in the look-up."""
    draft = Draft(lookup=lookup(), lookup_score=0.5)
    prompt = (1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4)
    num_copied = num_drafted = 0
    committed, held = prompt, None
    for round_index in range(6):
        base_length = len(committed) - 1 if round_index else 0
        asked = item(
            committed, base_length, rule=rule, look_ahead=16, round_index=round_index, held=held,
            prompt_length=len(prompt),
        )  # fmt: skip
        heard = await draft.send(asked)
        assert not any(isinstance(reply, Resync | Refused) for reply in heard)
        pushed = [reply for reply in heard if reply.assumed]
        for reply in pushed:
            assumed = (*committed, *reply.assumed)
            guess = lookup().guess(lookup_request(assumed, 3, rule))
            if guess.score >= 0.5:
                num_copied += 1
                assert reply.proposal.token_ids == guess.token_ids
            else:
                num_drafted += 1
                tokens, _ = expected_proposal(assumed, len(reply.proposal), rule, PLAIN, 1)
                assert list(reply.proposal.token_ids) == tokens
        chosen = pushed[round_index % len(pushed)]
        committed, held = (*committed, *chosen.assumed), chosen.proposal.token_ids
    assert num_copied > 5
    assert num_drafted > 5
    draft.service.check_integrity()
    await draft.service.close()


def lookup_request(tokens: Sequence[int], count: int, rule: Rule) -> DraftRequest:
    noise = RoundNoise(1, rule, len(tokens))
    return DraftRequest("another", "", tokens, len(tokens), count, PLAIN, rule, noise)


async def test_nothing_is_left_of_a_session_that_is_over(draft: Draft) -> None:
    free = draft.engine.page_counts().num_free
    draft.link.send(item(PROMPT, count=6))
    await draft.listener.wait(1)
    draft.link.release(session_name(1), 1)
    await draft.settled()
    counts = draft.engine.page_counts()
    assert counts.num_free + counts.num_evictable == free
    assert not any(draft.engine.length(name) for name in draft.engine.held)


async def test_nothing_is_left_of_an_outcome_that_came_true_where_nothing_is_wanted(
    draft: Draft,
) -> None:
    """One of these rounds comes to what is being drafted, and is asked for no token."""
    free = draft.engine.page_counts().num_free
    for session in range(1, 81):
        correction, num_passes = session % 8, session // 8
        num_answers = len(draft.listener.answers)
        draft.link.send(item(PROMPT, count=6, session=session))
        await draft.listener.wait(num_answers + 1)
        for _ in range(num_passes):  # Its outcomes grow.
            await asyncio.sleep(0)
        committed = (*PROMPT, correction)
        draft.link.send(item(committed, len(PROMPT), count=0, session=session, round_index=1))
        await draft.settled()
        draft.link.release(session_name(session), 1)
    await draft.settled()
    counts = draft.engine.page_counts()
    assert counts.num_free + counts.num_evictable == free


async def test_a_stream_that_ends_ends_its_work(draft: Draft) -> None:
    draft.link.send(item(PROMPT, count=6))
    await draft.listener.wait(1)
    await draft.link.close()
    await draft.settled()
    assert not any("/" in name and draft.engine.length(name) for name in draft.engine.held)


async def test_pages_that_are_needed_are_there() -> None:
    """Outcomes take what is free and give way to sessions that come, however many there are."""
    draft = Draft(ToyEngine(salt=2, max_model_len=64, num_pages=24))
    for session in range(1, 6):
        [answer, *_] = await draft.send(item([1] * 13, session=session, look_ahead=16))
        assert len(answer.proposal) == 3
    draft.service.check_integrity()
    await draft.service.close()


@pytest.mark.parametrize("num_passes", [0, 2])
async def test_a_session_that_loses_its_pages_is_answered_what_it_has(
    draft: Draft, num_passes: int
) -> None:
    """As when an older one takes them while its proposal grows."""
    draft.link.send(item(PROMPT, count=6))
    while len(draft.engine.batches) <= num_passes:
        await asyncio.sleep(0)
    num_drawn = len(draft.engine.batches)
    draft.engine.release(session_name(1))
    await draft.settled()
    [answer] = draft.listener.answers
    expected, _ = expected_proposal(PROMPT, num_drawn, Rule.TOKEN, PLAIN, 1)
    assert list(answer.proposal.token_ids) == expected
    assert answer.cached_length == 0
    await check_begins_anew(draft, (*PROMPT, 7), len(PROMPT))


async def test_a_session_may_lose_its_pages_before_the_first_pass_of_its_round(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has been drawn then, and nothing is proposed."""
    _, *pushed = await draft.send(item(PROMPT))
    missed = next(v for v in range(8) if all(reply.assumed != (v,) for reply in pushed))
    committed = (*PROMPT, missed)
    num_passes = len(draft.engine.batches)
    begin = ModelDrafter.begin

    def begin_and_evict(drafter: ModelDrafter, request: DraftRequest) -> Branch | None:
        branch = begin(drafter, request)
        draft.engine.release(request.session_id)
        return branch

    with monkeypatch.context() as patch:
        patch.setattr(ModelDrafter, "begin", begin_and_evict)
        [late] = await draft.send(item(committed, len(PROMPT), round_index=1))
    assert (late.proposal.token_ids, late.cached_length) == ((), 0)
    assert len(draft.engine.batches) == num_passes
    await check_begins_anew(draft, committed, len(PROMPT))


async def check_begins_anew(draft: Draft, committed: tuple[int, ...], length: int) -> None:
    """The draft has lost a session's pages: a round that builds on what it held is told so, and
    one that states all tokens is drafted."""
    [again] = await draft.send(item(committed, length, round_index=2))
    assert isinstance(again, Resync)
    assert again.cached_length == 0
    late = (await draft.send(item(committed, round_index=3)))[0]
    expected, _ = expected_proposal(committed, 3, Rule.TOKEN, PLAIN, 1)
    assert list(late.proposal.token_ids) == expected


async def test_a_round_pushes_no_more_bytes_than_it_may() -> None:
    """What was worked out all the same is answered with when it is asked for, and not drafted
    twice."""
    draft = Draft(look_ahead_bytes_max=200)
    _, *pushed = await draft.send(item(PROMPT))
    sizes = [
        len(reply.proposal.q) + 4 * (len(reply.proposal) + len(reply.assumed)) for reply in pushed
    ]
    assert 0 < sum(sizes) <= 200
    assert len(pushed) < 8
    _, *all_of_them = await Draft().send(item(PROMPT))
    sent = {reply.assumed for reply in pushed}
    kept = next(reply for reply in all_of_them if reply.assumed not in sent)
    committed = (*PROMPT, *kept.assumed)
    num_passes = len(draft.engine.batches)
    draft.link.send(item(committed, kept.cached_length, round_index=1))
    answer = (await draft.listener.wait(len(pushed) + 2))[len(pushed) + 1]
    assert len(draft.engine.batches) <= num_passes + 2  # The step that reads it comes after it.
    assert answer.proposal == kept.proposal
    await draft.service.close()


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {"look_ahead": 0}),
        ({}, {"sampling": SamplingParams(frequency_penalty=0.5)}),
    ],
)
async def test_without_looking_ahead_there_is_one_answer(
    options: dict[str, Any], changes: dict[str, Any]
) -> None:
    """None is asked for; and penalties would count tokens that are not there."""
    draft = Draft(**options)
    assert len(await draft.send(item(PROMPT, **changes))) == 1
    await draft.service.close()


@pytest.mark.parametrize("crash", [RuntimeError("out of memory"), BadRequest("token_ids", "no")])
async def test_a_failure_while_looking_ahead_harms_nobody(draft: Draft, crash: Exception) -> None:
    """It comes after the answer, or beside somebody's drawn tokens, which are proposed then."""
    draft.link.send(item(PROMPT))
    await draft.listener.wait(1)
    draft.engine.crash = crash
    await draft.settled()
    committed = (*PROMPT, 7)
    draft.engine.crash = None
    answer, *pushed = [
        answer
        for answer in await draft.send(item(committed, round_index=1))
        if not isinstance(answer, Refused)
    ]
    expected, _ = expected_proposal(committed, 3, Rule.TOKEN, PLAIN, 1)
    assert list(answer.proposal.token_ids) == expected
    check_pushed(pushed, committed, Rule.TOKEN)


class ForgetfulEngine(ToyEngine):
    """Can fail a pass of several sequences, and has forgotten the last of them then."""

    is_forgetful = False

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        if self.is_forgetful and len(steps) > 1:
            self.release(steps[-1].sequence_id)
            raise OutOfPages("the machine has failed")
        return super().forward(steps)


async def test_a_sequence_that_a_failed_pass_has_lost_is_not_gone_on_with() -> None:
    """Its session is answered nothing, and told later what is missing; the other is drafted."""
    engine = ForgetfulEngine(salt=2, max_model_len=256)
    draft = Draft(engine)
    for number in (1, 2):
        await draft.send(item(PROMPT, session=number, look_ahead=1))
    engine.is_forgetful = True
    num_heard = len(draft.listener.answers)
    for number in (1, 2):
        draft.link.send(item((*PROMPT, 7), len(PROMPT), session=number, round_index=1))
    await draft.settled()
    drafted, lost = sorted(
        (answer for answer in draft.listener.answers[num_heard:] if not answer.assumed),
        key=lambda answer: answer.key.session_id,
    )
    assert (len(lost.proposal), lost.cached_length) == (0, 0)
    expected, _ = expected_proposal((*PROMPT, 7), 3, Rule.TOKEN, PLAIN, 1)
    assert list(drafted.proposal.token_ids) == expected[: len(drafted.proposal)] != []
    engine.is_forgetful = False
    again = await draft.send(item((*PROMPT, 7, 6), 4, session=2, round_index=2))
    assert isinstance(again[0], Resync)
    draft.service.check_integrity()
    await draft.service.close()
