"""Every rule by full enumeration: no samples, no thresholds, equality to 1e-12."""

import functools
from collections import defaultdict

import numpy as np
import pytest
import torch

from outrider.speculation.gumbel_max import race
from outrider.speculation.proposal import Proposal
from outrider.speculation.random_streams import RoundNoise, verdict_keys
from outrider.speculation.sampling_params import Rule
from tests.support import core_toys
from tests.support.verdict_laws import score, verdict_law

FAILS = -1
CELLS = [
    *(
        (size, k, seed)
        for size, k in ((3, 0), (3, 1), (3, 2), (3, 3), (4, 3), (5, 2), (8, 2))
        for seed in range(3)
    ),
    *(
        pytest.param(size, k, seed, marks=pytest.mark.full)
        for size, k in ((3, 4), (4, 4), (5, 3), (6, 3), (7, 2), (8, 3))
        for seed in range(3, 6)
    ),
]


@pytest.mark.parametrize(("vocab_size", "k", "seed"), CELLS)
def test_ratio_rules(vocab_size, k, seed):
    """Some rows have zeros or ties, some are equal, disjoint or one-hot. Block accepts at least as
    many tokens as token."""
    pair = core_toys.random_pair(vocab_size, seed)
    accepted = [core_toys.assert_exact(pair, rule, k) for rule in core_toys.RATIO_RULES]
    assert accepted[1] >= accepted[0] - core_toys.EXACT


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.GREEDY])
def test_own_draw_rules_accept_the_targets_own_tokens(rule):
    pair = core_toys.random_pair(4, 5)
    accepted = set()
    for seed, (token_ids, states) in enumerate(zip(*pair.paths(2), strict=True)):
        rows, noise = pair.p[states], RoundNoise(seed, rule, 7)
        proposal = Proposal(tuple(token_ids.tolist()))
        own = race(rows, verdict_keys([noise], [len(rows)])).tolist()
        if rule is Rule.GREEDY:
            own = rows.argmax(dim=1).tolist()
        verdict = score(rows, proposal, noise)
        assert verdict.correction == tuple(own)
        matches = zip(own, proposal.token_ids, strict=False)
        assert verdict.accept_probability == tuple(float(mine == its) for mine, its in matches)
        accepted |= {*verdict.accept_probability}
    assert accepted == {0.0, 1.0}


@pytest.mark.parametrize(("vocab_size", "k"), [(3, 1), (3, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("rule", core_toys.RATIO_RULES)
def test_stopping_before_a_draw(rule, vocab_size, k):
    """Whether to draw again depends on the tokens drawn before, in several ways. The numbers of
    accepted tokens differ, so the drafts do stop."""
    accepted = set()
    for seed in range(8):
        pair = core_toys.random_pair(vocab_size, seed % 3)
        law, num = core_toys.round_law(pair, rule, k, goes_on=core_toys.stopping_rule(seed))
        np.testing.assert_allclose(law, pair.law(k + 1), atol=core_toys.EXACT)
        accepted.add(num)
    assert len(accepted) > 4


def law_until_failure(pair, state, num_tokens):
    """The target's law of the next tokens. A text ends with `FAILS` in a state without p."""
    if pair.p[state].isnan().any():
        return {(FAILS,): 1.0}
    law = {(): 1.0} if num_tokens == 0 else {}
    for token_id in pair.p[state].nonzero()[:, 0].tolist() if num_tokens else ():
        rest = law_until_failure(pair, int(pair.step[state, token_id]), num_tokens - 1)
        law |= {(token_id, *text): float(pair.p[state, token_id]) * p for text, p in rest.items()}
    return law


def committed_until_failure(pair, rule, k):
    """The law of k + 1 tokens if one round of K = k is followed by the target alone, by summing
    over all events; and how many events end a round before a row without p."""
    law, num_ended = defaultdict(float), 0
    rest = {
        (state, left): law_until_failure(pair, state, left)
        for state in range(len(pair.p))
        for left in range(k + 1)
    }
    tokens, states = pair.paths(k)
    for path, visited in zip(tokens, states, strict=True):
        mass = pair.mass[0][visited[:-1]]
        drawn = float(mass.gather(1, path[:, None]).prod())
        rows, path = pair.p[visited], tuple(path.tolist())
        bad = [*rows.isnan().any(dim=1).tolist(), True].index(True)
        if drawn == 0.0:
            continue
        verdict = verdict_law(rule, rows[None], [core_toys.proposal_of(torch.tensor(path), mass)])
        accept = verdict.accept.numpy()
        accept[:, bad:] = 0.0  # as in `usable_verdict`
        for n in np.flatnonzero(counts := core_toys.accepted_law(rule, accept)[0]):
            chance, num_ended = drawn * counts[n], num_ended + int(n == bad)
            weights = verdict.weights[0, n] / verdict.weights[0, n].sum()
            ends = (
                [(path[:n], 1.0)]
                if n == bad
                else [((*path[:n], v), float(weights[v])) for v in weights.nonzero()[:, 0].tolist()]
            )
            for text, share in ends:
                state = functools.reduce(lambda at, v: int(pair.step[at, v]), text, 0)
                for more, likely in rest[state, k + 1 - len(text)].items():
                    law[(*text, *more)] += chance * share * likely
    return law, num_ended


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rule", core_toys.RATIO_RULES)
def test_texts_fail_where_p_is_missing_as_often_as_without_drafts(rule, k):
    """Some states have no p. What is committed before a failure has the target's law, too."""
    num_ended = 0
    for seed in range(8):
        pair = core_toys.random_pair(3, seed)
        states = np.random.default_rng(seed).permutation(np.arange(1, len(pair.p)))
        pair.p[states[:4]] = torch.nan
        law, num = committed_until_failure(pair, rule, k)
        expected = law_until_failure(pair, 0, k + 1)
        for text in law.keys() | expected.keys():
            assert law.get(text, 0.0) == pytest.approx(expected.get(text, 0.0), abs=core_toys.EXACT)
        num_ended += num
    assert num_ended > 4


def test_the_example_of_the_block_paper():
    """Sun et al.: Ms = (2/3, 1/3), Mb = (1/3, 2/3), K = 2. 10/9 accepted tokens become 11/9."""
    pair = core_toys.flat_pair([1.0, 2.0], [2.0, 1.0])
    pair = core_toys.ToyPair(pair.p, pair.q, pair.q, pair.step)  # thirds are no counts of 2^16
    assert core_toys.assert_exact(pair, Rule.TOKEN, 2) == pytest.approx(10 / 9, abs=core_toys.EXACT)
    assert core_toys.assert_exact(pair, Rule.BLOCK, 2) == pytest.approx(11 / 9, abs=core_toys.EXACT)


@pytest.mark.parametrize("rule", core_toys.RATIO_RULES)
@pytest.mark.parametrize("entries_max", [1, 2, 3])
def test_truncated_drafts(rule, entries_max):
    """Drafts are drawn from the truncated q that is sent, so few entries change no law."""
    pair = core_toys.random_pair(6, 4)
    core_toys.assert_exact(core_toys.make_pair(pair.p, pair.q, entries_max), rule, 2)


@pytest.mark.parametrize("rule", core_toys.RATIO_RULES)
@pytest.mark.parametrize("draft_vocab", [4, 7])
def test_vocabularies_of_different_width(rule, draft_vocab):
    """A wider draft vocabulary proposes tokens that do not exist; a narrower one never proposes the
    last tokens. Both are exact."""
    narrow = core_toys.random_pair(5, 6)
    random = np.random.default_rng(3)
    mass = torch.from_numpy(
        random.multinomial(2**16, np.ones(draft_vocab) / draft_vocab, (1, len(narrow.p))) / 2**16
    )
    step = torch.zeros(len(narrow.p), max(5, draft_vocab), dtype=torch.int64)
    step[:, :5] = narrow.step
    core_toys.assert_exact(core_toys.ToyPair(narrow.p, mass, mass, step), rule, 2)
