"""Texts with look-ahead, and the law of tokens whose proposals time cuts, where times depend on
tokens.

The sessions run one after the other, on a virtual clock. Half of a proposal would be cut depending
on the next token's own random number, if outcomes shared random numbers, or if time cut a proposal
of a repeated seed."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from scipy.stats import binomtest

from draft_service.model_drafter import ModelDrafter
from draft_service.service import DraftService
from outrider.foundation.clock import run_virtually
from outrider.interfaces.engine import SequenceStep, take_stated_seconds
from outrider.interfaces.request import GenerateRequest, RoundReport
from outrider.replica.drivers import InlineDriver
from outrider.speculation.sampling_params import Rule
from target_service.service import TargetService
from tests.exactness.law import FALSE_ALARM
from tests.support.coordinator_bench import Bench, tokens_of
from tests.support.toy_engine import ToyEngine

P_ONE = 0.7
"""The target's and the draft's probability of token 1, except right after `PROMPT`."""
PROMPT = (1, 1, 1)
TARGET_S, PASS_S, ZERO_S = 0.0165, 0.002, 0.002
"""Time of a target's step, of a draft's pass, and of each token 0 in this pass."""


class Rows(ToyEngine):
    """Each row of logits is `rest`, but `first` right after the prompt."""

    def __init__(
        self, salt: int, first: Sequence[float], rest: Sequence[float], pass_s: float, zero_s: float
    ) -> None:
        super().__init__(2, salt, max_model_len=64, pass_s=pass_s)
        self._first, self._rest = torch.tensor(first).log(), torch.tensor(rest).log()
        self._zero_s = zero_s

    def _run(self, step: SequenceStep) -> torch.Tensor:
        rows = super()._run(step)
        num_tokens = len(self.tokens(step.sequence_id))
        for row in range(len(rows)):
            is_first = num_tokens - len(rows) + 1 + row == len(PROMPT)
            rows[row] = self._first if is_first else self._rest
        return rows

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        rows = super().forward(steps)
        drafted = [step.token_ids for step in steps if len(step.token_ids) < len(PROMPT)]
        num_zeros = sum(token_id == 0 for ids in drafted for token_id in ids)
        self.stated_seconds += self._zero_s * num_zeros
        return rows


def service_of(make: Any, engine: Rows, served: Any, max_num_seqs: int) -> Any:
    driver = InlineDriver(partial(take_stated_seconds, engine))
    return make(served, driver, max_num_seqs=max_num_seqs)


async def fleet(target: Rows, draft: Rows, seats: int, look_ahead: int) -> Bench:
    bench = Bench(
        target=service_of(TargetService, target, target, 8),
        draft=service_of(DraftService, draft, ModelDrafter(draft), seats),
        look_ahead=look_ahead,
        length_control=False,
        max_sessions=200,
        audit_share=0,
        telemetry="prometheus=0",
        draft_timeout_ms=60_000,
        num_draft_tokens=4,
    )
    await bench.service.start()
    return bench


async def played(
    bench: Bench, rule: Rule, seed: int, num: int, num_draft_tokens: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """The `num` tokens of a session. For each round but the first, the number of tokens that were
    missing when it began, and the number of tokens of its proposal."""
    request = GenerateRequest(
        PROMPT,
        max_tokens=num,
        seed=seed,
        rule=rule,
        num_draft_tokens=num_draft_tokens,
        include_rounds=True,
    )
    events = await bench.events(request)
    rounds, missing = [], num
    for report in [one for one in events if isinstance(one, RoundReport)]:
        rounds.append((missing, len(report.proposed_token_ids)))
        missing -= report.num_accepted + 1
    return tokens_of(events), rounds[1:]


async def closed(bench: Bench) -> None:
    for service in (bench.service, bench.target, bench.draft):
        await service.close()


@pytest.mark.parametrize("rule", [Rule.TOKEN, pytest.param(Rule.BLOCK, marks=pytest.mark.full)])
def test_outcomes_of_equal_length_share_no_random_numbers(rule: Rule) -> None:
    """How far an outcome is drafted when its round begins depends on the tokens of the others. With
    shared numbers, token 4 after 1, 1, 1 was 1 with probability 0.9. With 150 samples, the test
    sees a probability of 0.9 with a power of 0.8."""

    async def play() -> list[list[int]]:
        rest = 1 - P_ONE, P_ONE
        target = Rows(1, (0.05, 0.95), rest, TARGET_S, 0.0)
        bench = await fleet(target, Rows(2, (0.95, 0.05), rest, PASS_S, ZERO_S), 1, 8)
        found = []
        for seed in range(360):
            tokens, _ = await played(bench, rule, seed, 6, 4)
            found.append(tokens)
            await asyncio.sleep(0.5)
        await closed(bench)
        return found

    chosen = [tokens[3] for tokens in run_virtually(play()) if tokens[:3] == [1, 1, 1]]
    assert len(chosen) > 120
    assert binomtest(sum(chosen), len(chosen), P_ONE).pvalue > FALSE_ALARM


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_look_ahead_that_cuts_no_proposal_changes_no_text(rule: Rule) -> None:
    """What is drafted ahead uses the random numbers of the round for which it is drafted. The draft
    is fast enough to finish each outcome that it predicts."""

    async def play(look_ahead: int) -> list[Any]:
        target = Rows(1, (0.5, 0.5), (0.5, 0.5), 0.010, 0.0)
        draft = Rows(2, (0.6, 0.4), (0.6, 0.4), 0.0005, 0.0)
        bench = await fleet(target, draft, 8, look_ahead)
        found = [await played(bench, rule, seed, 12, 3) for seed in range(10)]
        await closed(bench)
        return found

    ahead, plain = run_virtually(play(16)), run_virtually(play(0))
    assert ahead == plain
    assert len({tuple(tokens) for tokens, _ in ahead}) > 5


def test_time_cuts_no_proposal_of_a_repeated_seed() -> None:
    """When the second session's rounds begin depends on the tokens of the first one. So each of its
    proposals must have all tokens that there is room for."""

    async def play() -> list[tuple[int, int]]:
        target = Rows(1, (0.66, 0.34), (0.66, 0.34), 0.010, 0.0)
        bench = await fleet(target, Rows(2, (0.98, 0.02), (0.98, 0.02), 0.0045, 0.0), 8, 16)
        found = []
        for seed in range(25):
            first = asyncio.create_task(played(bench, Rule.TOKEN, seed, 8, 4))
            await asyncio.sleep(0.0235)
            found += (await played(bench, Rule.TOKEN, seed, 8, 4))[1]
            await first
            await asyncio.sleep(1)
        await closed(bench)
        return found

    rounds = run_virtually(play())
    assert len(rounds) > 50
    assert all(num == min(4, missing - 1) for missing, num in rounds), rounds
