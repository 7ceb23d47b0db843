"""Long messages are looked at before they are decoded."""

import pytest
from google.protobuf.message import Message

from outrider import limits
from outrider.errors import BadRequest, TooLarge
from outrider.transport.wire import check_fields
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import types_pb2

REQUEST = pb.GenerateRequest.DESCRIPTOR
MANY = limits.GRPC_FIELDS_MAX + 1


def chat(number: int) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")] * number)


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(stop=["a"] * MANY),
        pb.GenerateRequest(chat=chat(MANY)),
        pb.GenerateRequest(choice=pb.Choices(texts=[""] * MANY)),
        pb.GenerateRequest(
            sampling=types_pb2.SamplingParams(logit_bias=dict.fromkeys(range(MANY), 1.0))
        ),
    ],
)
def test_a_message_of_many_fields_is_refused(request_: Message) -> None:
    with pytest.raises(TooLarge, match=f"has more than {limits.GRPC_FIELDS_MAX} fields"):
        check_fields(request_.SerializeToString(), REQUEST)


def test_a_message_of_many_numbers_is_refused() -> None:
    ids = pb.TokenIds(ids=[1] * (limits.GRPC_NUMBERS_BYTES_MAX + 1))
    with pytest.raises(TooLarge, match="bytes of numbers"):
        check_fields(pb.GenerateRequest(token_ids=ids).SerializeToString(), REQUEST)


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(text="é" * 2**21, model="m", seed=2**63, ignore_eos=True),
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[limits.TOKEN_ID_MAX] * limits.HTTP_VALUES_MAX)
        ),
        pb.GenerateRequest(
            chat=chat(limits.CHAT_MESSAGES_MAX),
            choice=pb.Choices(texts=["a"] * limits.CHOICES_MAX),
            stop=["a"] * limits.STOP_STRINGS_MAX,
            sampling=types_pb2.SamplingParams(
                temperature=0.5,
                logit_bias=dict.fromkeys(range(limits.LOGIT_BIAS_ENTRIES_MAX), 1.0),
                stop_token_ids=range(limits.STOP_TOKEN_IDS_MAX),
            ),
        ),
    ],
)
def test_the_largest_requests_pass(request_: Message) -> None:
    check_fields(request_.SerializeToString(), REQUEST)
    assert limits.GRPC_FIELDS_MAX > limits.CHAT_MESSAGES_MAX + limits.CHOICES_MAX


def test_unknown_fields_pass() -> None:
    fields = b"".join((b"\xf8\x3f\x96\x01", b"\xf9\x3f" + bytes(8), b"\xfd\x3f" + bytes(4)))
    check_fields(fields + b"\xfa\x3f\x02ab", REQUEST)


@pytest.mark.parametrize(
    "data", [b"\x12\x05abc", b"\x08", b"\x80" * 11, b"\x0b\x0c", b"\x1a\x01\x0a"]
)
def test_data_that_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest, match="message"):
        check_fields(data, REQUEST)
