"""How a step's tokens are shared: rounds first, long prefixes in chunks, neither left out."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.interfaces.step_costs import StepCosts
from outrider.replica.token_budget import ROUND_BACKLOG_MAX, STEP_GROWTH, TokenBudget, TokenDemand

COSTS = StepCosts((1, 16, 512), (0.010, 0.012, 0.260), session_s=0.0001, slot_s=1e-6)
ROUND = TokenDemand(num_tokens=9, num_last=9, context=300)


def prefix(num_tokens: int, num_last: int = 1) -> TokenDemand:
    return TokenDemand(num_tokens, num_last, context=0)


@pytest.mark.parametrize(
    ("max_tokens", "max_steps", "demands", "grants"),
    [
        # Rounds go first, and prefixes share the rest in order.
        (100, 8, [prefix(60), prefix(200), ROUND, ROUND], [60, 22, 9, 9]),
        # Alone a prefix has the whole step.
        (512, 8, [prefix(4000)], [512]),
        (512, 8, [prefix(512)], [512]),
        # The last 9 tokens run together: not 595 of them, but 591.
        (595, 8, [prefix(600, num_last=9)], [591]),
        # Rounds that fill a step leave the oldest prefix PREFIX_TOKENS_MIN tokens.
        (512, 65, [prefix(900), prefix(900), *[ROUND] * 64], [8, 0, *[9] * 56, *[0] * 8]),
        # Of three seats one is a prefix's.
        (512, 3, [ROUND, ROUND, ROUND, prefix(60)], [9, 9, 0, 60]),
        (512, 3, [ROUND, ROUND, ROUND], [9, 9, 9]),
    ],
)
def test_a_step_is_shared_out(
    max_tokens: int, max_steps: int, demands: list[TokenDemand], grants: list[int]
) -> None:
    assert TokenBudget(max_tokens, max_steps).share(demands) == grants


@pytest.mark.parametrize(
    ("num_carried", "demands", "grants"),
    [
        (2, [ROUND, ROUND, prefix(60)], [0, 0, 0]),
        (1, [ROUND, ROUND], [9, 0]),
        (1, [prefix(60), ROUND], [60, 0]),
        (1, [prefix(600)], [99]),
    ],
)
def test_rounds_of_earlier_steps_keep_their_seats_and_tokens(
    num_carried: int, demands: list[TokenDemand], grants: list[int]
) -> None:
    assert TokenBudget(100, 2).share(demands, num_carried) == grants


def test_the_last_of_many_prompts_is_read_as_fast_as_the_first() -> None:
    """Later, when only the rounds of the others go on, it waits as any single prompt."""
    rounds = [ROUND] * 7
    after_many, alone = TokenBudget(512, 64, COSTS), TokenBudget(512, 64, COSTS)
    first = after_many.share([*rounds, *[prefix(4000)] * 5])[7]
    assert after_many.share([*rounds, prefix(4000)])[7] > 0.9 * first
    for _ in range(60):
        after_many.share(rounds)
    assert after_many.share([*rounds, prefix(4000)]) == alone.share([*rounds, prefix(4000)])


@pytest.mark.parametrize(
    ("num_rounds", "num_prefixes", "is_limited"), [(1, 1, True), (1, 2, False), (3, 2, True)]
)
def test_if_most_sessions_wait_for_the_prefill_its_time_is_not_limited(
    num_rounds: int, num_prefixes: int, is_limited: bool
) -> None:
    """The sessions of the last rounds count while a step has no rounds."""
    rounds, prefixes = [ROUND] * num_rounds, [prefix(200)] * num_prefixes
    for step in ([*rounds, *prefixes], prefixes):
        budget = TokenBudget(512, 64, COSTS)
        budget.share(rounds)
        assert (sum(budget.share(step)[-num_prefixes:]) < 200 * num_prefixes) is is_limited


def test_many_prompts_of_the_past_do_not_lift_the_limit() -> None:
    """Even if a step has few of the rounds that decode."""
    budget, alone = TokenBudget(512, 64, COSTS), TokenBudget(512, 64, COSTS)
    budget.share([prefix(60)] * 8)
    for _ in range(60):
        budget.share([ROUND] * 8)
    for step in ([ROUND] * 2, [ROUND, prefix(4000)], [ROUND, *[prefix(4000)] * 2]):
        alone.share([ROUND] * 8)
        assert budget.share(step) == alone.share(step)
        assert sum(alone.share(step)) < 100


def test_costs_that_were_wrong_are_corrected_by_the_steps_themselves() -> None:
    """Contexts are cheaper than measured, so chunks are too long at first."""
    foretold = StepCosts((1, 512), (0.010, 0.260), slot_s=6e-6)
    true = StepCosts((1, 512), (0.010, 0.260), slot_s=2e-6)
    budget = TokenBudget(512, 64, foretold)
    rounds = [TokenDemand(num_tokens=1, num_last=1, context=300)] * 8
    usual = true.step_seconds(8, 8, 2400)
    for _ in range(30):
        budget.share(rounds)
        budget.note_seconds(usual)
    growths = []
    for _ in range(30):
        *_, part = budget.share([*rounds, prefix(4000)])
        growths.append(true.step_seconds(8 + part, 9, 2400) / usual)
        budget.note_seconds(growths[-1] * usual)
    uncorrected = TokenBudget(512, 64, foretold).share([*rounds, prefix(4000)])[-1]
    assert true.step_seconds(8 + uncorrected, 9, 2400) / usual > 1.2 * (1 + STEP_GROWTH)
    assert max(growths) <= 1.05 * (1 + STEP_GROWTH)
    assert growths[-1] > 0.95 * (1 + STEP_GROWTH)


def test_a_delayed_step_hardly_changes_the_next_chunk() -> None:
    budget = TokenBudget(512, 64, COSTS)
    rounds = [ROUND] * 8
    usual = COSTS.step_seconds(72, 8, 2400)
    for _ in range(20):
        budget.share(rounds)
        budget.note_seconds(usual)
    *_, before = budget.share([*rounds, prefix(4000)])
    budget.share(rounds)
    budget.note_seconds(10 * usual)
    *_, after = budget.share([*rounds, prefix(4000)])
    assert before <= after < 1.1 * before


def test_the_end_of_a_long_prompt_is_shared_out_like_its_beginning() -> None:
    """Each of its tokens reads the whole context, so they would delay the rounds."""
    costs = replace(COSTS, row_slot_s=1e-6)
    rounds, end = [ROUND] * 4, TokenDemand(40, 1, context=4000)
    assert TokenBudget(512, 64, costs).share([*rounds, end])[-1] < 20


@pytest.mark.parametrize("num_passes", [1, 8])
@pytest.mark.parametrize(
    ("num_rounds", "num_prefixes"), [(2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4)]
)
def test_beside_rounds_a_step_grows_as_much_as_it_may(
    num_passes: int, num_rounds: int, num_prefixes: int
) -> None:
    """By STEP_GROWTH for each waiting prefix. Later passes, of a draft, run a token a round."""
    budget = TokenBudget(2048, 64, COSTS)
    rounds = [TokenDemand(num_tokens=2, num_last=1, context=300)] * num_rounds
    later_s = (num_passes - 1) * COSTS.step_seconds(num_rounds, num_rounds, 300 * num_rounds)
    usual = COSTS.step_seconds(2 * num_rounds, num_rounds, 300 * num_rounds) + later_s

    def grown(num_tokens: int) -> float:
        rows = 2 * num_rounds + num_tokens
        return (COSTS.step_seconds(rows, num_rounds + 1, 300 * num_rounds) + later_s) / usual

    budget.share(rounds)
    budget.note_passes(num_passes)
    budget.note_seconds(usual)
    for _ in range(20):
        part = budget.share([*rounds, *[prefix(4000)] * num_prefixes])[num_rounds]
        assert grown(part) <= 1 + STEP_GROWTH * num_prefixes + 1e-9
        assert grown(part + 1) > 1 + STEP_GROWTH * num_prefixes
        budget.note_passes(num_passes)
        budget.note_seconds(grown(part) * usual)


def test_passes_that_admit_nothing_are_no_steps() -> None:
    """As those of a draft that looks ahead. Their time corrects nothing."""

    def parts(num_between: int) -> list[int]:
        budget = TokenBudget(512, 64, COSTS)
        budget.share([ROUND] * 4)
        for _ in range(num_between):
            assert budget.share([]) == []
            budget.note_seconds(1.0)
        later = ([prefix(4000)], [*[ROUND] * 4, prefix(4000)], [prefix(4000)])
        return [grant for demands in later for grant in budget.share(demands)]

    assert parts(10) == parts(0)


DEMANDS = st.builds(
    lambda tokens, last, context: TokenDemand(tokens, min(tokens, last), context),
    st.integers(1, ROUND_BACKLOG_MAX + 1) | st.integers(1, 2000),
    st.integers(1, 17),
    st.integers(0, 4000),
)
WISHES = st.lists(DEMANDS, min_size=1, max_size=20)


@given(WISHES, st.integers(64, 700), st.integers(1, 12), st.sampled_from([None, COSTS]))
@example(
    [TokenDemand(num, 1, 0) for num in (ROUND_BACKLOG_MAX + 1, ROUND_BACKLOG_MAX + 2)], 64, 2, None
)
def test_whatever_is_wished(
    demands: list[TokenDemand], max_tokens: int, max_steps: int, costs: StepCosts | None
) -> None:
    grants = TokenBudget(max_tokens, max_steps, costs).share(demands)
    assert 0 < sum(grants) <= max_tokens
    assert 0 < sum(grant > 0 for grant in grants) <= max_steps
    for demand, grant in zip(demands, grants, strict=True):
        whole = grant == demand.num_tokens
        assert whole or grant <= demand.num_tokens - demand.num_last or grant == 0
        assert whole or grant == 0 or not demand.is_round
    rounds = [i for i, demand in enumerate(demands) if demand.is_round]
    if rounds and max_steps > 1:
        assert grants[rounds[0]] > 0
    prefixes = [i for i, demand in enumerate(demands) if not demand.is_round]
    if prefixes:
        assert grants[prefixes[0]] > 0
