"""Verdicts by Triton kernels, compared with those of the CPU: on a CUDA device, otherwise in
Triton's interpreter, if installed."""

import os
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

ON_CUDA = torch.cuda.is_available()
if not ON_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="the compiler of the kernels is not installed")

from outrider.errors import InvariantError  # noqa: E402
from outrider.grammar.token_mask import TokenMask  # noqa: E402
from outrider.speculation import cuda_verdicts, draft_sampling, verification  # noqa: E402
from outrider.speculation.draft_sampling import draw_from_logits  # noqa: E402
from outrider.speculation.logits_processing import DraftVocabulary  # noqa: E402
from outrider.speculation.proposal import Proposal  # noqa: E402
from outrider.speculation.random_streams import RoundNoise  # noqa: E402
from outrider.speculation.sampling_params import NO_HISTORY, Rule, SamplingParams, TokenHistory  # noqa: E402
from outrider.speculation.verification import VerifyInput, verdicts_from_logits  # noqa: E402
from tests.support.verdict_laws import drafted  # noqa: E402

DEVICE = "cuda" if ON_CUDA else "cpu"
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=5),
    SamplingParams(min_p=0.05, top_k=40, top_p=0.6),
    SamplingParams(top_p=1e-9),
    SamplingParams(repetition_penalty=1.3, logit_bias=((3, 4.0), (4_000, 1.0))),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, top_p=0.9),
    GREEDY,
    replace(GREEDY, repetition_penalty=1.3, frequency_penalty=2.0, logit_bias=((5, 6.0),)),
)


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, CPU rows go through the kernels, too, in short passes."""
    if not ON_CUDA:
        monkeypatch.setattr(cuda_verdicts, "_BLOCK", 256)
        monkeypatch.setattr(cuda_verdicts, "_WAITS", 2)
        for module in (verification, draft_sampling):
            monkeypatch.setattr(
                module, "has_kernels", lambda device: device not in cuda_verdicts._FAILED
            )
    monkeypatch.setattr(cuda_verdicts, "_FAILED", set())


def on_cpu(verify_input: VerifyInput) -> VerifyInput:
    """The same input in float64, which the kernels do not accept."""
    return replace(verify_input, logits=verify_input.logits.double().cpu())


def verify_input(
    rule: Rule,
    params: SamplingParams,
    num: int = 4,
    seed: int = 1,
    logits: torch.Tensor | None = None,
    is_masked: bool = False,
) -> VerifyInput:
    """For random logits and a slightly flatter draft. Masks forbid half of the tokens, except in
    the second row, and all tokens beyond a limit."""
    generator = torch.Generator().manual_seed(seed)
    if logits is None:
        logits = torch.randn((num + 1, 1_000), generator=generator) * 3
    noise = RoundNoise(seed, rule, 100 + seed)
    flatter = replace(params, temperature=1.25 * params.temperature, top_p=1.0, logit_bias=())
    flatter = replace(flatter, repetition_penalty=1.0)
    proposal = drafted(logits[:-1].double(), flatter, noise)
    history = TokenHistory((1, 2), (3, 3), proposal.token_ids) if params.penalised else NO_HISTORY
    asked = VerifyInput(logits.to(DEVICE), params, history, proposal, noise)
    if not is_masked:
        return asked
    bits = np.random.default_rng(seed).integers(0, 256, (num + 1, 1_000 // 9), dtype=np.uint8)
    masks: list[TokenMask | None] = [*map(TokenMask, bits)]
    masks[1:2] = [None] * len(masks[1:2])
    return replace(asked, masks=masks)


def test_verdicts_equal_those_without_kernels() -> None:
    """One call has all rules, sampling parameters and lengths; every third row is masked."""
    asked = [
        verify_input(rule, params, num=seed % 6, seed=seed, is_masked=seed % 3 == 0)
        for seed, (rule, params) in enumerate(product(Rule, SAMPLINGS))
        if params.greedy == (rule is Rule.GREEDY)
    ]
    found = verdicts_from_logits(asked)
    expected = verdicts_from_logits([on_cpu(each) for each in asked])
    for own, other in zip(found, expected, strict=True):
        assert own.correction == other.correction
        accept = own.accept_probability, other.accept_probability
        np.testing.assert_allclose(*accept, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("is_reduced", [False, True])
def test_draws_equal_those_without_kernels(is_reduced: bool) -> None:
    """One call has all rules and sampling parameters."""
    asked = [
        (params, RoundNoise(seed, rule, 100 + seed))
        for seed, (rule, params) in enumerate(product(Rule, SAMPLINGS))
        if params.greedy == (rule is Rule.GREEDY)
    ]
    params, noises = zip(*asked, strict=True)
    num = len(asked)
    logits = 3 * torch.randn((num, 1_000), generator=torch.Generator().manual_seed(2))
    vocabulary = DraftVocabulary(4 * np.arange(1_000) + 3) if is_reduced else None
    rest = params, noises, [1] * num, [TokenHistory((3, 7), (3, 3, 11))] * num, vocabulary
    found, _ = draw_from_logits(logits.to(DEVICE), *rest)
    expected, _ = draw_from_logits(logits.double(), *rest)  # which the kernels do not accept
    for (token_id, q), (other, known) in zip(found, expected, strict=True):
        assert token_id == other
        assert (q is None) == (known is None)
        if q is not None and known is not None:
            assert q.token_ids == known.token_ids
            np.testing.assert_allclose(q.counts, known.counts, atol=1)


def test_each_is_what_it_would_be_alone() -> None:
    asked = [
        verify_input(rule, GREEDY if rule is Rule.GREEDY else SAMPLINGS[1], seed=7) for rule in Rule
    ]
    assert verdicts_from_logits(asked) == [verdicts_from_logits([each])[0] for each in asked]


@pytest.mark.parametrize("spread", [0.0, 0.5, 6.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.0503),
        SamplingParams(top_p=0.9999),
        SamplingParams(top_k=37),
        SamplingParams(top_k=500, top_p=0.5003),
        SamplingParams(min_p=0.3, top_p=0.7003),
    ],
)
def test_what_filters_keep(spread: float, params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((3, 5_000 if ON_CUDA else 1_500), generator=generator) * spread
    logits[2] = (logits[2] * 4).round() / 4
    asked = verify_input(Rule.TOKEN, params, num=2, logits=logits)
    [own] = verdicts_from_logits([asked])
    [other] = verdicts_from_logits([on_cpu(asked)])
    assert own.correction == other.correction
    np.testing.assert_allclose(own.accept_probability, other.accept_probability, rtol=2e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_distribution(bad: float) -> None:
    """An outcome ends before such a row, and a first row fails. Other sessions notice nothing."""
    asked = []
    biased = replace(SAMPLINGS[3], logit_bias=((5, 1.0),))
    for seed, (rule, sampling) in enumerate(product(Rule, (SAMPLINGS[0], biased, GREEDY))):
        if sampling.greedy == (rule is Rule.GREEDY):
            made = verify_input(rule, sampling, num=3, seed=seed)
            made.logits[1 + seed % 3, 5 if bad != -torch.inf else slice(None)] = bad
            asked += [made, verify_input(rule, sampling, num=1, seed=seed)]
    found = verdicts_from_logits(asked)
    expected = verdicts_from_logits([on_cpu(each) for each in asked])
    for own, other in zip(found, expected, strict=True):
        assert own.correction == other.correction
        accept = own.accept_probability, other.accept_probability
        np.testing.assert_allclose(*accept, rtol=2e-5, atol=1e-7)
    asked[0].logits[0, 5 if bad != -torch.inf else slice(None)] = bad
    with pytest.raises(InvariantError, match="row 0"):
        verdicts_from_logits(asked[:1])


def test_the_greedy_take_the_largest_of_nearly_equal_logits() -> None:
    logits = torch.zeros(2, 300)
    logits[:, 7] = 0.3
    logits[:, 3] = torch.nextafter(torch.tensor(0.3), torch.tensor(0.0))
    biased = replace(GREEDY, logit_bias=((3, 1.0), (7, 1.0)))
    asked = [
        verify_input(Rule.GREEDY, params, num=0, logits=row[None])
        for params, row in zip((GREEDY, biased), logits, strict=True)
    ]
    # The sums are equal as float32, so the lower id is taken.
    assert [each.correction for each in verdicts_from_logits(asked)] == [(7,), (3,)]
    on_host = [replace(each, logits=each.logits.cpu()) for each in asked]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(verification, "has_kernels", lambda device: False)
        assert verdicts_from_logits(on_host) == verdicts_from_logits(asked)


def test_draft_tokens_outside_their_q_are_found() -> None:
    asked = verify_input(Rule.TOKEN, SAMPLINGS[0])
    drafted = replace(asked.proposal, token_ids=(999, *asked.proposal.token_ids[1:]))
    with pytest.raises(InvariantError, match="outside the distribution"):
        verdicts_from_logits([replace(asked, proposal=drafted)])


def test_kernels_that_do_not_run_are_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = verify_input(Rule.TOKEN, SAMPLINGS[1])
    verification.try_kernels(asked.logits[:2])
    assert not caplog.records

    def broken(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cuda_verdicts, "settle", broken)
    verification.try_kernels(asked.logits[:2])
    assert "use no Triton kernels" in caplog.text
    [own], [other] = verdicts_from_logits([asked]), verdicts_from_logits([on_cpu(asked)])
    assert own.correction == other.correction


def test_a_draft_that_is_the_target_leaves_nothing_to_correct() -> None:
    logits = torch.full((2, 300), -torch.inf)
    logits[:, 7] = 0.0
    asked = verify_input(Rule.TOKEN, SAMPLINGS[0], num=1, logits=logits)
    assert asked.proposal.token_ids == (7,)
    for rule in (Rule.TOKEN, Rule.BLOCK):
        own = replace(asked, noise=replace(asked.noise, rule=rule))
        [verdict] = verdicts_from_logits([own])
        assert verdict.accept_probability == (1.0,)
        assert verdict.correction == (7, 7)
        outside = replace(own, proposal=Proposal((4_000,), (None,)))
        [verdict] = verdicts_from_logits([outside])
        assert verdict.accept_probability == (0.0,)
        assert verdict.correction == (7, 7)
