"""All errors that Outrider raises on purpose, with their gRPC codes and HTTP statuses. An error
says what was wrong, what was expected, and what to do."""

import difflib
from collections.abc import Iterable
from typing import Self


class OutriderError(Exception):
    """INTERNAL: the base of all errors. `grpc_code` is a google.rpc.Code."""

    grpc_code: int = 13
    http_status: int = 500

    def __init_subclass__(cls, grpc_code: int = 0, http_status: int = 0) -> None:
        cls.grpc_code = grpc_code or cls.grpc_code
        cls.http_status = http_status or cls.http_status

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(OutriderError, grpc_code=3, http_status=400):
    """INVALID_ARGUMENT: a request's field is wrong. `field` is its path, like `sampling.top_p`."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class Unauthenticated(OutriderError, grpc_code=16, http_status=401):
    """UNAUTHENTICATED: the request has no key or a wrong key."""


class PermissionDenied(OutriderError, grpc_code=7, http_status=403):
    """PERMISSION_DENIED: the caller is known but may not make this request."""


class NotFound(OutriderError, grpc_code=5, http_status=404):
    """NOT_FOUND: there is no such session or model."""


class SessionNotFound(NotFound):
    """The session never existed, belongs to another tenant, or has expired."""


class Incompatible(OutriderError, grpc_code=9, http_status=409):
    """FAILED_PRECONDITION: two replicas, or a request and a replica, do not fit together."""


class StaleEpoch(OutriderError, grpc_code=10, http_status=409):
    """ABORTED: another coordinator has taken over the session."""


class DataLoss(OutriderError, grpc_code=15, http_status=500):
    """DATA_LOSS: tokens that were committed can no longer be read."""


class OtherTokens(DataLoss):
    """A client resumes a session with tokens that differ from the stored tokens."""


class _Retryable(OutriderError):
    """The same request may succeed later, after `retry_after_ms`."""

    def __init__(self, message: str, retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class Overloaded(_Retryable, grpc_code=8, http_status=429):
    """RESOURCE_EXHAUSTED: a request rate, a number of requests or a queue is at its limit. `limit`
    is a short name of the limit, under which `refusals.py` counts the refusal; empty = uncounted.
    The message names the setting, if there is one. `of_server` says that this server alone is at
    its limit, so that another may have room."""

    def __init__(
        self, message: str, retry_after_ms: int = 1000, limit: str = "", *, of_server: bool = False
    ) -> None:
        super().__init__(message, retry_after_ms)
        self.limit, self.of_server = limit, of_server


class TooLarge(OutriderError, grpc_code=8, http_status=413):
    """RESOURCE_EXHAUSTED: a body or message is longer than allowed. For `limit`, see
    `Overloaded`."""

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class OutOfPages(Overloaded):
    """The sequences in use fill all pages of an engine."""


class Unavailable(_Retryable, grpc_code=14, http_status=503):
    """UNAVAILABLE: a service that the request needs does not answer."""


class StreamBroken(Unavailable):
    """No coordinator answers, or a stream broke without an error from the coordinator."""


class EngineLost(Unavailable):
    """An engine cannot recover, for example because a rank of its model is gone."""


class LinkLost(Unavailable):
    """The stream to a replica broke. The replica may or may not have handled the sent items."""


class StoreUnavailable(Unavailable):
    """The session store does not answer."""


class TargetUnavailable(Unavailable):
    """A coordinator cannot start, because it knows no target."""


class DeadlineExceeded(OutriderError, grpc_code=4, http_status=504):
    """DEADLINE_EXCEEDED: the deadline passed before the answer came."""


class ConfigError(OutriderError, grpc_code=9):
    """A setting is wrong or does not suit this machine; the process stops with exit code 2."""


class SettingError(ConfigError):
    """A setting or option is wrong. `key` is its name."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        # Ray pickles an actor's errors to send them to other processes.
        return type(self), (self.key, self.reason)


class UnknownSetting(ConfigError):
    """There is no setting `key`. `source` is the variable, or the file and key, that gives it."""

    def __init__(self, source: str, key: str, hint: str = "") -> None:
        super().__init__(f"{source}: there is no such setting{hint}")
        self.source, self.key = source, key


class StepUndone(OutriderError):
    """A draft step failed. Its sequences have freed the cache slots that they took for the step."""


class InvariantError(OutriderError):
    """An internal invariant does not hold: a bug."""


def check(condition: bool, message: str) -> None:
    """Raises `InvariantError(message)` unless `condition`, even under `python -O`."""
    if not condition:
        raise InvariantError(message)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the hint `; did you mean X?`, to append to an error about an unknown word. Returns an
    empty text if no `known` word is similar. Ignores case. For `cutoff`, see `difflib`."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def error_from_code(grpc_code: int, message: str) -> OutriderError:
    """Returns the error that a peer raised. `grpc_code` is a google.rpc.Code."""
    for kind in (
        NotFound,
        Incompatible,
        StaleEpoch,
        DataLoss,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Unauthenticated,
        PermissionDenied,
    ):
        if kind.grpc_code == grpc_code:
            return kind(message)
    if grpc_code == BadRequest.grpc_code:
        field, _, rest = message.partition(": ")
        return BadRequest(field, rest)
    return OutriderError(message)
