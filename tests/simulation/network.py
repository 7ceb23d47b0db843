"""What lies between processes: messages travel, unless a direction is cut."""

from __future__ import annotations

import asyncio
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from rounds import SeverableLink

from outrider.drafters.drafter import DraftDeadline
from outrider.errors import LinkLost, OutriderError, Unavailable, check
from outrider.messages import ReplicaDescription
from outrider.transport.link import Connection, ReplicaService
from tests.simulation.adversary import TRAVEL_S, Adversary
from tests.simulation.processes import Process, current, deliver

T = TypeVar("T")
Item = TypeVar("Item")
Answer = TypeVar("Answer")
Message = Callable[[], object]
MESSAGE_BYTES = 60
"""Of a message without content: headers."""


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


class _Sizer(pickle.Pickler):
    """Writes what a message contains, without what its receiver adds to it."""

    def reducer_override(self, value: Any) -> Any:
        return (str, ()) if isinstance(value, DraftDeadline) else NotImplemented


class SlowLink:
    """A direction in which messages take turns: each takes its size over the bandwidth."""

    def __init__(self, sender: Process, receiver: Process, bytes_per_s: float) -> None:
        self.ends = sender.name, receiver.name
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def wait_s(self, payload: object) -> float:
        """How long a message with this content takes that is sent now."""
        now = asyncio.get_running_loop().time()
        file = io.BytesIO()
        _Sizer(file).dump(payload)
        size = MESSAGE_BYTES + file.tell()
        self._free_at = max(self._free_at, now) + size / self._bytes_per_s
        return self._free_at - now


class Network:
    """Carries messages from the process that runs to others, and runs them there."""

    def __init__(self, adversary: Adversary) -> None:
        self.adversary = adversary
        self._slow: dict[tuple[str, str], SlowLink] = {}
        self._cuts: dict[tuple[str, str], list[Cut]] = defaultdict(list)
        """By the names of (from, to): who is started anew under one is as cut off."""
        self.last_arrival_at = 0.0
        """When the last of the messages under way arrives, on the loop's clock."""

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

    def slow_down(self, link: SlowLink) -> None:
        """From now on, in place of another one between the same ends."""
        self._slow[link.ends] = link

    def speed_up(self, link: SlowLink) -> None:
        """It is as fast as others again; what it has begun to carry still takes its time."""
        if self._slow.get(link.ends) is link:
            del self._slow[link.ends]

    def post(self, receiver: Process, message: Message, payload: object = None) -> None:
        """One message of a stream: it may be late, lost or doubled."""
        for travel_s in self.adversary.travels():
            self.carry(receiver, message, travel_s, payload)

    def carry(
        self,
        receiver: Process,
        message: Message,
        travel_s: float = TRAVEL_S,
        payload: object = None,
    ) -> None:
        """One that only a cut keeps from arriving, or a death. `payload` is what it contains, of
        which its size is taken."""
        sender = current()
        if sender is not None:
            if sender.is_dead:
                return
            cuts = self._cuts.get((sender.name, receiver.name))
            if cuts:
                cuts[0].stop(receiver, message)
                return
            if self._slow:
                link = self._slow.get((sender.name, receiver.name))
                travel_s += link.wait_s(payload) if link is not None else 0.0
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
            self.last_arrival_at = max(self.last_arrival_at, loop.time() + travel_s)
            loop.call_later(travel_s, deliver, message, context=receiver.context)


class Wire(SeverableLink[Item, Answer], Generic[Item, Answer]):
    """A coordinator's link to whoever serves at an address."""

    def __init__(self, network: Network, coordinator: Process, address: str) -> None:
        """Nobody serves there before `lead`."""
        self.address = address
        self.coordinator = coordinator
        self.replica: Process | None = None
        self._network = network
        self._payload: object = None
        """Content of the message that is being sent."""
        nobody: Any = None
        super().__init__(nobody, self._post)
        self._unreachable = LinkLost("nobody is there")

    def lead(self, replica: Process, service: ReplicaService[Item, Answer]) -> None:
        """This one serves there now, or can be reached again."""
        if replica is self.replica:
            self.restore()
            return
        self.replica = replica
        self.restore(_Remote(self._network, replica, service, self._telling))

    def send(self, item: Item) -> None:
        self._payload = item
        super().send(item)
        self._payload = None

    def _telling(self, send: Callable[[Sequence[Answer]], None]) -> Any:
        """`send` of a stream's answers, of which the sizes are known."""

        def told(answers: Sequence[Answer]) -> None:
            self._payload = answers
            send(answers)
            self._payload = None

        return told

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
            receiver = self.coordinator if is_answer else self.replica
            self._network.post(receiver, message, self._payload)


class _Remote(Generic[Item, Answer]):
    """A replica's service, as a link of another process may call it."""

    def __init__(
        self,
        network: Network,
        replica: Process,
        service: ReplicaService[Item, Answer],
        telling: Callable[[Any], Any],
    ) -> None:
        self._network = network
        self._replica = replica
        self._service = service
        self._telling = telling

    def connect(self, send: Any) -> Connection[Item]:
        inner = self._service.connect(self._telling(send))
        return _RemoteConnection(self._network, self._replica, inner)

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
