"""What lies between processes: messages travel, unless a direction is cut."""

from __future__ import annotations

import asyncio
import io
import pickle  # noqa: TID251 (it only measures)
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from rounds import SeverableLink

from outrider.drafters.drafter import DraftDeadline
from outrider.errors import LinkLost, OutriderError, Unavailable
from outrider.messages import ReplicaDescription
from outrider.transport.link import ReplicaService
from tests.simulation.processes import Process, current, deliver

T = TypeVar("T")
Message = Callable[[], object]
MESSAGE_BYTES = 60
TRAVEL_S = 0.0002
"""Of a message that nothing happens to."""


@dataclass(frozen=True)
class Odds:
    """How often what happens: probabilities per message or call."""

    drop: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    store_failure: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random) -> Odds:
        wildness = rng.choice((0.3, 1.0, 2.0))
        return cls(*(share * wildness for share in (0.02, 0.10, 0.05, 0.10, 0.05)))


CALM = Odds()
NOISE = frozenset(("drop", "delay", "duplicate", "reorder", "store"))
"""All kinds of what happens to one of them."""


class Adversary:
    """Draws all harm. `faults` counts what was done."""

    def __init__(self, rng: random.Random, odds: Odds) -> None:
        self.rng = rng
        self.odds = odds
        self.faults: Counter[str] = Counter()

    def travels(self) -> list[float]:
        """How long each copy of a message travels that is sent now: none where it is lost."""
        rng, odds = self.rng, self.odds
        if odds is CALM:
            return [TRAVEL_S]
        if rng.random() < odds.drop:
            self.faults["drop"] += 1
            return []
        travel_s = TRAVEL_S
        if rng.random() < odds.reorder:
            self.faults["reorder"] += 1
            travel_s += rng.uniform(0.0, 0.005)
        if rng.random() < odds.delay:
            self.faults["delay"] += 1
            travel_s += rng.expovariate(1 / 0.1)
        if rng.random() < odds.duplicate:
            self.faults["duplicate"] += 1
            return [travel_s, travel_s + rng.expovariate(1 / 0.05)]
        return [travel_s]

    def call_fails(self) -> bool:
        """Whether this half of a call of the store, its question or its answer, is lost."""
        odds = self.odds
        failed = odds is not CALM and self.rng.random() < odds.store_failure / 2
        if failed:
            self.faults["store"] += 1
        return failed


@dataclass(eq=False)
class Cut:
    """Directions, (from, to), in which nothing goes. What is sent is lost, or arrives when it is
    over, as by TCP, which sends it again."""

    pairs: list[tuple[Process, Process]]
    loses: bool
    held: list[tuple[Process, Message]] = field(default_factory=list)


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
        for sender, receiver in cut.pairs:
            self._cuts[sender.name, receiver.name].append(cut)

    def heal(self, cut: Cut) -> None:
        """It is over; another cut may still be there."""
        for sender, receiver in cut.pairs:
            self._cuts[sender.name, receiver.name].remove(cut)
        for receiver, message in cut.held:
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
                if not cuts[0].loses:
                    cuts[0].held.append((receiver, message))
                return
            if self._slow:
                link = self._slow.get((sender.name, receiver.name))
                travel_s += link.wait_s(payload) if link is not None else 0.0
        self._arrive(receiver, message, travel_s)

    async def call(self, receiver: Process, act: Callable[[], T]) -> T:
        """What `act`, which does not wait, returns or raises over there. May never return: the
        caller has the time-out."""
        caller: Any = current()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            settle: Any
            try:
                settle = partial(answer.set_result, act())
            except OutriderError as error:
                settle = partial(answer.set_exception, error)
            self.carry(caller, lambda: answer.done() or settle())

        self.carry(receiver, arrive)
        return await answer

    def _arrive(self, receiver: Process, message: Message, travel_s: float) -> None:
        if not receiver.is_dead:
            loop = asyncio.get_running_loop()
            self.last_arrival_at = max(self.last_arrival_at, loop.time() + travel_s)
            loop.call_later(travel_s, deliver, message, context=receiver.context)


class Wire(SeverableLink):
    """A coordinator's link to whoever serves at an address."""

    def __init__(self, network: Network, coordinator: Process, address: str) -> None:
        self.address = address
        self.coordinator = coordinator
        self.replica: Process | None = None
        self._network = network
        self._payload: object = None
        """Content of the message that is being sent."""
        nobody: Any = None
        super().__init__(nobody, self._post)
        self._unreachable = LinkLost("nobody is there")

    def lead(self, replica: Process, service: ReplicaService) -> None:
        """This one serves there now, or can be reached again."""
        if replica is self.replica:
            self.restore()
            return
        self.replica = replica
        connect = partial(self.connect_to, replica, service.connect)
        remote: Any = SimpleNamespace(
            connect=connect, describe=service.describe, release=service.release
        )
        self.restore(remote)

    def send(self, item: Any) -> None:
        self._payload = item
        super().send(item)
        self._payload = None

    def connect_to(self, replica: Process, connect: Any, send: Any) -> Any:
        """A connection to a replica's service, of whose answers the sizes are known, too."""

        def told(answers: Sequence[Any]) -> None:
            self._payload = answers
            send(answers)
            self._payload = None

        inner = connect(told)
        close = partial(self._network.carry, replica, inner.close)
        return SimpleNamespace(receive=inner.receive, close=close)

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
