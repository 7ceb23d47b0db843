"""One trace and the numbers of every request that a coordinator serves.

    chat MODEL                            from arrival to the last event; totals as attributes
      outrider.open                       tokenizing, and opening the session in the store
      outrider.round                      a sampled round
        outrider.wire  (peer = draft)     question to answer; what its children leave is the wire
          outrider.queue, outrider.draft      in the draft
        outrider.wire  (peer = target)
          outrider.queue, outrider.verify     in the target
        outrider.commit                   decision to acknowledgement

Rounds that are not sampled have no spans; they count in the totals like all others.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context

from outrider.errors import OutriderError
from outrider.request import ChatMessage, Finished, GenerateRequest
from outrider.sessions.store import FinishReason
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.sampling_params import Rule
from outrider.telemetry.metrics import (
    AUDIT_SUMS,
    GREEDY_AUDIT_SUMS,
    PHASES,
    PREFIX,
    READINGS,
    REQUEST_COUNTERS,
    REQUEST_TIMES,
    ObservedCounter,
    times,
    watch,
)
from outrider.telemetry.observer import (
    AuditOutcome,
    Observation,
    Readings,
    RequestObserver,
    Side,
)
from outrider.telemetry.setup import read_traceparent, write_traceparent

PROVIDER: Final = "outrider"
_POSITIONS: Final = tuple(str(position) for position in range(64))


@dataclass(frozen=True, slots=True)
class Detail:
    """What of a request is recorded."""

    first_rounds: int
    """So many rounds at its beginning have spans ..."""
    every_rounds: int
    """... and after those every Nth; 0 = none."""
    prompts: bool = False
    """Whether text of prompts is recorded."""

    def samples(self, index: int) -> bool:
        """Whether the round at this place has spans."""
        if index < self.first_rounds:
            return True
        return self.every_rounds > 0 and (index - self.first_rounds) % self.every_rounds == 0


class ObservedRequests(Observation):
    """Traces and measures every request."""

    listens = True

    def __init__(self, tracer: Tracer, meter: Meter, detail: Detail) -> None:
        self.tracer = tracer
        self.detail = detail
        self._meter = meter
        self.counters = {
            name: ObservedCounter(meter, name, *told) for name, told in REQUEST_COUNTERS.items()
        }
        self.times = {name: times(meter, name, about) for name, about in REQUEST_TIMES.items()}

    def begin(self, request: GenerateRequest, model: str, traceparent: str) -> RequestObserver:
        """See `Observation.begin`."""
        return ObservedRequest(self, request, model, read_traceparent(traceparent))

    def watch(self, readings: Readings) -> None:
        """See `Observation.watch`."""
        for name, (about, label, grows) in READINGS.items():
            watch(self._meter, name, about, partial(_reading, readings, name), label, grows)

    def audited(self, rule: str, sums: AuditSums) -> None:
        """See `Observation.audited`."""
        greedy = GREEDY_AUDIT_SUMS if rule == Rule.GREEDY.value else {}
        for field, name in (AUDIT_SUMS | greedy).items():
            self.counters[name].add(getattr(sums, field), rule)

    def audit_ended(self, outcome: AuditOutcome) -> None:
        """See `Observation.audit_ended`."""
        self.counters["audits"].add(1, outcome)


class ObservedRequest(RequestObserver):
    def __init__(
        self, shared: ObservedRequests, request: GenerateRequest, model: str, caller: Context | None
    ) -> None:
        self._tracer = shared.tracer
        self._counters = shared.counters
        self._histograms = shared.times
        self._detail = shared.detail
        self._arrived, self._arrived_ns = time.monotonic(), time.time_ns()
        operation = _operation(request)
        self._genai = {
            "gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
        }  # fmt: skip
        # Never as a child of the span that happens to be current here.
        self._span = shared.tracer.start_span(
            f"{operation} {model}", context=Context() if caller is None else caller,
            kind=SpanKind.SERVER, attributes=self._genai, start_time=self._arrived_ns,
        )  # fmt: skip
        _describe(self._span, request, shared.detail.prompts)
        self._parent = set_span_in_context(self._span, Context())
        self._quiet = write_traceparent(self._span, sampled=False)
        self._contexts: dict[Side, str] = dict.fromkeys(
            ("draft", "target"), write_traceparent(self._span)
        )
        self._sampled: Span | None = None
        """The span of the current round."""
        self._asked: dict[Side, Span] = {}
        self._rounds: dict[int, Span] = {}
        """Spans of sampled rounds that are not committed, by the round's index."""
        self._index = 0
        self._times: list[tuple[str, float]] = []
        """Of rounds since tokens were shown last, by phase."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        """Of the rounds before that."""
        self._open_s = 0.0
        self._num_sampled = self._num_resyncs = self._num_fallbacks = 0
        self._first_token_at: float | None = None
        self._last_shown_at = 0.0
        self._ended = False

    @property
    def trace_id(self) -> str:
        return self._quiet[3:35]

    def context(self, side: Side) -> str:
        return self._contexts[side]

    def opened(self, session_id: str, num_prompt_tokens: int, seed: int) -> None:
        self._open_s = time.monotonic() - self._arrived
        self._counters["prompt_tokens"].add(num_prompt_tokens)
        self._span.set_attributes({
            "gen_ai.response.id": session_id,
            "gen_ai.response.model": self._genai["gen_ai.request.model"],
            "gen_ai.conversation.id": session_id,
            # An attribute has 63 bits and a sign; a larger seed is given as text.
            "gen_ai.request.seed": seed if seed < 2**63 else str(seed),
            "gen_ai.usage.input_tokens": num_prompt_tokens,
        })  # fmt: skip
        self._tracer.start_span(
            "outrider.open", context=self._parent, start_time=self._arrived_ns
        ).end()

    def round_began(self, index: int) -> None:
        self._index = index
        self._sampled = None
        if self._detail.samples(index) and self._span.is_recording():
            self._num_sampled += 1
            self._sampled = self._rounds[index] = self._tracer.start_span(
                "outrider.round", context=self._parent, attributes={"outrider.round.index": index}
            )
        else:
            self._contexts["draft"] = self._contexts["target"] = self._quiet

    def chosen(self, num_draft_tokens: int) -> None:
        self._counters["rounds_by_num_draft_tokens"].add(1, str(num_draft_tokens))

    def asked(self, side: Side) -> None:
        if self._sampled is not None:
            span = self._asked[side] = self._tracer.start_span(
                "outrider.wire", context=set_span_in_context(self._sampled, Context()),
                kind=SpanKind.CLIENT, attributes={"outrider.peer": side},
            )  # fmt: skip
            self._contexts[side] = write_traceparent(span)

    def resynced(self, side: Side) -> None:
        self._num_resyncs += 1
        self._counters["resyncs"].add(1, side)
        if self._sampled is not None:
            self._asked[side].add_event("outrider.resync")

    def moved(self, side: Side) -> None:
        self._counters["session_moves"].add(1, side)
        self._span.add_event("outrider.move", {"outrider.peer": side})

    def proposal_unreadable(self) -> None:
        self._counters["unreadable_proposals"].add(1)

    def drafted(
        self,
        num_tokens: int,
        by_replica: bool,
        seconds: float,
        queue_ms: float,
        compute_ms: float,
        ahead: bool = False,
    ) -> None:
        if ahead:
            self._counters["look_ahead_hits"].add(1)
        self._times.append(("draft", seconds))
        if not by_replica:
            self._num_fallbacks += 1
            self._counters["fallback_rounds"].add(1)
        if self._sampled is not None:
            self._asked["draft"].set_attributes(
                {"outrider.num_draft_tokens": num_tokens, "outrider.by_replica": by_replica}
            )
        self._answered("draft", seconds, queue_ms, compute_ms)

    def look_ahead_missed(self) -> None:
        self._counters["look_ahead_misses"].add(1)

    def verified(self, seconds: float, queue_ms: float, compute_ms: float) -> None:
        queue_s, compute_s = queue_ms / 1e3, compute_ms / 1e3
        wire_s = max(0.0, seconds - queue_s - compute_s)
        self._times += (("wire", wire_s), ("queue", queue_s), ("verify", compute_s))
        if self._index == 0:
            self._record("outrider.request_queue_time_seconds", self._open_s + queue_s)
        self._answered("target", seconds, queue_ms, compute_ms)

    def _answered(self, side: Side, seconds: float, queue_ms: float, compute_ms: float) -> None:
        if self._sampled is not None:
            span = self._asked.pop(side)
            wire_ms = max(0.0, seconds * 1e3 - queue_ms - compute_ms)
            span.set_attributes({
                "outrider.wire_ms": wire_ms, "outrider.queue_ms": queue_ms,
                "outrider.compute_ms": compute_ms,
            })  # fmt: skip
            span.end()

    def decided(self, num_draft_tokens: int, num_accepted: int, num_tokens: int) -> None:
        counters = self._counters
        counters["num_rounds"].add(1)
        if num_draft_tokens:
            counters["spec_decode_num_drafts"].add(1)
            counters["spec_decode_num_draft_tokens"].add(num_draft_tokens)
            counters["spec_decode_num_accepted_tokens"].add(num_accepted)
            for position in _POSITIONS[:num_accepted]:
                counters["spec_decode_num_accepted_tokens_per_pos"].add(1, position)
        if self._sampled is not None:
            self._sampled.set_attributes({
                "outrider.num_draft_tokens": num_draft_tokens,
                "outrider.num_accepted_draft_tokens": num_accepted,
                "outrider.num_tokens": num_tokens,
            })  # fmt: skip

    def shown(self, round_index: int, num_tokens: int, commit_seconds: float) -> None:
        now = time.monotonic()
        self._times.append(("commit", commit_seconds))
        self._record_times()
        self._counters["generation_tokens"].add(num_tokens)
        if self._first_token_at is None:
            self._first_token_at = now
            self._record("outrider.time_to_first_token_seconds", now - self._arrived)
            self._record("gen_ai.server.time_to_first_token", now - self._arrived, self._genai)
        elif num_tokens:
            each = (now - self._last_shown_at) / num_tokens
            self._record("outrider.inter_token_latency_seconds", each)
        self._last_shown_at = now
        span = self._rounds.pop(round_index, None)
        if span is not None:
            self._tracer.start_span(
                "outrider.commit", context=set_span_in_context(span, Context()),
                start_time=time.time_ns() - int(commit_seconds * 1e9),
            ).end()  # fmt: skip
            span.end()

    def finished(self, event: Finished) -> None:
        now = time.monotonic()
        num_tokens = event.usage.completion_tokens
        self._counters["request_success"].add(1, event.finish_reason.value)
        self._record("outrider.e2e_request_latency_seconds", now - self._arrived)
        self._record("gen_ai.server.request.duration", now - self._arrived, self._genai)
        if self._first_token_at is not None and num_tokens > 1:
            each = (now - self._first_token_at) / (num_tokens - 1)
            self._record("gen_ai.server.time_per_output_token", each, self._genai)
        metrics = event.metrics
        self._span.set_attributes({
            "gen_ai.response.finish_reasons": [event.finish_reason.value],
            "gen_ai.usage.output_tokens": num_tokens,
            "gen_ai.server.time_to_first_token": metrics.time_to_first_token_ms / 1e3,
            "outrider.num_rounds": metrics.num_rounds,
            "outrider.num_draft_tokens": metrics.num_draft_tokens,
            "outrider.num_accepted_draft_tokens": metrics.num_accepted_draft_tokens,
            "outrider.mean_acceptance_length": metrics.mean_acceptance_length,
        })  # fmt: skip
        self._end()

    def failed(self, error: BaseException) -> None:
        """A client that goes away is no failure, but a cancel."""
        if self._ended:
            return
        labels = self._genai
        if isinstance(error, Exception):
            kind = type(error).__name__
            self._counters["request_failure"].add(1, kind)
            labels = labels | {"error.type": kind}
            self._span.set_attribute("error.type", kind)
            # Nothing but our own errors is sure to say nothing of the prompt.
            message = error.message if isinstance(error, OutriderError) else kind
            self._span.set_status(StatusCode.ERROR, message)
        else:
            reason = FinishReason.CANCELLED.value
            self._counters["request_success"].add(1, reason)
            self._span.set_attribute("gen_ai.response.finish_reasons", [reason])
        self._record("gen_ai.server.request.duration", time.monotonic() - self._arrived, labels)
        self._end()

    def _record(self, name: str, seconds: float, labels: dict[str, str] | None = None) -> None:
        self._histograms[name].record(seconds, labels)

    def _record_times(self) -> None:
        """Not when they are known: the next round is under way, and nothing waits for this."""
        for phase, seconds in self._times:
            self._seconds[phase] += seconds
            self._record(_PHASE_TIMES[phase], seconds)
        self._times.clear()

    def _end(self) -> None:
        self._ended = True
        self._record_times()
        for span in (*self._asked.values(), *self._rounds.values()):
            span.end()
        # Rounds that still end after this are counted and not traced.
        self._asked, self._rounds, self._sampled = {}, {}, None
        totals = {f"outrider.{phase}_ms": s * 1e3 for phase, s in self._seconds.items()}
        self._span.set_attributes({
            **totals, "outrider.num_sampled_rounds": self._num_sampled,
            "outrider.num_resyncs": self._num_resyncs,
            "outrider.num_fallback_rounds": self._num_fallbacks,
        })  # fmt: skip
        self._span.end()


_PHASE_TIMES: Final = {phase: f"{PREFIX}round_{phase}_seconds" for phase in PHASES}


def _reading(readings: Readings, name: str) -> dict[str, float]:
    return {**readings()[name]}


def _operation(request: GenerateRequest) -> str:
    prompt = request.prompt
    chat = isinstance(prompt, tuple) and bool(prompt) and isinstance(prompt[0], ChatMessage)
    return "chat" if chat else "text_completion"


def _describe(span: Span, request: GenerateRequest, prompts: bool) -> None:
    """The request's parameters; nothing of its prompt unless asked for."""
    sampling = request.sampling
    found = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.stop_sequences": request.stop or None,
        "outrider.request.num_draft_tokens": request.num_draft_tokens,
        "gen_ai.input.messages": _messages(request) if prompts else None,
    }
    span.set_attributes({name: value for name, value in found.items() if value is not None})


def _messages(request: GenerateRequest) -> str:
    """The prompt as the semantic conventions write it; token ids as they are."""
    prompt = request.prompt
    if isinstance(prompt, str):
        turns = [("user", prompt)]
    else:
        turns = [(part.role, part.content) for part in prompt if isinstance(part, ChatMessage)]
        if not turns:
            return json.dumps(prompt)
    found = [
        {"role": role, "parts": [{"type": "text", "content": content}]} for role, content in turns
    ]
    return json.dumps(found, ensure_ascii=False)
