"""The numbers of a process, as OpenTelemetry instruments under the names in docs/operations.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, get_args

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from outrider.sessions.store import FinishReason
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.sampling_params import Rule
from outrider.telemetry.observer import AuditOutcome, HealthReadings, Side

PREFIX: Final = "outrider."
SECONDS: Final = (
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2, 4, 8, 15, 30,
    60, 120, 300,
)  # fmt: skip
"""Upper bounds of the buckets of a time, s."""
ITEMS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SIDES: Final[tuple[str, ...]] = get_args(Side)
PHASES: Final = ("draft", "wire", "queue", "verify", "commit")
"""Where a round's time goes: the whole wait for a proposal; of the wait for a verdict what is
neither the target's queue nor its step; those two; from the decision until it may be shown."""


class ObservedCounter:
    """Numbers that only grow, one for each value of one attribute. The SDK reads them when it
    collects: adding to one costs what adding to a plain number costs, many times a round."""

    def __init__(
        self, meter: Meter, name: str, about: str, attribute: str = "", known: Iterable[str] = ()
    ) -> None:
        """Without an `attribute` there is one number, under the value "". `known` values are shown
        from the start, as 0: a rate cannot be taken of what appears with its first event."""
        self._attribute = attribute
        self._values: dict[str, float] = dict.fromkeys(known if attribute else ("",), 0.0)
        meter.create_observable_counter(PREFIX + name, [self._observe], "", about)

    def add(self, amount: float, value: str = "") -> None:
        """For one thread."""
        self._values[value] = self._values.get(value, 0) + amount

    def _observe(self, options: CallbackOptions) -> Iterable[Observation]:
        # A copy: the SDK collects on a thread of its own.
        return _observations(self._attribute, dict(self._values))


def _observations(attribute: str, values: Mapping[str, float]) -> list[Observation]:
    return [
        Observation(value, {attribute: key} if attribute else None) for key, value in values.items()
    ]


def times(meter: Meter, name: str, about: str) -> Histogram:
    """A histogram of seconds. `name` is whole, with its prefix."""
    return meter.create_histogram(name, "s", about, explicit_bucket_boundaries_advisory=SECONDS)


def watch(
    meter: Meter, name: str, about: str, read: Callable[[], float], grows: bool = False
) -> None:
    """A number that `read` gives, from any thread: a counter if it only grows, else a gauge."""
    watch_each(meter, name, about, "", lambda: {"": read()}, grows)


def watch_each(
    meter: Meter,
    name: str,
    about: str,
    attribute: str,
    read: Callable[[], Mapping[str, float]],
    grows: bool = False,
) -> None:
    """As `watch`, a number for each value of an attribute."""

    def observe(options: CallbackOptions) -> Iterable[Observation]:
        return _observations(attribute, read())

    create = meter.create_observable_counter if grows else meter.create_observable_gauge
    create(PREFIX + name, [observe], "", about)


class RequestMetrics:
    """Instruments shared by all requests of a coordinator."""

    def __init__(self, meter: Meter) -> None:
        self._count_tokens(meter)
        counter = partial(ObservedCounter, meter)
        reasons = [reason.value for reason in FinishReason]
        self.successes = counter(
            "request_success", "Requests that got a last event.", "finished_reason", reasons
        )
        self.failures = counter(
            "request_failure", "Requests that got an error instead.", "error_type"
        )
        self.resyncs = counter(
            "resyncs", "Answers of a replica that lacked the stated prefix.", "side", SIDES
        )
        self.moves = counter(
            "session_moves", "Sessions that went on to another replica.", "side", SIDES
        )
        self.phases = {
            phase: times(meter, f"{PREFIX}round_{phase}_seconds", f"A round's time: {phase}.")
            for phase in PHASES
        }
        self.queue = times(
            meter, PREFIX + "request_queue_time_seconds",
            "From arrival until the target began the first step.",
        )  # fmt: skip
        self.first_token = times(
            meter, PREFIX + "time_to_first_token_seconds", "From arrival to the first token."
        )
        self.inter_token = times(
            meter, PREFIX + "inter_token_latency_seconds",
            "Between two rounds' tokens at the client, a token: one value a round.",
        )  # fmt: skip
        self.latency = times(
            meter, PREFIX + "e2e_request_latency_seconds",
            "From arrival to the last event, of completions that were sent whole.",
        )  # fmt: skip
        self.genai_first_token = times(
            meter, "gen_ai.server.time_to_first_token", "From arrival to the first token."
        )
        self.genai_per_token = times(
            meter, "gen_ai.server.time_per_output_token", "After the first token, a token."
        )
        self.genai_duration = times(
            meter, "gen_ai.server.request.duration", "From arrival to the last event or error."
        )

    def _count_tokens(self, meter: Meter) -> None:
        counter = partial(ObservedCounter, meter)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of opened sessions.")
        self.generation_tokens = counter("generation_tokens", "Committed tokens.")
        self.rounds = counter("num_rounds", "Rounds decided.")
        self.chosen_lengths = counter(
            "rounds_by_num_draft_tokens",
            "Rounds but the first of a request, by the draft tokens that were asked for.",
            "num_draft_tokens",
        )
        self.drafts = counter("spec_decode_num_drafts", "Rounds with a proposal.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens proposed.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.accepted_per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the proposal.",
            "position",
        )
        self.unreadable_proposals = counter(
            "unreadable_proposals", "Proposals whose distributions the target could not read."
        )
        self.look_ahead_hits = counter(
            "look_ahead_hits", "Rounds whose proposal was there before they began."
        )
        self.look_ahead_misses = counter(
            "look_ahead_misses",
            "Rounds that a draft had looked ahead of and whose proposal was not there.",
        )
        self.fallback_rounds = counter(
            "fallback_rounds", "Rounds drafted here because no draft answered."
        )


_AUDIT: Final = {
    "audit_tokens": ("num_tokens", "Tokens audited."),
    "audit_impossible_tokens": (
        "num_impossible", "Of them those that the target gives no probability."
    ),
    "audit_unlikely_tokens": (
        "num_unlikely", "Greedy ones that are neither the likeliest token nor a near tie of it."
    ),
    "audit_near_ties": ("num_near_ties", "Greedy ones that are such a near tie."),
    "audit_surprise_nats": ("surprise", "Sum of -log p of tokens that were drawn."),
    "audit_entropy_nats": ("entropy", "What that sum is expected to be."),
    "audit_variance_nats2": ("variance", "Variance of that sum."),
}  # fmt: skip
"""By name: the attribute of `AuditSums`, and what it says."""
_OF_GREEDY: Final = ("num_unlikely", "num_near_ties")


class AuditMetrics:
    """What audits of a coordinator's sessions have come to. From what the counters grow by in a
    time follow the mean drift of a token and a z value for the whole:
    (surprise - entropy) / tokens, and (surprise - entropy) / sqrt(variance)."""

    def __init__(self, meter: Meter) -> None:
        rules, greedy = [rule.value for rule in Rule], [Rule.GREEDY.value]
        about, outcomes = (
            "Sessions chosen for an audit, by what came of it.",
            get_args(AuditOutcome),
        )
        self.outcomes = ObservedCounter(meter, "audits", about, "outcome", outcomes)
        self._sums = {
            field: ObservedCounter(
                meter, name, about, "rule", greedy if field in _OF_GREEDY else rules
            )
            for name, (field, about) in _AUDIT.items()
        }

    def add(self, rule: str, sums: AuditSums) -> None:
        """Tokens of a session have been audited."""
        for field, counter in self._sums.items():
            if rule == Rule.GREEDY.value or field not in _OF_GREEDY:
                counter.add(getattr(sums, field), rule)


_HEALTH: Final[dict[str, tuple[str, bool, str]]] = {
    "target_available": (
        "", False, "Whether a target answers: without one no session makes progress. 1 or 0.",
    ),
    "store_available": (
        "", False, "Whether the session store answers: while it does not, sessions pause. 1 or 0.",
    ),
    "replicas_wanted": (
        "role", False, "Replicas that the deployment is to have; the same at every coordinator.",
    ),
    "replicas_present": (
        "role", False,
        "Replicas that announce themselves and do not leave; the same at every coordinator.",
    ),
    "wire_bytes_sent": ("side", True, "Bytes of frames to replicas."),
    "wire_bytes_received": ("side", True, "Bytes of frames from replicas."),
    "stale_answers": (
        "side", True, "Proposals and verdicts that came when their round or session was over.",
    ),
}  # fmt: skip
"""By name: the label that tells its values apart, whether they only grow, and what it says."""


def watch_health(meter: Meter, readings: HealthReadings) -> None:
    """Shows a coordinator's health, read whenever the SDK collects."""
    for name, (label, grows, about) in _HEALTH.items():
        watch_each(meter, name, about, label, partial(_reading, readings, name), grows)


def _reading(readings: HealthReadings, name: str) -> Mapping[str, float]:
    return readings()[name]
