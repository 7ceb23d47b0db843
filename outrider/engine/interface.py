"""What a service knows of the engine that runs its model."""

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
    """Token ids are below it; the width of the logits, padding included, but for ..."""
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    weights_fingerprint: str
    tokenizer_fingerprint: str
    """Empty for a model without a tokenizer."""
    logit_token_ids: tuple[int, ...] = field(default=(), repr=False)
    """... a head over a part of the vocabulary: the token of each of its columns, ascending."""
    numerics: str = ""
    """See `ReplicaDescription.numerics`."""
    features: str = ""
    """See `ReplicaDescription.features`."""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """New tokens of one sequence in one step."""

    sequence_id: str
    token_ids: tuple[int, ...]
    """Run after the slots the sequence holds; at least one."""
    num_logits: int
    """Logits are wanted for the last so many of `token_ids`; 0..len(token_ids)."""
    parents: tuple[int, ...] = ()
    """Of a tree: for each of `token_ids` the index of the one that it follows, smaller than its
    own; -1 is the last slot held. Empty for a chain."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """How an engine's pages are used."""

    num_pages: int
    num_free: int
    num_evictable: int
    """Held by idle sequences or remembered for their prefix alone."""
    prefix_queries: int
    """Tokens of the sequences that were attached ..."""
    prefix_hits: int
    """... and those of them that were there."""
    page_size: int = PAGE_SIZE
    """Tokens of a page."""

    @property
    def num_slots(self) -> int:
        """Tokens that all pages hold."""
        return self.num_pages * self.page_size

    @property
    def usage(self) -> float:
        """Share of the pages that busy sequences hold, 0 to 1."""
        return 1.0 - (self.num_free + self.num_evictable) / self.num_pages


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """The pages on which a sequence can begin, as long as its engine has run no step."""

    length: int
    """Slots of them, all of which hold the sequence's tokens."""
    pages: tuple[int, ...]


class Engine(Protocol):
    """Runs one causal language model over many sequences, and keeps their keys and values.

    One slot holds one token; slots are taken in pages, of which there is a fixed number. A sequence
    comes into being with `attach`, or with its first step. What is done depends on the calls alone,
    so that two engines that hear the same calls hold the same pages. Calls are made from one thread
    at a time; none of them waits on anything but the model. Where the machine fails in a call, the
    call's sequences are as they were before it, or, if that is not to be had, forgotten; all others
    are untouched.
    """

    @property
    def info(self) -> ModelInfo:
        """What runs here; constant."""
        ...

    def forward(self, steps: Sequence[SequenceStep]) -> list[Tensor]:
        """Appends each step's tokens to its sequence, and returns per step its logits
        [num_logits, V], or [num_logits, N] with N `logit_token_ids`; float32, on the model's
        device: row j follows the j-th of the last `num_logits` tokens. They stand until the next
        call. At most one step a sequence. Where pages are missing, idle sequences and remembered
        prefixes are evicted.
        Raises `BadRequest` for a token id outside the vocabulary or a sequence longer than
        `max_model_len`, `OutOfPages` where even eviction does not make room; then no sequence of
        the call has changed."""
        ...

    def can_hold(
        self,
        steps: Sequence[SequenceStep],
        without: Iterable[str] = (),
        begun: Mapping[str, FoundPrefix] | None = None,
    ) -> bool:
        """Whether `forward` would find pages for them, eviction included, once the sequences of
        `without`, none of them in a step, were released, and those of `begun`, none of which is
        held, attached to what was found of them; changes nothing."""
        ...

    def find(self, token_ids: Sequence[int], salt: str = "") -> FoundPrefix:
        """What `attach` would begin a sequence on; changes nothing."""
        ...

    def attach(self, sequence_id: str, token_ids: Sequence[int], salt: str = "") -> int:
        """Begins a sequence that is not held on the pages that others have left or hold of the same
        tokens under the same `salt`: as many whole pages as agree, but never all of `token_ids`,
        so that one is left to run. Returns the slots held now. Evicts nothing."""
        ...

    def fork(self, sequence_id: str, branch_id: str) -> None:
        """Begins the unknown `branch_id` with the slots of `sequence_id`. Pages are shared, only
        the last partial one is copied. Of idle sequences branches are the first to be evicted.
        Evicts as `forward` does, and raises `OutOfPages` where that does not do."""
        ...

    def mark_idle(self, sequence_id: str) -> None:
        """The sequence may be evicted from now on, after those that are idle for longer,
        and then has length 0. Its next step makes it busy again. Unknown ones are ignored."""
        ...

    def page_counts(self) -> PageCounts:
        """How the pages are used now."""
        ...

    def length(self, sequence_id: str) -> int:
        """Slots the sequence holds; 0 for an unknown one."""
        ...

    def keep(self, sequence_id: str, length: int, path: Sequence[int] = ()) -> None:
        """Keeps the first `length` slots, then those slots that `path` names (ascending indices
        >= `length`), in that order; frees the others. Other sequences are unchanged."""
        ...

    def release(self, sequence_id: str) -> None:
        """Forgets the sequence; unknown ones are ignored."""
        ...

    def take_step_seconds(self) -> float:
        """Time that the steps since the last call must appear to have taken, and resets it.
        0 for an engine whose steps take their own time; emulated engines state theirs."""
        return 0.0

    @property
    def stated_seconds(self) -> float:
        """What `take_step_seconds` would return now: how far a step that runs is ahead of the
        clock."""
        return 0.0


@runtime_checkable
class FeatureEngine(Engine, Protocol):
    """An engine that can show what its logits were made of."""

    @property
    def shows_features(self) -> bool:
        """Whether it does; constant."""
        ...

    def features(self) -> Sequence[Tensor]:
        """If it does, for each step of the last `forward` [num_logits, D]: what the model's head
        made its logits of, in the model's dtype, on its device. Valid until the next call."""
        ...


@runtime_checkable
class ShallowEngine(Engine, Protocol):
    """An engine that runs tokens through its model's first layers alone, on the same slots, for
    a drafter that reads what these put out."""

    def forward_shallow(self, steps: Sequence[SequenceStep]) -> list[Tensor]:
        """As `forward`, but per step [num_logits, D]: what the last of the first layers put out, in
        the model's dtype. The slots that it takes are the sequence's own, hold keys and values of
        these layers alone, and are given back by `keep` before the sequence's next `forward`."""
        ...


@runtime_checkable
class DraftingEngine(FeatureEngine, Protocol):
    """An engine that runs, as one more layer on the same slots, a head that drafts from pairs: what
    it makes of the model's layers at a token, and the token behind it. `features` are then what the
    head makes of them. A slot holds the key and the value of the pair that its token ends."""

    def forward_draft(
        self, steps: Sequence[SequenceStep], features: Sequence[Tensor]
    ) -> list[Tensor]:
        """Runs one pair a step, of a feature [D] and the step's only token, behind the slots of a
        sequence that holds some; returns what the head puts out, [1, D] each, in the model's dtype.
        The slots that it takes are the sequence's own, hold keys and values of pairs alone, and are
        given back by `keep` before the sequence's next `forward`."""
        ...


@runtime_checkable
class FeatureKeeper(Engine, Protocol):
    """An engine that may keep, with every slot, what a head that drafts apart from it makes of the
    model's layers there."""

    @property
    def feature_width(self) -> int:
        """D, the numbers that it keeps of a slot; 0 = none. Constant."""
        ...

    def held_features(self, ranges: Sequence[tuple[str, int, int]]) -> Tensor:
        """Where it does, [n, D]: of sequences the slots from a first one up to an end, all of which
        hold tokens, one range after another; in the model's dtype, on its device."""
        ...


def check_steps(
    steps: Sequence[SequenceStep],
    info: ModelInfo,
    max_num_seqs: int,
    length: Callable[[str], int],
) -> None:
    """Raises unless these steps may be run on sequences of these lengths; changes nothing.

    `BadRequest` for what a request can cause, `InvariantError` for what only a service can.
    """
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
    """Raises `InvariantError` unless `Engine.keep` may be asked this of a sequence of `held`."""
    check(0 <= length <= held, f"cannot keep {length} of {held} slots")
    previous = length - 1
    for slot in path:
        check(previous < slot < held, f"slot {slot} of a path is not in {previous + 1}..{held - 1}")
        previous = slot
