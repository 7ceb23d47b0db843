"""What may follow depends on the tokens so far alone, not on tokens that were tried and
discarded."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import BadRequest, Incompatible
from outrider.grammar.compiler import Grammars, GrammarTokenizer
from outrider.grammar.constraint import Constraint
from outrider.grammar.matcher import Matchers, PrefixMatcher
from outrider.limits import FOLLOWED_AT_ONCE, MASK_S_MAX, TOO_SLOW_S
from tests.support import constrained


@pytest.mark.parametrize("name", constrained.CONSTRAINTS)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.integers(-6, 6), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_after_any_extends_and_rollbacks_the_mask_is_that_of_a_fresh_matcher(
    name: str, seed: int, steps: list[int]
) -> None:
    chosen = random.Random(seed)
    matcher, token_ids = PrefixMatcher(constrained.grammar(name), constrained.grammars()), []
    for step in steps:
        if step < 0:
            token_ids = token_ids[: max(0, len(token_ids) + step)]
            assert matcher.replace_from(0, token_ids) == len(token_ids)
        else:
            walk = PrefixMatcher(constrained.grammar(name), constrained.grammars())
            walk.replace_from(0, token_ids)
            longer = list(token_ids)
            for _ in range(step):
                longer.append(chosen.choice(constrained.allowed_ids(walk)))
                assert walk.replace_from(len(longer) - 1, longer[-1:]) == 1
            known = chosen.randint(0, len(token_ids))
            # A token that no mask has may spell a part of what is allowed, and is consumed then.
            some = chosen.sample(range(len(constrained.hf_tokenizer())), 50)
            tried = [*longer, next(v for v in some if walk.replace_from(len(longer), [v]) == 0)]
            assert matcher.replace_from(known, tried[known:]) == len(longer) - known
            token_ids = longer
        assert constrained.allowed_ids(matcher) == constrained.fresh_mask(name, token_ids)


def test_the_end_of_text_may_stand_where_the_text_is_whole_and_nothing_else_follows() -> None:
    matcher = PrefixMatcher(constrained.grammar("choice"), constrained.grammars())
    brown = constrained.hf_tokenizer().encode("brown")
    assert constrained.eos() not in constrained.allowed_ids(matcher)
    assert matcher.replace_from(0, [*brown[:-1], constrained.eos()]) == len(brown) - 1
    matcher.replace_from(0, brown)
    assert constrained.eos() in constrained.allowed_ids(matcher)
    assert len(constrained.allowed_ids(matcher)) > 1  # " fox" may still come
    assert matcher.replace_from(0, [*brown, constrained.eos(), constrained.eos()]) == len(brown) + 2
    assert constrained.allowed_ids(matcher) == [constrained.eos()]
    assert matcher.mask().is_over
    whole = constrained.hf_tokenizer().encode("brown fox")
    matcher.replace_from(0, whole)
    assert constrained.allowed_ids(matcher) == [constrained.eos()]
    assert not matcher.mask().is_over


def test_sessions_are_followed_anew_after_their_matcher_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.limits.MATCHERS_MAX", 1)
    matchers, schema = Matchers(constrained.grammars()), constrained.grammar("schema")
    ids = constrained.hf_tokenizer().encode('{"name":"x","tags":["bb"')
    first = matchers.allowed_tokens("a", schema, ids[:5])
    drafted = ids[5:8]
    mask = first.mask_after(drafted)
    matchers.allowed_tokens("b", schema, [])  # Drops the matcher of a.
    assert len(matchers._matchers) == 1
    again = matchers.allowed_tokens("a", schema, ids[:7])
    there = again.mask_after(ids[7:8])
    assert mask is not None
    assert there is not None
    assert (mask.bits == there.bits).all()
    ahead = matchers.allowed_tokens("a", schema, ids[:3]).advanced(ids[3:6])
    assert (ahead.mask_after(ids[6:8]).bits == mask.bits).all()  # type: ignore[union-attr]
    assert ahead.mask_after([constrained.eos()]) is None
    matchers.release("a")
    assert len(matchers._matchers) == 0


MANY_STATES = Constraint.of_regex("[a-d]*a[a-d]{15}")


def with_states(lexer_states_max: int) -> Grammars:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("outrider.limits.LEXER_STATES_MAX", lexer_states_max)
        limited = GrammarTokenizer(constrained.hf_tokenizer(), (constrained.eos(),))
    return Grammars(lambda: limited)


def test_sessions_that_use_a_grammar_up_go_on_with_the_next() -> None:
    chosen = random.Random(2)
    known, letters = with_states(300), [constrained.hf_tokenizer().encode(c)[0] for c in "abcd"]
    first = known.get(MANY_STATES)
    roomy = constrained.tokens().compile(MANY_STATES)
    matchers = Matchers(known)
    written: list[list[int]] = [[] for _ in range(40)]
    for _ in range(14):
        for session, token_ids in enumerate(written):
            followed = matchers.allowed_tokens(str(session), first, token_ids)
            mask = followed.mask_after(())
            alone = PrefixMatcher(roomy, constrained.grammars())
            assert alone.replace_from(0, token_ids) == len(token_ids)
            assert mask is not None
            assert (mask.bits == alone.mask().bits).all()
            token_ids.append(chosen.choice(letters))
    assert first.is_used_up()
    assert known.get(MANY_STATES) is not first
    assert PrefixMatcher(known.get(MANY_STATES), known).mask().bits.any()


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_completion_too_hard_for_any_grammar_is_refused_and_hurts_no_other(is_slow: bool) -> None:
    """A grammar that was slow to compile is not compiled again during a step."""
    known, seconds = with_states(60), [0.0]
    text = "abcabcdabcabadcabdacbbacabbabdabcacabdabacbadbacba"
    letters = constrained.hf_tokenizer().encode(text)
    said = r"^regex: cannot be applied after \d+ tokens: needs too many lexer states"
    said += ", and is too slow to compile again$" if is_slow else "$"
    for _ in range(1 if is_slow else 3):
        known.clock = lambda: ticking(seconds, is_slow * (MASK_S_MAX + 0.01))
        compiled = known.get(MANY_STATES)
        known.clock = lambda: 0.0
        with pytest.raises(Incompatible, match=said):
            Matchers(known).allowed_tokens("a", compiled, letters).mask_after(())
        again = Matchers(known).allowed_tokens("b", known.get(MANY_STATES), letters[:1])
        assert again.mask_after(()) is not None


@pytest.mark.parametrize("num_tokens", [0, 3, FOLLOWED_AT_ONCE + 1])
def test_a_grammar_that_is_slow_twice_is_refused_for_a_while(num_tokens: int) -> None:
    """A grammar is too slow if a mask, or the consumption of this many tokens, takes too long."""
    seconds = [0.0, 0.0]
    known = constrained.grammars()
    known.clock, known.now = lambda: seconds[0], lambda: seconds[1]
    constraint = Constraint.of_regex("[a-z]+")
    letters = constrained.hf_tokenizer().encode("a")[:1] * num_tokens
    compiled = known.get(constraint)
    followed = Matchers(known).allowed_tokens("quick", compiled, letters)
    assert followed.mask_after(()) is not None
    known.clock = lambda: ticking(seconds, MASK_S_MAX * (1 + num_tokens // FOLLOWED_AT_ONCE) + 0.01)
    matchers = Matchers(known)

    def ask() -> object:
        return matchers.allowed_tokens("a", compiled, letters).mask_after(())

    if num_tokens == 0:
        assert ask() is not None
    with pytest.raises(Incompatible, match=r"regex: .*takes more than 0\.25 s a token"):
        ask()
    known.clock = lambda: seconds[0]
    with pytest.raises(Incompatible, match=r"regex: takes more than 0\.25 s a token; simp"):
        ask()
    with pytest.raises(BadRequest, match=r"regex: .*takes more than 0\.25 s a token"):
        known.get(constraint)
    seconds[1] += TOO_SLOW_S
    assert ask() is not None


def test_a_grammar_that_is_slow_after_draft_tokens_is_not_refused() -> None:
    """Draft tokens must not change whether a session fails."""
    seconds = [0.0]
    known, letter = constrained.grammars(), constrained.hf_tokenizer().encode("a")[:1]
    constraint = Constraint.of_regex("[a-z]+")
    compiled, matchers = known.get(constraint), Matchers(known)
    known.clock = lambda: ticking(seconds, MASK_S_MAX + 0.01)
    assert matchers.allowed_tokens("a", compiled, []).mask_after(letter) is not None
    for _ in range(3):
        with pytest.raises(Incompatible, match="regex: is too slow for draft tokens"):
            matchers.allowed_tokens("a", compiled, []).mask_after(letter)
    known.clock = lambda: seconds[0]
    assert matchers.allowed_tokens("a", compiled, letter).mask_after(()) is not None
    assert known.get(constraint) is compiled


def ticking(seconds: list[float], step: float) -> float:
    seconds[0] += step
    return seconds[0]
