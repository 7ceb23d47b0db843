"""A whole deployment in one event loop on a virtual clock: fleet, replicas, Redis, clients, and the
network between them. Every process runs the real code."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from coordinator.decoding.loop import COMMIT_GRACE_S
from outrider.client import Client
from outrider.client.failover import EndpointPool, ResumingTransport
from outrider.config.deployment import DraftConfig, load_config
from outrider.drafters.lookup import LookupDrafter, NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.errors import InvariantError, OutriderError, StoreUnavailable, check
from outrider.fleet.ray_cluster import Demand
from outrider.fleet.replica_set import Fleet
from outrider.fleet.spec import FleetSpec, plan_fleet
from outrider.interfaces.request import GenerateRequest
from outrider.limits import SLOT_LEASE_MS
from outrider.registry.registry import LEASE_S, ROLES, Role
from outrider.telemetry.observer import Observation, RequestObserver
from tests.simulation import nodes
from tests.simulation.cancels import Cancels
from tests.simulation.network import Adversary, Network, Wire
from tests.simulation.processes import Process
from tests.simulation.redis_host import Redis
from tests.simulation.slots import LIMITED, SlotWatch

NUM_TARGETS = 2
REPLICAS_MAX = 3
"""Most replicas of a role that are ever wanted here."""
HASTY_SHARE = 0.2
"""Share of the seeds in which drafts have too little time for all that is asked of them."""
LOOK_UP_SHARE = 0.2
LOOK_UPS_ON = "coordinator", "target", "target"
LOOK_AHEADS = 0, 3
"""Numbers of outcomes for which drafts look ahead, equally often."""
FRONT_PORT = 50051
STOP_S = 1.0
CLOSING_S = COMMIT_GRACE_S + 0.1
"""By then everything that has just ended is closed."""
LEASE_ROUNDING_S = 0.001
"""Redis counts leases in ms."""
RESUME_TIMEOUT_S = 60.0
WHOLE_S_MAX = 90.0
"""Virtual seconds after the last fault in which the fleet must become whole again."""


@cache
def spec(num_coordinators: int, num_targets: int, with_ports: bool) -> FleetSpec:
    """Two drafts and some targets, which reuse the ports of those before them or take new ones."""
    settings = {
        "engine": "emulated:vocab_size=10",
        "draft_model": "emulated",
        "stop_timeout_s": STOP_S,
        "num_targets": num_targets,
        "num_drafts": 2,
        "num_coordinators": num_coordinators,
        "grpc_port": FRONT_PORT,
    }
    if with_ports:
        settings |= {"target_port": 7000, "draft_port": 8000}
    config = load_config(settings, {})
    return plan_fleet(config, config, 0.0, "d", local=True)


class CountedMoves(Observation, RequestObserver):
    """Counts moves of sessions to other replicas, and verdicts on other tokens than a session's."""

    def __init__(self) -> None:
        self.num_moves = self.num_mismatches = 0

    def begin(self, request: GenerateRequest, model: str, traceparent: str) -> RequestObserver:
        return self

    def count(self, name: str, *_: Any) -> None:
        self.num_moves += name == "session_moves"
        self.num_mismatches += name == "verdict_mismatches"


class World:
    def __init__(self, rng: random.Random, adversary: Adversary) -> None:
        self.rng = rng
        self.network = Network(adversary)
        self.redis = Redis(self.network)
        self.moves = CountedMoves()
        self.clients = Process("clients")
        self.calls: dict[nodes.Call, None] = {}
        self.shapes: Counter[str] = Counter()
        """What has happened to sessions besides faults."""
        self.cancels = Cancels(self.redis, self.shapes)
        self.broken: OutriderError | None = None
        """The first violation in any process, if any."""
        self.is_hasty = is_hasty = rng.random() < HASTY_SHARE
        self._services = nodes.HASTY if is_hasty else rng.choice(nodes.KINDS)
        shape = {
            "look_ahead": rng.choice(LOOK_AHEADS),
            "length_control": rng.random() < 0.5,
            "lookup": nodes.MODEL if is_hasty else rng.choice((nodes.MODEL, nodes.HYBRID)),
        }
        self._lookup: Callable[[], LookupDrafter] = NgramDrafter
        if not is_hasty and rng.random() < LOOK_UP_SHARE:
            shape |= {"lookup": DraftConfig(), "lookup_on": rng.choice(LOOK_UPS_ON)}
            # Look-ups have no look-ahead.
            self._lookup = SuffixDrafter if shape["look_ahead"] else NgramDrafter
        self._settings = replace(
            nodes.HASTY_SETTINGS if is_hasty else nodes.PATIENT_SETTINGS, **shape
        )
        self.looks_ahead = bool(self._settings.look_ahead)
        self._num_targets = 0
        """Number of targets so far. Every third has no look-up, as if of another version."""
        self._wires: list[Wire] = []
        self._serving: dict[str, nodes.Node] = {}
        self.machines = nodes.Machines(self, self._built)
        self._server = Process("server")
        self._servers = [self._server]
        self._operator = Process("operator")
        self._spec = spec(rng.choice((1, 2, 2, 2)), NUM_TARGETS, rng.random() < 0.3)
        self._cluster: Any = self.machines
        self.fleet = Fleet(self._cluster, self._spec, self.redis.registry())
        self._fleet_task: asyncio.Task[None] | None = None
        self.ports = [f"host:{FRONT_PORT + slot}" for slot in range(REPLICAS_MAX)]
        self.connect: Any = partial(nodes.PortTransport, self)
        self.client = self._client()
        self.limited = self._client(caller=LIMITED)
        self.slots = SlotWatch(self.redis)

    def _client(self, **options: Any) -> Client:
        connect, clock = partial(self.connect, **options), asyncio.get_running_loop().time
        pool = EndpointPool(",".join(self.ports), connect, clock, first=0)
        return Client(ResumingTransport(pool, RESUME_TIMEOUT_S, random=self.rng.random))

    def _built(self, demand: Demand) -> nodes.Node:
        if demand.role == "coordinator":
            return nodes.CoordinatorNode(demand.name, self._settings)
        build: Any = self._services[demand.role]
        if demand.role == "target":
            self._num_targets += 1
            build = partial(build, lookup=self._lookup if self._num_targets % 3 else None)
        return nodes.ReplicaNode(demand.role, demand.name, build)

    async def start(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._hear_exception)
        await self._server.start(self.fleet.start())
        self._fleet_task = self._server.start(self.fleet.run())

    async def restart_fleet(self, away_s: float) -> None:
        """Its process dies with whatever it was doing; another one takes over. Meanwhile there is
        none: Ray has one actor of a name."""
        if not self.has_fleet:
            return
        self._server.die()
        await asyncio.sleep(away_s)
        self._server = Process("server")
        self._servers.append(self._server)
        self.fleet = Fleet(self._cluster, self._spec, self.redis.registry())
        fleet = self.fleet

        async def run() -> None:
            await fleet.adopt()
            await fleet.run()

        self._fleet_task = self._server.start(run())

    async def want(self, counts: dict[Role, int]) -> None:
        """As `outrider scale` does, until Redis has the number."""
        while True:
            with suppress(StoreUnavailable):
                return await self._operator.start(self.redis.registry().want(counts))
            await asyncio.sleep(0.1)

    def serve(self, node: nodes.Node, address: str) -> None:
        self._serving[address] = node
        loop = asyncio.get_running_loop()
        for wire in self._wires:
            if wire.address == address:
                loop.call_soon(self._lead, wire, context=wire.coordinator.context)

    def link(self, coordinator: Process, address: str) -> Wire:
        """A coordinator's link to the replica at an address."""
        wire = Wire(self.network, coordinator, address)
        self._wires.append(wire)
        self._lead(wire)
        return wire

    def _lead(self, wire: Wire) -> None:
        node = self._serving.get(wire.address)
        if node is not None and not wire.coordinator.is_dead:
            wire.lead(node.process, node.service)

    def coordinator_at(self, address: str) -> nodes.CoordinatorNode | None:
        node = self._serving.get(address)
        return node if isinstance(node, nodes.CoordinatorNode) else None

    def silence(self, node: nodes.Node) -> None:
        for address in [where for where, one in self._serving.items() if one is node]:
            del self._serving[address]

    def hang_up(self, node: nodes.Node, reason: str) -> None:
        self.silence(node)
        for wire in self._wires:
            if wire.replica is node.process:
                wire.hang_up(reason)

    def break_calls(self, node: nodes.Node) -> None:
        for call in list(self.calls):
            if call.node is node:
                call.break_off()

    def break_wires(self, a: Process, b: Process, *, reachable: bool = False) -> None:
        """Streams between two processes break, because no messages pass, or only these streams
        do."""
        for wire in self._between(a, b):
            wire.hang_up("nothing came back", reachable=reachable)

    def mend_wires(self, a: Process, b: Process) -> None:
        loop = asyncio.get_running_loop()
        for wire in self._between(a, b):
            loop.call_soon(self._lead, wire, context=wire.coordinator.context)

    def _between(self, a: Process, b: Process) -> list[Wire]:
        return [wire for wire in self._wires if {wire.coordinator, wire.replica} == {a, b}]

    def bury(self, node: nodes.Node) -> None:
        """A node has died, and others learn of it as with TCP."""
        self.hang_up(node, "the process has died")
        self._wires = [wire for wire in self._wires if wire.coordinator is not node.process]
        self.break_calls(node)

    def hear_failure(self, error: OutriderError) -> None:
        """Notes a failure in a process, if it must not occur."""
        if isinstance(error, InvariantError) and self.broken is None:
            self.broken = error

    def look_at_slots(self) -> None:
        actors = self.machines.actors
        found = [one.node for one in actors if isinstance(one.node, nodes.CoordinatorNode)]
        self.slots.look(node for node in found if not node.process.is_dead)

    def _hear_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Notes exceptions of messages and timers. A failed call whose caller has gone is not a
        fault."""
        if "handle" in context:
            found = f"{context['message']}: {context.get('exception')!r}"
            self.hear_failure(InvariantError(found))

    def check(self) -> None:
        """Raises the first violation."""
        if self._fleet_task is not None:
            if self._fleet_task.done():
                self._fleet_task.result()
            if role := self.fleet.failed_role:
                self.hear_failure(InvariantError(f"the fleet has given up for want of a {role}"))
        broken = self.broken or self.redis.history.broken
        if broken is not None:
            raise broken
        num = self.moves.num_mismatches
        check(num == 0, f"{num} verdicts are on other tokens than their sessions")

    @property
    def actors(self) -> list[nodes.SimulatedActor]:
        leaders = [one.ranks[0] for one in self.fleet.replicas if one.address and one.ranks]
        return [one for one in leaders if not one.node.process.is_dead]  # type: ignore[attr-defined,misc]

    @property
    def operators(self) -> tuple[Process, Process]:
        """The fleet's process, and the one that sets how many replicas are wanted."""
        return self._server, self._operator

    @property
    def has_fleet(self) -> bool:
        return not self._server.is_dead

    def nodes(self, *roles: Role) -> Iterator[Any]:
        return (actor.node for actor in self.actors if actor.node.role in roles)

    async def whole(self) -> None:
        """Returns once there are as many replicas as are wanted, and all coordinators know exactly
        these."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + WHOLE_S_MAX
        while (lacking := self._lacking()) is not None:
            if loop.time() > give_up_at:
                raise InvariantError(f"the fleet is not whole: {lacking}")
            await asyncio.sleep(0.25)

    def _lacking(self) -> str | None:
        there = {role: {node.name for node in self.nodes(role)} for role in ROLES}
        for role, names in there.items():
            if not len(names) == self.fleet.wanted[role] == len(self.fleet.of(role)):
                return f"{self.fleet.wanted[role]} wanted, but of {role}s there are {names}"
        for node in self.nodes("target", "draft"):
            if node.is_stuck:
                return f"{node.name} has a step that never ends"
        for coordinator in self.nodes("coordinator"):
            for role in ("target", "draft"):
                if (known := coordinator.knows(role)) != there[role]:
                    return f"{coordinator.name} knows {known} of the {role}s {there[role]}"
        return None

    async def stop(self) -> None:
        """Stops all, and checks that nothing is left over."""
        await asyncio.sleep(CLOSING_S)
        if self.slots.is_used:
            # A request for a slot may reach Redis on a slow link after the slot was freed.
            await self._late_arrivals(SLOT_LEASE_MS / 1e3)
        self.slots.check_end(self.nodes("coordinator"))
        for node in self.nodes("coordinator"):
            node.check_work()
        for node in self.nodes(*ROLES):
            node.check_integrity()
        self.check()
        if self._fleet_task is not None:
            self._fleet_task.cancel()
            self._fleet_task = None
        await self._server.start(self.fleet.close())
        self.check()
        # An announcement on a slow link may reach Redis after its withdrawal.
        await self._late_arrivals(LEASE_S)
        registry = self.redis.registry()
        for role in ROLES:
            left = await self._operator.start(registry.records(role))
            check(not left, f"still announced: {left}")

    async def _late_arrivals(self, lease_s: float) -> None:
        """Waits until leases have ended that the messages now on their way begin."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(
            max(0.0, self.network.last_arrival_at - now) + lease_s + LEASE_ROUNDING_S
        )

    def clear_away(self) -> None:
        """Cancels everything that still runs."""
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        others = (*self._servers, self._operator, *self.redis.processes)
        for process in (*(one.node.process for one in self.machines.actors), *others):
            process.bury()
