"""What an audit has found, on the wire."""

from __future__ import annotations

import math

from outrider.errors import BadRequest
from outrider.speculation.audit_totals import AuditSums
from outrider.v1 import target_pb2


def audit_to_proto(sums: AuditSums | None, message: target_pb2.Verdict) -> None:
    """Puts sums into a verdict, field for field, if there are any."""
    if sums is None:
        return
    found = message.audit
    found.SetInParent()
    found.num_tokens = sums.num_tokens
    found.num_impossible = sums.num_impossible
    found.num_unlikely = sums.num_unlikely
    found.num_near_ties = sums.num_near_ties
    found.surprise = sums.surprise
    found.entropy = sums.entropy
    found.variance = sums.variance


def audit_from_proto(message: target_pb2.Verdict) -> AuditSums | None:
    """Those of a verdict, if it has any. Raises `BadRequest` for numbers that are none, or that
    count more tokens than there are."""
    if not message.HasField("audit"):
        return None
    found = message.audit
    sums = AuditSums(
        found.num_tokens,
        found.num_impossible,
        found.num_unlikely,
        found.num_near_ties,
        found.surprise,
        found.entropy,
        found.variance,
    )
    parts = (sums.num_impossible, sums.num_unlikely, sums.num_near_ties)
    if sums.num_tokens != len(message.accept_probability) or sum(parts) > sums.num_tokens:
        raise BadRequest("verdict.audit", f"{sums} does not count the tokens of its verdict")
    for value in (sums.surprise, sums.entropy, sums.variance):
        if not 0.0 <= value < math.inf:
            raise BadRequest("verdict.audit", f"{value!r} is no sum of an audit")
    return sums
