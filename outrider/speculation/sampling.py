"""What a request may ask of the sampler, and which rule verifies its drafts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from outrider.limits import GREEDY_TEMPERATURE


class Rule(StrEnum):
    """How a proposal is accepted or refused (docs/ARCHITECTURE.md, accept-reject)."""

    TOKEN = "token"  # noqa: S105 (a rule, not a secret)
    BLOCK = "block"
    COUPLED = "coupled"
    GREEDY = "greedy"

    @property
    def absolute_noise(self) -> bool:
        """Whether noise is keyed by the token's absolute position instead of the round."""
        return self in (Rule.COUPLED, Rule.GREEDY)

    @property
    def needs_q(self) -> bool:
        """Whether the verdict depends on the draft's distributions, not only on its tokens."""
        return self in (Rule.TOKEN, Rule.BLOCK)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Transforms between logits and the sampled distribution; limits in `outrider.limits`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 = off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit), sorted by id."""

    @property
    def greedy(self) -> bool:
        """Whether the temperature is so low that the likeliest token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalised(self) -> bool:
        """Whether the distribution depends on the tokens so far other than through the model."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def hash(self) -> int:
        """A 64-bit name for these parameters, the same in every process."""
        return int.from_bytes(
            hashlib.blake2b(repr(self).encode(), digest_size=8).digest(), "little"
        )


def resolve_rule(params: SamplingParams, rule: Rule | None, seeded: bool) -> Rule:
    """The rule a request gets: greedy at temperature 0, else the one asked for, else coupled
    where the caller gave a seed (its tokens then do not depend on the drafter), else token."""
    if params.greedy:
        return Rule.GREEDY
    if rule is not None and rule is not Rule.GREEDY:
        return rule
    return Rule.COUPLED if seeded else Rule.TOKEN
