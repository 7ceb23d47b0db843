"""Converts between protobuf messages and dataclasses, field by field.

A field of a message corresponds to the dataclass field with the same name. `OWN_CODECS` has the
messages that need other conversions. Peers are not trusted, so decoding raises `BadRequest` with
the field's path if a field exceeds its limit in `_LIMITS`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from outrider import limits
from outrider.errors import BadRequest, InvariantError
from outrider.interfaces.step_costs import StepCosts
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.sampling_params import Rule

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value", bound="DataclassInstance")
Wire = TypeVar("Wire", bound=Message)

_WORD_START = re.compile(r"(?<=[a-z])(?=[A-Z])")
_LIMITS: Mapping[str, int] = {
    "RoundHead.tenant": limits.TENANT_CHARS_MAX,
    "RoundHead.traceparent": limits.TRACEPARENT_CHARS_MAX,
    "RoundHead.deadline_ms": limits.DEADLINE_MS_MAX,
    "VerifyItem.run_ahead": limits.RUN_AHEAD_ROUNDS_MAX,
    "VerifyItem.num_logprobs": limits.LOGPROBS_MAX,
    "VerifyItem.num_next_draft_tokens": limits.NUM_DRAFT_TOKENS_MAX,
    "VerifyItem.features_from": limits.SESSION_TOKENS_MAX,
    "VerifyItem.num_lookup_tokens": limits.NUM_DRAFT_TOKENS_MAX,
    "VerifyItem.num_probe_tokens": limits.NUM_DRAFT_TOKENS_MAX,
    "VerifyItem.num_tokens_left": limits.SESSION_TOKENS_MAX,
    "VerifyItem.next_budget_us": 1000 * limits.DRAFT_DEADLINE_MS_MAX,
    "DraftItem.num_draft_tokens": limits.NUM_DRAFT_TOKENS_MAX,
    "DraftItem.look_ahead": limits.LOOK_AHEAD_MAX,
    "DraftItem.budget_us": 1000 * limits.DRAFT_DEADLINE_MS_MAX,
    "Verdict.looked_up": limits.NUM_DRAFT_TOKENS_MAX,
    "Verdict.probed": limits.NUM_DRAFT_TOKENS_MAX,
    # The accepted draft tokens, and the token after them.
    "ProposalAnswer.assumed": limits.NUM_DRAFT_TOKENS_MAX + 1,
    "Refused.message": limits.ERROR_MESSAGE_CHARS_MAX,
}
"""Maps a field to its largest value, or to its largest number of characters or list entries."""
_AMOUNTS = ("VerifyItem", "Verdict", "ProposalAnswer", "AuditSums")
"""In these messages, floating-point fields that are not repeated must be finite and at least 0."""
_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}

# Only a field's descriptor knows the type of the field's value.
Encode = Callable[[Any], object]
Decode = Callable[[Any, str], object]  # The string is the field's path.

OWN_CODECS: dict[str, tuple[Encode | None, Decode]] = {}
"""Encoder (None = `fields_to_proto`) and decoder of messages, by the message's name. Each module
adds those of its messages."""
ENUMS: dict[str, type[StrEnum]] = {"Rule": Rule}
"""Our class of each enum, by name."""
VALUES: dict[str, type[DataclassInstance]] = {"StepCosts": StepCosts, "AuditSums": AuditSums}
"""Our class of each nested message that is not in `OWN_CODECS`, by name."""


def to_proto(value: DataclassInstance, kind: type[Wire], **others: object) -> Wire:
    """Builds a message. Raises `BadRequest` for a value that the message cannot hold."""
    given = fields_to_proto(value, kind, **others)
    try:
        return kind(**given)
    except (TypeError, ValueError):
        find_unsendable(kind, given)
        raise


def fields_to_proto(
    value: DataclassInstance, kind: type[Message], **others: object
) -> dict[str, object]:
    """Returns the fields of a message of class `kind`. Takes the fields in `others` as they are and
    the rest from the dataclass `value`. Omits None and protobuf's default values. Most nested
    messages become dictionaries of their fields, because protobuf would copy message objects."""
    for name, is_optional, encode in _encoders(kind, type(value)):  # type: ignore[arg-type]
        if name not in others:
            content = getattr(value, name)
            if content or (is_optional and content is not None):
                try:
                    others[name] = content if encode is None else encode(content)
                except BadRequest as error:
                    raise BadRequest(f"{name}.{error.field}", error.reason) from error
    return others


def find_unsendable(kind: type[Message], given: Mapping[str, object], path: str = "") -> None:
    """Raises `BadRequest` for the first value that a message of class `kind` cannot hold."""
    theirs = {field.name: field for field in _fields_of(kind)}
    for name, content in given.items():
        field = theirs[name]
        several, items = False, [content]
        if field.is_repeated and isinstance(content, list | tuple):
            several, items = True, [*content]
        for index, item in enumerate(items):
            place = f"{path}{name}[{index}]" if several else f"{path}{name}"
            try:
                kind(**{name: [item] if several else item})
            except (TypeError, ValueError) as error:
                reason = f"cannot be sent: {error}"
                nested = field.message_type
                if field.cpp_type in _RANGES and isinstance(item, int):
                    lowest, highest = _RANGES[field.cpp_type]
                    reason = f"{item} is wrong; it must be from {lowest} to {highest}"
                elif isinstance(item, dict) and nested and not nested.GetOptions().map_entry:
                    find_unsendable(GetMessageClass(nested), item, f"{place}.")
                raise BadRequest(place, reason) from error


def from_proto(message: Message, kind: type[Value], path: str = "", **others: object) -> Value:
    """Builds a dataclass `kind` from a message. Takes values in `others` as they are, and all other
    values from the message. Unset fields get their defaults. An enum's member 0 becomes None if the
    dataclass allows None. Raises `BadRequest`, whose field begins with `path`, for a value beyond
    `_LIMITS`, a missing value, an unknown enum member, or a value that the dataclass refuses."""
    decoders, unset, read_unset = _decoders(type(message), kind)  # type: ignore[arg-type]
    values, prefix = {**unset, **others}, f"{path}." if path else ""
    for field, content in message.ListFields():
        name = field.name
        if name in decoders and name not in others:
            decode = decoders[name]
            values[name] = content if decode is None else decode(content, prefix + name)
    for name, decode in read_unset.items():
        if name not in values:
            values[name] = decode(0, prefix + name)
    try:
        return kind(**values)
    except InvariantError as error:
        raise BadRequest(path, error.message) from error


@cache
def _encoders(
    message: type[Message], kind: type[DataclassInstance]
) -> list[tuple[str, bool, Encode | None]]:
    """For each field that message and dataclass share, returns its name, whether it can be unset,
    and its encoder (None = the value is used as it is)."""
    return [
        (field.name, field.has_presence, _encoder(field)) for field, _ in _shared(message, kind)
    ]


@cache
def _decoders(
    message: type[Message], kind: type[DataclassInstance]
) -> tuple[dict[str, Decode | None], dict[str, object], dict[str, Decode]]:
    """Returns three dictionaries, keyed by the names of fields that message and dataclass share:

    - The decoder of a set field; None = the value is used as it is.
    - The value of an unset field.
    - The decoder of an unset field without a default. It raises `BadRequest`, or returns None for
      an enum field that may be None."""
    decoders: dict[str, Decode | None] = {}
    unset, read_unset = dict[str, object](), dict[str, Decode]()
    for field, ours in _shared(message, kind):
        decode = decoders[field.name] = _decoder(field, ours, message.DESCRIPTOR.name)
        if field.has_presence:
            if ours.default is MISSING and ours.default_factory is MISSING:
                read_unset[field.name] = _missing
        elif field.is_repeated:
            unset[field.name] = ()
        elif field.enum_type is not None and decode is not None:
            read_unset[field.name] = decode
        else:
            unset[field.name] = field.default_value
    return decoders, unset, read_unset


def _shared(
    message: type[Message], kind: type[DataclassInstance]
) -> list[tuple[FieldDescriptor, Field[object]]]:
    ours = {field.name: field for field in fields(kind) if field.init}
    return [(field, ours[field.name]) for field in _fields_of(message) if field.name in ours]


def _fields_of(message: type[Message]) -> Sequence[FieldDescriptor]:
    # The stubs have another class for the descriptors of protobuf's other implementation.
    return message.DESCRIPTOR.fields  # type: ignore[return-value]


def _encoder(field: FieldDescriptor) -> Encode | None:
    encode: Encode
    if field.enum_type is not None:
        members = _members(field.enum_type)
        encode = {member: number for number, member in members.items()}.__getitem__
    elif field.message_type is None:
        return None
    else:
        own, _ = OWN_CODECS.get(field.message_type.name, (None, None))
        encode = own or partial(fields_to_proto, kind=GetMessageClass(field.message_type))
    return (lambda values: [encode(item) for item in values]) if field.is_repeated else encode


def _decoder(field: FieldDescriptor, ours: Field[object], of: str) -> Decode | None:
    decode = _reader(field, may_be_none="None" in str(ours.type))
    limit: float | None = _LIMITS.get(f"{of}.{field.name}")
    if of in _AMOUNTS and not field.is_repeated and field.cpp_type in _FLOATS:
        limit = sys.float_info.max
    if limit is None:
        return decode
    has_length = field.is_repeated or field.cpp_type == field.CPPTYPE_STRING

    def bounded(content: Any, path: str) -> object:
        what, size = ("length", len(content)) if has_length else ("value", content)
        if not 0 <= size <= limit:
            raise BadRequest(path, f"{what} {size} is not in 0..{limit}")
        return content if decode is None else decode(content, path)

    return bounded


def _missing(_: object, path: str) -> object:
    raise BadRequest(path, "is missing")


def _reader(field: FieldDescriptor, may_be_none: bool) -> Decode | None:
    read: Decode
    if field.enum_type is not None:
        read = _enum_reader(field.enum_type, may_be_none)
    elif field.message_type is not None:
        name = field.message_type.name
        own = OWN_CODECS.get(name)
        read = own[1] if own else lambda message, path: from_proto(message, VALUES[name], path)
    elif not field.is_repeated:
        return None
    elif field.cpp_type == field.CPPTYPE_UINT32:
        return token_ids_from_wire
    else:
        return lambda values, path: tuple(values)
    if not field.is_repeated:
        return read
    return lambda values, path: tuple(read(value, path) for value in values)


def _enum_reader(enum: EnumDescriptor, may_be_none: bool) -> Callable[[int, str], StrEnum | None]:
    members = _members(enum)
    kind = _WORD_START.sub(" ", enum.name).lower()

    def read(number: int, path: str) -> StrEnum | None:
        member = members.get(number)
        if member is None and (number or not may_be_none):
            raise BadRequest(path, f"{number} is no {kind} ({', '.join(members.values())})")
        return member

    return read


def _members(enum: EnumDescriptor) -> dict[int, StrEnum]:
    """Maps the numbers of an enum's members to the members, without 0 (unspecified)."""
    unspecified, *values = enum.values
    prefix, kind = unspecified.name.removesuffix("UNSPECIFIED"), ENUMS[enum.name]
    return {value.number: kind[value.name.removeprefix(prefix)] for value in values}


def token_ids_from_wire(
    ids: Sequence[int], path: str, num_max: int = limits.SESSION_TOKENS_MAX
) -> tuple[int, ...]:
    """Checks the number of token ids, and that each id fits in 31 bits."""
    token_ids = tuple(ids[:])  # Iteration over a slice of a repeated field is twice as fast.
    if len(token_ids) > num_max:
        raise BadRequest(path, f"{len(token_ids)} tokens are more than {num_max}")
    if token_ids and (max(token_ids) > limits.TOKEN_ID_MAX or min(token_ids) < 0):
        raise BadRequest(path, f"a token id is not in 0..{limits.TOKEN_ID_MAX}")
    return token_ids
