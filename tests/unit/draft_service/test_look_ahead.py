"""The draft service works out what has not happened yet: what it pushes, when, and what it costs
those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from looking_ahead import PLAIN, PROMPT, Draft, check_pushed, item
from rounds import GREEDY, session_name
from test_draft_service import expected_proposal

from draft_service import worker as proposing
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
