"""The network between processes: messages travel, unless a direction is cut."""

from __future__ import annotations

import asyncio
import io
import pickle  # noqa: TID251 (only for measuring)
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from outrider.drafters.drafter import DraftDeadline
from outrider.errors import LinkLost, OutriderError, Unavailable
from outrider.interfaces.messages import ReplicaDescription
from outrider.transport.link import ReplicaService
from tests.simulation.processes import Process, current, deliver
from tests.support.rounds import SeverableLink

T = TypeVar("T")
Message = Callable[[], object]
MESSAGE_BYTES = 60
TRAVEL_S = 0.0002
"""Travel time of an undisturbed message."""


@dataclass(frozen=True)
class Odds:
    """Probabilities of disturbances, per message or call."""

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
"""Kinds of disturbances of single messages."""


class Adversary:
    """Draws all disturbances. `faults` counts them."""

    def __init__(self, rng: random.Random, odds: Odds) -> None:
        self.rng = rng
        self.odds = odds
        self.faults: Counter[str] = Counter()

    def travels(self) -> list[float]:
        """Travel times of the copies of a message that is sent now: none if it is lost."""
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
        """Whether this half of a call of the store, request or answer, is lost."""
        odds = self.odds
        failed = odds is not CALM and self.rng.random() < odds.store_failure / 2
        if failed:
            self.faults["store"] += 1
        return failed


@dataclass(eq=False)
class Cut:
    """Directions, (from, to), without messages. They are lost, or arrive when the cut is over, as
    with TCP, which sends them again."""

    pairs: list[tuple[Process, Process]]
    loses: bool
    held: list[tuple[Process, Message]] = field(default_factory=list)


class _Sizer(pickle.Pickler):
    """Pickles the contents of a message, without what its receiver adds."""

    def reducer_override(self, value: Any) -> Any:
        return (str, ()) if isinstance(value, DraftDeadline) else NotImplemented


class SlowLink:
    """A direction in which messages queue: each takes its size over the bandwidth."""

    def __init__(self, sender: Process, receiver: Process, bytes_per_s: float) -> None:
        self.ends = sender.name, receiver.name
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def wait_s(self, payload: object) -> float:
        """Time that a message with this content takes if sent now."""
        now = asyncio.get_running_loop().time()
        file = io.BytesIO()
        _Sizer(file).dump(payload)
        size = MESSAGE_BYTES + file.tell()
        self._free_at = max(self._free_at, now) + size / self._bytes_per_s
        return self._free_at - now


class Network:
    """Carries messages from the running process to others, and runs them there."""

    def __init__(self, adversary: Adversary) -> None:
        self.adversary = adversary
        self._slow: dict[tuple[str, str], SlowLink] = {}
        self._cuts: dict[tuple[str, str], list[Cut]] = defaultdict(list)
        """By the names of (from, to): a restarted process is still cut off."""
        self.last_arrival_at = 0.0
        """Arrival time of the last message under way, on the loop's clock."""

    def cut(self, cut: Cut) -> None:
        for sender, receiver in cut.pairs:
            self._cuts[sender.name, receiver.name].append(cut)

    def heal(self, cut: Cut) -> None:
        """Ends a cut; another one may remain."""
        for sender, receiver in cut.pairs:
            self._cuts[sender.name, receiver.name].remove(cut)
        for receiver, message in cut.held:
            self._arrive(receiver, message, TRAVEL_S)

    def slow_down(self, link: SlowLink) -> None:
        """Slows a direction down, replacing another slow link there."""
        self._slow[link.ends] = link

    def speed_up(self, link: SlowLink) -> None:
        """Ends it; messages under way still take their time."""
        if self._slow.get(link.ends) is link:
            del self._slow[link.ends]

    def post(self, receiver: Process, message: Message, payload: object = None) -> None:
        """Sends one message of a stream: it may be late, lost or doubled."""
        for travel_s in self.adversary.travels():
            self.carry(receiver, message, travel_s, payload)

    def carry(
        self,
        receiver: Process,
        message: Message,
        travel_s: float = TRAVEL_S,
        payload: object = None,
    ) -> None:
        """Sends a message that only a cut or a death keeps from arriving. Its size is that of
        `payload`."""
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
        """The result or error of `act`, run over there without waiting. May never return: the
        caller has a timeout."""
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
    """A coordinator's link to the replica that serves at an address."""

    def __init__(self, network: Network, coordinator: Process, address: str) -> None:
        self.address = address
        self.coordinator = coordinator
        self.replica: Process | None = None
        self._network = network
        self._payload: object = None
        """Content of the message being sent."""
        super().__init__(None, self._post)  # type: ignore[arg-type]
        self._unreachable = LinkLost("no replica is there")

    def lead(self, replica: Process, service: ReplicaService) -> None:
        """`replica` serves there now, or can be reached again."""
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
        """A connection to a replica's service that also tracks the sizes of answers."""

        def told(answers: Sequence[Any]) -> None:
            self._payload = answers
            send(answers)
            self._payload = None

        inner = connect(told)
        close = partial(self._network.carry, replica, inner.close)
        return SimpleNamespace(receive=inner.receive, close=close)

    def hang_up(self, reason: str, *, reachable: bool = False) -> None:
        """The coordinator learns that the stream has broken, as soon as it runs."""
        broken = partial(self.sever, LinkLost(reason), reachable=reachable)
        asyncio.get_running_loop().call_soon(broken, context=self.coordinator.context)

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        await asyncio.sleep(0)
        replica, service = self.replica, self._service
        if self._unreachable is not None or self._closed or replica is None:
            raise Unavailable(f"nothing answers at {self.address}")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._network.call(replica, service.describe)
        except TimeoutError:
            raise Unavailable(f"{self.address} does not answer") from None

    def _post(self, message: Callable[[], None]) -> None:
        if self.replica is not None:
            receiver = self.coordinator if current() is self.replica else self.replica
            self._network.post(receiver, message, self._payload)
