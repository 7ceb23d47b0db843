"""What differs between the stream of a target and that of a draft, as one value each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.descriptor import ServiceDescriptor

from outrider.messages import (
    DraftAnswer,
    DraftItem,
    ReplyKey,
    RoundHead,
    VerifyAnswer,
    VerifyItem,
)
from outrider.transport import codec as convert
from outrider.v1 import draft_pb2, target_pb2


class Keyed(Protocol):
    """An answer: it says which item it belongs to."""

    @property
    def key(self) -> ReplyKey:
        """The item's round."""
        ...


Item = TypeVar("Item")
Answer = TypeVar("Answer", bound=Keyed)


@dataclass(frozen=True, slots=True)
class Codec(Generic[Item, Answer]):
    """Names and conversions of one kind of replica. Protobuf messages are `Any` here: the fields
    that are used (`items`, `head`) are the same in both kinds."""

    service: ServiceDescriptor
    stream_method: str
    request_frame: Callable[[Sequence[Any]], Any]
    """Items to a frame."""
    parse_reply: Callable[[bytes], Any]
    """Bytes to a frame of answers; raises `DecodeError`."""
    reply_frame: Callable[[Sequence[Any]], Any]
    item_to_proto: Callable[[Item, int | None], Any]
    item_from_proto: Callable[[Any], Item]
    item_head: Callable[[Item], RoundHead]
    awaits_answer: Callable[[Item], bool]
    """Whether an item asks for anything but guesses."""
    with_head: Callable[[Item, RoundHead], Item]
    answer_to_proto: Callable[[Answer], Any]
    answer_from_proto: Callable[[Any], Answer]

    def path(self, method: str) -> str:
        """The path of a method of the service."""
        return f"/{self.service.full_name}/{method}"


VERIFY: Codec[VerifyItem, VerifyAnswer] = Codec(
    service=target_pb2.DESCRIPTOR.services_by_name["Target"],
    stream_method="Verify",
    request_frame=lambda items: target_pb2.VerifyRequest(items=items),
    parse_reply=target_pb2.VerifyReply.FromString,
    reply_frame=lambda items: target_pb2.VerifyReply(items=items),
    item_to_proto=convert.verify_item_to_proto,
    item_from_proto=convert.verify_item_from_proto,
    item_head=lambda item: item.head,
    awaits_answer=lambda item: True,
    with_head=lambda item, head: replace(item, head=head),
    answer_to_proto=convert.verify_answer_to_proto,
    answer_from_proto=convert.verify_answer_from_proto,
)
"""The stream between a coordinator and a target."""

DRAFT: Codec[DraftItem, DraftAnswer] = Codec(
    service=draft_pb2.DESCRIPTOR.services_by_name["Draft"],
    stream_method="Propose",
    request_frame=lambda items: draft_pb2.DraftRequest(items=items),
    parse_reply=draft_pb2.DraftReply.FromString,
    reply_frame=lambda items: draft_pb2.DraftReply(items=items),
    item_to_proto=convert.draft_item_to_proto,
    item_from_proto=convert.draft_item_from_proto,
    item_head=lambda item: item.head,
    awaits_answer=lambda item: item.held is None,
    with_head=lambda item, head: replace(item, head=head),
    answer_to_proto=convert.draft_answer_to_proto,
    answer_from_proto=convert.draft_answer_from_proto,
)
"""The stream between a coordinator and a draft."""
