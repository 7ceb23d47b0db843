"""The toy pair: its specification, its laws, and the times that it states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config.emulated_spec import EmulatedSpec
from outrider.engine.emulated import EmulatedEngine
from outrider.errors import ConfigError
from outrider.interfaces.engine import SequenceStep, take_stated_seconds


def rows(engine: EmulatedEngine, tokens: tuple[int, ...], num: int) -> torch.Tensor:
    return engine.forward([SequenceStep("s", tokens, num)])[0].clone()


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().softmax(-1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("speed=3", "speed='3'"),
        ("verify_ms=nan", "verify_ms='nan'"),
        ("vocab_size=8", r"emulated: support=64 is wrong; allowed: 1\.\.8 "),
        ("eos=32000", r"emulated: eos=32000 is wrong; allowed: -1 \(none\)\.\.31999"),
        ("seed=1,seed=2", "seed is given twice"),
        ("acceptance_rates=0.5/1.5", "acceptance_rates='1.5'"),
        ("acceptance_rates=0.5/0.6", r"=\(0\.5, 0\.6\) is wrong; allowed: rates that do not "),
        ("support=1,acceptance_rates=0.5", "support=1 is wrong"),
        (
            "support=4,novel_share=0.1,max_model_len=96,vocab_size=99",
            r"vocab_size=99 is wrong; allowed: with novel_share, at least 100 \(support \+ max",
        ),
    ],
)
def test_a_bad_specification_names_its_key(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EmulatedSpec.parse(text)


@given(
    vocab_size=st.integers(2, 300),
    support=st.integers(1, 300),
    order=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=60, deadline=None)
def test_each_row_is_a_zipf_law_on_distinct_ids(
    vocab_size: int, support: int, order: int, seed: int
) -> None:
    support = min(support, vocab_size)
    spec = EmulatedSpec(vocab_size=vocab_size, support=support, order=order, seed=seed)
    target, draft = EmulatedEngine(spec, "target"), EmulatedEngine(spec, "draft")
    tokens = tuple(i % vocab_size for i in range(6))
    p, q = probabilities(rows(target, tokens, 6)), probabilities(rows(draft, tokens, 6))
    weights = torch.arange(1, support + 1, dtype=torch.float64) ** -spec.exponent
    expected = weights / weights.sum()
    for p_row, q_row in zip(p, q, strict=True):
        assert (p_row > 0).sum().item() == support
        assert torch.equal(p_row > 0, q_row > 0)
        actual = p_row.sort(descending=True).values[:support]
        assert torch.allclose(actual, expected, atol=1e-6)


def test_the_default_pair_has_two_nats_and_an_acceptance_of_about_0_8() -> None:
    """Means over 400 prefixes; the acceptance of one prefix has a standard deviation of about 0.1,
    so the mean is within 0.05 of its expectation but for a probability < 1e-20."""
    target, draft = (EmulatedEngine(EmulatedSpec(), role) for role in ("target", "draft"))
    tokens = tuple(range(1000, 1400))
    p, q = probabilities(rows(target, tokens, 400)), probabilities(rows(draft, tokens, 400))
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1).mean().item()
    assert entropy == pytest.approx(2.0, abs=0.01)
    assert torch.minimum(p, q).sum(-1).mean().item() == pytest.approx(0.8, abs=0.05)


def test_a_drafted_token_has_all_probability_or_none_by_its_place_in_the_round() -> None:
    """With chances 0.8 / 0.4 / 0.4 a second token is accepted with 1/2 if the first was, a third
    always, a fourth never. The draft would hardly choose the tokens of these 800 rounds. The bounds
    are five standard errors: false alarm < 1e-5."""
    spec = EmulatedSpec(vocab_size=5_000, acceptance_rates=(0.8, 0.4, 0.4), num_pages=64)
    plain = EmulatedEngine(spec.model_copy(update={"acceptance_rates": ()}), "target")
    engine, accepted = EmulatedEngine(spec, "target"), torch.zeros(4)
    for start in range(800):
        tokens = (start, *range(start + 1, start + 5))
        p, law = (probabilities(rows(one, tokens, 5)) for one in (engine, plain))
        drafted = p[torch.arange(4), torch.tensor(tokens[1:])]
        accepted += drafted == 1
        assert ((drafted == 0) | (drafted == 1)).all()
        law[:4].scatter_(1, torch.tensor(tokens[1:])[:, None], 0)
        for row in [
            *(drafted == 0).nonzero().flatten(),
            4,
        ]:  # The law is the pair's own, without the token that was drafted.
            assert torch.allclose(p[row], law[row] / law[row].sum(), atol=1e-6)
        for one in (engine, plain):
            one.release("s")
    assert accepted[2:].tolist() == [800, 0]
    assert (accepted / 800).tolist()[:2] == pytest.approx([0.8, 0.5], abs=0.09)
    assert torch.equal(rows(engine, (7, 8, 9), 1), rows(plain, (7, 8, 9), 1))


def test_draft_tokens_are_judged_in_the_step_of_their_prompt() -> None:
    """Tokens 10, 20 and 30 follow the prompt, in a step beside another sequence. At a chance of 1,
    they are accepted; at a chance of 0, they are not."""
    spec = EmulatedSpec(vocab_size=64, acceptance_rates=(1.0, 1.0, 1.0))
    steps = [SequenceStep("other", (1, 2), 0), SequenceStep("s", (1, 2, 10, 20, 30), 4)]
    p = probabilities(EmulatedEngine(spec, "target").forward(steps)[1])
    assert p.argmax(-1)[:3].tolist() == [10, 20, 30]
    assert (p > 0).sum(-1).tolist() == [1, 1, 1, 64]
    never = spec.model_copy(update={"acceptance_rates": (0.0,)})
    p = probabilities(EmulatedEngine(never, "target").forward(steps)[1])
    assert p[[0, 1, 2], [10, 20, 30]].tolist() == [0, 0, 0]
    assert (p > 0).sum(-1).tolist() == [63, 63, 63, 64]


@pytest.mark.parametrize("rates", [(), (0.5,)])
def test_a_share_of_the_tokens_is_new_in_the_text(rates: tuple[float, ...]) -> None:
    """A text of 1,000 tokens of the ids 0..49 and new ids. Bounds of five standard errors."""
    spec = EmulatedSpec(
        vocab_size=1_050, support=8, novel_share=0.2, max_model_len=1_000, acceptance_rates=rates
    )
    engine = EmulatedEngine(spec, "target")
    text = list(range(50))
    p = probabilities(rows(engine, tuple(text), 1))[0]
    while True:
        text.append(int(p.argmax()))
        if text[-1] >= 50:
            assert p.max() == 1
            assert text.index(text[-1]) == len(text) - 1
        if len(text) > 1_000:
            break
        p = probabilities(rows(engine, (text[-1],), 1))[0]
    assert sum(token_id >= 50 for token_id in text) / 950 == pytest.approx(0.2, abs=0.065)
    assert max(text) < 1_050


def test_a_draft_token_that_is_certain_is_accepted_at_every_rate() -> None:
    """Tokens 0 and 1 are followed by the new ids 51 and 52. No other id has any probability."""
    spec = EmulatedSpec(
        vocab_size=150, support=8, novel_share=1, max_model_len=100, acceptance_rates=(0.0,)
    )
    p = probabilities(rows(EmulatedEngine(spec, "target"), (0, 1, 51, 7), 3))
    assert [p[0, 51], p[1, 7], p[1, 52], p[2, 53]] == [1, 0, 1, 1]


def test_a_repeated_context_repeats_no_outcome() -> None:
    """The text and the drafts are the token 1, again and again. Bounds of five standard errors."""
    engine = EmulatedEngine(EmulatedSpec(vocab_size=64, acceptance_rates=(0.5,)), "target")
    rows(engine, (1, 1, 1), 1)
    accepted = [int(probabilities(rows(engine, (1, 1), 2))[0, 1]) for _ in range(400)]
    assert sum(accepted) / 400 == pytest.approx(0.5, abs=0.125)


def test_the_stated_time_of_a_pass_is_known_at_its_launch() -> None:
    engine = EmulatedEngine(EmulatedSpec.parse("verify_ms=10"), "target")
    wait = engine.launch([SequenceStep("s", (1, 2), 1)])
    assert take_stated_seconds(engine) == pytest.approx(0.010)
    other = EmulatedEngine(EmulatedSpec.parse("verify_ms=10"), "target")
    assert torch.equal(wait()[0], rows(other, (1, 2), 1))
    assert take_stated_seconds(engine) == 0.0


def test_stated_times() -> None:
    spec = EmulatedSpec.parse("verify_ms=10,verify_tokens=4,draft_ms=2,draft_branches=3")
    target, draft = EmulatedEngine(spec, "target"), EmulatedEngine(spec, "draft")
    for engine in (target, draft):
        engine.forward([SequenceStep("a", (1, 2, 3), 1), SequenceStep("b", (1, 2), 2)])
    assert take_stated_seconds(target) == pytest.approx(0.020)
    assert take_stated_seconds(draft) == pytest.approx(0.002)
    assert take_stated_seconds(target) == take_stated_seconds(draft) == 0.0
    for engine in (target, draft):
        engine.forward([SequenceStep("a", (4, 5, 6, 7), 4)])
        engine.forward([SequenceStep("a", (4,), 0)])
    assert take_stated_seconds(target) == pytest.approx(0.020)
    assert take_stated_seconds(draft) == pytest.approx(0.006)
