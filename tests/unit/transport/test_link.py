"""The in-process link: what a courier may do to messages, and what breaks do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

import pytest
from rounds import Listener, SeverableLink, make_head

from outrider.errors import LinkLost, Unavailable
from outrider.messages import Refused, ReplicaDescription, VerifyAnswer, VerifyItem
from outrider.transport.grpc_link import target_link
from outrider.transport.link import MemoryLink

DESCRIPTION = ReplicaDescription("m", "", "", 8, "float32", 0, (), 1)


class Echo:
    """A service that refuses every item at once, and counts."""

    def __init__(self) -> None:
        self.connections: list[EchoConnection] = []
        self.released: list[tuple[str, int]] = []

    def connect(self, send: Callable[[Sequence[VerifyAnswer]], None]) -> EchoConnection:
        self.connections.append(EchoConnection(send))
        return self.connections[-1]

    def describe(self) -> ReplicaDescription:
        return DESCRIPTION

    def release(self, session_id: str, epoch: int) -> None:
        self.released.append((session_id, epoch))


class EchoConnection:
    def __init__(self, send: Callable[[Sequence[VerifyAnswer]], None]) -> None:
        self._send = send
        self.rounds: list[int] = []
        self.closed = False

    def receive(self, items: Sequence[VerifyItem]) -> None:
        self.rounds.extend(item.head.round for item in items)
        self._send([Refused(item.head.key, 1, "echo") for item in items])

    def close(self) -> None:
        self.closed = True


def item(round_index: int) -> VerifyItem:
    return VerifyItem(make_head((1,), round_index=round_index))


async def test_a_courier_may_drop_repeat_and_reorder_both_ways() -> None:
    """The courier holds each message; called twice it arrives twice, never called it is lost."""
    held: list[Callable[[], None]] = []
    service = Echo()
    link: MemoryLink[VerifyItem, VerifyAnswer] = MemoryLink(service, held.append)
    heard = Listener(link)
    for round_index in range(3):
        link.send(item(round_index))
    first, _, third = held
    held.clear()
    for message in (third, first, third):
        message()
    assert service.connections[0].rounds == [2, 0, 2]
    held[1]()
    held[0]()
    held[0]()
    assert [answer.key.round for answer in heard.answers] == [0, 2, 2]
    link.release("s", 4)
    assert service.released == []
    held[-1]()
    assert service.released == [("s", 4)]


async def test_a_severed_stream_loses_what_is_on_its_way_and_reopens() -> None:
    held: list[Callable[[], None]] = []
    service = Echo()
    link: SeverableLink[VerifyItem, VerifyAnswer] = SeverableLink(service, held.append)
    heard = Listener(link)
    link.send(item(0))
    held[0]()
    link.send(item(1))
    link.sever(ConnectionError("cut"))
    assert service.connections[0].closed
    for message in held:
        message()
    await heard.wait(num_lost=1)
    assert heard.answers == []
    assert isinstance(heard.lost[0], LinkLost)
    link.send(item(2))
    held[-1]()
    held[-1]()
    assert [connection.rounds for connection in service.connections] == [[0], [2]]
    assert [answer.key.round for answer in heard.answers] == [2]
    assert len(heard.lost) == 1


async def test_who_asks_hears_that_it_is_closed() -> None:
    """And is not cancelled, as closing a channel looks to its calls."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        link = target_link(f"127.0.0.1:{silent.getsockname()[1]}")
        asking = asyncio.create_task(link.describe(30.0))
        accepted, _ = await asyncio.get_running_loop().sock_accept(silent)
        await link.close()
        with pytest.raises(Unavailable, match="closed"):
            await asking
        with pytest.raises(Unavailable, match="closed"):
            await link.describe(1.0)
        accepted.close()
