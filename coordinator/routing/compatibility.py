"""Which replicas go together: sessions move between targets, and all draw on the same drafts."""

from __future__ import annotations

from outrider.errors import Incompatible
from outrider.messages import ReplicaDescription


class Compatibility:
    """What the replicas of a coordinator have in common: with the first of each role."""

    def __init__(self) -> None:
        self.target: ReplicaDescription | None = None
        self.draft: ReplicaDescription | None = None

    def check_target(self, target: ReplicaDescription) -> None:
        """Raises `Incompatible` for a target whose tokens mean something else than the first one's,
        or that drafts in another way."""
        if self.target is None:
            self.target = target
        elif _kind(target) != _kind(self.target):
            raise Incompatible(
                f"the target {target.model!r} has another vocabulary, tokenizer or way of "
                f"drafting than {self.target.model!r}"
            )

    def check_draft(self, draft: ReplicaDescription) -> None:
        """Raises `Incompatible` for a draft that does not go with the targets, or goes on from
        something else than the first one."""
        if self.target is not None:
            check_compatible(self.target, draft)
        if self.draft is None:
            self.draft = draft
        elif draft.reads_features != self.draft.reads_features:
            raise Incompatible(
                f"of the drafts {draft.model!r} and {self.draft.model!r} only one goes on from "
                "what its target's head reads"
            )


def _kind(target: ReplicaDescription) -> tuple[int, str, bool, bool]:
    return (
        target.vocab_size,
        target.tokenizer_fingerprint,
        target.drafts_itself,
        target.shows_features,
    )


def check_compatible(target: ReplicaDescription, draft: ReplicaDescription) -> None:
    """Raises `Incompatible` unless the draft's tokens mean what the target's mean, and it is shown
    what it reads."""
    known = draft.tokenizer_fingerprint and target.tokenizer_fingerprint
    if known and draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise Incompatible(
            f"the draft {draft.model!r} has another tokenizer ({draft.tokenizer_fingerprint}) than "
            f"the target {target.model!r} ({target.tokenizer_fingerprint})"
        )
    if draft.reads_features and not target.shows_features:
        raise Incompatible(
            f"the draft {draft.model!r} goes on from what its target's head reads, which "
            f"{target.model!r} does not show"
        )
