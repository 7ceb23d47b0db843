"""Deadlines with each drafter that draws token by token. The time of a draw depends on its token
here, so a drafter keeps the law only if it decides before each draw whether to make it and proposes
everything it has drawn (`test_stopping_before_a_draw`)."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch

from draft_service.feature_drafter import FeatureDrafter, HeadEngine
from draft_service.model_drafter import ModelDrafter, ParallelDrafter
from draft_service.service import Proposer
from outrider.drafters import autoregressive_draft
from outrider.drafters.autoregressive_draft import DraftSampler
from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline, DraftRequest
from outrider.drafters.features import Features
from outrider.engine.paged_engine import PagedEngine
from outrider.interfaces.engine import ModelInfo, SequenceStep
from outrider.interfaces.messages import DraftItem, ProposalReply
from outrider.models.eagle3 import LoadedEagle3
from outrider.replica.step_request import Answers, StepRequest
from outrider.replica.token_budget import TokenBudget
from outrider.speculation.proposal import Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from target_service.actor import self_drafter_of
from tests.support.models import tiny_config, tiny_eagle3, tiny_module, twin
from tests.support.rounds import PENALISED, make_head, run_step, step_request
from tests.support.toy_engine import ToyEngine

VOCAB, LENGTH, K = 24, 40, 3
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
HEAD_IDS = tuple(range(0, VOCAB, 2))
DRAFT_SALT = 4
FLATTER = 0.01
"""Scales the logits of the random heads, so that they draw many different tokens."""
QUICK_S, SLOW_S = 1.0, 4.0
PLAIN = SamplingParams()
INFO = ModelInfo("tiny", VOCAB, LENGTH, "float64", (), "w", "t")
TOGETHER = 50


class Draws:
    """The draws of each seed and their time: four times as long for half of the tokens."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = defaultdict(float)
        self.token_ids: dict[int, list[int]] = defaultdict(list)
        self.begun: dict[int, list[float]] = defaultdict(list)

    def note(self, noise: RoundNoise, token_id: int) -> None:
        """Records draws of the requested round, not those of look-ahead."""
        if noise.committed_length == len(PROMPT):
            self.begun[noise.seed].append(self.seconds[noise.seed])
            self.token_ids[noise.seed].append(token_id)
            self.seconds[noise.seed] += SLOW_S if token_id // 2 % 2 else QUICK_S

    def watch(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wraps the function by which drafters draw, as a module imports it."""
        draw_from_logits = module.draw_from_logits

        def drawn(logits: Any, params: Any, noises: Sequence[RoundNoise], *rest: Any) -> Any:
            found = draw_from_logits(logits, params, noises, *rest)
            for noise, (token_id, _) in zip(noises, found[0], strict=True):
                self.note(noise, token_id)
            return found

        monkeypatch.setattr(module, "draw_from_logits", drawn)

    def deadline(self, seed: int, ends_at: float) -> DraftDeadline:
        return DraftDeadline(ends_at, lambda: self.seconds[seed])


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Draws:
    made = Draws()
    made.watch(autoregressive_draft, monkeypatch)
    return made


Propose = Callable[[Sequence[int], Draws, float], list[Proposal]]
"""Proposals for seeds, with the time of each."""


@lru_cache
def tiny_target() -> Any:
    config = tiny_config("llama", VOCAB, LENGTH)
    config.tie_word_embeddings = False
    module = tiny_module(config, dtype=torch.float64)
    with torch.no_grad():
        module.lm_head.weight.mul_(FLATTER)
    return module


def flat_head(module: Any) -> LoadedEagle3:
    layer = tiny_eagle3(module, HEAD_IDS)
    layer.module.lm_head.weight.mul_(FLATTER)
    return layer


def by_target() -> Propose:
    module = twin(tiny_target())
    layer = flat_head(module)
    engine = PagedEngine(module, INFO, draft_layer=layer)
    drafter = self_drafter_of(engine)
    assert drafter is not None
    names = [f"s{number}" for number in range(TOGETHER)]
    engine.forward([SequenceStep(name, PROMPT[:-1], num_logits=1) for name in names])
    features = torch.linspace(-1.0, 1.0, layer.module.width, dtype=torch.float64)

    def propose(seeds: Sequence[int], draws: Draws, ends_at: float) -> list[Proposal]:
        requests = [
            DraftRequest(
                name,
                "",
                PROMPT,
                len(PROMPT),
                K,
                PLAIN,
                Rule.TOKEN,
                RoundNoise(seed, Rule.TOKEN, len(PROMPT)),
                deadline=draws.deadline(seed, ends_at),
            )
            for name, seed in zip(names, seeds, strict=False)
        ]
        with torch.inference_mode():
            return drafter.propose(requests, [features] * len(requests))

    return propose


def by_draft(
    proposer: Proposer,
    sampling: SamplingParams = PLAIN,
    look_ahead: int = 0,
    features: Features | None = None,
) -> Propose:
    def propose(seeds: Sequence[int], draws: Draws, ends_at: float) -> list[Proposal]:
        items = [
            step_request(
                DraftItem(
                    make_head(PROMPT, session=seed, seed=seed, rule=Rule.TOKEN, sampling=sampling),
                    K,
                    look_ahead,
                    features=features,
                ),
                draws.deadline(seed, ends_at),
            )
            for seed in seeds
        ]
        found: dict[int, Proposal] = {}
        while waiting := [one for one in items if one.item.head.seed not in found]:
            for asked, answer in zip(waiting, run_step(proposer, waiting), strict=True):
                for one in answer.answers if isinstance(answer, Answers) else (answer,):
                    if isinstance(one, ProposalReply) and not one.assumed:
                        found[asked.item.head.seed] = one.proposal.decode()
        for asked in items:
            proposer.leave({asked.session_id: True})
        return [found[seed] for seed in seeds]

    return propose


def drafting(kind: str) -> Propose:
    if kind == "eagle3":
        return by_target()
    if kind == "apart":
        layer = flat_head(twin(tiny_target()))
        width = layer.module.width
        rows = torch.linspace(-1.0, 1.0, (len(PROMPT) - 1) * width).bfloat16()
        features = Features(0, width, rows.view(torch.uint8).numpy().tobytes())
        head = HeadEngine(layer, INFO, max_num_seqs=TOGETHER, kv_cache_memory_bytes=2**20)
        worker = Proposer(FeatureDrafter(layer, head), TokenBudget(512, TOGETHER))
        return by_draft(worker, features=features)
    engine, budget = ToyEngine(VOCAB, DRAFT_SALT), TokenBudget(512, TOGETHER)
    if kind == "parallel":
        return by_draft(Proposer(ParallelDrafter(engine, 0), budget), PENALISED)
    look_ahead = 4 if kind == "look-ahead" else 0
    return by_draft(Proposer(ModelDrafter(engine), budget), look_ahead=look_ahead)


def proposed(
    propose: Propose, draws: Draws, ends_at: float, num: int
) -> list[tuple[int, Proposal]]:
    found = []
    for first in range(1, num + 1, TOGETHER):
        seeds = range(first, min(first + TOGETHER, num + 1))
        found += zip(seeds, propose(seeds, draws, ends_at), strict=True)
    return found


KINDS = ("eagle3", "apart", "model", "look-ahead", "parallel")
"""A parallel drafter draws token by token if the request has penalties. For other requests:
`test_parallel_drafts.py`."""


@pytest.mark.parametrize("ends_at", [0.0, 0.5, 1.5, 4.5, 60.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_is_made_while_there_is_time_and_then_proposed(
    kind: str, ends_at: float, draws: Draws
) -> None:
    lengths = set()
    for seed, proposal in proposed(drafting(kind), draws, ends_at, 30):
        assert [*proposal.token_ids] == draws.token_ids[seed]
        assert all(begun < ends_at for begun in draws.begun[seed])
        assert len(proposal) == K or draws.seconds[seed] >= ends_at
        lengths.add(len(proposal))
    assert lengths == {0.0: {0}, 0.5: {1}, 1.5: {1, 2}, 4.5: {2, 3}, 60.0: {3}}[ends_at]


class Branches:
    """The draws after each prefix, in all rounds, and the times at which those after the prefix
    `timed` began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: dict[tuple[int, ...], list[int]] = {}
        self.timed: tuple[int, ...] = ()
        self.begun: list[float] = []
        self.now = 0.0
        draw = DraftSampler.draw

        def noted(sampler: DraftSampler, drafts: Any, rows: Any) -> Any:
            found = draw(sampler, drafts, rows)
            for one in drafts:
                self.drawn[tuple(one.request.token_ids)] = [*one.token_ids]
                if tuple(one.request.token_ids) == self.timed:
                    self.begun.append(self.now)
                    self.now += SLOW_S if one.token_ids[-1] % 2 else QUICK_S
            return found

        monkeypatch.setattr(DraftSampler, "draw", noted)


def answers_to(proposer: Proposer, item: DraftItem | StepRequest[DraftItem]) -> list[ProposalReply]:
    """The answers of one step."""
    [answer] = run_step(proposer, [item])
    return [*answer.answers] if isinstance(answer, Answers) else [answer]


def answered(proposer: Proposer, item: DraftItem | StepRequest[DraftItem]) -> ProposalReply:
    while True:
        for one in answers_to(proposer, item):
            if not one.assumed:
                return one


def ahead_until(proposer: Proposer, item: DraftItem, num_steps: int) -> list[ProposalReply]:
    """Answers the item, and looks ahead for some steps. Returns what was pushed."""
    answered(proposer, item)
    steps = [answers_to(proposer, item) for _ in range(num_steps)]
    return [one for answers in steps for one in answers]


def late_request(
    outcome: Sequence[int], seed: int, deadline: DraftDeadline
) -> StepRequest[DraftItem]:
    text = (*PROMPT, *outcome)
    head = make_head(text, len(PROMPT), seed=seed, rule=Rule.TOKEN, sampling=PLAIN, round_index=1)
    return step_request(DraftItem(head, LATE_K, LATE_K), deadline)


LATE_K, LATE_STEPS = 5, 12


@pytest.mark.parametrize("ends_at", [0.0, 1.5, 4.5, None])
def test_an_outcome_that_comes_true_before_it_is_drafted(
    ends_at: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its round begins, 0 to 5 tokens are drawn, depending on the steps before. From then on,
    a token is drawn only while there is time. All that was drawn is proposed; without a time limit,
    all that is wanted."""
    branches, lengths, kept = Branches(monkeypatch), set(), set()
    for seed, num_steps in product(range(1, 9), range(LATE_STEPS)):
        worker = Proposer(ModelDrafter(ToyEngine(VOCAB, DRAFT_SALT)), TokenBudget(512, TOGETHER))
        head = make_head(PROMPT, seed=seed, rule=Rule.TOKEN, sampling=PLAIN)
        item = DraftItem(head, LATE_K, LATE_K)
        [likeliest, *_] = ahead_until(worker, item, 2 * LATE_STEPS)
        worker.leave({head.session_id: True})
        branches.timed, text = (), (*PROMPT, *likeliest.assumed)
        branches.drawn.clear()
        ahead_until(worker, item, num_steps)
        num_before = len(branches.drawn.get(text, ()))
        branches.timed, branches.begun, branches.now = text, [], 0.0
        deadline = NO_DEADLINE
        if ends_at is not None:
            deadline = DraftDeadline(ends_at, lambda: branches.now)
        found = answered(worker, late_request(likeliest.assumed, seed, deadline))
        assert [*found.proposal.token_ids] == branches.drawn.get(text, [])
        assert all(ends_at is None or begun < ends_at for begun in branches.begun)
        kept.add(num_before)
        lengths.add(len(found.proposal))
    assert kept == {*range(LATE_K + 1)}
    least = {None: LATE_K, 0.0: 0, 1.5: 1, 4.5: 2}[ends_at]
    assert lengths == {*range(least, LATE_K + 1)}
