"""Many sequences at once through the product's own kernels, round after round.

No rule is restated here: draft draws, verdicts, uniforms and acceptance come from
`outrider.speculation`; this file only advances tokens, states and lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from core_toys import ToyPair
from verdict_laws import NoiseRows, score_rows

from outrider.speculation.accept_reject import count_accepted
from outrider.speculation.draft_sampling import count_levels, draw_quantised
from outrider.speculation.gumbel_max import race
from outrider.speculation.sampling_params import Rule

torch.set_num_threads(1)  # The rows are too short for more.
K_MAX = 3
PROMPT_LENGTH = 5


@dataclass
class Seen:
    """All that a controller may have read of its sequences' last round, [N] or [N, K_MAX(+1)]; 0
    for missing slots."""

    num_drafted: torch.Tensor
    num_accepted: torch.Tensor
    drafted: torch.Tensor
    accept: torch.Tensor
    uniforms: torch.Tensor
    correction: torch.Tensor
    round: int = 0

    @classmethod
    def nothing(cls, num: int) -> Seen:
        def ids(width: int) -> torch.Tensor:
            return torch.zeros(num, width, dtype=torch.int64)

        reals = torch.zeros(num, K_MAX, dtype=torch.float64)
        return cls(ids(1)[:, 0], ids(1)[:, 0].clone(), ids(K_MAX), reals, reals.clone(),
                   ids(K_MAX + 1))  # fmt: skip

    def thrown_away(self, values: torch.Tensor) -> torch.Tensor:
        """For each sequence the value in the slot after the corrected one; 0 if there is none."""
        slot = self.num_accepted + 1
        at = values.gather(1, slot.clamp(max=K_MAX - 1)[:, None])[:, 0]
        return torch.where(slot < self.num_drafted, at, torch.zeros_like(at))


Plan = tuple[torch.Tensor, torch.Tensor]
"""K and drafter of each sequence's next round, [N] each."""
Controller = Callable[[Seen], Plan]


@dataclass(frozen=True)
class Broken:
    """Where a test plants a fault; none by default."""

    noise: type[NoiseRows] = NoiseRows
    drawn_from: torch.Tensor | None = None
    """[D, S, V]: what drafts are really drawn from, instead of what is sent."""
    rows: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda p: p)
    """Applied to the rows p_1..p_{K+1} before they are scored."""


def generate(
    pair: ToyPair,
    rule: Rule,
    controller: Controller,
    seeds: np.ndarray,
    num_tokens: int,
    broken: Broken = Broken(),
) -> np.ndarray:
    """The first `num_tokens` tokens of one sequence for each seed: [N, num_tokens]."""
    num = len(seeds)
    tokens = torch.zeros(num, num_tokens + K_MAX + 1, dtype=torch.int64)
    lengths, states = torch.zeros(2, num, dtype=torch.int64)
    seen = Seen.nothing(num)

    def play(k: int, drafter: int, chosen: torch.Tensor, after: Seen) -> None:
        start = lengths[chosen]
        begun_at = (start + PROMPT_LENGTH).numpy().astype(np.uint64)
        noise = broken.noise(seeds[chosen.numpy()], rule, begun_at)
        path = [states[chosen]]
        drafted = torch.zeros(len(chosen), k, dtype=torch.int64)
        for i in range(k):
            drafted[:, i] = _draw(pair, noise, drafter, path[-1], i, broken)
            path.append(pair.step[path[-1], drafted[:, i]])
        visited = torch.stack(path, dim=1)
        drafts = pair.draft_rows(drafted, visited[:, :-1], drafter)
        accept, correction = score_rows(broken.rows(pair.p[visited]), drafts, noise)
        uniforms = noise.accept_uniforms(k)
        accepted = accepted_of(rule, uniforms <= accept)
        last = correction.gather(1, accepted[:, None])[:, 0]
        for i in range(k):
            rows = accepted > i
            tokens[chosen[rows], start[rows] + i] = drafted[rows, i]
        tokens[chosen, start + accepted] = last
        lengths[chosen] = start + accepted + 1
        states[chosen] = pair.step[visited.gather(1, accepted[:, None])[:, 0], last]
        after.num_drafted[chosen], after.num_accepted[chosen] = k, accepted
        for name, what in (("drafted", drafted), ("accept", accept), ("uniforms", uniforms),
                           ("correction", correction)):  # fmt: skip
            getattr(after, name)[chosen[:, None], torch.arange(what.shape[1])] = what

    while bool((running := lengths < num_tokens).any()):
        plan_k, plan_drafter = controller(seen)
        after = Seen.nothing(num)
        after.round = seen.round + 1
        for k, drafter in itertools.product(range(K_MAX + 1), range(len(pair.q))):
            chosen = (running & (plan_k == k) & (plan_drafter == drafter)).nonzero()[:, 0]
            if len(chosen):
                play(k, drafter, chosen, after)
        seen = after
    return tokens[:, :num_tokens].numpy()


def _draw(
    pair: ToyPair,
    noise: NoiseRows,
    drafter: int,
    states: torch.Tensor,
    index: int,
    broken: Broken,
) -> torch.Tensor:
    keys = noise.draft_keys(np.full(len(states), index, dtype=np.uint64))
    if noise.rule is Rule.GREEDY:
        return pair.q[drafter][states].argmax(dim=1)
    if noise.rule is Rule.COUPLED:
        return race(pair.q[drafter][states], keys)
    mass = pair.mass if broken.drawn_from is None else broken.drawn_from
    every = torch.arange(mass.shape[2]).expand(len(states), -1)
    levels = count_levels(mass[drafter][states].numpy())
    return torch.from_numpy(draw_quantised(every.numpy(), levels, keys))


def accepted_of(rule: Rule, passes: torch.Tensor) -> torch.Tensor:
    """`count_accepted` of every row of `passes` [N, K], by a table of its 2^K answers."""
    k = passes.shape[1]
    patterns = list(itertools.product((False, True), repeat=k))
    table = torch.tensor([count_accepted(rule, pattern) for pattern in patterns])
    places = 2 ** torch.arange(k - 1, -1, -1)
    return table[(passes.long() * places).sum(dim=1)]


def cells_of(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """The index of each sequence [N, T] in a law of shape [V] * T."""
    return np.ravel_multi_index(tuple(tokens.T), (vocab_size,) * tokens.shape[1])


def seeds_of(num: int, test_seed: int) -> np.ndarray:
    """Seeds for `num` sequences; a failing test is replayed from `test_seed`."""
    return np.random.default_rng(test_seed).integers(2**64, size=num, dtype=np.uint64)


def fixed(k: int, drafter: int = 0) -> Controller:
    return lambda seen: (
        torch.full_like(seen.num_accepted, k),
        torch.full_like(seen.num_accepted, drafter),
    )


def varying(seen: Seen) -> Plan:
    """K and drafter change between rounds and sequences, independently of what was seen."""
    turn = torch.arange(len(seen.num_accepted)) * 5 + seen.round * 3
    return turn % (K_MAX + 1), turn // 7 % 2


def stops_after_a_weak_slot(seen: Seen) -> Plan:
    """Drafts nothing next if the discarded slot's acceptance was under 0.5."""
    thrown = seen.num_accepted + 1 < seen.num_drafted
    weak = thrown & (seen.thrown_away(seen.accept) < 0.5)
    return torch.where(weak, 0, K_MAX), torch.zeros_like(seen.num_accepted)


def reads_everything(seen: Seen) -> Plan:
    """Tries to keep good discarded slots: their uniforms, tokens, acceptance and corrections choose
    K and the drafter of the next round."""
    lucky = seen.thrown_away(seen.uniforms) < 0.5
    wanted = seen.thrown_away(seen.drafted) == seen.thrown_away(seen.correction[:, :K_MAX])
    strong = seen.thrown_away(seen.accept) >= 0.7
    k = torch.where(lucky, K_MAX, 0) ^ (wanted & strong).long()
    return k, (seen.thrown_away(seen.drafted) == 2).long()
