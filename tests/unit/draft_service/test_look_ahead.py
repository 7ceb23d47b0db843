"""Look-ahead of the draft service: what it pushes and when, its cost for waiting sessions, and what
remains after failures and at the end."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch

from outrider.errors import BadRequest, OutOfPages
from outrider.interfaces.engine import SequenceStep
from outrider.interfaces.messages import ProposalReply, Refused, Resync
from outrider.interfaces.step_costs import StepCosts
from outrider.replica.token_budget import CORRECTION_WEIGHT
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.draft_items import PLAIN, item
from tests.support.draft_world import draft_over, expected_proposal
from tests.support.rounds import GREEDY, Replica, session_name
from tests.support.toy_engine import ToyEngine

PROMPT = (1, 2, 3)
LONG_US, SHORT_US = 60_000_000, 1
"""Time limits of drafts, in microseconds: one that is never reached, and one that ends at once."""


def check_pushed(pushed: Sequence[ProposalReply], prefix: Sequence[int], rule: Rule) -> None:
    """Each proposal is what the draft would propose after the tokens that it assumes; no two assume
    the same."""
    sampling = GREEDY if rule is Rule.GREEDY else PLAIN
    for reply in pushed:
        assert reply.base_length == len(prefix)
        assert reply.cached_length == len(prefix) + len(reply.assumed) - 1
        assumed = (*prefix, *reply.assumed)
        tokens, q = expected_proposal(assumed, len(reply.proposal), rule, sampling, 1)
        assert list(reply.proposal.token_ids) == tokens
        assert list(reply.proposal.decode().q) == (q if rule.needs_q else [])
    assert len({reply.assumed for reply in pushed}) == len(pushed)


@pytest.fixture
async def draft() -> AsyncIterator[Replica]:
    async with draft_over() as made:
        yield made


@pytest.mark.parametrize("rule", list(Rule))
async def test_what_is_pushed_is_what_would_be_proposed(draft: Replica, rule: Rule) -> None:
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


async def test_a_round_goes_on_from_the_proposal_that_is_held(draft: Replica) -> None:
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


async def test_an_outcome_that_is_known_is_answered_before_anything_runs(draft: Replica) -> None:
    _, *pushed = await draft.send(item(PROMPT))
    chosen = pushed[1]
    committed = (*PROMPT, *chosen.assumed)
    num_passes = len(draft.engine.batches)
    draft.link.send(item(committed, chosen.cached_length, round_index=1))
    answer = (await draft.listener.wait(10))[9]
    assert len(draft.engine.batches) <= num_passes + 2  # The answer is read in a later step.
    assert answer.proposal == chosen.proposal
    assert (answer.key.round, answer.base_length, answer.assumed) == (1, len(committed), ())
    await draft.settle()
    check_pushed(draft.listener.answers[10:], committed, Rule.TOKEN)


@pytest.mark.parametrize(("budget_us", "num_proposed"), [(LONG_US, 4), (0, 6)])
async def test_how_far_a_late_outcome_is_drafted_says_nothing_of_its_tokens(
    budget_us: int, num_proposed: int
) -> None:
    """A predicted outcome comes true when some of its tokens are drafted, and only these are
    proposed. Their number is the same for every seed, as `docs/exactness.md` requires. A round
    without a time limit, whose seed is repeated, gets all tokens."""
    lengths, tokens = set(), set()
    for seed in range(1, 21):
        draft = draft_over()
        _, *pushed = await draft.send(item(PROMPT, seed=seed))
        outcome = pushed[0].assumed
        num_heard = len(draft.listener.answers)
        draft.link.send(item(PROMPT, session=2, count=6, seed=seed))
        await draft.listener.wait(num_heard + 1)
        name = f"{session_name(2)}/"
        while sum(any(one.startswith(name) for one in batch) for batch in draft.engine.batches) < 3:
            await asyncio.sleep(0)
        num_heard = len(draft.listener.answers)
        text = (*PROMPT, *outcome)
        head = {"session": 2, "round_index": 1, "seed": seed}
        draft.link.send(item(text, len(PROMPT), count=6, budget_us=budget_us, **head))
        late = (await draft.listener.wait(num_heard + 1))[num_heard]
        lengths.add(len(late.proposal))
        tokens.add(late.proposal.token_ids)
        await draft.settle()
        await draft.close()
    assert lengths == {num_proposed}
    assert len(tokens) > 10


async def until_outcomes_have(draft: Replica, num_tokens: int) -> dict[tuple[int, ...], int]:
    """Waits until an outcome of session 1 has `num_tokens` draft tokens. Returns the number of
    tokens of each unfinished outcome."""
    rounds = draft.service._proposer._look_ahead._rounds
    while True:
        await asyncio.sleep(0)
        now = rounds.get(session_name(1))
        drawn = {at: len(one.token_ids) for at, one in now.outcomes.items()} if now else {}
        if num_tokens in drawn.values():
            return drawn


async def test_what_an_abandoned_draft_has_drawn_is_drawn_again() -> None:
    """The time that is left may depend on these tokens, so it must not decide whether they are
    proposed."""
    async with draft_over() as draft:
        draft.link.send(item(PROMPT, count=6))
        drawn = await until_outcomes_have(draft, 3)
        draft.service._proposer._look_ahead.drop_drafts()
        outcome = next(outcome for outcome, num in drawn.items() if num == 3)
        committed = (*PROMPT, *outcome)
        num_heard = len(draft.listener.answers)
        draft.link.send(item(committed, round_index=1, count=6, budget_us=SHORT_US))
        again = (await draft.listener.wait(num_heard + 1))[num_heard]
        expected, _ = expected_proposal(committed, 3, Rule.TOKEN, PLAIN, 1)
        assert list(again.proposal.token_ids) == expected
        assert again.out_of_time
        await draft.settle()


@pytest.mark.parametrize(("look_ahead", "num_proposed"), [(8, 2), (0, 5)])
async def test_a_repeated_seed_gets_no_shorter_proposal_from_look_ahead(
    draft: Replica, look_ahead: int, num_proposed: int
) -> None:
    """What was drafted ahead has at most K tokens of the round before. Once an item comes without
    look-ahead, nothing that was drafted ahead is left."""
    _, *pushed = await draft.send(item(PROMPT, count=2))
    committed = (*PROMPT, *pushed[0].assumed)
    asked = item(committed, len(PROMPT), round_index=1, count=5, look_ahead=look_ahead)
    found = (await draft.send(asked))[0]
    expected, _ = expected_proposal(committed, num_proposed, Rule.TOKEN, PLAIN, 1)
    assert list(found.proposal.token_ids) == expected
    rounds = draft.service._proposer._look_ahead._rounds
    assert bool(rounds) == bool(look_ahead)


@pytest.mark.virtual
async def test_a_step_corrects_what_its_passes_cost_unless_its_answer_was_known() -> None:
    """Passes take 19 ms where 20 were predicted. Without look-ahead a step has three of them, and a
    step that is answered at once has none."""
    costs = StepCosts((1, 64), (0.020, 0.020))
    learned = {False: pytest.approx(1 - 0.05 * CORRECTION_WEIGHT), True: 1.0}
    async with draft_over(step_s=0.057, costs=costs) as draft:
        await draft.send(item(PROMPT, look_ahead=0))
        assert draft.service._proposer._budget._corrections == learned
    async with draft_over(step_s=0.019, costs=costs) as draft:
        _, *pushed = await draft.send(item(PROMPT))
        budget, chosen = draft.service._proposer._budget, pushed[1]
        assert budget._corrections == learned
        learned, committed = budget._corrections.copy(), (*PROMPT, *chosen.assumed)
        known, *_ = await draft.send(item(committed, chosen.cached_length, round_index=1))
        assert known.proposal == chosen.proposal
        assert budget._corrections == learned


async def test_a_round_may_want_fewer_tokens_than_were_drafted_for_it(draft: Replica) -> None:
    _, *pushed = await draft.send(item(PROMPT))
    committed = (*PROMPT, *pushed[0].assumed)
    known, *_ = await draft.send(item(committed, len(PROMPT) - 1, round_index=1, count=2))
    assert known.proposal == pushed[0].proposal.cut(2)


async def test_what_came_otherwise_is_drafted_as_ever(draft: Replica) -> None:
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
    """What was drafted but not pushed is sent when it is asked for, and not drafted twice."""
    draft = draft_over()
    with monkeypatch.context() as patch:
        patch.setattr("draft_service.lookahead.LOOK_AHEAD_BYTES_MAX", 200)
        _, *pushed = await draft.send(item(PROMPT))
    sizes = [
        len(reply.proposal.q) + 4 * (len(reply.proposal) + len(reply.assumed)) for reply in pushed
    ]
    assert 0 < sum(sizes) <= 200
    assert len(pushed) < 8
    _, *all_of_them = await draft_over().send(item(PROMPT))
    sent = {reply.assumed for reply in pushed}
    kept = next(reply for reply in all_of_them if reply.assumed not in sent)
    committed = (*PROMPT, *kept.assumed)
    num_passes = len(draft.engine.batches)
    draft.link.send(item(committed, kept.cached_length, round_index=1))
    answer = (await draft.listener.wait(len(pushed) + 2))[len(pushed) + 1]
    assert len(draft.engine.batches) <= num_passes + 2  # The answer is read in a later step.
    assert answer.proposal == kept.proposal
    await draft.close()


@pytest.mark.parametrize(
    "changes", [{"look_ahead": 0}, {"sampling": SamplingParams(frequency_penalty=0.5)}]
)
async def test_without_looking_ahead_there_is_one_answer(
    draft: Replica, changes: dict[str, Any]
) -> None:
    """Look-ahead is not requested, or penalties, which would count draft tokens, forbid it."""
    assert len(await draft.send(item(PROMPT, **changes))) == 1


async def test_pages_that_are_needed_are_there() -> None:
    """Outcomes use free pages and give them up to new sessions."""
    draft = draft_over(ToyEngine(salt=2, max_model_len=64, num_pages=24))
    for session in range(1, 6):
        [answer, *_] = await draft.send(item([1] * 13, session=session, look_ahead=16))
        assert len(answer.proposal) == 3
    await draft.close()


async def test_a_repeated_seed_drafts_again_if_a_pass_lacks_pages(draft: Replica) -> None:
    """Drafts of other sessions may have taken them in the same step. Whether they have may depend
    on a session with the same random numbers."""
    whole = draft.engine.forward

    def failing(steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        if len(draft.engine.batches) == 3:
            draft.engine.crash = OutOfPages("no page is free")
        return whole(steps)

    draft.engine.forward = failing
    [found] = await draft.send(item(PROMPT, count=6, look_ahead=0))
    expected, _ = expected_proposal(PROMPT, 6, Rule.TOKEN, PLAIN, 1)
    assert list(found.proposal.token_ids) == expected


@pytest.mark.parametrize("num_pages", [3, 4])
@pytest.mark.parametrize("lengths", [(2, 2), (2, 3), (3, 4), (4, 3), (4, 4)])
async def test_repeated_seeds_that_share_few_pages_are_all_answered(
    num_pages: int, lengths: tuple[int, int]
) -> None:
    """Each fits alone. The younger takes the pages of the older one as soon as that one rests."""
    draft = draft_over(ToyEngine(salt=2, max_model_len=256, num_pages=num_pages))
    for session, length in enumerate(lengths, start=1):
        draft.link.send(item([session] * length, session=session, count=4, look_ahead=0))
    answers = await draft.settle()
    assert {one.key.session_id: len(one.proposal) for one in answers} == {
        session_name(1): 4,
        session_name(2): 4,
    }
    await draft.close()


async def test_a_session_that_loses_its_pages_is_answered_what_it_has(draft: Replica) -> None:
    draft.link.send(item(PROMPT, count=6, budget_us=LONG_US))
    while len(draft.engine.batches) <= 2:
        await asyncio.sleep(0)
    num_drawn = len(draft.engine.batches)
    draft.engine.release(session_name(1))
    await draft.settle()
    [answer] = draft.listener.answers
    expected, _ = expected_proposal(PROMPT, num_drawn, Rule.TOKEN, PLAIN, 1)
    assert list(answer.proposal.token_ids) == expected
    assert answer.cached_length == 0
    committed = (*PROMPT, 7)
    [again] = await draft.send(item(committed, len(PROMPT), round_index=2))
    assert (type(again), again.cached_length) == (Resync, 0)
    late = (await draft.send(item(committed, round_index=3)))[0]
    expected, _ = expected_proposal(committed, 3, Rule.TOKEN, PLAIN, 1)
    assert list(late.proposal.token_ids) == expected


@pytest.mark.parametrize("crash", [RuntimeError("out of memory"), BadRequest("token_ids", "no")])
async def test_a_failure_while_looking_ahead_harms_no_session(
    draft: Replica, crash: Exception
) -> None:
    draft.link.send(item(PROMPT))
    await draft.listener.wait(1)
    draft.engine.crash = crash
    await draft.settle()
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
