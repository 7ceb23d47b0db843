from __future__ import annotations

import pytest

from outrider.request import ResumeRequest
from outrider.tokens import EMPTY_DIGEST
from outrider.transport.request_codec import resume_from_proto, resume_to_proto


@pytest.mark.parametrize(
    "request_",
    [
        ResumeRequest("a" * 32),
        ResumeRequest("a" * 32, 0, 0, tokens_digest=EMPTY_DIGEST),
        ResumeRequest("a" * 32, 2**32 - 1, 7, 1, 2**64 - 1),
    ],
)
def test_what_is_asked_arrives(request_: ResumeRequest) -> None:
    """Also the digest of no tokens, which is 0 and not the same as none."""
    assert resume_from_proto(resume_to_proto(request_)) == request_
