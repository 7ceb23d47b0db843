"""A request's constraint survives the wire, and what is none is refused under its field."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.errors import BadRequest
from outrider.grammar.constraint import Constraint
from outrider.request import GenerateRequest
from outrider.transport.codec import constraint_from_proto
from outrider.transport.request_codec import request_from_proto, request_to_proto
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import types_pb2


@pytest.mark.parametrize(
    "constraint",
    [
        None,
        Constraint.of_schema({"type": "object", "title": "é"}),
        Constraint.any_object(),
        Constraint.of_regex(r"\d+"),
        Constraint.of_choices(["a", 'b"']),
    ],
)
def test_a_constraint_survives(constraint: Constraint | None) -> None:
    request = replace(GenerateRequest("hello"), constraint=constraint)
    message = pb.GenerateRequest.FromString(request_to_proto(request).SerializeToString())
    assert request_from_proto(message).constraint == constraint


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (pb.GenerateRequest(json_schema="{"), "json_schema: is no JSON"),
        (pb.GenerateRequest(regex=""), "regex: is empty"),
        (pb.GenerateRequest(choice=pb.Choices()), "choice: got 0 choices"),
    ],
)
def test_what_is_no_constraint_is_refused(given: pb.GenerateRequest, said: str) -> None:
    given.text = "hello"
    with pytest.raises(BadRequest, match=said):
        request_from_proto(given)
    with pytest.raises(BadRequest, match=said):
        request_from_proto(pb.GenerateRequest.FromString(given.SerializeToString()))


def test_any_object_may_be_asked_not_to_be() -> None:
    assert request_from_proto(pb.GenerateRequest(text="x", json_object=False)).constraint is None


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            types_pb2.RoundHead(constraint=types_pb2.Constraint(kind="x")),
            "head.constraint.kind: 'x' is no kind",
        ),
        (types_pb2.RoundHead(constraint_hash=b"12"), "head.constraint_hash: has 2 bytes, not 16"),
    ],
)
def test_what_a_peer_sends_is_not_trusted(message: types_pb2.RoundHead, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        constraint_from_proto(message, "head.constraint")
