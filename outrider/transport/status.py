"""Maps Outrider's errors to gRPC statuses with details, and back."""

import logging

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.errors import BadRequest, OutriderError, Overloaded, Unavailable, error_from_code
from outrider.foundation.refusals import count_refusal
from outrider.limits import ERROR_MESSAGE_CHARS_MAX

logger = logging.getLogger(__name__)

_INTERNAL = 13


def error_to_status(error: OutriderError) -> status_pb2.Status:
    """Returns the google.rpc.Status of an error. The details are the field of a `BadRequest`, or
    the retry delay of an `Overloaded` or `Unavailable`. Long texts are cut."""
    status = status_pb2.Status(
        code=error.grpc_code, message=error.message[:ERROR_MESSAGE_CHARS_MAX]
    )
    if isinstance(error, BadRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field[:ERROR_MESSAGE_CHARS_MAX],
            description=error.reason[:ERROR_MESSAGE_CHARS_MAX],
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    elif isinstance(error, Overloaded | Unavailable):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


async def abort(
    context: grpc.aio.ServicerContext[bytes, bytes], error: Exception, method: str
) -> None:
    """Ends a call with the status of `error`, or with INTERNAL if `error` is no `OutriderError`.
    Logs the traceback of an INTERNAL error. Always raises, because `context.abort` raises."""
    if getattr(error, "grpc_code", _INTERNAL) == _INTERNAL:
        logger.error("%s failed", method, exc_info=error)
    if not isinstance(error, OutriderError):
        error = OutriderError(f"internal error in {method}; the server's log has its traceback")
    count_refusal(error)
    status = rpc_status.to_status(error_to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def status_to_error(error: grpc.aio.AioRpcError) -> OutriderError:
    """Returns the error that the server raised, or `Unavailable` if no server answered."""
    code: int = error.code().value[0]
    plain = error_from_code(code, error.details() or error.code().name)
    try:
        # `from_call` uses only methods that an `AioRpcError` has, too.
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except (DecodeError, ValueError):
        logger.warning("a server sent status details that cannot be read")
        return plain
    for detail in () if status is None else status.details:
        bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            violation = bad_request.field_violations[0]
            return BadRequest(violation.field, violation.description)
        if detail.Unpack(retry) and isinstance(plain, Overloaded | Unavailable):
            plain.retry_after_ms = retry.retry_delay.ToMilliseconds()
    return plain
