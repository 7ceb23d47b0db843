"""Under a grammar, whose masks are a function of the tokens so far, the law of what is committed is
that of the masked target alone, step by step: by adding up everything that can happen in a round.
The draft has masks, or none, and then proposes what the grammar forbids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from core_enumeration import EXACT, accepted_law
from core_toys import ToyPair, make_pair, random_pair
from verdict_laws import draft_rows, verdict_law

from outrider.errors import Incompatible, InvariantError
from outrider.grammar.token_mask import TokenMask
from outrider.speculation.accept_reject import Verdict, decide, ending_at
from outrider.speculation.logits_processing import (
    draft_mask,
    masked_logits,
    row_masks,
    target_probabilities,
)
from outrider.speculation.proposal import Proposal
from outrider.speculation.sampling_params import Rule, SamplingParams

V = 3
OVER = 2
"""A token that ends the completion where it stands behind another one of its kind."""
Text = tuple[int, ...]
Masks = Callable[[torch.Tensor, Proposal, "Held"], torch.Tensor]


@dataclass(frozen=True)
class Held:
    """A grammar over a toy's states: `flags` [S, V]. Implements `Allowed` from `state` on."""

    pair: ToyPair
    flags: torch.Tensor
    state: int = 0

    def after(self, drafted: Sequence[int]) -> TokenMask | None:
        state = self.state
        for token_id in drafted:
            if not self.flags[state, token_id]:
                return None
            state = int(self.pair.step[state, token_id])
        bits = np.packbits(self.flags[state].numpy(), bitorder="little")
        return TokenMask(bits, is_over=state == 1 + V * (1 + OVER) + OVER)

    def num_legal(self, drafted: Sequence[int]) -> int:
        raise NotImplementedError

    def behind(self, committed: Sequence[int]) -> Held:
        raise NotImplementedError


def constrained(seed: int) -> tuple[ToyPair, Held, ToyPair]:
    """A random pair; a random grammar that leaves the target something in each state; and the pair
    as both sides would be under it."""
    random = np.random.default_rng([seed, 99])
    raw = random_pair(V, seed)
    flags = torch.from_numpy(random.random(raw.p.shape) < 0.6)
    likeliest = raw.p.argmax(dim=1)
    flags[torch.arange(len(flags)), likeliest] = True
    drafters = raw.q * flags
    nothing = drafters.sum(dim=2) == 0
    drafters[nothing] = 1.0  # Nobody draws there.
    return raw, Held(raw, flags), make_pair(raw.p * flags, drafters)


def product_masks(logits: torch.Tensor, proposal: Proposal, held: Held) -> torch.Tensor:
    return masked_logits(logits, row_masks(held, proposal).masks)


def masks_of_the_row_before(logits: torch.Tensor, proposal: Proposal, held: Held) -> torch.Tensor:
    masks = row_masks(held, proposal).masks
    return masked_logits(logits, [masks[0], *masks[:-1]])


def mask_of_the_first_row_alone(
    logits: torch.Tensor, proposal: Proposal, held: Held
) -> torch.Tensor:
    return masked_logits(logits, [row_masks(held, proposal).masks[0], *[None] * len(proposal)])


def draws(
    raw: ToyPair, held: Held, masked: ToyPair, drafter: int, k: int, *, draft_masks: bool
) -> list[tuple[tuple[int, ...], list[int], list[torch.Tensor], float]]:
    """Every proposal that may be drawn: its tokens, the states along it, the q of each, its
    probability. One that the grammar leaves nothing ends there."""
    found = []

    def grow(
        path: tuple[int, ...], states: list[int], q: list[torch.Tensor], chance: float
    ) -> None:
        mask = draft_mask(held, path) if draft_masks else None
        known = (raw.q[drafter][states[-1]] * held.flags[states[-1]]).sum() > 0
        if len(path) == k or (draft_masks and (mask is None or not known)):
            found.append((path, states, q, chance))
            return
        row = (masked if draft_masks else raw).mass[drafter][states[-1]]
        for token_id in row.nonzero()[:, 0].tolist():
            state = int(raw.step[states[-1], token_id])
            grow((*path, token_id), [*states, state], [*q, row], chance * float(row[token_id]))

    grow((), [held.state], [], 1.0)
    return found


def committed_law(
    seed: int, rule: Rule, k: int, *, draft_masks: bool, masks: Masks = product_masks
) -> tuple[np.ndarray, np.ndarray]:
    """The law of k + 1 tokens when one round is followed by the masked target alone; and the law
    that it must be."""
    raw, held, masked = constrained(seed)
    law = np.zeros((V,) * (k + 1))
    for path, states, q, chance in draws(raw, held, masked, 0, k, draft_masks=draft_masks):
        logits = raw.p[states].log()
        p = target_probabilities(masks(logits, Proposal(path), held), SamplingParams())
        width = len(path)
        mass = torch.stack(q)[None] if q else torch.zeros(1, 0, V, dtype=torch.float64)
        drafts = draft_rows(torch.tensor(path, dtype=torch.int64).view(1, width),
                           torch.arange(V).expand(mass.shape), mass)  # fmt: skip
        verdict = verdict_law(rule, p[None], drafts)
        counts = accepted_law(rule, verdict.accept.numpy())[0] * chance
        weights = (verdict.weights / verdict.weights.sum(dim=2, keepdim=True))[0].numpy()
        for n in range(width + 1):
            if counts[n] == 0:
                continue
            for token_id in weights[n].nonzero()[0].tolist():
                rest = masked.continuation(raw.step[states[n], token_id], k - n)
                law[(*path[:n], token_id)] += counts[n] * weights[n][token_id] * rest
    return law, masked.law(k + 1)


@pytest.mark.parametrize("draft_masks", [True, False])
@pytest.mark.parametrize("k", [0, 2, 4])
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_what_is_committed_has_the_masked_targets_law(
    rule: Rule, k: int, draft_masks: bool
) -> None:
    for seed in range(12 if k < 4 else 5):
        law, expected = committed_law(seed, rule, k, draft_masks=draft_masks)
        np.testing.assert_allclose(law, expected, atol=EXACT)


FAILS = -1
"""Ends a text behind which the constraint cannot be followed."""


@dataclass(frozen=True)
class Failing(Held):
    """A grammar that cannot be followed in some states."""

    failing: frozenset[int] = frozenset()

    def after(self, drafted: Sequence[int]) -> TokenMask | None:
        mask = super().after(drafted)
        state = self.state
        for token_id in drafted:
            state = int(self.pair.step[state, token_id])
        if mask is not None and state in self.failing:
            raise Incompatible("too hard")
        return mask


def failing_law(masked: ToyPair, held: Failing, state: int, length: int) -> dict[Text, float]:
    """The masked target's law of the next tokens, in which a text ends that reaches a failure."""
    if state in held.failing:
        return {(FAILS,): 1.0}
    if length == 0:
        return {(): 1.0}
    law: dict[Text, float] = {}
    for token_id in masked.p[state].nonzero()[:, 0].tolist():
        rest = failing_law(masked, held, int(masked.step[state, token_id]), length - 1)
        for text, chance in rest.items():
            law[(token_id, *text)] = chance * float(masked.p[state, token_id])
    return law


@pytest.mark.parametrize("draft_masks", [True, False])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_a_constraint_that_fails_does_so_where_plain_decoding_does(
    rule: Rule, k: int, draft_masks: bool
) -> None:
    """The law of k + 1 tokens, and of where a text ends because its constraint cannot be followed
    any further. A failure behind a draft token that is refused changes nothing."""
    num_ended = 0
    for seed in range(16 if k < 4 else 6):
        raw, grammar, masked = constrained(seed)
        states = np.random.default_rng(seed).permutation(np.arange(1, len(raw.p)))
        held = Failing(raw, grammar.flags, failing=frozenset(states[: len(states) // 2].tolist()))
        law: dict[Text, float] = defaultdict(float)
        for path, at, q, chance in draws(raw, held, masked, 0, k, draft_masks=draft_masks):
            rows = row_masks(held, Proposal(path))
            logits = masked_logits(raw.p[at].log(), rows.masks)
            p = target_probabilities(logits, SamplingParams())
            mass = torch.stack(q)[None] if q else torch.zeros(1, 0, V, dtype=torch.float64)
            drafts = draft_rows(torch.tensor(path, dtype=torch.int64).view(1, len(path)),
                               torch.arange(V).expand(mass.shape), mass)  # fmt: skip
            found = verdict_law(rule, p[None], drafts)
            counts = accepted_law(rule, found.accept.numpy())[0] * chance
            weights = (found.weights / found.weights.sum(dim=2, keepdim=True))[0].numpy()
            for n in np.flatnonzero(counts):
                last = next((i for i in range(n) if i + 1 in rows.untold), None)
                if last is None:
                    drawn = [(t, weights[n][t]) for t in np.flatnonzero(weights[n]).tolist()]
                    committed = [((*path[:n], t), share) for t, share in drawn]
                else:
                    verdict = Verdict(tuple(found.accept[0].tolist()), (0,) * (len(path) + 1))
                    ended = ending_at(verdict, last, path)
                    outcome = decide(ended, path, rule, (0.999,) * len(path))
                    committed = [(outcome.token_ids, 1.0)]
                    num_ended += 1
                for tokens, share in committed:
                    state = 0
                    for token_id in tokens:
                        state = int(raw.step[state, token_id])
                    rest = failing_law(masked, held, state, k + 1 - len(tokens))
                    for text, likely in rest.items():
                        law[(*tokens, *text)] += counts[n] * share * likely
        expected = failing_law(masked, held, 0, k + 1)
        for text in law.keys() | expected.keys():
            assert law[text] == pytest.approx(expected.get(text, 0.0), abs=EXACT)
    assert num_ended > 5


@pytest.mark.parametrize("masks", [masks_of_the_row_before, mask_of_the_first_row_alone])
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_masks_at_the_wrong_rows_are_found(rule: Rule, masks: Masks) -> None:
    """What this file finds: each row's mask must follow its own draft tokens."""

    def is_found(seed: int) -> bool:
        try:
            law, expected = committed_law(seed, rule, 2, draft_masks=True, masks=masks)
        except InvariantError:  # Nothing is left of a row.
            return True
        return not np.abs(law - expected).max() < 1e-3

    assert any(is_found(seed) for seed in range(6))
