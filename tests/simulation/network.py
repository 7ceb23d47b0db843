"""What lies between processes: messages travel, unless a direction is cut."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from outrider.errors import LinkLost, OutriderError, Unavailable, check
from outrider.messages import ReplicaDescription
from outrider.wire.link import Connection, ReplicaService
from outrider.wire.memory_link import MemoryLink

from .adversary import TRAVEL_S, Adversary
from .processes import Process, current

T = TypeVar("T")
Item = TypeVar("Item")
Answer = TypeVar("Answer")
Message = Callable[[], object]


class Cut:
    """A direction in which nothing goes. What is sent is lost, or arrives when it is over, as by
    TCP, which sends it again."""

    def __init__(self, pairs: list[tuple[Process, Process]], loses: bool) -> None:
        """`pairs` are (from, to)."""
        self.pairs = pairs
        self._loses = loses
        self._held: list[tuple[Process, Message]] = []

    def stop(self, receiver: Process, message: Message) -> None:
        """A message that would go this way."""
        if not self._loses:
            self._held.append((receiver, message))

    def heard(self) -> list[tuple[Process, Message]]:
        """What arrives once it is over."""
        held, self._held = self._held, []
        return held


class Network:
    """Carries messages from the process that runs to others, and runs them there."""

    def __init__(self, adversary: Adversary) -> None:
        self.adversary = adversary
        self._cuts: dict[tuple[str, str], list[Cut]] = defaultdict(list)
        """By the names of (from, to): who is started anew under one is as cut off."""

    def cut(self, cut: Cut) -> None:
        """From now on, until it is healed."""
        for sender, receiver in cut.pairs:
            self._cuts[sender.name, receiver.name].append(cut)

    def heal(self, cut: Cut) -> None:
        """It is over; another cut may still be there."""
        for sender, receiver in cut.pairs:
            self._cuts[sender.name, receiver.name].remove(cut)
        for receiver, message in cut.heard():
            self._arrive(receiver, message, TRAVEL_S)

    def post(self, receiver: Process, message: Message) -> None:
        """One message of a stream: it may be late, lost or doubled."""
        for travel_s in self.adversary.travels():
            self.carry(receiver, message, travel_s)

    def carry(self, receiver: Process, message: Message, travel_s: float = TRAVEL_S) -> None:
        """One that only a cut keeps from arriving, or a death."""
        sender = current()
        if sender is not None:
            if sender.is_dead:
                return
            cuts = self._cuts.get((sender.name, receiver.name))
            if cuts:
                cuts[0].stop(receiver, message)
                return
        self._arrive(receiver, message, travel_s)

    async def call(self, receiver: Process, act: Callable[[], T]) -> T:
        """What `act`, which does not wait, returns or raises over there. May never return: the
        caller has the time-out."""
        caller = current()
        check(caller is not None, "only processes call")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(result: T | None, error: OutriderError | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def arrive() -> None:
            result, failure = None, None
            try:
                result = act()
            except OutriderError as error:
                failure = error
            self.carry(caller, lambda: settle(result, failure))  # type: ignore[arg-type]

        self.carry(receiver, arrive)
        return await answer

    def _arrive(self, receiver: Process, message: Message, travel_s: float) -> None:
        if not receiver.is_dead:
            loop = asyncio.get_running_loop()
            loop.call_later(travel_s, message, context=receiver.context)


class Wire(MemoryLink[Item, Answer], Generic[Item, Answer]):
    """A coordinator's link to whoever serves at an address."""

    def __init__(self, network: Network, coordinator: Process, address: str) -> None:
        """Nobody serves there before `lead`."""
        self.address = address
        self.coordinator = coordinator
        self.replica: Process | None = None
        self._network = network
        nobody: Any = None
        super().__init__(nobody, self._post)
        self._unreachable = LinkLost("nobody is there")

    def lead(self, replica: Process, service: ReplicaService[Item, Answer]) -> None:
        """This one serves there now, or can be reached again."""
        if replica is self.replica:
            self.restore()
            return
        self.replica = replica
        self.restore(_Remote(self._network, replica, service))

    def hang_up(self, reason: str, *, reachable: bool = False) -> None:
        """The coordinator hears that the stream has broken, as soon as it runs."""
        loop = asyncio.get_running_loop()
        loop.call_soon(
            lambda: self.sever(LinkLost(reason), reachable=reachable),
            context=self.coordinator.context,
        )

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        await asyncio.sleep(0)
        replica, service = self.replica, self._service
        if self._unreachable is not None or self._closed or replica is None:
            raise Unavailable(f"nobody answers at {self.address}")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._network.call(replica, service.describe)
        except TimeoutError:
            raise Unavailable(f"{self.address} does not answer") from None

    def _post(self, message: Callable[[], None]) -> None:
        if self.replica is not None:
            is_answer = current() is self.replica
            self._network.post(self.coordinator if is_answer else self.replica, message)


class _Remote(Generic[Item, Answer]):
    """A replica's service, as a link of another process may call it."""

    def __init__(
        self, network: Network, replica: Process, service: ReplicaService[Item, Answer]
    ) -> None:
        self._network = network
        self._replica = replica
        self._service = service

    def connect(self, send: Any) -> Connection[Item]:
        return _RemoteConnection(self._network, self._replica, self._service.connect(send))

    def describe(self) -> ReplicaDescription:
        return self._service.describe()

    def release(self, session_id: str, epoch: int) -> None:
        self._service.release(session_id, epoch)


class _RemoteConnection(Generic[Item]):
    def __init__(self, network: Network, replica: Process, inner: Connection[Item]) -> None:
        self._network = network
        self._replica = replica
        self._inner = inner
        self.receive = inner.receive

    def close(self) -> None:
        self._network.carry(self._replica, self._inner.close)
