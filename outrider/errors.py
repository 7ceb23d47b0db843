"""Every error that Outrider raises on purpose, and its one meaning on gRPC and on HTTP.

    OutriderError
    ├── BadRequest            INVALID_ARGUMENT      400   names the field
    ├── Unauthenticated       UNAUTHENTICATED       401
    ├── PermissionDenied      PERMISSION_DENIED     403
    ├── NotFound              NOT_FOUND             404
    │   └── SessionNotFound
    ├── Incompatible          FAILED_PRECONDITION   409   fingerprints that do not match
    ├── StaleEpoch            ABORTED               409   another coordinator owns the session
    ├── DataLoss              DATA_LOSS             500   stored tokens are gone
    │   └── OtherTokens                                   the client's differ from the stored ones
    ├── Overloaded            RESOURCE_EXHAUSTED    429   with a time to retry after
    │   └── OutOfPages                                    an engine's memory is full of sequences
    ├── Unavailable           UNAVAILABLE           503   with a time to retry after
    │   ├── StreamBroken                                  no coordinator answers its client
    │   ├── EngineLost                                    no step can run; the replica ends
    │   ├── LinkLost                                      a stream to a replica broke
    │   └── StoreUnavailable                              Redis does not answer
    ├── DeadlineExceeded      DEADLINE_EXCEEDED     504
    ├── ConfigError           (start-up only: one line and exit code 2)
    │   └── SettingError                                  names the setting
    ├── StepUndone            INTERNAL              500   a draft step failed and was undone
    └── InvariantError        INTERNAL              500   a bug

An error says what was wrong, what was expected, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NO_TOKENIZER = "the model has no tokenizer; give token_ids"
"""Reason of a `BadRequest` about a prompt in text. The command line names its flag instead of
`token_ids`."""


class OutriderError(Exception):
    """Base of all errors. `grpc_code` is a google.rpc.Code."""

    grpc_code: int = 13
    http_status: int = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(OutriderError):
    """A field of a request is wrong. `field` is its path, such as `sampling.top_p`."""

    grpc_code, http_status = 3, 400

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class Unauthenticated(OutriderError):
    """No key, or a wrong one."""

    grpc_code, http_status = 16, 401


class PermissionDenied(OutriderError):
    """The caller is known but may not do this."""

    grpc_code, http_status = 7, 403


class NotFound(OutriderError):
    """No such session or model."""

    grpc_code, http_status = 5, 404


class SessionNotFound(NotFound):
    """The session never existed, is another tenant's, or has outlived its time to live."""


class Incompatible(OutriderError):
    """Two replicas, or a request and a replica, do not fit together."""

    grpc_code, http_status = 9, 409


class StaleEpoch(OutriderError):
    """Another coordinator has taken over the session."""

    grpc_code, http_status = 10, 409


class DataLoss(OutriderError):
    """Tokens that were committed can no longer be read."""

    grpc_code, http_status = 15, 500


class OtherTokens(DataLoss):
    """A client resumes a session with tokens that differ from the stored ones."""


class _Retryable(OutriderError):
    """The same request may succeed later, after `retry_after_ms`."""

    def __init__(self, message: str, retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class Overloaded(_Retryable):
    """A rate, a concurrency limit or a queue is at its limit."""

    grpc_code, http_status = 8, 429


class OutOfPages(Overloaded):
    """The sequences in use fill an engine's key-value memory."""


class Unavailable(_Retryable):
    """Something that the request needs does not answer."""

    grpc_code, http_status = 14, 503


class StreamBroken(Unavailable):
    """No coordinator answers, or a stream broke. No coordinator has refused the request."""


class EngineLost(Unavailable):
    """An engine cannot recover, for example because a rank of its model is gone."""


class LinkLost(Unavailable):
    """The stream to a replica broke; requests on it may or may not have been carried out."""


class StoreUnavailable(Unavailable):
    """The session store does not answer."""


class DeadlineExceeded(OutriderError):
    """The deadline passed before the first token."""

    grpc_code, http_status = 4, 504


class ConfigError(OutriderError):
    """A setting is wrong or does not suit this machine; the process stops with exit code 2."""

    grpc_code = 9


class SettingError(ConfigError):
    """A setting or a command's option is wrong. `key` is its name in a configuration; code that
    knows the source of the value may name that instead."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason

    def __reduce__(self) -> tuple[type[SettingError], tuple[str, str]]:
        # For processes that receive it: an actor's start-up raises it.
        return type(self), (self.key, self.reason)


class StepUndone(OutriderError):
    """A draft step failed. Its sequences have returned the slots that they had taken for it."""


class InvariantError(OutriderError):
    """Something that cannot happen happened."""


def check(condition: bool, message: str) -> None:
    """Raises `InvariantError(message)` unless `condition`, even under `python -O`."""
    if not condition:
        raise InvariantError(message)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """End of an error about a word that is not `known`: `; did you mean X?`, or empty if no known
    word is similar enough (`cutoff`, see `difflib`). Ignores case."""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def error_from_code(grpc_code: int, message: str) -> OutriderError:
    """The error that a peer raised, from a google.rpc.Code and a message."""
    for kind in (NotFound, Incompatible, StaleEpoch, DataLoss, Overloaded, Unavailable,
                 DeadlineExceeded, Unauthenticated, PermissionDenied):  # fmt: skip
        if kind.grpc_code == grpc_code:
            return kind(message)
    if grpc_code == BadRequest.grpc_code:
        field, _, rest = message.partition(": ")
        return BadRequest(field, rest)
    return OutriderError(message)
