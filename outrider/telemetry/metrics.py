"""Metrics of a process, as OpenTelemetry instruments. docs/operations.md explains the metrics."""

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, get_args

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import Rule
from outrider.telemetry.observer import AuditOutcome, Side

PREFIX = "outrider."
SECONDS = (
    0.0005,
    0.001,
    0.002,
    0.004,
    0.008,
    0.015,
    0.03,
    0.06,
    0.125,
    0.25,
    0.5,
    1,
    2,
    4,
    8,
    15,
    30,
    60,
    120,
    300,
)
"""Upper bounds of the buckets of time histograms."""
PHASES = ("draft", "wire", "queue", "verify", "commit")
"""Parts of a round's time. draft: the wait for a proposal. wire, queue, verify: the three parts of
the wait for a verdict. commit: from the round's outcome until its tokens may be shown."""
_SIDES = get_args(Side)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_RULES, _GREEDY = tuple(rule.value for rule in Rule), (Rule.GREEDY.value,)

REQUEST_COUNTERS: dict[str, tuple[Any, ...]] = {
    "prompt_tokens": ("Prompt tokens of opened sessions.",),
    "generation_tokens": ("Committed tokens.",),
    "num_rounds": ("Rounds decided.",),
    "rounds_by_num_draft_tokens": (
        "Rounds, except the first of each request, by the number of draft tokens asked for."
        " Length control chooses this number, up to the request's num_draft_tokens.",
        "num_draft_tokens",
    ),
    "verdict_mismatches": ("Verdicts after other tokens than the session's, which were dropped.",),
    "unreadable_proposals": ("Proposals whose distributions the target could not read.",),
    "look_ahead_hits": ("Rounds whose proposal was ready when the round began.",),
    "look_ahead_misses": (
        "Rounds whose proposal was not ready, although the draft had looked ahead.",
    ),
    "fallback_rounds": ("Rounds in which a draft was asked, but did not answer in time.",),
    "request_success": (
        "Requests that ended without an error.",
        "finished_reason",
        tuple(reason.value for reason in FinishReason),
    ),
    "request_failure": ("Requests that ended with an error.", "error_type"),
    "resyncs": ("Answers of replicas that lacked a part of the prefix.", "side", _SIDES),
    "session_moves": ("Sessions that moved to another replica.", "side", _SIDES),
    "audits": (
        "Sessions chosen for an audit, by the audit's outcome.",
        "outcome",
        get_args(AuditOutcome),
    ),
    "audit_tokens": ("Tokens audited.", "rule", _RULES),
    "audit_impossible_tokens": (
        "Audited tokens to which the target gives probability 0.",
        "rule",
        _RULES,
    ),
    "audit_unlikely_tokens": (
        "Audited greedy tokens that are neither the likeliest token nor a near tie.",
        "rule",
        _GREEDY,
    ),
    "audit_near_ties": ("Audited greedy tokens that are a near tie.", "rule", _GREEDY),
    "audit_surprise_nats": ("Sum of -log p of audited tokens, except greedy ones.", "rule", _RULES),
    "audit_entropy_nats": ("Expected value of audit_surprise_nats.", "rule", _RULES),
    "audit_variance_nats2": ("Variance of audit_surprise_nats.", "rule", _RULES),
}
"""Counters of a coordinator. Name -> description, label, and label values that are exported from
the start. The increases of the audit counters over a period yield the mean drift per token,
(surprise - entropy) / tokens, and the drift's z value, (surprise - entropy) / sqrt(variance)."""
CONTEXT_BOUNDS = (1024, 4096, 16_384, 65_536)
CONTEXTS = ("0-1k", "1k-4k", "4k-16k", "16k-64k", "64k+")
"""Values of the label `context`: ranges of the session's length in tokens."""
AUDIT_COUNTERS = {
    "audit_tokens": "num_tokens",
    "audit_impossible_tokens": "num_impossible",
    "audit_unlikely_tokens": "num_unlikely",
    "audit_near_ties": "num_near_ties",
    "audit_surprise_nats": "surprise",
    "audit_entropy_nats": "entropy",
    "audit_variance_nats2": "variance",
}
"""Counter -> field of `AuditSums`."""
REQUEST_TIMES = {
    **{f"{PREFIX}round_{phase}_seconds": f"Time of a round's phase {phase}." for phase in PHASES},
    "outrider.request_queue_time_seconds": "From arrival to the start of the first target step.",
    "outrider.time_to_first_token_seconds": "From arrival to the first token.",
    "outrider.inter_token_latency_seconds": (
        "Time between two events with tokens, divided by the second event's number of tokens."
    ),
    "outrider.e2e_request_latency_seconds": (
        "From arrival to the last event, for requests that got a last event."
    ),
    "gen_ai.server.time_to_first_token": "From arrival to the first token.",
    "gen_ai.server.time_per_output_token": "Mean time of a token after the first.",
    "gen_ai.server.request.duration": "From arrival to the last event or error.",
}
"""Histograms of a coordinator. Full name -> description."""
READINGS: dict[str, tuple[Any, ...]] = {
    "num_requests_running": ("Sessions that run.",),
    "num_requests_waiting": ("Requests whose session is not open yet.",),
    "loop_lag_seconds": ("Delay of callbacks on the event loop, mean over some seconds.",),
    "target_available": (
        "1 if a target answers; 0 if none answers, so that sessions make no progress.",
    ),
    "store_available": (
        "1 if the session store answers; 0 if it does not answer, so that sessions pause.",
    ),
    "replicas_wanted": (
        "Replicas that the deployment should have; the same at every coordinator.",
        "role",
    ),
    "replicas_present": (
        "Announced replicas, neither leaving nor on trial; same at every coordinator.",
        "role",
    ),
    "wire_bytes_sent": ("Bytes of frames to replicas.", "side", True),
    "wire_bytes_received": ("Bytes of frames from replicas.", "side", True),
    "refusals": ("Requests refused because of a limit, by the limit's name.", "limit", True),
    "stale_answers": (
        "Proposals and verdicts that came after their round or session was over.",
        "side",
        True,
    ),
}
"""Values read from a coordinator. Name -> description, label, whether the value only grows."""


class ObservedCounter:
    """A counter that the SDK reads only when it collects metrics, so that `add` is fast."""

    def __init__(
        self, meter: Meter, name: str, about: str, label: str = "", known: Iterable[str] = ()
    ) -> None:
        """`known` label values are exported from the start, because Prometheus does not count the
        event that creates a series."""
        self._values: dict[str, float] = dict.fromkeys(known if label else ("",), 0.0)
        # The SDK gets a copy, because it collects on its own thread.
        watch(meter, name, lambda: dict(self._values), about, label, grows=True)

    def add(self, amount: float, value: str = "") -> None:
        """Only one thread may call this. Without a label, `value` is empty."""
        self._values[value] = self._values.get(value, 0) + amount


class SpeculationCounters:
    """The counters `spec_decode_num_...` of rounds with a proposal. The sums by position are
    computed when the SDK collects metrics."""

    def __init__(self, meter: Meter) -> None:
        name, labels = "spec_decode_num_", ("position", "context")
        self._drafts = ObservedCounter(meter, f"{name}drafts", "Rounds with a proposal.")
        self._proposed = ObservedCounter(meter, f"{name}draft_tokens", "Draft tokens proposed.")
        self._accepted = ObservedCounter(meter, f"{name}accepted_tokens", "Draft tokens accepted.")
        self._rounds: Counter[tuple[str, int, int]] = Counter()
        """(Context, number of draft tokens, number accepted) -> number of rounds."""
        for kind, what in (
            ("draft", "with a token at this position"),
            ("accepted", "whose token at this position was accepted"),
        ):
            read = partial(self._by_position, kind == "accepted")
            about = f"Proposals {what}, by context length."
            watch(meter, f"{name}{kind}_tokens_per_pos", read, about, labels, grows=True)

    def add(self, length: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Counts a round of a session of `length` tokens. Only one thread may call this."""
        self._drafts.add(1)
        self._proposed.add(num_draft_tokens)
        self._accepted.add(num_accepted)
        context = CONTEXTS[bisect(CONTEXT_BOUNDS, length)]
        self._rounds[context, num_draft_tokens, num_accepted] += 1

    def _by_position(self, accepted: bool) -> Mapping[tuple[str, str], float]:
        sums: Counter[tuple[str, str]] = Counter()
        for (context, num_draft_tokens, num_accepted), num_rounds in dict(self._rounds).items():
            for at in range(num_draft_tokens):
                # Adding 0 gives positions without accepted tokens a series, too.
                sums[str(at), context] += num_rounds * (at < num_accepted or not accepted)
        return sums


def watch(
    meter: Meter,
    name: str,
    read: Callable[[], Mapping[Any, float]],
    about: str,
    label: str | tuple[str, ...] = "",
    grows: bool = False,
) -> None:
    """Exports the numbers that `read` returns, as a counter if `grows`, otherwise as a gauge. The
    keys are label values, or tuples of them if `label` is a tuple. Any thread may call `read`."""

    def attributes(key: Any) -> dict[str, str] | None:
        if isinstance(label, tuple):
            return dict(zip(label, key, strict=True))
        return {label: key} if label else None

    def observe(options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, attributes(key)) for key, value in read().items()]

    create = meter.create_observable_counter if grows else meter.create_observable_gauge
    create(PREFIX + name, [observe], "", about)


def times(meter: Meter, name: str, about: str) -> Histogram:
    """Creates a histogram of seconds. `name` includes the prefix."""
    return meter.create_histogram(name, "s", about, explicit_bucket_boundaries_advisory=SECONDS)


class HttpTimes:
    """Times of HTTP requests, under the names of OpenTelemetry's semantic conventions."""

    def __init__(self, meter: Meter) -> None:
        self._times = times(
            meter, "http.server.request.duration", "From a request's arrival to its last byte."
        )

    def add(self, seconds: float, method: str, scheme: str, route: str, status: int | None) -> None:
        """Records a finished request. `route` is the pattern of the request's route; empty if no
        route matches. If the caller disconnected before the answer, `status` is None."""
        # Unknown methods become `_OTHER`, because callers could send any number of them.
        attributes: dict[str, str | int] = {
            "http.request.method": method if method in _METHODS else "_OTHER",
            "url.scheme": scheme,
        }
        if route:
            attributes["http.route"] = route
        if status is not None:
            attributes["http.response.status_code"] = status
            if status >= 500:
                attributes["error.type"] = str(status)
        self._times.record(seconds, attributes)
