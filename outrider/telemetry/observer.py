"""What a coordinator tells of its requests, and the observer that ignores it.

The calls are made in every case; `ObservedRequests` overrides them where telemetry is on. Where it
is off, each costs a call and allocates nothing, and OpenTelemetry is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Final, Literal

from outrider.request import Finished, GenerateRequest
from outrider.speculation.audit_totals import AuditSums

Side = Literal["draft", "target"]
AuditOutcome = Literal["audited", "busy", "repeated", "failed"]
"""What comes of a session that is chosen for an audit. Busy: too many audits run, or all seats are
taken. Repeated: the session's seed is an earlier session's, so its tokens are not independent."""


class RequestObserver:
    """Follows one request, from its arrival to its end."""

    __slots__ = ()

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty without a trace."""
        return ""

    def context(self, side: Side) -> str:
        """The `traceparent` of a message to a side."""
        return ""

    def opened(self, session_id: str, num_prompt_tokens: int, seed: int) -> None:
        """The request was admitted, and its session is open."""

    def round_began(self, index: int) -> None:
        """A round begins."""

    def chosen(self, num_draft_tokens: int) -> None:
        """The round, not the first one, is to be drafted so many tokens at most; 0 = none."""

    def asked(self, side: Side) -> None:
        """A side is about to be asked; its answer ends what begins here."""

    def resynced(self, side: Side) -> None:
        """A side lacked the prefix and said so."""

    def moved(self, side: Side) -> None:
        """A side has another replica from now on."""

    def proposal_unreadable(self) -> None:
        """The target could not read q of a proposal."""

    def drafted(
        self,
        num_tokens: int,
        by_replica: bool,
        seconds: float,
        queue_ms: float,
        compute_ms: float,
        ahead: bool = False,
    ) -> None:
        """There is a proposal, so many seconds after it was asked for; the times in ms are the
        replica's. `ahead`: it was there before."""

    def look_ahead_missed(self) -> None:
        """A round that the draft had looked ahead of began without a proposal."""

    def verified(self, seconds: float, queue_ms: float, compute_ms: float) -> None:
        """There is a verdict."""

    def decided(self, num_draft_tokens: int, num_accepted: int, num_tokens: int) -> None:
        """The round has an outcome: so many of its draft tokens were accepted, and so many tokens
        added."""

    def shown(self, round_index: int, num_tokens: int, commit_seconds: float) -> None:
        """A round's tokens are committed, so long after they were decided, and go to the client."""

    def finished(self, event: Finished) -> None:
        """The last event goes to the client."""

    def failed(self, error: BaseException) -> None:
        """The request ends without a last event. Does nothing after `finished`."""


SILENT: Final = RequestObserver()


Readings = Callable[[], Mapping[str, Mapping[str, float]]]
"""What a coordinator knows of its load and its surroundings: numbers by metric and the value of
its label."""


class Observation:
    """Gives every request its observer. This one observes nothing."""

    listens: ClassVar[bool] = False
    """Whether anything is observed."""

    def begin(self, request: GenerateRequest, model: str, traceparent: str) -> RequestObserver:
        """A request has come, for a model, perhaps as part of its caller's trace."""
        return SILENT

    def watch(self, readings: Readings) -> None:
        """Shows the coordinator's load and health. They may be read from any thread."""

    def audited(self, rule: str, sums: AuditSums) -> None:
        """Tokens of a session that is over have been held against its target's law."""

    def audit_ended(self, outcome: AuditOutcome) -> None:
        """A session was chosen for an audit, and this has come of it."""


UNOBSERVED: Final = Observation()
