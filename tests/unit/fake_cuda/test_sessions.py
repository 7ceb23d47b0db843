"""How often the workers of a target and a draft read from a CUDA device, send to it and start
operators: for verdicts, masks, features, drafts by models and heads, and look-ahead.
`test_steps.py` says what cannot be seen."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from time import perf_counter
from typing import Any

import pytest
import torch

from draft_service.feature_drafter import FeatureDrafter, HeadEngine
from draft_service.model_drafter import ModelDrafter
from draft_service.service import Proposer
from outrider.drafters.features import Features
from outrider.interfaces.engine import ModelInfo
from outrider.interfaces.messages import (
    DraftItem,
    ProposalReply,
    RoundHead,
    RoundItem,
    VerdictReply,
    VerifyItem,
)
from outrider.replica.step_loop import Worker
from outrider.replica.step_request import Answers
from outrider.replica.token_budget import TokenBudget
from outrider.speculation.draft_sampling import draw_from_logits
from outrider.speculation.proposal import (
    COUNT_TOTAL,
    EMPTY_ENCODED_PROPOSAL,
    DraftDistribution,
    EncodedProposal,
    Proposal,
)
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import NO_HISTORY, Rule, SamplingParams
from outrider.speculation.verification import VerifyInput, verdicts_from_logits
from target_service.actor import self_drafter_of
from target_service.verifier import Verifier
from tests.support.constrained import CONSTRAINTS, grammar, grammars, hf_tokenizer
from tests.support.fake_cuda import BACKEND, CUDA, VOCAB, DeviceWatch, fake_engine, to_device
from tests.support.models import tiny_config, tiny_eagle3, tiny_module
from tests.support.rounds import GREEDY, PENALISED, make_head, run_step, step_request

WARM = SamplingParams(temperature=0.8)
FILTERED = SamplingParams(temperature=0.8, min_p=0.01, top_k=50, top_p=0.9)
BIASED = replace(PENALISED, logit_bias=((3, 1.0), (9, -2.0)))
PREFIX = (65, 66, 67)
DRAFTED = (97, 98, 99)
_sessions = count(1)


@cache
def verifier(kind: str = "") -> Verifier:
    module = tiny_module(tiny_config("llama", VOCAB))
    layer = tiny_eagle3(module, range(0, VOCAB, 2)) if kind else None
    if layer is not None:
        to_device(layer.module)
    engine = fake_engine(
        to_device(module), BACKEND, draft_layer=layer, drafts_apart=kind == "apart"
    )
    drafter = self_drafter_of(engine)
    return Verifier(engine, TokenBudget(2**20, 1024), drafter, perf_counter, grammars())


@cache
def proposer(kind: str = "") -> Proposer:
    if kind == "apart":
        head = tiny_eagle3(tiny_module(tiny_config("llama", VOCAB)), range(0, VOCAB, 2))
        to_device(head.module)
        info = ModelInfo("head", VOCAB, 64, "float32", (), "w", "t", head.token_ids)
        own = HeadEngine(head, info, max_num_seqs=1024, kv_cache_memory_bytes=2**26)
        return Proposer(FeatureDrafter(head, own), TokenBudget(2**20, 1024), grammars())
    module = to_device(tiny_module(tiny_config("llama", VOCAB)))
    engine = fake_engine(module, BACKEND)
    return Proposer(ModelDrafter(engine), TokenBudget(2**20, 1024), grammars())


def head(
    tokens: tuple[int, ...], session: int, rule: Rule, sampling: SamplingParams, **more: Any
) -> RoundHead:
    held = more.pop("held", 0)
    return make_head(tokens, held, session=session, rule=rule, sampling=sampling, **more)


def answers_to(worker: Worker[Any, Any], items: Sequence[RoundItem]) -> list[Any]:
    """Of one step. All constraints are the schema."""
    schema = grammar("schema") if any(one.head.constraint for one in items) else None
    return run_step(
        worker,
        [step_request(one, grammar=schema if one.head.constraint else None) for one in items],
    )


def proposal(rule: Rule, drafted: tuple[int, ...]) -> EncodedProposal:
    q = [DraftDistribution((v, v + 1, v + 2), (COUNT_TOTAL - 2, 1, 1)) for v in drafted]
    return EncodedProposal.of(Proposal(drafted, tuple(q) if rule.needs_q else ()))


Case = Callable[[int], Callable[[], object]]
"""Takes a number of sessions that have run their first round. Returns their next round."""


def verdicts(
    rule: Rule,
    sampling: SamplingParams,
    prefix: tuple[int, ...] = PREFIX,
    drafted: tuple[int, ...] = DRAFTED,
    kind: str = "",
    **more: Any,
) -> Case:
    """`more` is told of each item, and of its head a constraint."""
    about = {"constraint": more.pop("constraint", None), "prompt_length": 2}

    def begun(num: int) -> Callable[[], None]:
        sessions = [next(_sessions) for _ in range(num)]
        worker = verifier(kind)

        def step(held: int, encoded: EncodedProposal, tokens: tuple[int, ...], **of: Any) -> None:
            heads = [
                head(tokens, session, rule, sampling, held=held, round_index=held, **about)
                for session in sessions
            ]
            answers = answers_to(worker, [VerifyItem(one, encoded, **of) for one in heads])
            assert all(isinstance(answer, VerdictReply) for answer in answers), answers[0]

        step(0, EMPTY_ENCODED_PROPOSAL, prefix[:-1])
        encoded = proposal(rule, drafted)
        return lambda: step(len(prefix) - 1, encoded, prefix, **more)

    return begun


def constrained(case: Callable[..., Case], rule: Rule, **more: bool) -> Case:
    """Of sessions that are held to a schema."""
    text = tuple(hf_tokenizer().encode('{"name": "a'))
    about = {"constraint": CONSTRAINTS["schema"], "prefix": (65, 66, *text[:2]), **more}
    if case is verdicts:
        about["drafted"] = text[2:5]
    return case(rule, FILTERED, **about)


def drafts(
    rule: Rule,
    *samplings: SamplingParams,
    prefix: tuple[int, ...] = PREFIX,
    kind: str = "",
    constraint: Any = None,
    is_mixed: bool = False,
) -> Case:
    """Two tokens for each session, with these parameters in turns; `is_mixed`: each second one has
    no constraint."""

    def begun(num: int) -> Callable[[], None]:
        heads = [
            head(
                prefix,
                next(_sessions),
                rule,
                samplings[i % len(samplings)],
                prompt_length=2,
                constraint=None if is_mixed and i % 2 else constraint,
            )
            for i in range(num)
        ]

        def work() -> None:
            answers = answers_to(proposer(kind), [DraftItem(one, 2) for one in heads])
            assert all(isinstance(one, ProposalReply) for one in answers), answers[0]
            assert all(one.proposal.token_ids for one in answers)

        return work

    return begun


def apart(num: int) -> Callable[[], None]:
    """Two tokens for each, behind features of two more."""
    sessions = [next(_sessions) for _ in range(num)]

    def propose(tokens: tuple[int, ...], held: int, first: int) -> None:
        rows = Features(first, 24, bytes(2 * 24 * (len(tokens) - 1 - first)))
        heads = [
            head(tokens, one, Rule.TOKEN, WARM, held=held, round_index=held) for one in sessions
        ]
        answers = run_step(proposer("apart"), [DraftItem(one, 2, features=rows) for one in heads])
        assert all(len(one.proposal.token_ids) == 2 for one in answers)

    propose((65, 66, 67), 0, 0)
    return lambda: propose((65, 66, 67, 68, 69), 3, 2)


def ahead(rule: Rule, sampling: SamplingParams) -> Case:
    """A proposal of two tokens, and one for each of four outcomes, to their end."""

    def begun(num: int) -> Callable[[], None]:
        heads = [head(PREFIX, next(_sessions), rule, sampling) for _ in range(num)]
        items = [DraftItem(one, 2, look_ahead=4) for one in heads]

        def work() -> None:
            left, num_answers = items, 0
            while left:
                answers: list[Answers] = run_step(proposer(), left)
                num_answers += sum(len(one.answers) for one in answers)
                left = [item for item, one in zip(left, answers, strict=True) if one.more]
            assert num_answers > num

        return work

    return begun


CASES: dict[str, tuple[Case, tuple[int, int, int]]] = {
    "token": (verdicts(Rule.TOKEN, FILTERED), (1, 3, 13)),
    "block": (verdicts(Rule.BLOCK, FILTERED), (1, 3, 13)),
    "coupled": (verdicts(Rule.COUPLED, FILTERED), (1, 3, 13)),
    "greedy": (verdicts(Rule.GREEDY, GREEDY), (1, 3, 13)),
    "penalised": (verdicts(Rule.COUPLED, BIASED), (1, 3, 14)),
    "masked": (constrained(verdicts, Rule.TOKEN), (1, 3, 14)),
    "features": (verdicts(Rule.TOKEN, FILTERED, kind="apart", features_from=0), (2, 5, 20)),
    "layer": (verdicts(Rule.TOKEN, WARM, kind="layer", num_next_draft_tokens=2), (3, 10, 103)),
    "drafts by token": (drafts(Rule.TOKEN, WARM), (2, 2, 26)),
    "drafts coupled": (drafts(Rule.COUPLED, FILTERED), (2, 4, 36)),
    "drafts greedy": (drafts(Rule.GREEDY, GREEDY), (2, 2, 24)),
    "drafts of several kinds": (drafts(Rule.TOKEN, WARM, FILTERED, BIASED), (2, 4, 36)),
    "drafts masked": (constrained(drafts, Rule.COUPLED), (1, 4, 29)),
    "drafts masked and not": (constrained(drafts, Rule.COUPLED, is_mixed=True), (2, 7, 44)),
    "drafts filtered": (drafts(Rule.TOKEN, FILTERED), (2, 4, 34)),
    "apart": (apart, (2, 10, 76)),
    "ahead token": (ahead(Rule.TOKEN, WARM), (5, 6, 70)),
    "ahead coupled": (ahead(Rule.COUPLED, WARM), (5, 10, 82)),
    "ahead greedy": (ahead(Rule.GREEDY, GREEDY), (5, 6, 66)),
}
"""The most reads, sends and operators for 1 and for 16 sessions, and so for any number, without
those of the library's modules. They include a pass of a model of two layers, two passes for two
drafts, or five for look-ahead."""
OPERATORS_A_SESSION = {"apart": 11}
"""Further operators for each session: it has tensors of its own for what attention sees."""


@pytest.mark.parametrize("case", CASES)
def test_many_sessions_ask_no_more_than_one(watch: DeviceWatch, case: str) -> None:
    begun, (num_reads, num_sends, num_operators) = CASES[case]
    for num in (1, 16):
        if num == 1:  # What is made once is not counted.
            begun(num)()
        counts = watch.counted(begun(num))
        print(num, counts)
        more = OPERATORS_A_SESSION.get(case, 0) * num
        allowed = (num_reads, num_sends, num_operators + more)
        assert all(map(int.__le__, counts, allowed)), counts


def inputs(num: int) -> list[VerifyInput]:
    """Of sessions of all rules and parameters, in turns."""
    rows = torch.zeros(num, 4, VOCAB, device=CUDA).unbind()
    asked = []
    for index, logits in enumerate(rows):
        rule = [*Rule][index % len(Rule)]
        sampling = GREEDY if rule is Rule.GREEDY else (WARM, FILTERED, BIASED)[index // 4 % 3]
        encoded = proposal(rule, DRAFTED)
        noise = RoundNoise(index, rule, 9)
        asked.append(VerifyInput(logits, sampling, NO_HISTORY, encoded.decode(), noise))
    return asked


def test_verdicts_of_all_rules_are_one_call(watch: DeviceWatch) -> None:
    few, many = inputs(12), inputs(96)
    assert watch.counted(lambda: verdicts_from_logits(few)) == (1, 2, 6)
    assert watch.counted(lambda: verdicts_from_logits(many)) == (1, 2, 6)


@pytest.mark.parametrize("num", [4, 64])
def test_draws_of_all_rules_are_one_call(watch: DeviceWatch, num: int) -> None:
    noises = [RoundNoise(index, [*Rule][index % len(Rule)], 9) for index in range(num)]
    logits = torch.zeros(num, VOCAB, device=CUDA)
    num_reads, num_sends, num_operators = watch.counted(
        lambda: draw_from_logits(logits, [FILTERED] * num, noises, [1] * num)
    )
    assert (num_reads, num_sends) == (1, 1)
    assert num_operators <= 12
