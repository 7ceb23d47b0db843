"""The audit of live sessions: no alarm for honest services, a clear one for planted faults."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import astuple, replace
from functools import partial
from operator import add
from pathlib import Path

import jsonschema
import pytest

from outrider.foundation.clock import run_virtually
from outrider.interfaces.request import GenerateRequest, Tokens
from outrider.limits import AUDITS_CHOSEN_MAX, NUM_DRAFT_TOKENS_MAX
from outrider.models.tokenizer import TokenizerText
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.speculation.verification import VerifyInput, verdicts_from_logits
from outrider.telemetry.observer import AuditOutcome, Observation
from tests.support.constrained import CONSTRAINTS, SCHEMA, EndingEngine, grammars, hf_tokenizer
from tests.support.coordinator_bench import Bench, draft_service, running, target_service
from tests.support.stack import running_stack, until
from tests.support.toy_engine import ToyEngine

pytestmark = pytest.mark.virtual

VOCAB = 7
NUM_SESSIONS = 16
NUM_TOKENS = 60
SAMPLING = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.2)


class Heard(Observation):
    def __init__(self) -> None:
        self.sums: dict[str, AuditSums] = {}
        self.outcomes: list[AuditOutcome] = []

    def audited(self, rule: str, sums: AuditSums) -> None:
        before = self.sums.get(rule, AuditSums())
        self.sums[rule] = AuditSums(*map(add, astuple(before), astuple(sums)))

    def audit_ended(self, outcome: AuditOutcome) -> None:
        self.outcomes.append(outcome)


class AuditedBench(Bench):
    """Engines have a small vocabulary, and outcomes of audits are recorded."""

    def __init__(self, audit_share: float = 1.0) -> None:
        self.heard = Heard()
        self.engine, drafting = (ToyEngine(VOCAB, salt, max_model_len=128) for salt in (1, 2))
        super().__init__(
            target=target_service(self.engine, 0.001),
            draft=draft_service(drafting, 0.001),
            observation=self.heard,
            telemetry="prometheus=0",
            audit_share=audit_share,
            num_draft_tokens=4,
            max_sessions=64,
        )

    async def audit(self, request: GenerateRequest) -> None:
        num = len(self.heard.outcomes)
        await self.events(request)
        await until(lambda: len(self.heard.outcomes) > num, 100)


def audited(rule: Rule | None, sampling: SamplingParams, num: int = NUM_SESSIONS) -> AuditSums:
    async def main() -> Heard:
        async with running(AuditedBench()) as bench:
            for seed in range(num):
                request = GenerateRequest(
                    (seed % VOCAB, 1, 2),
                    sampling=sampling,
                    rule=rule,
                    seed=seed,
                    max_tokens=NUM_TOKENS,
                    num_draft_tokens=3,
                )
                await bench.audit(request)
        return bench.heard

    heard = run_virtually(main())
    assert heard.outcomes == ["audited"] * num
    (sums,) = heard.sums.values()
    return sums


def z(sums: AuditSums) -> float:
    return (sums.surprise - sums.entropy) / math.sqrt(sums.variance)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.COUPLED])
def test_honest_services_are_within_chance(rule: Rule) -> None:
    """960 tokens are audited. A value beyond 5 occurs once in 1.7 million runs of each rule; seeds
    are fixed."""
    sums = audited(rule, SAMPLING)
    assert sums.num_tokens == NUM_SESSIONS * NUM_TOKENS
    assert sums.num_impossible == sums.num_unlikely == 0
    assert sums.variance > 0.1 * sums.num_tokens
    assert abs(z(sums)) < 5


def test_honest_greedy_tokens_are_the_likeliest() -> None:
    sums = audited(None, SamplingParams(temperature=0.0), num=4)
    assert sums == AuditSums(num_tokens=4 * NUM_TOKENS)


def all_accepted(inputs: Sequence[VerifyInput]) -> list[Verdict]:
    return [
        Verdict((1.0,) * len(verdict.accept_probability), verdict.correction)
        for verdict in verdicts_from_logits(inputs)
    ]


def changed(inputs: Sequence[VerifyInput], **params: float) -> list[Verdict]:
    asked = [replace(one, params=replace(one.params, **params)) for one in inputs]
    return verdicts_from_logits(asked)


@pytest.mark.parametrize("fault", [all_accepted, partial(changed, temperature=0.6)])
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.COUPLED])
def test_planted_faults_are_far_beyond_chance(
    rule: Rule, fault: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("target_service.verifier.verdicts_from_logits", fault)
    assert abs(z(audited(rule, SamplingParams(temperature=1.0)))) > 8


REQUEST = GenerateRequest((1, 2, 3), seed=5, max_tokens=40)


async def test_a_seed_is_audited_once() -> None:
    greedy = replace(REQUEST, sampling=SamplingParams(temperature=0.0))
    async with running(AuditedBench()) as bench:
        for request in (REQUEST, REQUEST, greedy, greedy, replace(REQUEST, seed=6)):
            await bench.audit(request)
    assert bench.heard.outcomes == ["audited", "repeated", "audited", "audited", "audited"]


def together(num: int, first: int = 20) -> list[GenerateRequest]:
    return [replace(REQUEST, seed=first + n, max_tokens=20 + n) for n in range(num)]


async def test_no_more_are_chosen_than_may_wait() -> None:
    async with running(AuditedBench()) as bench:
        for _ in range(2):  # Finished audits make room.
            num = len(bench.heard.outcomes)
            await asyncio.gather(*(bench.events(one) for one in together(20, first=20 + num)))
            assert bench.heard.outcomes[num:][:4] == ["busy"] * 4
            while len(bench.heard.outcomes) < num + 20:
                await asyncio.sleep(0.01)
    assert sorted(bench.heard.outcomes) == ["audited"] * 2 * AUDITS_CHOSEN_MAX + ["busy"] * 8


async def test_a_target_whose_seats_are_taken_is_left_alone() -> None:
    async with running(AuditedBench()) as bench:
        # Longer ones fill the step of eight.
        others = [
            asyncio.create_task(bench.events(replace(REQUEST, max_tokens=120, seed=seed)))
            for seed in range(10, 18)
        ]
        await asyncio.sleep(0.005)
        await bench.events(replace(REQUEST, max_tokens=2))
        for _ in range(20):
            await asyncio.sleep(0.001)
            assert bench.service._sessions.scored_ids == set()
        assert bench.heard.outcomes == []
        await asyncio.gather(*others)
        await asyncio.sleep(30)
    assert bench.heard.outcomes == ["audited"] * 9


async def test_a_share_is_a_share() -> None:
    """Half of 200 sessions are audited. A count outside 65..135 occurs once in 2 million runs."""
    async with running(AuditedBench(0.5)) as bench:
        for seed in range(200):
            await bench.events(replace(REQUEST, seed=seed, max_tokens=1))
            await asyncio.sleep(1)
    assert set(bench.heard.outcomes) == {"audited"}
    assert 65 <= len(bench.heard.outcomes) <= 135


async def test_tokens_count_after_the_client_has_gone() -> None:
    """Clients leave when they have seen enough, so a sample without their tokens would be
    biased."""
    async with running(AuditedBench()) as bench:
        async with aclosing(bench.service.streams.generate(REQUEST)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    break
        await asyncio.sleep(10)
        async with aclosing(bench.service.streams.generate(replace(REQUEST, seed=6))) as events:
            async for _ in events:
                break
        await asyncio.sleep(10)
        assert bench.service.streams._auditor._num_chosen == 0
    assert bench.heard.outcomes == ["audited"]  # The other session has no tokens.
    (sums,) = bench.heard.sums.values()
    assert 1 <= sums.num_tokens < 40


async def test_a_target_that_fails_ends_an_audit_of_which_counts_what_it_has_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(AuditedBench()) as bench:
        note = bench.heard.audited

        def fail_next(rule: str, sums: AuditSums) -> None:
            note(rule, sums)
            bench.engine.poisoned |= bench.service._sessions.scored_ids

        monkeypatch.setattr(bench.heard, "audited", fail_next)
        await bench.audit(REQUEST)
        assert bench.service._sessions.scored_ids == set()
    assert bench.heard.outcomes == ["failed"]
    assert bench.heard.sums["coupled"].num_tokens == NUM_DRAFT_TOKENS_MAX


async def test_a_coordinator_that_closes_gives_its_audits_up() -> None:
    async with running(AuditedBench()) as bench:
        await asyncio.gather(*(bench.events(request) for request in together(8)))
        while not bench.service._sessions.scored_ids:
            await asyncio.sleep(0.0001)
    assert bench.service.streams._auditor._num_chosen == 0
    assert len(bench.heard.outcomes) < 8
    assert set(bench.heard.outcomes) <= {"audited"}


CONSTRAINED = GenerateRequest(
    (1, 2, 3),
    sampling=SamplingParams(temperature=1.0),
    rule=Rule.TOKEN,
    max_tokens=60,
    num_draft_tokens=3,
    constraint=CONSTRAINTS["schema"],
)


@pytest.mark.virtual(False)
async def test_constrained_completions_are_within_chance(tmp_path: Path) -> None:
    """A value beyond 5 occurs once in 1.7 million runs. Without the mask most tokens would be far
    more surprising than expected. Each completion that ends by itself meets the schema."""
    heard = Heard()
    async with running_stack(
        EndingEngine(1),
        EndingEngine(2),
        tmp_path,
        grammars=grammars,
        text=TokenizerText(hf_tokenizer(), "toy"),
        observation=heard,
        audit_share=1.0,
    ) as stack:
        asked = [replace(CONSTRAINED, seed=seed) for seed in range(12)]
        answers = await asyncio.gather(*(stack.client.complete(request) for request in asked))
        await until(lambda: len(heard.outcomes) == 12, 60)
    for answer in answers:
        if answer.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(answer.text), SCHEMA)
    assert heard.outcomes == ["audited"] * 12
    sums = heard.sums["token"]
    assert sums.num_tokens == sum(answer.usage.completion_tokens for answer in answers) > 200
    assert sums.num_impossible == 0
    assert sums.variance > 20
    assert abs(z(sums)) < 5
