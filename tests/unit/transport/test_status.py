"""Errors survive a gRPC status, and every kind keeps its meaning."""

import logging
from collections import Counter
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest

from coordinator.http_api.reading import error_response
from outrider import errors
from outrider.foundation import refusals
from outrider.limits import ERROR_MESSAGE_CHARS_MAX
from outrider.transport.status import abort, status_to_error


async def through_grpc(error: Exception) -> errors.OutriderError:
    context = AsyncMock()
    await abort(context, error, "Target.Verify")
    code, details, metadata = context.abort.await_args.args
    return status_to_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details, None))


@pytest.mark.parametrize(
    "error",
    [
        errors.BadRequest("sampling.top_p", "2.0 is not in (0, 1]"),
        errors.Unauthenticated("no key"),
        errors.PermissionDenied("not yours"),
        errors.NotFound("gone"),
        errors.Incompatible("other weights"),
        errors.StaleEpoch("taken over"),
        errors.DataLoss("lost"),
        errors.DeadlineExceeded("late"),
        errors.Overloaded("full", 250),
        errors.Unavailable("no target", 1500),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_every_error_comes_back_as_itself(error: errors.OutriderError) -> None:
    back = await through_grpc(error)
    assert type(back) is type(error)
    assert back.message == error.message
    assert vars(back) == vars(error)


async def test_refusals_are_counted_by_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "REFUSALS", counted := Counter[str]())
    await through_grpc(errors.Overloaded("full", limit="places"))
    await through_grpc(errors.TooLarge("long", "bytes"))
    error_response(errors.Overloaded("full", limit="places"))
    await through_grpc(errors.Overloaded("internal"))
    await through_grpc(errors.Unavailable("away"))
    assert counted == {"places": 2, "bytes": 1}


async def test_a_bug_is_internal_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        back = await through_grpc(KeyError("secret"))
        own = await through_grpc(errors.InvariantError("tables disagree"))
    assert (back.grpc_code, own.grpc_code) == (13, 13)
    assert "secret" not in back.message
    assert "Target.Verify" in back.message
    assert "KeyError: 'secret'" in caplog.text
    assert "tables disagree" in caplog.text


async def test_long_messages_are_cut() -> None:
    back = await through_grpc(errors.BadRequest("f" * 5000, "x" * 50_000))
    assert isinstance(back, errors.BadRequest)
    assert len(back.field) == ERROR_MESSAGE_CHARS_MAX
    assert len(back.message) <= 2 * ERROR_MESSAGE_CHARS_MAX + 2


def test_details_of_strangers_do_no_harm() -> None:
    metadata: Any = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    code = grpc.StatusCode.UNAVAILABLE
    error = status_to_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, "down", None))
    assert (type(error), error.message) == (errors.Unavailable, "down")
