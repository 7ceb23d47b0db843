"""Which rpcs a server answers, and when it gives up a client that does not take the messages of an
answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from outrider import limits
from outrider.errors import InvariantError, Unavailable
from outrider.transport.codec import VERIFY
from outrider.transport.server import Context, Service, _writing

STUCK_S = 0.05


class Client:
    """The context of a call whose client takes each message in its own way."""

    def __init__(self, *takes: Callable[[], Awaitable[None]]) -> None:
        self._takes = iter(takes)

    async def send_initial_metadata(self, metadata: Any) -> None:
        assert not metadata

    async def write(self, message: bytes) -> None:
        await next(self._takes)()

    async def answer(self, *pauses_s: float) -> None:
        """Answers with a message after each pause."""
        async with _writing(cast("Context", self)) as write:
            for pause_s in pauses_s:
                await asyncio.sleep(pause_s)
                await write(b"message")


async def takes_it() -> None:
    pass


async def takes_nothing() -> None:
    await asyncio.Event().wait()


async def breaks_off() -> None:
    raise ConnectionResetError


async def takes_it_at_the_last_moment() -> None:
    """The event loop is so late that it learns in one turn that the message is taken, and that the
    time is over."""
    taken = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.call_later(0.5 * STUCK_S, taken.set)
    loop.call_soon(time.sleep, 2 * STUCK_S)
    await taken.wait()


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRPC_STUCK_WRITE_S", STUCK_S)


async def test_a_client_that_takes_no_message_is_given_up() -> None:
    with pytest.raises(Unavailable, match="took no data"):
        await Client(takes_it, takes_nothing).answer(0.0, 0.0)


async def test_the_time_between_messages_does_not_count() -> None:
    await Client(takes_it, takes_it, takes_it).answer(0.0, 1.5 * STUCK_S, 1.5 * STUCK_S)


async def test_a_message_that_is_taken_at_the_last_moment_is_taken() -> None:
    await Client(takes_it_at_the_last_moment, takes_it, takes_it).answer(0.0, 0.0, 1.5 * STUCK_S)


async def test_a_client_that_breaks_off_is_not_late() -> None:
    with pytest.raises(ConnectionResetError):
        await Client(takes_it, breaks_off).answer(0.0, 0.0)


async def test_a_write_that_failed_no_longer_counts() -> None:
    async with _writing(cast("Context", Client(breaks_off, takes_it))) as write:
        with pytest.raises(ConnectionResetError):
            await write(b"lost")
        await asyncio.sleep(1.5 * STUCK_S)
        await write(b"message")


def test_each_rpc_of_a_service_is_answered() -> None:
    with pytest.raises(InvariantError, match=r"the rpcs of outrider.v1.Target are .*Verify"):
        Service(VERIFY.service, {})
