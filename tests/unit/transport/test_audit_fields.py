"""Audits on the wire: asked for, answered, and not believed blindly."""

from __future__ import annotations

import math

import pytest

from outrider.errors import BadRequest
from outrider.messages import ReplyKey, RoundHead, VerdictReply, VerifyItem
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.proposal import SealedProposal
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.codec import (
    verify_answer_from_proto,
    verify_answer_to_proto,
    verify_item_from_proto,
    verify_item_to_proto,
)

SUMS = AuditSums(2, 1, 0, 0, 1.5, 1.25, 0.5)
KEY = ReplyKey("ab" * 16, 1, 0)


def reply(audit: AuditSums | None) -> VerdictReply:
    return VerdictReply(KEY, Verdict((1.0, 0.5), (1, 2, 3)), 9, audit=audit)


@pytest.mark.parametrize("sums", [None, SUMS, AuditSums(2)])
def test_sums_come_out_as_they_went_in(sums: AuditSums | None) -> None:
    assert verify_answer_from_proto(verify_answer_to_proto(reply(sums))) == reply(sums)


def test_an_item_says_whether_it_audits() -> None:
    sampling = SamplingParams()
    head = RoundHead("ab" * 16, "t", 1, 0, 0, 0, (4,), 1, Rule.BLOCK, 7, sampling, sampling.hash())
    for audits in (True, False):
        item = VerifyItem(head, SealedProposal((1,), b"\0\0"), audit=audits)
        assert verify_item_from_proto(verify_item_to_proto(item)) == item


@pytest.mark.parametrize(
    "sums",
    [
        AuditSums(3),
        AuditSums(2, 2, 1),
        AuditSums(2, surprise=math.nan),
        AuditSums(2, entropy=math.inf),
        AuditSums(2, variance=-1.0),
    ],
)
def test_sums_that_cannot_be_are_refused(sums: AuditSums) -> None:
    with pytest.raises(BadRequest, match="audit"):
        verify_answer_from_proto(verify_answer_to_proto(reply(sums)))
