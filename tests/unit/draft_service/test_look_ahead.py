"""The draft service works out what has not happened yet: what it pushes, when, what it costs those
who wait, and what is left where it fails or is needed no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch
from looking_ahead import PLAIN, PROMPT, Draft, check_pushed, item
from rounds import GREEDY, session_name
from test_draft_service import expected_proposal
from toy_engine import ToyEngine

from draft_service import worker as proposing
from outrider.engine.interface import SequenceStep
from outrider.errors import BadRequest, OutOfPages
from outrider.messages import Refused, Resync
from outrider.speculation.sampling_params import Rule, SamplingParams


@pytest.fixture
async def draft() -> AsyncIterator[Draft]:
    made = Draft()
    yield made
    made.service.check_integrity()
    await made.service.close()


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

    run = draft.service._executor.run
    draft.service._executor.run = counted  # type: ignore[method-assign]
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
    # Of an outcome with a refusal: the prompt, at most five accepted tokens and a correction.
    begun = min((draft.engine.held[name] for name in draft.engine.batches[-1]), key=len)
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


async def test_a_round_pushes_no_more_bytes_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was worked out all the same is answered with when it is asked for, and not drafted
    twice."""
    with monkeypatch.context() as patch:
        patch.setattr("draft_service.service.LOOK_AHEAD_BYTES_MAX", 200)
        draft = Draft()
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
    "changes", [{"look_ahead": 0}, {"sampling": SamplingParams(frequency_penalty=0.5)}]
)
async def test_without_looking_ahead_there_is_one_answer(
    draft: Draft, changes: dict[str, Any]
) -> None:
    """None is asked for; and penalties would count tokens that are not there."""
    assert len(await draft.send(item(PROMPT, **changes))) == 1


async def test_nothing_is_left_of_a_session_that_is_over(draft: Draft) -> None:
    free = draft.engine.page_counts().num_free
    draft.link.send(item(PROMPT, count=6))
    await draft.listener.wait(1)
    draft.link.release(session_name(1), 1)
    await draft.settled()
    counts = draft.engine.page_counts()
    assert counts.num_free + counts.num_evictable == free
    assert not any(draft.engine.length(name) for name in draft.engine.held)


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


async def check_begins_anew(draft: Draft, committed: tuple[int, ...], length: int) -> None:
    """The draft has lost a session's pages: a round that builds on what it held is told so, and
    one that states all tokens is drafted."""
    [again] = await draft.send(item(committed, length, round_index=2))
    assert isinstance(again, Resync)
    assert again.cached_length == 0
    late = (await draft.send(item(committed, round_index=3)))[0]
    expected, _ = expected_proposal(committed, 3, Rule.TOKEN, PLAIN, 1)
    assert list(late.proposal.token_ids) == expected


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


async def test_an_outcome_that_comes_true_and_fails_is_proposed_as_far_as_it_was_drawn(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives its pages back, those of the session excepted."""
    monkeypatch.setattr(proposing, "PASSES_MAX", 1)
    free = draft.engine.page_counts().num_free
    draft.link.send(item(PROMPT, count=6))
    await draft.listener.wait(1)
    while len(draft.engine.batches[-1]) < 8:  # until the outcomes have had their first pass
        await asyncio.sleep(0)
    [begun] = [name for name in draft.engine.batches[-1] if name.endswith("/0")]
    committed = draft.engine.held[begun]
    draft.engine.crash = OutOfPages("the machine has failed")
    draft.link.send(item(committed, len(PROMPT), round_index=1, count=6))
    late = (await draft.listener.wait(2))[1]
    expected, _ = expected_proposal(committed, 6, Rule.TOKEN, PLAIN, 1)
    assert list(late.proposal.token_ids) == expected[:1]
    draft.engine.crash = None
    await draft.settled()
    draft.service.check_integrity()
    draft.link.release(session_name(1), 1)
    await draft.settled()
    counts = draft.engine.page_counts()
    assert counts.num_free + counts.num_evictable == free
