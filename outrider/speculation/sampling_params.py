"""The sampling parameters of a request, and the rule that verifies its drafts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import Annotated, TypeVar

from annotated_types import Interval, MaxLen

from outrider import limits
from outrider.errors import BadRequest
from outrider.foundation.bounds import beyond, check_bounds


class Rule(StrEnum):
    """How a proposal is accepted or rejected (docs/ARCHITECTURE.md, "A round")."""

    TOKEN = "token"  # noqa: S105 (a rule, not a secret)
    BLOCK = "block"
    COUPLED = "coupled"
    GREEDY = "greedy"

    @cached_property
    def absolute_noise(self) -> bool:
        """Whether noise depends on absolute positions, and not on rounds."""
        return self in (Rule.COUPLED, Rule.GREEDY)

    @cached_property
    def needs_q(self) -> bool:
        """Whether verdicts depend on the draft's distributions."""
        return self in (Rule.TOKEN, Rule.BLOCK)


Entries = TypeVar("Entries")
_BIAS = Interval(ge=-limits.LOGIT_BIAS_MAX, le=limits.LOGIT_BIAS_MAX)

Temperature = Annotated[float, Interval(ge=0.0, le=limits.TEMPERATURE_MAX)]
TopP = Annotated[float, Interval(gt=0.0, le=1.0)]
TopK = Annotated[int, Interval(ge=-1)]
MinP = Annotated[float, Interval(ge=0.0, le=1.0)]
Penalty = Annotated[float, Interval(ge=-limits.PENALTY_MAX, le=limits.PENALTY_MAX)]
RepetitionPenalty = Annotated[float, Interval(gt=0.0, le=limits.REPETITION_PENALTY_MAX)]
Bias = Annotated[float, _BIAS]
LogitBias = Annotated[Entries, MaxLen(limits.LOGIT_BIAS_ENTRIES_MAX)]
MinTokens = Annotated[int, Interval(ge=0)]
StopTokenIds = Annotated[Entries, MaxLen(limits.STOP_TOKEN_IDS_MAX)]


@dataclass(frozen=True)
class SamplingParams:
    """The transforms from logits to the sampled distribution. The types state the limits, as far as
    they do not depend on the model. `check_sampling` checks all limits."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    """0 or -1 = off."""
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: LogitBias[tuple[tuple[int, Bias], ...]] = ()
    """Pairs of a token id and the bias to add to its logit, sorted by id."""
    min_tokens: MinTokens = 0
    """Until the completion has this many tokens, EOS and stop tokens cannot be drawn, and stop
    strings are ignored."""
    stop_token_ids: StopTokenIds[tuple[int, ...]] = ()
    """Tokens that end the completion, like EOS."""

    @cached_property
    def greedy(self) -> bool:
        return self.temperature < limits.GREEDY_TEMPERATURE

    @cached_property
    def penalised(self) -> bool:
        """Whether a penalty makes the transforms depend on earlier tokens."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @cached_property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p may drop unlikely tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def hash(self) -> int:
        """A 64-bit hash that is the same in every process, and the same for 1 as for 1.0."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        *numbers, biases, min_tokens, ends = (getattr(self, each.name) for each in fields(self))
        parts = ([*numbers, min_tokens], chain.from_iterable(sorted(biases)), ends)
        named = repr([[*map(float, part)] for part in parts])
        return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens that penalties count. For row i of the target's logits over a proposal, these are
    prompt, output and `drafted_ids[:i]`. A drafter adds its own draft tokens to `output_ids`."""

    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    drafted_ids: Sequence[int] = ()


NO_HISTORY = TokenHistory()


def check_sampling(
    params: SamplingParams, path: str = "sampling.", vocab_size: int | None = None
) -> None:
    """Raises `BadRequest` for a parameter outside its limits. The error's field is the parameter's
    name after `path`. Without `vocab_size`, `top_k` and token ids are not compared with the
    vocabulary."""
    check_bounds(params, path)
    if vocab_size is not None and params.top_k > vocab_size:
        reason = f"got {params.top_k}; allowed: -1 or 0 (off), or 1..{vocab_size}"
        raise BadRequest(f"{path}top_k", reason)
    _check_ids([token_id for token_id, _ in params.logit_bias], f"{path}logit_bias", vocab_size)
    most = limits.LOGIT_BIAS_MAX
    for token_id, bias in params.logit_bias:
        if not -most <= bias <= most:  # For many entries, faster than `beyond`.
            raise BadRequest(f"{path}logit_bias[{token_id}]", beyond(bias, _BIAS))
    _check_ids(params.stop_token_ids, f"{path}stop_token_ids", vocab_size)


def _check_ids(token_ids: Sequence[int], field: str, vocab_size: int | None) -> None:
    for token_id in token_ids:
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            allowed = "0 or more" if vocab_size is None else f"0..{vocab_size - 1}"
            raise BadRequest(field, f"{token_id} is not a token id; allowed: {allowed}")
