"""What a toy pair accepts, against its engines and by hand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.emulate_pair import PairLaw, expected_tokens
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.engine.interface import SequenceStep
from outrider.errors import InvariantError
from outrider.speculation.sampling_params import Rule

NUM_CONTEXTS = 4_000


@pytest.fixture(scope="module")
def law() -> PairLaw:
    return PairLaw(64, 1.706)


@pytest.fixture(scope="module")
def engine_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """log p and log q of the emulated engines after `NUM_CONTEXTS` prefixes, over the tokens that
    have any."""
    spec = EmulatedSpec(vocab_size=600, deviation=PairLaw(64, 1.706).solve_deviation(0.80))
    tokens = tuple(torch.randint(600, (NUM_CONTEXTS,), generator=torch.Generator()).tolist())
    step = SequenceStep("s", tokens, NUM_CONTEXTS)
    p, q = (
        EmulatedEngine(spec, role).forward([step])[0].double().log_softmax(-1)
        for role in ("target", "draft")
    )
    ids = p.topk(64).indices
    return p.gather(1, ids), q.gather(1, ids)


def test_the_solved_pairs_engines_overlap_as_asked(
    engine_rows: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """A prefix's overlap has a standard deviation of 0.08, and so the mean one of 0.0013."""
    p, q = (rows.exp() for rows in engine_rows)
    assert torch.minimum(p, q).sum(-1).mean().item() == pytest.approx(0.80, abs=0.005)


def test_the_solved_pairs_coupled_draws_are_equal_as_often_as_told(
    law: PairLaw, engine_rows: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """The share of 20 draws after each prefix; its standard deviation is about 0.002."""
    p, q = (rows.repeat(20, 1) for rows in engine_rows)
    noise = -torch.rand(p.shape, generator=torch.Generator(), dtype=torch.float64).log().neg().log()
    equal = ((p + noise).argmax(-1) == (q + noise).argmax(-1)).double().mean().item()
    deviation = law.solve_deviation(0.80)
    assert law.acceptance(deviation, Rule.COUPLED) == pytest.approx(equal, abs=0.01)


@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.95])
def test_a_solved_deviation_gives_what_was_asked_for(law: PairLaw, acceptance: float) -> None:
    deviation = law.solve_deviation(acceptance)
    assert law.acceptance(deviation, Rule.TOKEN) == pytest.approx(acceptance, abs=1e-4)
    assert law.acceptance(deviation, Rule.COUPLED) < acceptance
    assert PairLaw(64, 1.706).solve_deviation(acceptance) == deviation


def test_a_perfect_draft_has_no_deviation_and_is_always_accepted(law: PairLaw) -> None:
    assert law.solve_deviation(1.0) == pytest.approx(0.0, abs=1e-4)
    assert law.acceptance(0.0, Rule.COUPLED) == pytest.approx(1.0)


def test_what_no_deviation_gives_is_refused(law: PairLaw) -> None:
    with pytest.raises(InvariantError, match=r"gives an acceptance of 0\.01"):
        law.solve_deviation(0.01)
    with pytest.raises(InvariantError, match="rule block"):
        law.acceptance(0.5, Rule.BLOCK)


def test_the_target_has_two_nats(law: PairLaw) -> None:
    assert law.entropy == pytest.approx(2.0, abs=0.01)


def test_expected_tokens_by_hand() -> None:
    assert expected_tokens(0.5, 0) == 1.0
    assert expected_tokens(0.5, 3) == 1.875
    assert expected_tokens(1.0, 14) == 15.0
