"""Sessions, many of them cancelled or disconnected, leave nothing behind."""

import asyncio
import gc
import os
import random
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from coordinator.decoding.loop import SessionRun
from coordinator.routing.draft_client import DraftClient
from coordinator.routing.replica_pool import SessionContext, SessionRoute
from coordinator.routing.target_client import TargetClient
from outrider.client import Client
from outrider.config.emulated_spec import EmulatedSpec
from outrider.errors import Unavailable
from outrider.interfaces.request import Finished, GenerateRequest, Started, Tokens
from outrider.kv_cache.session_table import SessionTable
from outrider.replica.step_request import StepRequest
from outrider.sessions.state import Session
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.chaos.proxy import FaultProxy
from tests.support.stack import Stack, emulated_stack

pytestmark = pytest.mark.xdist_group("redis")

SPEC = EmulatedSpec(vocab_size=64, support=8, verify_ms=1.0, draft_ms=0.1)
WARM_UP = 60
AT_A_TIME = 40
NUM_TOKENS = (8, 60)
LONGER = 4
"""Factor for the number of tokens, so that a cancellation comes before the session's end."""
GRACE_S = 0.3
"""How long a disconnected client may resume its session."""
FINISHED_MS = 3_000
"""How long a finished session stays readable in these tests."""
SETTLED_S = 60.0
"""Time in which ended sessions must release everything, on a busy machine."""
ENDS = ("whole", "whole", "cancelled", "left", "closed", "cut")
"""A third each ends by itself, is cancelled or left by its client, and disconnects."""
EVERYTHING = {
    SessionRun,
    Session,
    SessionRoute,
    SessionContext,
    TargetClient,
    DraftClient,
    StepRequest,
}
"""Types whose objects exist only for running sessions."""


@dataclass(frozen=True, slots=True)
class Plan:
    request: GenerateRequest
    end: str
    after: int
    """Number of tokens that the client waits for before it acts."""


def plans(number: int, drawn: random.Random) -> list[Plan]:
    found = []
    for _ in range(number):
        rule = drawn.choice(list(Rule))
        end, num_tokens = drawn.choice(ENDS), drawn.randint(*NUM_TOKENS)
        request = GenerateRequest(
            tuple(drawn.randrange(64) for _ in range(drawn.randint(1, 40))),
            max_tokens=LONGER * num_tokens if end == "cancelled" else num_tokens,
            seed=drawn.randrange(2**32),
            rule=rule,
            sampling=SamplingParams(temperature=0.0 if rule is Rule.GREEDY else 1.0),
            num_draft_tokens=drawn.choice((0, 2, 4, 6)),
        )
        found.append(Plan(request, end, drawn.randrange(num_tokens)))
    return found


class Clients:
    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.outcomes: Counter[str] = Counter()

    async def play(self, all_plans: list[Plan]) -> None:
        left = iter(all_plans)

        async def one_after_the_other() -> None:
            for plan in left:
                self.outcomes[await self._play(plan)] += 1

        await asyncio.gather(*(one_after_the_other() for _ in range(AT_A_TIME)))

    async def _play(self, plan: Plan) -> str:
        if plan.end in ("whole", "cancelled", "left"):
            return await self._hear(self._stack.client, plan, None)
        proxy = FaultProxy()
        address = await proxy.forward(self._stack.server.address)
        async with Client(address, resume_timeout_s=0.0) as client:
            try:
                return await self._hear(client, plan, proxy)
            except Unavailable:
                return "lost"
            finally:
                proxy.close()

    async def _hear(self, client: Client, plan: Plan, proxy: FaultProxy | None) -> str:
        session_id, num_tokens, acted = "", 0, plan.end == "whole"
        async with aclosing(client.generate(plan.request)) as events:
            async for event in events:
                if isinstance(event, Started):
                    session_id = event.session_id
                elif isinstance(event, Tokens):
                    num_tokens += len(event.token_ids)
                elif isinstance(event, Finished):
                    return event.finish_reason.value
                if not acted and num_tokens >= plan.after:
                    acted = True
                    if plan.end == "left":
                        return "left"
                    if plan.end == "cancelled":
                        await client.cancel(session_id)
                    elif plan.end == "closed":
                        await client.close()
                    elif proxy is not None:
                        proxy.close()
        raise AssertionError("a stream without an end")


def descriptors(stack: Stack) -> int:
    """Open file descriptors of this process, except the bounded pool of connections to Redis."""
    store: Any = stack.coordinator._store
    pool = store._client.connection_pool
    pooled = [*pool._available_connections, *pool._in_use_connections]
    return len(os.listdir("/proc/self/fd")) - sum(bool(one.is_connected) for one in pooled)


def in_use(stack: Stack) -> dict[str, int]:
    gc.collect()
    found = {
        "tasks": len(asyncio.all_tasks()),
        "file descriptors": descriptors(stack),
        "sessions of the coordinator": stack.coordinator.num_running,
        "admissions": stack.coordinator.admission.num_admitted,
        "commits": len(stack.coordinator._committer.sessions),
        "background work": len(stack.coordinator._sessions._background),
        "runs that end": len(stack.coordinator._sessions._ending),
    }
    for pool in (stack.coordinator.targets, stack.coordinator.drafts):
        offices: Any = pool.replicas.values()
        found[f"mailboxes of the {pool.role}"] = sum(len(one.routes) for one in offices)
        for office in offices:
            for stream in office.link._streams.values():
                found[f"parameters sent to the {pool.role}"] = len(stream._sent)
    for role, service in (("target", stack.target), ("draft", stack.draft)):
        worker: Any = service._worker
        table: SessionTable = worker._admission._table
        engine: Any = table._engine
        counts = engine.page_counts()
        used = counts.num_pages - counts.num_free - counts.num_evictable
        found |= {
            f"sessions of the {role}": len(table),
            f"sessions that the {role} hears of": len(service.sessions),
            f"sequences of the {role}": len(engine._pool._sequences),
            f"pages of the {role}": used,
            f"items that wait for the {role}": len(service._queue.waiting),
            f"open requests of the {role}": service._num_open,
        }
    found["rounds that run ahead"] = len(stack.target.run_aheads.sessions)
    drafter: Any = stack.draft._worker
    found["rounds looked ahead of"] = len(drafter._look_ahead._rounds)
    kinds = Counter(type(one) for one in gc.get_objects() if type(one) in EVERYTHING)
    return found | {f"objects: {kind.__name__}": number for kind, number in kinds.items()}


async def grown(stack: Stack, before: dict[str, int]) -> dict[str, int]:
    """What is in use beyond `before`, once it no longer changes."""
    loop, last, changed_at = asyncio.get_running_loop(), None, 0.0
    while True:
        now = in_use(stack)
        more = {name: n - before.get(name, 0) for name, n in now.items() if n > before.get(name, 0)}
        if more != last:
            last, changed_at = more, loop.time()
        if not more or loop.time() > changed_at + SETTLED_S:
            return more
        await asyncio.sleep(0.2)


async def stored(stack: Stack) -> list[str]:
    """Keys in Redis, except the lease, when all finished sessions must have expired."""
    with redis.Redis.from_url(stack.redis.url, protocol=2) as admin:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + SETTLED_S
        # Counting may block the event loop for longer than the lease lasts.
        while len(left := admin.keys()) != 1 and loop.time() < give_up_at:
            await asyncio.sleep(0.1)
        keys = [key for key in left if b"session:" in key]
        assert len(left) == len(keys) + 1
        return [f"{key.decode()}: {admin.pttl(key)} ms" for key in keys]


@pytest.mark.parametrize("number", [300, pytest.param(2_000, marks=pytest.mark.full)])
async def test_nothing_is_left_of_sessions_however_they_end(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release may arrive late; the replica then keeps the session until it needs its pages."""
    monkeypatch.setattr("outrider.transport.grpc_link.RELEASE_TIMEOUT_S", SETTLED_S)
    drawn = random.Random(number)
    async with emulated_stack(
        tmp_path,
        SPEC,
        resume_grace_ms=int(GRACE_S * 1e3),
        length_control=True,
        lifetimes={"finished_ttl_ms": FINISHED_MS},
    ) as stack:
        idle = in_use(stack)  # Leftovers of earlier tests are not counted.
        clients = Clients(stack)
        await clients.play(plans(WARM_UP, drawn))
        clients.outcomes.clear()
        await asyncio.sleep(2 * GRACE_S)
        now = in_use(stack)
        at_rest = idle | {name: now[name] for name in ("tasks", "file descriptors")}
        await clients.play(plans(number, drawn))
        assert await grown(stack, at_rest) == {}
        assert await stored(stack) == []
    ends = clients.outcomes
    assert ends.total() == number
    assert ends["length"] > number / 5
    assert ends["left"] + ends["cancelled"] > ends["cancelled"] > number / 30
    assert ends["lost"] > number / 5
