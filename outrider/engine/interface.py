"""The interface of the engine that runs a service's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from outrider.errors import BadRequest, check
from outrider.limits import PAGE_SIZE

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model is, for `Describe` and for limits."""

    name: str
    vocab_size: int
    """Token ids are below it. Also the width of the logits, padding included, unless there are
    `logit_token_ids`."""
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    weights_fingerprint: str
    tokenizer_fingerprint: str
    """Empty for a model without a tokenizer."""
    logit_token_ids: tuple[int, ...] = field(default=(), repr=False)
    """For a head over a part of the vocabulary: each logit column's token, ascending."""
    numerics: str = ""
    """See `ReplicaDescription.numerics`."""
    features: str = ""
    """See `ReplicaDescription.features`."""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """New tokens of one sequence in one step."""

    sequence_id: str
    token_ids: tuple[int, ...]
    """Run after the slots that the sequence holds; at least one."""
    num_logits: int
    """How many of the last `token_ids` logits are wanted for; 0..len(token_ids)."""
    parents: tuple[int, ...] = ()
    """For a tree: the index, below its own, of the token that each of `token_ids` follows; -1 = the
    last slot held. Empty for a chain."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """How an engine's pages are used."""

    num_pages: int
    num_free: int
    num_evictable: int
    """Remembered only for their prefix."""
    prefix_queries: int
    """Tokens of all sequences that were attached ..."""
    prefix_hits: int
    """... and how many of them were found in the cache."""
    page_size: int = PAGE_SIZE
    """Tokens of a page."""

    @property
    def num_slots(self) -> int:
        """Tokens that all pages can hold."""
        return self.num_pages * self.page_size

    @property
    def usage(self) -> float:
        """Share of the pages that sequences hold, 0 to 1."""
        return 1.0 - (self.num_free + self.num_evictable) / self.num_pages


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """The pages on which a sequence can begin. Valid until its engine runs a step."""

    length: int
    """Slots of these pages; all hold the sequence's tokens."""
    pages: tuple[int, ...]


class Engine(Protocol):
    """Runs one causal language model over many sequences, and keeps their keys and values.

    One slot holds one token. Slots are taken in pages, of which there is a fixed number. A sequence
    begins with `attach` or with its first step. The state depends on the calls alone, so two
    engines that get the same calls hold the same pages. Calls are made from one thread at a time,
    and wait for nothing but the model. If a call fails unexpectedly, its sequences are as they were
    before it, or, where that is impossible, forgotten; all others are unchanged.
    """

    @property
    def info(self) -> ModelInfo:
        """What runs; constant."""
        ...

    def forward(self, steps: Sequence[SequenceStep]) -> list[Tensor]:
        """Appends each step's tokens to its sequence, at most one step for each. Returns for each
        step the logits [num_logits, V], or [num_logits, N] with N `logit_token_ids`, in float32 on
        the model's device: row j predicts the token after the j-th of the last `num_logits` tokens.
        Valid until the next call. Evicts remembered prefixes if pages are missing.
        Raises `BadRequest` for a token id outside the vocabulary or a sequence longer than
        `max_model_len`, and `OutOfPages` if eviction does not make enough room; then no sequence of
        the call has changed."""
        ...

    def can_hold(
        self,
        steps: Sequence[SequenceStep],
        without: Iterable[str] = (),
        begun: Mapping[str, FoundPrefix] | None = None,
    ) -> bool:
        """Whether `forward` would find pages for these steps, eviction included, after the
        sequences in `without` were released and those in `begun` attached to the given prefixes.
        None of `without` has a step, none of `begun` is held. Changes nothing."""
        ...

    def find(self, token_ids: Sequence[int], salt: str = "") -> FoundPrefix:
        """The prefix that `attach` would begin a sequence on; changes nothing."""
        ...

    def attach(self, sequence_id: str, token_ids: Sequence[int], salt: str = "") -> int:
        """Begins a sequence that is not held, on cached pages of the same tokens under the same
        `salt`. Takes every whole page that matches, but leaves at least one of `token_ids` to run.
        Returns the number of slots held now. Evicts nothing."""
        ...

    def fork(self, sequence_id: str, branch_id: str) -> None:
        """Begins the unknown `branch_id` with the slots of `sequence_id`. Whole pages are shared; a
        partial last page is copied. Evicts as `forward` does, and raises `OutOfPages` if that does
        not make room."""
        ...

    def page_counts(self) -> PageCounts:
        """How the pages are used now."""
        ...

    def length(self, sequence_id: str) -> int:
        """Slots the sequence holds; 0 for an unknown one."""
        ...

    def keep(self, sequence_id: str, length: int, path: Sequence[int] = ()) -> None:
        """Keeps the first `length` slots and then the slots in `path` (ascending indices >=
        `length`), in that order; frees the rest. Other sequences are unchanged."""
        ...

    def release(self, sequence_id: str) -> None:
        """Forgets the sequence; unknown ones are ignored."""
        ...

    def take_step_seconds(self) -> float:
        """Seconds that the steps since the last call must appear to have taken; resets them. Only
        emulated engines state a time; for others it is 0."""
        return 0.0

    @property
    def stated_seconds(self) -> float:
        """What `take_step_seconds` would return now."""
        return 0.0


@runtime_checkable
class DraftingEngine(Engine, Protocol):
    """An engine that runs a drafting head as one more layer on the same slots. The head reads
    pairs: a feature, made from the model's layers at a token, and the next token. A slot also holds
    the key and value of the pair that its token ends."""

    def features(self) -> Sequence[Tensor]:
        """For each step of the last `forward` the features [num_logits, D], in the model's dtype,
        on its device. Valid until the next `forward`."""
        ...

    def forward_draft(
        self, steps: Sequence[SequenceStep], features: Sequence[Tensor]
    ) -> list[Tensor]:
        """Runs one pair for each step, a feature [D] and the step's only token, after the slots of
        a sequence that holds some. Returns the head's output, [1, D] each, in the model's dtype.
        The slots that it takes hold keys and values of pairs alone; the caller gives them back by
        `keep` before the sequence's next `forward`."""
        ...


@runtime_checkable
class FeatureKeeper(Engine, Protocol):
    """An engine that may keep, with every slot, the features of a head that drafts elsewhere."""

    @property
    def feature_width(self) -> int:
        """D, the width of a feature; 0 = none are kept. Constant."""
        ...

    def held_features(self, ranges: Sequence[tuple[str, int, int]]) -> Tensor:
        """If it keeps them, the features [n, D] of these slots, one range after another, in the
        model's dtype, on its device. A range is (sequence, first, end), all of whose slots hold
        tokens."""
        ...


def check_steps(
    steps: Sequence[SequenceStep],
    info: ModelInfo,
    max_num_seqs: int,
    length: Callable[[str], int],
) -> None:
    """Raises unless these steps can run on sequences of these lengths: `BadRequest` for what a
    request can cause, `InvariantError` for what only a service can. Changes nothing."""
    check(len(steps) <= max_num_seqs, f"{len(steps)} sequences in a step; at most {max_num_seqs}")
    check(
        len({step.sequence_id for step in steps}) == len(steps),
        "a sequence has more than one step in one call",
    )
    for step in steps:
        ids = step.token_ids
        check(len(ids) > 0, f"{step.sequence_id}: a step without tokens")
        check(0 <= step.num_logits <= len(ids), f"{step.sequence_id}: {step.num_logits} logits")
        if min(ids) < 0 or max(ids) >= info.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < info.vocab_size)
            raise BadRequest("token_ids", f"{wrong} is not in 0..{info.vocab_size - 1}")
        total = length(step.sequence_id) + len(ids)
        if total > info.max_model_len:
            raise BadRequest(
                "token_ids", f"{total} tokens; the model takes at most {info.max_model_len}"
            )


def check_kept(held: int, length: int, path: Sequence[int]) -> None:
    """Raises `InvariantError` unless these are valid arguments of `Engine.keep` for a sequence that
    holds `held` slots."""
    check(0 <= length <= held, f"cannot keep {length} of {held} slots")
    previous = length - 1
    for slot in path:
        check(previous < slot < held, f"slot {slot} of a path is not in {previous + 1}..{held - 1}")
        previous = slot
