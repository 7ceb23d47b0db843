"""The sampling parameters of a request, and the rule that verifies its drafts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from itertools import chain

from outrider import limits
from outrider.errors import BadRequest


class Rule(StrEnum):
    """How a proposal is accepted or rejected (docs/ARCHITECTURE.md, "A round")."""

    TOKEN = "token"  # noqa: S105 (a rule, not a secret)
    BLOCK = "block"
    COUPLED = "coupled"
    GREEDY = "greedy"

    @property
    def absolute_noise(self) -> bool:
        """Whether noise depends on absolute positions, and not on rounds."""
        return self in (Rule.COUPLED, Rule.GREEDY)

    @property
    def needs_q(self) -> bool:
        """Whether verdicts depend on the draft's distributions."""
        return self in (Rule.TOKEN, Rule.BLOCK)


@dataclass(frozen=True)
class SamplingParams:
    """The transforms from logits to the sampled distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 = off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the bias to add to its logit, sorted by id."""
    min_tokens: int = 0
    """Until the completion has this many tokens, EOS and stop tokens cannot be drawn, and stop
    strings are ignored."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, like EOS."""

    @property
    def greedy(self) -> bool:
        return self.temperature < limits.GREEDY_TEMPERATURE

    @property
    def penalised(self) -> bool:
        """Whether a penalty makes the transforms depend on earlier tokens."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
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


_RANGES = (
    ("temperature", 0.0, limits.TEMPERATURE_MAX, True),
    ("min_p", 0.0, 1.0, True),
    ("presence_penalty", -limits.PENALTY_MAX, limits.PENALTY_MAX, True),
    ("frequency_penalty", -limits.PENALTY_MAX, limits.PENALTY_MAX, True),
    ("top_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, limits.REPETITION_PENALTY_MAX, False),
)
"""For each real parameter: name, minimum, maximum, and whether the minimum itself is allowed."""


def check_sampling(
    params: SamplingParams, field: str = "sampling", vocab_size: int | None = None
) -> None:
    """Raises `BadRequest` for a parameter outside its limits. Without `vocab_size`, `top_k` and
    token ids are not compared with the vocabulary."""
    for name, low, high, is_closed in _RANGES:
        value = getattr(params, name)
        if not (low <= value <= high and (is_closed or value > low)):  # Also refuses NaN.
            allowed = f"{low:g}..{high:g}" if is_closed else f"above {low:g}, at most {high:g}"
            raise BadRequest(f"{field}.{name}", f"got {value}; allowed: {allowed}")
    if params.top_k < -1 or (vocab_size is not None and params.top_k > vocab_size):
        most = "the vocabulary's size" if vocab_size is None else str(vocab_size)
        reason = f"got {params.top_k}; allowed: -1 or 0 (off), or 1..{most}"
        raise BadRequest(f"{field}.top_k", reason)
    if params.min_tokens < 0:
        raise BadRequest(f"{field}.min_tokens", f"got {params.min_tokens}; allowed: 0..max_tokens")
    given = [token_id for token_id, _ in params.logit_bias]
    _check_ids(given, f"{field}.logit_bias", limits.LOGIT_BIAS_ENTRIES_MAX, vocab_size)
    most_bias = limits.LOGIT_BIAS_MAX
    for token_id, bias in params.logit_bias:
        if not abs(bias) <= most_bias:
            reason = f"got {bias}; allowed: {-most_bias:g}..{most_bias:g}"
            raise BadRequest(f"{field}.logit_bias[{token_id}]", reason)
    stops, most_stops = params.stop_token_ids, limits.STOP_TOKEN_IDS_MAX
    _check_ids(stops, f"{field}.stop_token_ids", most_stops, vocab_size)


def _check_ids(
    token_ids: Sequence[int], field: str, entries_max: int, vocab_size: int | None
) -> None:
    if len(token_ids) > entries_max:
        raise BadRequest(field, f"got {len(token_ids)} entries; allowed: up to {entries_max}")
    for token_id in token_ids:
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            allowed = "0 or more" if vocab_size is None else f"0..{vocab_size - 1}"
            raise BadRequest(field, f"{token_id} is not a token id; allowed: {allowed}")
