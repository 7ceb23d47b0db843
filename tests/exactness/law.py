"""The law of a completion's first tokens by enumeration, and Pearson's test of samples against a
law. Sampling is restated here from its definitions, in float64 and without the product's code."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2, ncx2

from outrider.speculation.sampling_params import SamplingParams

FALSE_ALARM = 1e-6
"""Probability that a test rejects an exact law."""
POOLED_BELOW = 10.0
"""Completions of smaller expected count are pooled, so that the chi-square law holds."""
GREEDY_BELOW = 1e-5
"""A temperature below this one means greedy, as in vLLM."""


def sampled_law(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    *,
    eos: Collection[int] = (),
    allowed: Collection[int] | None = None,
) -> list[float]:
    """The probability of each next token, by these steps in this order:

    - forbidden tokens, and EOS and stop tokens before `min_tokens` tokens, get -inf
    - the bias is added
    - repetition penalty r, for tokens in prompt or output: x / r if x > 0, else x r (Keskar et al.)
    - frequency and presence penalties f and s, for a token that is n > 0 times in the output:
      x - f n - s (OpenAI)
    - the temperature divides; a temperature of 0 leaves the first of the largest logits alone
    - min-p keeps tokens of at least min-p times the largest probability
    - top-k keeps the k likeliest tokens
    - top-p keeps the fewest likeliest tokens whose share of what is left is at least top-p"""
    biases, ends = dict(params.logit_bias), {*eos, *params.stop_token_ids}
    scores = []
    for token_id, x in enumerate(map(float, logits)):
        is_early = len(output) < params.min_tokens and token_id in ends
        if is_early or (allowed is not None and token_id not in allowed):
            x = -math.inf
        x += biases.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            r = params.repetition_penalty
            x = x / r if x > 0 else x * r
        if num := [*output].count(token_id):
            x -= params.frequency_penalty * num + params.presence_penalty
        scores.append(x)
    most = max(scores)
    if params.temperature < GREEDY_BELOW:
        return [float(token_id == scores.index(most)) for token_id in range(len(scores))]
    weights = [math.exp((x - most) / params.temperature) for x in scores]
    kept = [token_id for token_id, w in enumerate(weights) if 0 < w >= params.min_p]
    kept.sort(key=lambda token_id: -weights[token_id])
    kept = kept[: params.top_k] if params.top_k > 0 else kept
    goal = params.top_p * math.fsum(weights[token_id] for token_id in kept)
    sums = np.cumsum([weights[token_id] for token_id in kept])
    if params.top_p < 1.0:
        kept = kept[: 1 + int((sums < goal).sum())]
    total, law = math.fsum(weights[token_id] for token_id in kept), [0.0] * len(weights)
    for token_id in kept:
        law[token_id] = weights[token_id] / total
    return law


def no_mask(prefix: tuple[int, ...]) -> None:
    """The tokens that may follow in an unconstrained completion: all."""


def completion_law(
    module: Any,
    prompt: Sequence[int],
    length: int,
    params: SamplingParams,
    mask: Callable[[tuple[int, ...]], Collection[int] | None] = no_mask,
    eos: Sequence[int] = (),
) -> dict[tuple[int, ...], float]:
    """Probability of every completion of `length` tokens: the model's dense forward pass over every
    prefix, then sampling. `mask` has the tokens that may follow a prefix. After its end, a
    completion goes on with the first of `eos`."""
    ends = {*eos, *params.stop_token_ids}
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        ids = torch.tensor([[*prompt, *prefix] for prefix in law])
        with torch.inference_mode():
            rows = module(ids).logits[:, -1].float()
        longer: dict[tuple[int, ...], float] = {}
        for row, (prefix, chance) in zip(rows.tolist(), law.items(), strict=True):
            if ends & {*prefix}:
                longer[(*prefix, eos[0])] = chance
                continue
            p = sampled_law(row, params, prompt, prefix, eos=eos, allowed=mask(prefix))
            for token_id in filter(p.__getitem__, range(len(p))):
                longer[(*prefix, token_id)] = chance * p[token_id]
        law = longer
    return law


@dataclass(frozen=True)
class Fit:
    """How well samples fit a law."""

    p_value: float
    num_samples: int
    degrees: int
    pooled: float = 0.0
    """The probability of the completions that are counted together, because each is rare. A fault
    that moves probability only among these completions is not seen."""

    @property
    def rejects(self) -> bool:
        return self.p_value < FALSE_ALARM

    def power(self, tv: float) -> float:
        """A lower bound of the probability that a law at total variation `tv` is rejected, if
        pooled completions count as one. For a given distance, sum d^2 / p is smallest, 4 tv^2,
        where half of the mass moves evenly. A law whose completions differ by TV + `pooled` differs
        by at least TV after pooling."""
        noncentrality = 4 * self.num_samples * tv**2
        return float(ncx2.sf(chi2.isf(FALSE_ALARM, self.degrees), self.degrees, noncentrality))


def chi_square(cells: np.ndarray, law: np.ndarray) -> Fit:
    """`cells`: the index of every sample in `law`; -1 if it has none."""
    law = law.ravel()
    observed = np.bincount(cells + 1, minlength=law.size + 1)
    if observed[0] or observed[1:][law == 0].any():
        return Fit(0.0, len(cells), law.size)
    seen, expected = observed[1:][law > 0], law[law > 0] * len(cells)
    rare, pooled = expected < POOLED_BELOW, 0.0
    if rare.any():
        pooled = float(expected[rare].sum() / len(cells))
        parts = [np.append(each[~rare], each[rare].sum()) for each in (seen, expected)]
        large = parts[1] >= POOLED_BELOW
        seen, expected = parts[0][large], parts[1][large]
    statistic = ((seen - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    p_value = float(chi2.sf(statistic, degrees) if degrees else 1.0)
    return Fit(p_value, len(cells), degrees, pooled)


def cells_of(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """The index of each sequence [N, T] in a law of shape [V] * T."""
    return np.ravel_multi_index(tuple(tokens.T), (vocab_size,) * tokens.shape[1])


def fit(samples: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> Fit:
    places = {cell: place for place, cell in enumerate(law)}
    cells = np.array([places.get(sample, -1) for sample in samples])
    return chi_square(cells, np.array(list(law.values())))
