"""The interface of the engine that runs a service's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from outrider.errors import BadRequest, InvariantError, check
from outrider.foundation.tokens import TokenSequence
from outrider.limits import PAGE_SIZE

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Describes a model."""

    name: str
    vocab_size: int  # including ids that only pad the vocabulary
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    weights_fingerprint: str
    tokenizer_fingerprint: str  # empty for a model without a tokenizer
    logit_token_ids: tuple[int, ...] = field(default=(), repr=False)
    """The token id of each column of the logits, ascending. Empty = every token id."""
    numerics: str = ""  # see `ReplicaDescription`
    features: str = ""  # see `ReplicaDescription`
    # Ranks compare their representations of this class. These fields may differ between ranks.
    dtype_note: str = field(default="", repr=False)  # see `ReplicaDescription`
    kernels: str = field(default="", repr=False, compare=False)  # see `ReplicaDescription`
    row_coupling: float = field(default=0.0, repr=False)  # see `ReplicaDescription`


class SequenceStep(NamedTuple):
    """The new tokens of one sequence in one step."""

    sequence_id: str
    token_ids: tuple[int, ...]  # at least one
    num_logits: int  # the engine returns logits for this many last tokens, 0..len(token_ids)


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Counts of an engine's pages, and of queries to its prefix cache."""

    num_pages: int
    num_free: int
    num_evictable: int  # cached pages that no sequence holds
    prefix_queries: int  # tokens that `attach` looked up, counted at the sequence's first step
    prefix_hits: int  # how many of these tokens were in cached pages
    page_size: int = PAGE_SIZE

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def usage(self) -> float:
        """Share of the pages that sequences hold, 0 to 1."""
        return 1.0 - (self.num_free + self.num_evictable) / self.num_pages


class Engine(Protocol):
    """Runs one causal language model over many sequences, and keeps their keys and values.
    `outrider/replica/engines.py` chooses one of the engines in `outrider/engine/`.

    A slot holds the keys and values of one token. A page is a fixed number of slots, and an engine
    has a fixed number of pages. A page that no sequence holds may stay cached until it is evicted.
    A new sequence can begin with the cached pages of its prefix. A sequence begins with `attach` or
    with its first step.

    An engine's state depends on its calls alone, so two engines that get the same calls hold the
    same pages. Only one thread at a time may call an engine. If a call fails unexpectedly, each
    sequence of the call is unchanged or forgotten. Other sequences are unchanged."""

    stated_seconds: float
    """The simulated duration of an emulated engine's steps since the last `take_stated_seconds`.
    It begins with the launch of the first of these steps. If forward passes and verdicts took less
    time, the caller waits for the rest. Always 0 in other engines."""

    @property
    def info(self) -> ModelInfo:
        """Describes the model. Constant."""

    def forward(self, steps: Sequence[SequenceStep]) -> list[Tensor]:
        """Appends each step's tokens to its sequence. A sequence has at most one step in a call. If
        too few pages are free, evicts cached pages.

        Returns logits [num_logits, V] for each step, in float32 on the model's device. Row j
        predicts the token after the j-th of the last `num_logits` tokens. V is the number of
        `logit_token_ids`, or `vocab_size` if there are none. The next call invalidates the logits.

        Raises `BadRequest` for a token id outside the vocabulary or a sequence longer than
        `max_model_len`. Raises `OutOfPages` if eviction does not make enough room. After either
        error, no sequence has changed."""

    def launch(self, steps: Sequence[SequenceStep]) -> Callable[[], list[Tensor]]:
        """Begins a call of `forward`. Returns a function that waits for its end, and returns or
        raises what the call does. The function must be called once, before any call that changes
        the engine or runs a step. Until then, a GPU runs the pass. A CPU may begin when the
        function is called. May raise the errors of `forward` at once."""

    def can_hold(self, steps: Sequence[SequenceStep], without: Iterable[str] = ()) -> bool:
        """Whether `forward` could run these steps with the free and the evictable pages, if the
        sequences in `without` were released first. `steps` must have no step of these sequences.
        Changes nothing."""

    def attach(self, sequence_id: str, token_ids: Sequence[int], salt: str = "") -> int:
        """Begins a new sequence with all cached pages that match the start of `token_ids` and were
        written under the same `salt`. Leaves out the last token, because `forward` must run it to
        get logits. Returns the number of slots that the sequence holds. Evicts nothing."""

    def fork(self, sequence_id: str, branch_id: str) -> None:
        """Begins the new sequence `branch_id` with the slots of `sequence_id`. The two sequences
        share all pages. Before a step writes to a shared page, it copies the page."""

    def page_counts(self) -> PageCounts:
        """Returns the current counts."""

    def tokens(self, sequence_id: str) -> TokenSequence:
        """Returns the tokens in the sequence's slots, none if the sequence is unknown. The result
        is not a copy, so later calls may change it."""

    def length(self, sequence_id: str) -> int:
        """Returns the number of slots that the sequence holds, 0 if it is unknown."""

    def keep(self, sequence_id: str, length: int) -> int:
        """Frees all but the sequence's first `length` slots. Returns the number of slots that the
        sequence holds now."""

    def release(self, sequence_id: str) -> None:
        """Forgets the sequence. Ignores an unknown sequence."""


@runtime_checkable
class DraftingEngine(Engine, Protocol):
    """An engine that also runs a drafting head, as one more layer on the same slots. A feature is D
    numbers, computed from inputs of the model's layers. The head reads *pairs* of a token's feature
    and the next token. A pair's key and value are in the slot of the next token."""

    def features(self) -> Sequence[Tensor]:
        """Returns features [num_logits, D] for each step of the last `forward`, in the model's
        dtype and on its device. The next `forward` invalidates the features."""

    def forward_draft(self, steps: Sequence[SequenceStep], features: Sequence[Tensor]) -> Tensor:
        """Runs the head on N >= 1 pairs. Each pair consists of a feature [D] and the only token of
        a step. Each sequence must already hold slots. Returns the head's output [N, D], in the
        model's dtype. Each pair takes a new slot, which lacks the model's keys and values. The
        caller must drop these slots with `keep` before the sequence's next `forward`."""


@runtime_checkable
class FeatureKeeper(Engine, Protocol):
    """An engine that can keep a feature in every slot, for a head that drafts on draft replicas."""

    @property
    def feature_width(self) -> int:
        """The width D of a feature, or 0 if the engine keeps no features. Constant."""

    def held_features(self, ranges: Sequence[tuple[str, int, int]]) -> Tensor:
        """Returns the features [n, D] of all slots in these ranges (sequence id, start, exclusive
        end), in the model's dtype and on its device. The sequences must hold all of these slots.
        Call this only if `feature_width` is not 0."""


def take_stated_seconds(engine: Engine) -> float:
    """Returns `engine.stated_seconds`, and sets it to 0."""
    seconds, engine.stated_seconds = engine.stated_seconds, 0.0
    return seconds


def check_steps(
    steps: Sequence[SequenceStep], info: ModelInfo, max_num_seqs: int, length: Callable[[str], int]
) -> None:
    """Checks the steps of a call of `Engine.forward`. Raises `BadRequest` for a fault of a request,
    and `InvariantError` for a fault of the calling code."""
    check(len(steps) <= max_num_seqs, f"{len(steps)} sequences in a step; at most {max_num_seqs}")
    check(
        len({step.sequence_id for step in steps}) == len(steps),
        "a sequence has more than one step in one call",
    )
    for step in steps:
        ids = step.token_ids
        if not ids:
            raise InvariantError(f"{step.sequence_id}: a step without tokens")
        if not 0 <= step.num_logits <= len(ids):
            raise InvariantError(f"{step.sequence_id}: num_logits={step.num_logits}")
        if min(ids) < 0 or max(ids) >= info.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < info.vocab_size)
            raise BadRequest("token_ids", f"{wrong} is not in 0..{info.vocab_size - 1}")
        total = length(step.sequence_id) + len(ids)
        if total > info.max_model_len:
            raise BadRequest(
                "token_ids", f"{total} tokens; the model takes at most {info.max_model_len}"
            )
