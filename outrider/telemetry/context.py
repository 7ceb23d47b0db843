"""W3C trace context as it travels with every item: `00-<trace id>-<span id>-<flags>`."""

from __future__ import annotations

import re
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    TraceFlags,
    set_span_in_context,
)

_SHAPE: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def write_traceparent(span: Span, *, sampled: bool = True) -> str:
    """What makes others children of `span`; without `sampled` they only know its trace."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    flags = int(sampled and context.trace_flags.sampled)
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"


def read_traceparent(text: str) -> Context | None:
    """The context of a remote span; None for what is none."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        return None
    trace_id, span_id, flags = (int(match[index], 16) for index in (1, 2, 3))
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags & 1))
    return set_span_in_context(NonRecordingSpan(context)) if context.is_valid else None


def read_sampled(text: str) -> Context | None:
    """As `read_traceparent`, and None for a trace that does not want to hear of this item."""
    if not text or text[-1] not in "13579bdf":
        return None
    return read_traceparent(text)
