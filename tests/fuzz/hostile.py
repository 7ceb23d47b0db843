"""Hostile values, and messages that are made of them from protobuf descriptors."""

from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from outrider import limits

SESSION_IDS: Final = tuple(f"{number:032x}" for number in range(4))
LENGTHS: Final = (9, 16, 17, 32, 33, 64, 65, 128, 129, 1024, 1025, 4097, 70_000)
_INTS: Final = (
    0,
    1,
    -1,
    2,
    3,
    15,
    16,
    17,
    20,
    21,
    32,
    33,
    64,
    65,
    255,
    256,
    319,
    320,
    1023,
    1024,
    1025,
    4096,
    65_535,
    65_536,
    600_000,
    600_001,
    3_600_000,
    3_600_001,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
    -(2**31),
    -(2**63),
)
_FLOATS: Final = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-6,
    1e-5,
    2.0,
    2.0000001,
    10.0,
    100.0,
    100.1,
    -100.0,
    5e-324,
    1e-308,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
)
_TEXTS: Final = (
    "",
    "\0",
    " ",
    "model",
    "user",
    "system",
    "<|end|>",
    "../../etc/passwd",
    "a{{7*7}}{% raw %}",
    "{{ ''.__class__.__mro__ }}",
    "%s%n",
    "$(id)",
    "'; FLUSHALL\r\n",
    "*1\r\n$8\r\nFLUSHALL\r\n",
    "(a+)+$",
    "\u202e\ufeff\u0000",
    "\U0001f469\u200d\U0001f469",
    "é" * 200,
    "[" * 10_000,
    "cos\nsystem\n(S'id'\ntR.",
    "0" * 32,
    "f" * 32,
    "F" * 32,
    "0" * 33,
    "a" * 257,
    "b" * 5000,
    "c" * 300_000,
    *SESSION_IDS,
)
_BOUNDS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}

TEXTS: Final = st.sampled_from(_TEXTS) | st.text(max_size=20)
INTS: Final = st.sampled_from(_INTS) | st.integers(-4, 40)
FLOATS: Final = st.sampled_from(_FLOATS) | st.floats()
BYTES: Final = st.one_of(
    st.binary(max_size=40),
    st.sampled_from((b"\x80\x04\x95", b"\xff" * 64, b"\0" * 6, b"\x02\0" + b"\0" * 12)),
    st.sampled_from(LENGTHS).map(lambda size: b"\x01" * size),
)
_KINDS: Final = {
    FieldDescriptor.CPPTYPE_STRING: TEXTS,
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-1, 6) | st.just(2**31 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: FLOATS,
    FieldDescriptor.CPPTYPE_FLOAT: FLOATS,
}


def scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in _BOUNDS:
        low, high = _BOUNDS[kind]
        return INTS.filter(lambda value: low <= value <= high)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return BYTES
    return _KINDS[kind]


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor) -> Message:
    """A message with a random subset of its fields, each with any value that the field can hold."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw(st.booleans()):
            put(draw, message, field)
    return message


def put(draw: st.DrawFn, message: Message, field: FieldDescriptor) -> None:
    message.ClearField(field.name)
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        key, value = inner.fields_by_name["key"], inner.fields_by_name["value"]
        numbers = range(draw(st.sampled_from((1, 2, limits.LOGIT_BIAS_ENTRIES_MAX + 1))))
        entries = getattr(message, field.name)
        first, more = draw(scalars(key)), draw(scalars(value))
        entries.update({min(first, 2**31 - 2000) + number: more for number in numbers})
    elif field.is_repeated:
        entries = getattr(message, field.name)
        values = scalars(field) if inner is None else messages(inner)
        if draw(st.integers(0, 3)):
            entries.extend(draw(st.lists(values, max_size=4)))
            return
        value, number = draw(values), draw(st.sampled_from(LENGTHS))
        size = len(value) if isinstance(value, str | bytes) else getattr(value, "ByteSize", int)()
        entries.extend([value] * min(number, 2**21 // max(1, size)))
    elif inner is not None:
        getattr(message, field.name).CopyFrom(draw(messages(inner)))
    else:
        setattr(message, field.name, draw(scalars(field)))


@st.composite
def mutated(draw: st.DrawFn, valid: st.SearchStrategy[Message]) -> Message:
    """A valid message in which up to three fields, at any depth, are replaced by hostile values."""
    message = draw(valid)
    for _ in range(draw(st.integers(0, 3)) if message.DESCRIPTOR.fields else 0):
        place: Any = message
        for _ in range(4):
            field = draw(st.sampled_from(tuple(place.DESCRIPTOR.fields)))
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                put(draw, place, field)
                break
            found = getattr(place, field.name)
            if field.is_repeated:
                found = found[0] if found else None
            if found is None or not found.DESCRIPTOR.fields or draw(st.integers(0, 3)) == 0:
                put(draw, place, field)
                break
            place = found
    return message


@st.composite
def broken(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """The bytes of a valid message, truncated, extended, doubled or partly changed."""
    data = bytearray(draw(valid))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 4)):
            case 0:
                del data[place:]
            case 1:
                data[place:place] = draw(st.binary(min_size=1, max_size=12))
            case 2:
                data[place : place + 1] = bytes([draw(st.integers(0, 255))])
            case 3:
                data += data[: 2**20]
            case _:
                del data[place : place + draw(st.integers(1, 8))]
    return bytes(data)
