"""A look at a long message before it is decoded. Protobuf decodes a whole message at once, and so
blocks the event loop: for 0.2 s if 8 MiB consist of the smallest submessages."""

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from outrider import limits
from outrider.errors import BadRequest, TooLarge

_NOT_PACKED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def check_fields(data: bytes, kind: Descriptor) -> None:
    """Raises `TooLarge` if a message of the type `kind` has too many fields, or too many bytes of
    numbers in lists. Fields of submessages count, except in submessages that consist of single
    values. Raises `BadRequest` if the data are no message."""
    _Fields(data).walk(kind, 0, len(data))


class _Fields:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_left = limits.GRPC_FIELDS_MAX
        self._num_bytes_left = limits.GRPC_NUMBERS_BYTES_MAX

    def walk(self, kind: Descriptor, at: int, end: int) -> None:
        """Walks through the fields of a message, which takes the bytes from `at` to `end`."""
        while at < end:
            self._num_left -= 1
            if self._num_left < 0:
                most = limits.GRPC_FIELDS_MAX
                raise TooLarge(
                    f"message: has more than {most} fields; shorten its lists", "message_fields"
                )
            tag, at = self._number(at)
            match tag & 7:  # the wire type
                case 0:
                    _, at = self._number(at)
                case 1:
                    at += 8
                case 2:
                    length, at = self._number(at)
                    if at + length > end:
                        raise BadRequest("message", "has a field that is longer than itself")
                    self._field(kind.fields_by_number.get(tag >> 3), at, length)
                    at += length
                case 5:
                    at += 4
                case _:
                    raise BadRequest("message", "has a field of an unknown wire type")

    def _field(self, field: FieldDescriptor | None, at: int, length: int) -> None:
        if field is None:
            return
        if (kind := field.message_type) is not None:
            if any(inner.message_type is not None or inner.is_repeated for inner in kind.fields):
                self.walk(kind, at, at + length)
        elif field.type not in _NOT_PACKED:
            self._num_bytes_left -= length
            if self._num_bytes_left < 0:
                most = limits.GRPC_NUMBERS_BYTES_MAX
                raise TooLarge(
                    f"message: has more than {most} bytes of numbers; shorten its lists",
                    "message_fields",
                )

    def _number(self, at: int) -> tuple[int, int]:
        """Returns a varint, and the place after it."""
        value = shift = 0
        for byte in self._data[at : at + 10]:
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise BadRequest("message", "has a number that does not end")
