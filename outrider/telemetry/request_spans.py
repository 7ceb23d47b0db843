"""Traces and metrics of every request that a coordinator serves.

    chat or text_completion MODEL         from arrival to the last event, with totals as attributes
      outrider.open                       tokenizing, and opening the session in the store
      outrider.round                      a sampled round
        outrider.wire  (peer = draft)     from request to answer; contains the next two spans
          outrider.queue, outrider.draft      in the draft
        outrider.wire  (peer = target)    from request to answer; contains the next two spans
          outrider.queue, outrider.verify     in the target
        outrider.commit                   from the outcome until the tokens may be shown

Rounds that are not sampled have no spans, but count in all totals."""

import time
from collections.abc import Mapping
from functools import partial

from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context

from outrider.config.deployment import CoordinatorConfig
from outrider.errors import OutriderError
from outrider.interfaces.request import ChatMessage, Finished, GenerateRequest
from outrider.sessions.store import FinishReason
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.proposal import EncodedProposal
from outrider.telemetry.metrics import (
    AUDIT_COUNTERS,
    PHASES,
    PREFIX,
    READINGS,
    REQUEST_COUNTERS,
    REQUEST_TIMES,
    ObservedCounter,
    SpeculationCounters,
    times,
    watch,
)
from outrider.telemetry.observer import AuditOutcome, Observation, Readings, RequestObserver, Side
from outrider.telemetry.setup import read_traceparent, write_traceparent

TRACED_ROUNDS = 2
"""If `trace_every_rounds` is above 0, this many rounds at the start of a request have spans."""
_TOTALS = ("num_rounds", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length")


class ObservedRequests(Observation):
    """Traces and measures every request."""

    def __init__(self, tracer: Tracer, meter: Meter, config: CoordinatorConfig) -> None:
        self.tracer, self.config, self._meter = tracer, config, meter
        self.counters = {
            name: ObservedCounter(meter, name, *instrument)
            for name, instrument in REQUEST_COUNTERS.items()
        }
        self.speculation = SpeculationCounters(meter)
        self.times = {name: times(meter, name, about) for name, about in REQUEST_TIMES.items()}

    def samples(self, index: int) -> bool:
        every = self.config.trace_every_rounds
        return every > 0 and (index < TRACED_ROUNDS or (index - TRACED_ROUNDS) % every == 0)

    def begin(self, request: GenerateRequest, model: str, traceparent: str) -> RequestObserver:
        """An invalid `traceparent` begins a new trace."""
        return ObservedRequest(self, request, model, read_traceparent(traceparent))

    def watch(self, readings: Readings) -> None:
        """`readings` is called on any thread."""
        for name, instrument in READINGS.items():
            watch(
                self._meter,
                name,
                partial(lambda key: {**readings().get(key, {})}, name),
                *instrument,
            )

    def audited(self, rule: str, sums: AuditSums) -> None:
        for name, field in AUDIT_COUNTERS.items():
            if amount := getattr(sums, field):
                self.counters[name].add(amount, rule)

    def audit_ended(self, outcome: AuditOutcome) -> None:
        self.counters["audits"].add(1, outcome)


class ObservedRequest(RequestObserver):
    def __init__(
        self, shared: ObservedRequests, request: GenerateRequest, model: str, caller: Context | None
    ) -> None:
        self._shared = shared
        self._arrived, self._arrived_ns = time.monotonic(), time.time_ns()
        is_chat = isinstance(next(iter(request.prompt), None), ChatMessage)
        operation, sampling = "chat" if is_chat else "text_completion", request.sampling
        self._genai = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "outrider",
            "gen_ai.request.model": model,
        }
        attributes = {
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.stop_sequences": request.stop or None,
            "outrider.request.num_draft_tokens": request.num_draft_tokens,
        }
        # Without an explicit context, the span would be a child of the current span.
        self._span = shared.tracer.start_span(
            f"{operation} {model}",
            context=Context() if caller is None else caller,
            kind=SpanKind.SERVER,
            attributes=self._genai,
            start_time=self._arrived_ns,
        )
        self._span.set_attributes(
            {key: value for key, value in attributes.items() if value is not None}
        )
        self._quiet = write_traceparent(self._span, sampled=False)
        self.trace_id = self._quiet[3:35]
        sampled = write_traceparent(self._span)
        self._contexts: dict[Side, str] = {"draft": sampled, "target": sampled}
        self._asked: dict[Side, Span] = {}
        self._rounds: dict[int, Span] = {}
        """Spans of sampled rounds that are not committed, by round index."""
        self._index = 0
        self._times: list[tuple[str, float]] = []
        """Measured times that are not in the histograms yet: (phase, seconds). `shown` records them
        while the next round runs, so that no request waits for the recording."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._open_s = 0.0
        self._first_token_at: float | None = None
        self._last_shown_at = 0.0
        self._ended = False

    def _child(
        self,
        parent: Span,
        name: str,
        start_ns: int | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        context, start = set_span_in_context(parent, Context()), self._shared.tracer.start_span
        return start(f"outrider.{name}", context, kind, start_time=start_ns)

    def context(self, side: Side) -> str:
        return self._contexts[side]

    def count(self, name: str, label: str = "", amount: int = 1) -> None:
        self._shared.counters[name].add(amount, label)

    def opened(self, session_id: str, num_prompt_tokens: int, seed: int) -> None:
        self._open_s = time.monotonic() - self._arrived
        self.count("prompt_tokens", amount=num_prompt_tokens)
        self._span.set_attributes(
            {
                "gen_ai.response.id": session_id,
                "gen_ai.response.model": self._genai["gen_ai.request.model"],
                "gen_ai.conversation.id": session_id,
                # A number in an attribute is a signed 64-bit integer. A larger seed becomes a text.
                "gen_ai.request.seed": seed if seed < 2**63 else str(seed),
                "gen_ai.usage.input_tokens": num_prompt_tokens,
            }
        )
        self._child(self._span, "open", self._arrived_ns).end()

    def round_began(self, index: int) -> None:
        self._index = index
        if self._shared.samples(index) and self._span.is_recording():
            self._rounds[index] = span = self._child(self._span, "round")
            span.set_attribute("outrider.round.index", index)
        else:
            self._contexts["draft"] = self._contexts["target"] = self._quiet

    def asked(self, side: Side) -> None:
        if (parent := self._rounds.get(self._index)) is not None:
            span = self._asked[side] = self._child(parent, "wire", kind=SpanKind.CLIENT)
            span.set_attribute("outrider.peer", side)
            self._contexts[side] = write_traceparent(span)

    def answered(
        self, side: Side, seconds: float, queue_ms: float, compute_ms: float, asked: bool = True
    ) -> None:
        """A proposal or verdict came, `seconds` after the request for it. The times in ms come from
        the replica. If `asked` is false, the replica ran the round in advance. The histograms then
        omit the round's times, because no request waited for the round."""
        wire_ms = max(0.0, seconds * 1e3 - queue_ms - compute_ms)
        times = {"wire": wire_ms / 1e3, "queue": queue_ms / 1e3, "verify": compute_ms / 1e3}
        self._count_times({"draft": seconds} if side == "draft" else times, asked)
        if side == "target" and self._index == 0:
            self._record("outrider.request_queue_time_seconds", self._open_s + times["queue"])
        if (span := self._asked.pop(side, None)) is not None:
            _describe(span, wire_ms=wire_ms, queue_ms=queue_ms, compute_ms=compute_ms)
            span.end()

    def decided(
        self, proposal: EncodedProposal, num_accepted: int, num_tokens: int, length: int
    ) -> None:
        """The round has added `num_tokens` tokens. The session now has `length` tokens."""
        self._shared.counters["num_rounds"].add(1)
        if proposal:
            self._shared.speculation.add(length, len(proposal), num_accepted)
        if (span := self._rounds.get(self._index)) is not None:
            _describe(
                span,
                num_draft_tokens=len(proposal),
                num_accepted_draft_tokens=num_accepted,
                num_tokens=num_tokens,
            )

    def shown(self, decided_s: Mapping[int, float], num_tokens: int) -> None:
        """The tokens of some rounds go to the client in one event. `decided_s` maps the index of
        each round to the seconds since its outcome."""
        now = time.monotonic()
        self._count_times({"commit": max(decided_s.values())})
        self._record_times()
        self._shared.counters["generation_tokens"].add(num_tokens)
        if self._first_token_at is None:
            self._first_token_at = now
            self._record("outrider.time_to_first_token_seconds", now - self._arrived)
            self._record("gen_ai.server.time_to_first_token", now - self._arrived, self._genai)
        elif num_tokens:
            each_s = (now - self._last_shown_at) / num_tokens
            self._record("outrider.inter_token_latency_seconds", each_s)
        self._last_shown_at = now
        for round_index, seconds in decided_s.items():
            if (span := self._rounds.pop(round_index, None)) is not None:
                self._child(span, "commit", time.time_ns() - int(seconds * 1e9)).end()
                span.end()

    def finished(self, event: Finished) -> None:
        now, metrics = time.monotonic(), event.metrics
        num_tokens = event.usage.completion_tokens
        self.count("request_success", event.finish_reason.value)
        self._record("outrider.e2e_request_latency_seconds", now - self._arrived)
        if self._first_token_at is not None and num_tokens > 1:
            each = (now - self._first_token_at) / (num_tokens - 1)
            self._record("gen_ai.server.time_per_output_token", each, self._genai)
        self._span.set_attributes(
            {
                "gen_ai.usage.output_tokens": num_tokens,
                "gen_ai.server.time_to_first_token": metrics.time_to_first_token_ms / 1e3,
            }
        )
        _describe(self._span, **{name: getattr(metrics, name) for name in _TOTALS})
        self._end(event.finish_reason)

    def failed(self, error: BaseException) -> None:
        """The request ends without a last event. After `finished`, does nothing. An `error` that is
        not an `Exception` means that the client has disconnected."""
        if self._ended:
            return
        if not isinstance(error, Exception):
            self.count("request_success", FinishReason.CANCELLED.value)
            self._end(FinishReason.CANCELLED)
            return
        kind = self._genai["error.type"] = type(error).__name__
        self.count("request_failure", kind)
        self._span.set_attribute("error.type", kind)
        # The texts of other errors may quote the prompt.
        message = error.message if isinstance(error, OutriderError) else kind
        self._span.set_status(StatusCode.ERROR, message)
        self._end()

    def _record(self, name: str, seconds: float, labels: dict[str, str] | None = None) -> None:
        self._shared.times[name].record(seconds, labels)

    def _count_times(self, times: Mapping[str, float], recorded: bool = True) -> None:
        for phase, seconds in times.items():
            self._seconds[phase] += seconds
        if recorded:
            self._times += times.items()

    def _record_times(self) -> None:
        for phase, seconds in self._times:
            self._record(f"{PREFIX}round_{phase}_seconds", seconds)
        self._times.clear()

    def _end(self, reason: FinishReason | None = None) -> None:
        self._ended = True
        self._record_times()
        duration_s = time.monotonic() - self._arrived
        self._record("gen_ai.server.request.duration", duration_s, self._genai)
        for span in (*self._asked.values(), *self._rounds.values()):
            span.end()
        self._asked, self._rounds = {}, {}
        if reason is not None:
            self._span.set_attribute("gen_ai.response.finish_reasons", [reason.value])
        totals_ms = {f"{phase}_ms": seconds * 1e3 for phase, seconds in self._seconds.items()}
        _describe(self._span, **totals_ms)
        self._span.end()


def _describe(span: Span, **values: float) -> None:
    span.set_attributes({f"outrider.{name}": value for name, value in values.items()})
