"""What both stores say when they refuse, and the check of a record before it is handed out."""

from __future__ import annotations

from outrider.errors import DataLoss, InvariantError, NotFound, StaleEpoch, Unavailable
from outrider.limits import TAKE_OVER_RETRY_MS
from outrider.sessions.store import SessionRecord
from outrider.tokens import TokenSequence


def missing(session_id: str) -> DataLoss:
    """The owner of a session wrote to it, and it is not stored."""
    return DataLoss(f"session {session_id} is not stored any more; it cannot be continued")


def stale(session_id: str, epoch: int, stored_epoch: int) -> StaleEpoch:
    """Somebody else owns the session."""
    return StaleEpoch(
        f"session {session_id} has a new owner: it is at epoch {stored_epoch}, this was {epoch}"
    )


def not_found(session_id: str) -> NotFound:
    """Nobody knows the session: it never was, or its time to live is over."""
    return NotFound(f"there is no session {session_id}")


def leased(session_id: str, left_ms: int) -> Unavailable:
    """The session's owner may be alive; `left_ms` is the rest of its lease."""
    return Unavailable(
        f"session {session_id} has an owner for another {left_ms} ms; try again then",
        retry_after_ms=max(left_ms, 1),
    )


def contended(session_id: str) -> Unavailable:
    """Another coordinator took the session over between two calls of a take-over."""
    return Unavailable(
        f"session {session_id} was taken over meanwhile; try again",
        retry_after_ms=TAKE_OVER_RETRY_MS,
    )


def taken(session_id: str) -> InvariantError:
    """An id was drawn twice."""
    return InvariantError(f"another session has the id {session_id}")


def verified(record: SessionRecord) -> SessionRecord:
    """The record, if its tokens are whole; else raises `DataLoss`."""
    length = len(record.token_ids)
    if length < record.prompt_length:
        raise DataLoss(
            f"session {record.session_id} has {length} of the {record.prompt_length} tokens of "
            f"its prompt; it cannot be continued"
        )
    if TokenSequence(record.token_ids).digest() != record.prefix_digest:
        raise DataLoss(
            f"the stored tokens of session {record.session_id} do not fit their digest; "
            f"it cannot be continued"
        )
    return record
