"""Simulated replicas: real services in processes, each with its lease; the clients' connections to
coordinators; and the cluster, which shows them as actors to a fleet."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from unittest.mock import AsyncMock, patch

from coordinator.auth.access_control import AccessControl
from coordinator.http_api.progress import RepeatedRequests
from coordinator.requests.validation import PromptEncoder
from coordinator.routing import draft_client, target_client
from coordinator.routing.discovery import Registered
from coordinator.service import CoordinatorService
from draft_service.model_drafter import ModelDrafter
from draft_service.service import DraftService
from outrider.client.transport import Method
from outrider.config.deployment import CoordinatorConfig, DraftConfig
from outrider.drafters.lookup import LookupDrafter, NgramDrafter
from outrider.errors import (
    DeadlineExceeded,
    InvariantError,
    OutriderError,
    StreamBroken,
    Unavailable,
    check,
)
from outrider.fleet.ray_cluster import Actor, Demand
from outrider.foundation import fair_turns
from outrider.foundation.api_keys import ANYBODY, Caller
from outrider.interfaces.engine import take_stated_seconds
from outrider.interfaces.messages import ProposalReply
from outrider.interfaces.request import Event, GenerateRequest, ResumeRequest, Started
from outrider.limits import LOST_REPLICA_GRACE_S
from outrider.registry.redis_registry import Lease
from outrider.registry.registry import Engagement, ReplicaRecord, Role
from outrider.replica.drivers import InlineDriver
from outrider.replica.ray_actor import ActorLocation
from outrider.replica.step_loop import Arrival, Release
from target_service.service import TargetService
from tests.simulation.keyed import KeyedRequest, Part, answer_once
from tests.simulation.processes import Process
from tests.simulation.shown import CheckedHead, KeepingEngine, PairEngine, pair_drafter
from tests.simulation.toy import SPEC, QuickEngine, UnevenEngine, toy_grammars, toy_text
from tests.support.pages import check_service
from tests.support.rounds import each_step

T = TypeVar("T")
PLACING_S = 0.05
LOADING_S = TARGET_LOADING_S = (0.01, 0.5)


class Node:
    """A replica's actor without gRPC."""

    def __init__(self, role: Role, name: str) -> None:
        self.role: Role = role
        self.name = name
        self.process = Process(name)
        self.service: Any = None
        self._lease: Lease | None = None
        self._engagement = Engagement()
        self._ended = asyncio.Event()

    async def _serve(self, config: Any, world: Any) -> str:
        """Starts the service, and returns its address."""
        raise NotImplementedError

    async def stop(self, grace_s: float, world: Any) -> None:
        """Ends the service."""
        raise NotImplementedError

    async def start(self, config: Any, world: Any) -> str:
        """Serves, and announces it. Raises `Unavailable` without a target."""
        address = await self._serve(config, world)
        begun = Engagement(address=address, member=config.membership)
        world.serve(self, address)
        self._lease = Lease(world.redis.registry(), lambda: self._record(address))
        await self._lease.start()
        self._engagement = begun
        return address

    def _record(self, address: str) -> ReplicaRecord:
        runs = self.service.description
        return ReplicaRecord(
            role=self.role,
            name=self.name,
            address=address,
            host="host",
            pid=1,
            model=runs.model,
            weights=runs.weights,
            leaving=self._engagement.leaving,
            load=len(self.service.sessions),
        )

    async def engagement(self) -> Engagement:
        return self._engagement

    async def wait(self) -> None:
        await self._ended.wait()

    def check_integrity(self) -> None:
        try:
            if self.service is not None:
                check_service(self.service)
        except (AssertionError, OutriderError) as error:
            error.add_note(f"of {self.name}")
            raise


class SimulatedActor(Actor):
    """An actor with a node. Calls of it always arrive while it lives."""

    def __init__(self, demand: Demand, node: Node, world: Any) -> None:
        super().__init__(demand.name, None)
        self.node = node
        self.location = ActorLocation(1, "host")
        self._world = world
        self._stopping: asyncio.Task[None] | None = None
        self._open: set[asyncio.Future[Any]] = set()

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        if self.node.process.is_dead:
            raise Unavailable(f"{self.name} has died")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open.add(answer)
        self.node.process.start(self._answer(answer, method, arguments))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise Unavailable(f"{self.name} does not answer {method}") from error
        finally:
            self._open.discard(answer)

    async def _answer(
        self, answer: asyncio.Future[Any], method: str, arguments: tuple[Any, ...]
    ) -> None:
        result = None
        try:
            if method == "start":
                limits = TARGET_LOADING_S if self.node.role == "target" else LOADING_S
                await asyncio.sleep(self._world.rng.uniform(*limits))
                result = await self.node.start(arguments[0], self._world)
            elif method == "prepare":
                await asyncio.sleep(LOADING_S[0])
            elif method == "stop":
                result = await self._stopped(arguments[0])
            elif method == "ping":
                result = self.location
            else:
                result = await getattr(self.node, method)()
        except OutriderError as error:
            self._world.hear_failure(error)
            if not answer.done():
                answer.set_exception(error)
        if not answer.done():
            answer.set_result(result)

    async def _stopped(self, grace_s: float) -> None:
        if self._stopping is None:
            self._stopping = self.node.process.start(self.node.stop(grace_s, self._world))
        await asyncio.shield(self._stopping)

    async def kill(self) -> None:
        self.die()

    def die(self) -> None:
        if self.node.process.is_dead:
            return
        self.node.process.die()
        self._world.bury(self.node)
        for answer in list(self._open):
            if not answer.done():
                answer.set_exception(Unavailable(f"{self.name} has died"))


class Machines:
    """A cluster with room for all actors."""

    def __init__(self, world: Any, build: Callable[[Demand], Node]) -> None:
        self.actors: list[SimulatedActor] = []
        self._world = world
        self._build = build
        self.head = asyncio.Event()
        """Set while Ray's head answers. Without it actors continue, but none is created, found or
        ended."""
        self.head.set()

    async def place(
        self, demands: Sequence[Demand], timeout_s: float, process_timeout_s: float
    ) -> list[list[Actor]]:
        await self.head.wait()
        await asyncio.sleep(PLACING_S)
        made = [SimulatedActor(demand, self._build(demand), self._world) for demand in demands]
        self.actors += made
        return [[one] for one in made]

    async def replicas(self) -> dict[str, list[Actor]]:
        await self.head.wait()
        return {one.name: [one] for one in self.actors if not one.node.process.is_dead}

    async def remove(self, actors: Sequence[Actor]) -> None:
        await self.head.wait()
        for actor in actors:
            await actor.kill()

    async def free_groups(self, kept: Collection[str] = ()) -> None:
        await self.head.wait()

    async def draining(self) -> frozenset[str]:
        await self.head.wait()
        return frozenset()


HEAD_STEP_S = 0.002
NUM_SEQUENCES = 3
"""Sequences in a step; sometimes fewer than there are sessions. The pages of `SPEC` do not suffice
for all of them either, so that some are preempted."""


def target_service(
    kind: type[QuickEngine] = QuickEngine,
    drafter: Any = None,
    *,
    lookup: Callable[[], LookupDrafter] | None = NgramDrafter,
) -> TargetService:
    engine = kind(SPEC, "target", NUM_SEQUENCES)
    return TargetService(
        engine,
        InlineDriver(partial(take_stated_seconds, engine)),
        max_num_seqs=NUM_SEQUENCES,
        self_drafter=None if drafter is None else drafter(SPEC, engine),
        clock=lambda: 0.0,
        grammars=toy_grammars(),
        lookup=None if lookup is None else lookup(),
    )


def draft_service(kind: type[QuickEngine] = QuickEngine) -> DraftService:
    engine = kind(SPEC, "draft", NUM_SEQUENCES)
    driver = InlineDriver(partial(take_stated_seconds, engine))
    drafter = ModelDrafter(engine)
    return DraftService(drafter, driver, max_num_seqs=NUM_SEQUENCES, grammars=toy_grammars())


def head_service() -> DraftService:
    drafter = CheckedHead(SPEC, NUM_SEQUENCES)
    driver = InlineDriver(each_step(HEAD_STEP_S))
    return DraftService(drafter, driver, max_num_seqs=NUM_SEQUENCES)


Builders = dict[str, Callable[[], Any]]
KINDS: tuple[Builders, ...] = (
    {"target": target_service, "draft": draft_service},
    {"target": target_service, "draft": draft_service},
    {"target": partial(target_service, PairEngine, pair_drafter), "draft": draft_service},
    {"target": partial(target_service, KeepingEngine), "draft": head_service},
)
"""Drafts beside a target that drafts for itself are not used."""
HASTY: Builders = {"target": target_service, "draft": partial(draft_service, UnevenEngine)}
"""For coordinators with little time for a draft."""


class ReplicaNode(Node):
    """A target or a draft."""

    def __init__(self, role: Role, name: str, build: Callable[[], Any]) -> None:
        super().__init__(role, name)
        self._build = build
        self.is_stuck = False
        """Whether a step runs that never ends."""

    async def _serve(self, config: Any, world: Any) -> str:
        self.service = self._build()
        self.process.start(self._follow_health(world))
        self._watch_steps(world)
        if self.role == "target":
            self._watch_releases(world)
            self._watch_lessons(world)
        if self.role == "draft" and not world.looks_ahead:
            self._watch_draws(world)
        return f"host:{config.port}" if config.port else f"{self.name}:1"

    def _watch_steps(self, world: Any) -> None:
        """Reports crashes of steps, which are answered with refusals and so would not be noticed of
        a draft. Counts preemptions."""
        worker = self.service._worker

        def watched(call: Any, *items: Any) -> Any:
            num_before = worker.figures.num_preemptions
            try:
                return call(*items)
            except Exception as error:
                world.hear_failure(InvariantError(f"a step of {self.name} crashed: {error!r}"))
                raise
            finally:
                world.shapes["preempted"] += worker.figures.num_preemptions - num_before

        launch = worker.launch
        worker.prepare = partial(watched, worker.prepare)
        worker.launch = lambda items: partial(watched, watched(launch, items))

    def _watch_releases(self, world: Any) -> None:
        """Checks that no step has a request of a session that was released."""
        steps = self.service._begin.args[0]
        receive, prepare = steps.receive, steps.worker.prepare
        released: set[str] = set()

        def received(message: Any) -> None:
            if isinstance(message, Release):
                released.add(message.session_id)
            elif isinstance(message, Arrival):
                released.discard(message.work.session_id)
            receive(message)

        def prepared(requests: Sequence[Any]) -> Any:
            if wrong := released.intersection(request.session_id for request in requests):
                found = f"{self.name} runs released sessions: {sorted(wrong)}"
                world.hear_failure(InvariantError(found))
            return prepare(requests)

        steps.receive, steps.worker.prepare = received, prepared

    def _watch_lessons(self, world: Any) -> None:
        """Checks that a look-up learns only from sessions whose end is stored, and only tokens that
        are."""
        lookups = self.service._worker._lookups
        if lookups is None:
            return
        drafter = lookups._drafter
        end = drafter.end

        def compared(session_id: str, token_ids: Sequence[int]) -> Any:
            world.shapes["learned"] += 1
            history = world.redis.history
            if not (history.held(session_id, token_ids) and history.was_finished(session_id)):
                found = f"{self.name} learns what was not stored: {session_id} {[*token_ids]}"
                world.hear_failure(InvariantError(found))
            return end(session_id, token_ids)

        drafter.end = compared

    def _watch_draws(self, world: Any) -> None:
        """Checks that every token that a model draws is in its proposal: dropping one for being
        late would bias the output."""
        proposer = self.service._worker
        drafter, run = proposer._drafter, proposer._run
        if not isinstance(drafter, ModelDrafter):
            return
        sampler = drafter._sampler
        draw = sampler._draw
        num_drawn: dict[tuple[str, int], int] = {}

        def counted(drafts: Any, depths: Any, logits: Any) -> None:
            for draft, depth in zip(drafts, depths, strict=True):
                request = draft.request
                num_drawn[request.session_id, request.noise.committed_length] = depth + 1
            draw(drafts, depths, logits)

        def compared(works: Any) -> Any:
            answers = run(works)
            for answer in answers:
                if isinstance(answer, ProposalReply):
                    drawn = num_drawn.pop((answer.key.session_id, answer.base_length), 0)
                    num = len(answer.proposal)
                    if num < drawn:
                        found = f"{self.name} proposes {num} of {drawn} tokens that it drew"
                        world.hear_failure(InvariantError(found))
            return answers

        sampler._draw, proposer._run = counted, compared  # type: ignore[method-assign]

    def get_stuck(self) -> None:
        """Its next step never ends."""

        async def run(*_: Any) -> None:
            self.is_stuck = True
            await asyncio.Event().wait()

        self.service._driver.run = run

    async def _follow_health(self, world: Any) -> None:
        """As `ReplicaHost` does."""
        while self.service.lost is None:
            await self.service.health_changed.wait()
            self.service.health_changed.clear()
        await self.stop(LOST_REPLICA_GRACE_S, world)

    async def wait(self) -> None:
        await super().wait()
        if self.service.lost is not None:
            raise self.service.lost

    async def traffic(self) -> Any:
        return self.service.num_items

    async def leave(self) -> None:
        self._engagement = replace(self._engagement, leaving=True)
        if self._lease is not None:
            self._lease.announce_now()

    async def stop(self, grace_s: float, world: Any) -> None:
        lease, self._lease = self._lease, None
        self._engagement = Engagement()
        if lease is not None:
            await lease.withdraw()
        if self.service is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.service.drain()
            world.hang_up(self, "the replica has stopped")
            await self.service.close()
            self.check_integrity()
        self._ended.set()


PATIENT_SETTINGS = CoordinatorConfig(
    served_model_name="toy",
    num_draft_tokens=4,
    run_ahead_rounds=4,
    max_sessions=16,
    resume_grace_ms=60_000,
    target_gone_ms=30_000,
    draft_timeout_ms=100,
)
HASTY_SETTINGS = replace(PATIENT_SETTINGS, draft_timeout_ms=9)
"""Less time than a draft needs for all that is asked of it."""


class InlineThreads(Executor):
    """Runs each call at once: other threads would make the order of events random."""

    def __init__(self, num_threads: int, thread_name_prefix: str) -> None:
        """Takes what a `ThreadPoolExecutor` takes."""

    def submit(self, call: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        future = Future[T]()
        try:
            future.set_result(call(*arguments, **named))
        except Exception as error:  # noqa: BLE001 (raised where the future is awaited)
            future.set_exception(error)
        return future


@contextmanager
def short_waits(is_hasty: bool) -> Iterator[None]:
    """Shorter delays before a coordinator asks a replica again, so that a run sees many. No child
    process checks constraints, as those have only real time."""
    with (
        patch.multiple(target_client, ANSWER_S=0.2, RETRY_S_MIN=0.02),
        patch.multiple(draft_client, RETRY_S=0.001 if is_hasty else 0.2),
        patch.object(PromptEncoder, "check_constraint", AsyncMock()),
        patch.object(fair_turns, "ThreadPoolExecutor", InlineThreads),
    ):
        yield


MODEL = DraftConfig(model="some/model")
HYBRID = DraftConfig(model="hybrid:ngram,some/model", hybrid_min_score=0.5, hybrid_model_tokens=2)


class CoordinatorNode(Node):
    def __init__(self, name: str, settings: CoordinatorConfig) -> None:
        super().__init__("coordinator", name)
        self.calls: dict[Call, None] = {}
        self.repeated = RepeatedRequests()
        self.access = AccessControl()
        self._settings = settings

    async def _serve(self, config: Any, world: Any) -> str:
        rng, link = world.rng, partial(world.link, self.process)
        self.service = CoordinatorService(
            self._settings,
            self.name,
            store=world.redis.store(),
            fallback=NgramDrafter(),
            text=toy_text(),
            random_bits=rng.getrandbits,
            observation=world.moves,
            registered=Registered(world.redis.registry(), link, link),
        )
        self.access = AccessControl(None, world.redis.slots())
        await self.service.start()
        return f"host:{config.grpc_port}"

    def _record(self, address: str) -> ReplicaRecord:
        return ReplicaRecord(
            role="coordinator",
            name=self.name,
            address=address,
            host="host",
            pid=1,
            load=self.service.num_running,
        )

    def has_session_at(self, replica: str) -> bool:
        """Whether a session of this coordinator uses a replica."""
        if self.service is None:
            return False
        pools = (self.service.targets, self.service.drafts)
        return any(replica in pool.replicas and pool.replicas[replica].routes for pool in pools)

    def knows(self, role: Role) -> set[str]:
        """The replicas of a role that it may use."""
        pool = self.service.targets if role == "target" else self.service.drafts
        return set(pool.replicas)

    async def stop(self, grace_s: float, world: Any) -> None:
        self._engagement = replace(self._engagement, leaving=True)
        if self.service is not None:
            self.service.streams.hand_over()
        if self._lease is not None:
            await self._lease.withdraw()
        if self.calls:
            await asyncio.wait([call.task for call in self.calls if call.task], timeout=grace_s)
        world.silence(self)
        for call in list(self.calls):
            call.end()
        await self.access.close()
        if self.service is not None:
            await self.service.close()
            self.check_integrity()
        self._ended.set()

    def check_work(self) -> None:
        """Raises `InvariantError` if a task that must not end has ended."""
        check(not self.service.streams.failed, f"{self.name} commits no more")
        is_over = any(task.done() for task in self.service.health._watching)
        check(not is_over, f"{self.name} follows no more")


@dataclass(frozen=True)
class CancelRequest:
    session_id: str


Asked = GenerateRequest | ResumeRequest | KeyedRequest | CancelRequest


class Call:
    """A call of a client to a coordinator, and its answer: a stream of events, or only its end."""

    def __init__(self, world: Any, node: CoordinatorNode, caller: Caller) -> None:
        self.events: asyncio.Queue[Event | Part | OutriderError | None] = asyncio.Queue()
        """For the client: the events, then an error or None."""
        self.node = node
        self.task: asyncio.Task[None] | None = None
        self._world = world
        self._caller = caller
        self._is_over = False

    def begin(self, request: Asked) -> None:
        if not self._is_over:
            self.node.calls[self] = None
            self.task = self.node.process.start(self._run(request))
            self.task.add_done_callback(lambda _: self.node.calls.pop(self))

    async def _run(self, request: Asked) -> None:
        try:
            if isinstance(request, CancelRequest):
                await self._cancel(request.session_id)
            elif isinstance(request, KeyedRequest):
                service, repeated = self.node.service, self.node.repeated
                async with aclosing(answer_once(service, repeated, request)) as parts:
                    async for part in parts:
                        self._tell(part)
            else:
                await self._generate(request)
            self._tell(None)
        except OutriderError as error:
            self._tell(error)
        except Exception as error:  # noqa: BLE001 - the client must not wait after a crash
            self._tell(InvariantError(f"a call crashed: {error!r}"))

    async def _generate(self, request: GenerateRequest | ResumeRequest) -> None:
        """As `CoordinatorServicer` does."""
        service, caller, resumes = self.node.service, self._caller, list[str]()
        if isinstance(request, ResumeRequest):
            resumes = [request.session_id]
            running = service.streams.resume(request, caller.tenant)
        else:
            running = service.streams.generate(request, caller.tenant)
        async with aclosing(running), self.node.access.admit(caller, resumes) as grant:
            async for event in running:
                await grant.note(event)
                if isinstance(event, Started):
                    self._world.slots.note_begun(self.node.name, event.session_id)
                    self._world.look_at_slots()
                self._tell(event)

    async def _cancel(self, session_id: str) -> None:
        service = self.node.service
        await service.streams.cancel(session_id, self._caller.tenant)
        run = service._sessions.running.get(session_id)
        await self._world.cancels.note(session_id, run and run.session)

    def _tell(self, event: Event | Part | OutriderError | None) -> None:
        world = self._world
        world.network.carry(world.clients, lambda: self.events.put_nowait(event), payload=event)

    def break_off(self) -> None:
        """The client learns that the stream broke at once; the coordinator, as soon as it runs."""
        self.events.put_nowait(StreamBroken(f"{self.node.name} fell silent"))
        self.leave()

    def leave(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(self.end, context=self.node.process.context)

    def end(self) -> None:
        self._is_over = True
        if self.task is not None:
            self.task.cancel()


class PortTransport:
    """A client's transport to the coordinator at an address; as much of `Transport` as is used
    here."""

    def __init__(self, world: Any, address: str, caller: Caller = ANYBODY) -> None:
        self._world = world
        self._caller = caller
        self.address = address

    async def close(self) -> None:
        """Nothing is open."""

    async def call(self, method: Method, timeout_s: float, session_id: str = "") -> None:
        """Only `cancel`."""
        check(method == "cancel", f"{method} is not simulated")
        try:
            async with (
                asyncio.timeout(timeout_s),
                aclosing(self.events(CancelRequest(session_id), timeout_s)) as events,
            ):
                async for event in events:
                    raise InvariantError(f"{event} does not answer Cancel")
        except TimeoutError:
            raise DeadlineExceeded(f"{self.address} did not answer within {timeout_s} s") from None

    async def events(self, request: Asked, timeout_s: float) -> AsyncGenerator[Any]:
        world = self._world
        node = world.coordinator_at(self.address)
        if node is None:
            raise StreamBroken(f"nothing answers at {self.address}")
        call = Call(world, node, self._caller)
        world.calls[call] = None
        try:
            world.network.carry(node.process, lambda: call.begin(request))
            while (event := await call.events.get()) is not None:
                if isinstance(event, OutriderError):
                    raise event
                yield event
        finally:
            del world.calls[call]
            call.leave()
