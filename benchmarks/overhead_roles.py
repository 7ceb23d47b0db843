"""What runs in the processes of `bench overhead` and `bench capacity` (see `role_process`)."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from outrider.config import CoordinatorConfig, TargetConfig
from outrider.replica.process_setup import build_engine, cores_for, on_passing_thread, use_threads

from .roles import Role, play

if TYPE_CHECKING:
    from outrider.messages import ReplyKey
    from outrider.transport.server import Service

    from .overhead_clocks import RoundClock

_GRACE_S: Final = 1.0


@asynccontextmanager
async def _canned(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    """A draft or a target that answers at once."""
    use_threads(1)
    from outrider.transport.codec import DRAFT, VERIFY
    from outrider.transport.stream_server import ReplicaServicer

    from .overhead_canned import canned_draft, canned_target

    is_draft = setup["role"] == "draft"
    servicer = (
        ReplicaServicer(canned_draft(), DRAFT)
        if is_draft
        else ReplicaServicer(canned_target(), VERIFY)
    )
    async with _server(servicer.grpc_service) as address:
        yield Role({"address": address}, lambda _: {})


@asynccontextmanager
async def _stepping(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    """A draft or a target that answers at the ends of steps (`capacity_replicas`); a later line
    with `step_s` and `sessions_max` changes them, and asks for what was held since then."""
    use_threads(1)
    from outrider.transport.codec import DRAFT, VERIFY
    from outrider.transport.stream_server import ReplicaServicer

    from .capacity_replicas import StepReplica, StepTime
    from .overhead_canned import canned_draft, canned_target

    time = StepTime(setup["step_s"], setup["sessions_max"])
    replica: StepReplica[Any, Any]
    if setup["side"] == "draft":
        replica = StepReplica(canned_draft(), time)
        service = ReplicaServicer(replica, DRAFT).grpc_service
    else:
        replica = StepReplica(canned_target(), time)
        service = ReplicaServicer(replica, VERIFY).grpc_service

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if "step_s" in question:
            replica.time = StepTime(question["step_s"], question["sessions_max"])
        held, replica.holds = replica.holds, []
        return {"held_s": [(h.key.session_id, h.key.round, h.seconds) for h in held]}

    async with _server(service) as address:
        yield Role({"address": address}, answer)


@asynccontextmanager
async def _coordinator(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    """A coordinator of one session at a time, all of whose messages are counted."""
    from .overhead_clocks import RoundClock, counted

    clock = RoundClock()
    async with _coordinating(setup, clock, lambda codec: counted(codec, clock)) as address:
        yield Role({"address": address}, lambda _: _rounds(clock))


@asynccontextmanager
async def _crowded(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    """A coordinator of many sessions; every later line asks for its rounds and computing time so
    far, and begins both anew."""
    from .overhead_clocks import RoundClock

    clock = RoundClock()

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        return {"spans_ns": clock.take_spans(), "cpu_s": time.process_time()}

    async with _coordinating(setup, clock, lambda codec: codec) as address:
        yield Role({"address": address, "pid": os.getpid()}, answer)


@asynccontextmanager
async def _coordinating(
    setup: Mapping[str, Any], clock: RoundClock, seen: Callable[[Any], Any]
) -> AsyncIterator[str]:
    """A coordinator between `setup`'s `draft`, `target` and `redis_url`, with its defaults; its
    address. `seen` is put on its links' codec."""
    use_threads(1)
    from coordinator.grpc_api import CoordinatorServicer
    from coordinator.options import CoordinatorOptions
    from coordinator.requests.validation import RequestDefaults
    from coordinator.routing.target_client import Timeouts
    from coordinator.service import CoordinatorService
    from outrider.drafters.lookup import NgramDrafter
    from outrider.sessions.redis_store import RedisStore
    from outrider.transport import codec
    from outrider.transport.channel import open_channel
    from outrider.transport.grpc_link import GrpcLink
    from outrider.transport.server import Service
    from outrider.v1 import coordinator_pb2

    from .overhead_clocks import ClockedLink, ClockedStore

    config = CoordinatorConfig()
    target, draft = setup["target"], setup["draft"]
    service = CoordinatorService(
        CoordinatorOptions(
            name="coordinator-overhead",
            served_model_name="canned",
            defaults=RequestDefaults(config.num_draft_tokens, config.deadline_ms),
            length_control=False,  # What is measured are rounds with drafts.
            run_ahead_rounds=config.run_ahead_rounds,
            max_sessions=config.max_sessions,
            timeouts=replace(
                Timeouts.of(config),
                # One that stalls is to be measured, not done without.
                draft_answer_s=config.target_timeout_ms / 1e3,
            ),
        ),
        store=ClockedStore(await RedisStore.connect(setup["redis_url"]), clock),
        targets={
            "target": ClockedLink(
                GrpcLink(open_channel(target), seen(codec.VERIFY), target),
                clock.verify_sent,
                clock.verdict_heard,
            )
        },
        drafts={
            "draft": ClockedLink(
                GrpcLink(open_channel(draft), seen(codec.DRAFT), draft),
                clock.draft_sent,
                clock.draft_heard,
            )
        },
        fallback=NgramDrafter(),
        text=None,
    )
    descriptor = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
    try:
        await service.start()
        async with _server(Service(descriptor, CoordinatorServicer(service))) as address:
            yield address
    finally:
        await service.close()


def _rounds(clock: RoundClock) -> dict[str, Any]:
    return {"rounds": [asdict(stamps) for stamps in clock.rounds]}


@asynccontextmanager
async def _model(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    """A target with a model, hosted as its actor hosts it."""
    config = TargetConfig(**setup["config"])
    num_threads = config.num_threads or cores_for("target")
    use_threads(num_threads)
    from outrider.engine.threads import start_workers
    from outrider.replica.host import ReplicaHost
    from outrider.transport.codec import VERIFY
    from target_service.service import TargetService

    from .overhead_clocks import ClockedExecutor, clock_queue

    engine = await on_passing_thread(build_engine, config, "target", num_threads)
    executor = ClockedExecutor("target-step", engine.take_step_seconds, start_workers)
    service = TargetService(engine, executor, max_num_seqs=config.max_num_seqs)
    queued = clock_queue(service)
    host: ReplicaHost[Any, Any] = ReplicaHost()
    address = await host.serve(service, VERIFY, config)
    try:
        yield Role(
            {"address": address},
            lambda _: {
                "queued_ns": _by_round(queued),
                "judged_ns": _by_round(executor.judged),
            },
        )
    finally:
        await host.stop(_GRACE_S)


def _by_round(stamps: Mapping[ReplyKey, int]) -> list[tuple[str, int, int]]:
    return [(key.session_id, key.round, stamp) for key, stamp in stamps.items()]


@asynccontextmanager
async def _server(service: Service) -> AsyncIterator[str]:
    from outrider.transport.server import RpcServer, ServerOptions

    async with AsyncExitStack() as stack:
        server = RpcServer([service], ServerOptions())
        await server.start()
        stack.push_async_callback(server.stop)
        await server.set_serving(True)
        yield server.address


ROLES: Final = {
    "draft": _canned, "target": _canned, "coordinator": _coordinator, "model": _model,
    "stepping": _stepping, "crowded": _crowded,
}  # fmt: skip
"""What a process can be."""


if __name__ == "__main__":
    play(ROLES)
