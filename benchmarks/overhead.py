"""`outrider bench overhead`: what rounds and requests cost without the models.

rounds    a round by its report, from sending the draft request to the store's acknowledgement
capacity  rounds a second of one coordinator with many sessions; client, coordinator, canned
          replicas and Redis are a process each

Canned replicas give well-formed answers without a model, at once or after the time of a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from outrider.client import Client
from outrider.errors import Unavailable
from outrider.limits import DEADLINE_MS_MAX
from outrider.messages import (
    DraftItem,
    ProposalReply,
    ReplicaDescription,
    VerdictReply,
    VerifyItem,
)
from outrider.request import GenerateRequest, RoundReport, Tokens
from outrider.settings import between, checked
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import (
    COUNT_TOTAL,
    DraftDistribution,
    Proposal,
    SealedProposal,
)
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.codec import DRAFT, VERIFY
from outrider.transport.server import RpcServer, ServerOptions
from outrider.transport.stream_server import ReplicaServicer

from .measurement import Progress, together
from .options import Concurrency, Options
from .processes import Process, Replicas, Role, embedded_redis, service_process
from .report import Report, percentile

NUM_DRAFT_TOKENS = 8
PROMPT_TOKENS = 64
ACCEPT_PROBABILITY = 0.7
"""Of every canned draft token: a round of 8 commits about 3 tokens."""
Q_ENTRIES = 64
CANNED = ReplicaDescription(
    model="canned", weights_fingerprint="canned", tokenizer_fingerprint="canned",
    vocab_size=151_936, dtype="float32", max_model_len=32_768, eos_token_ids=(), max_num_seqs=1,
)  # fmt: skip
WARM_UP_ROUNDS = 200
SESSION_TOKENS = 512
VERIFY_S = 0.0183
"""A step of a 70B target (as in `bench emulate`), for `capacity`."""
DRAFT_S = NUM_DRAFT_TOKENS * 0.0013
CROWD_TOKENS = 2_048
WARM_UP_S = 3.0
_PARTS_OF_A_ROUND = ("draft_ms", "wire_ms", "queue_ms", "verify_ms", "commit_ms")


@checked()
class OverheadOptions(Options):
    parts: tuple[Literal["rounds", "capacity"], ...] = ("rounds",)
    """What to measure."""
    rounds: Annotated[int, between(1, 100_000)] = 2_000
    """Number of rounds, for `rounds`."""
    sessions: Concurrency = 500
    """Sessions at a time, for `capacity`."""
    seconds: Annotated[float, between(1, 600)] = 10.0
    """Length of the measurement, for `capacity`, s."""


async def run(options: OverheadOptions, progress: Progress) -> Report:
    """Measures the chosen parts. Raises `Unavailable` if a process ends."""
    measures = {"rounds": measure_rounds, "capacity": measure_capacity}
    figures = {part: await measures[part](options, progress) for part in options.parts}
    return Report.of("overhead beside the models", figures.pop("rounds", {}) | figures)


def canned_request(seed: int, max_tokens: int) -> GenerateRequest:
    """A session that always runs to `max_tokens`, with K = `NUM_DRAFT_TOKENS` and rule token."""
    return GenerateRequest(
        prompt=tuple(range(1, 1 + PROMPT_TOKENS)), sampling=SamplingParams(temperature=1.0),
        max_tokens=max_tokens, ignore_eos=True, seed=seed, rule=Rule.TOKEN,
        num_draft_tokens=NUM_DRAFT_TOKENS, deadline_ms=DEADLINE_MS_MAX,
    )  # fmt: skip


@asynccontextmanager
async def _canned_services(
    draft_s: float = 0.0, verify_s: float = 0.0
) -> AsyncIterator[tuple[Client, Process]]:
    """A coordinator with a canned draft and target, whose steps take these seconds."""
    setup = {"draft_s": draft_s, "verify_s": verify_s}
    async with (
        embedded_redis() as redis_url,
        Process("benchmarks.overhead:canned_role", "the canned replicas", setup) as canned,
        service_process(
            "coordinator", Replicas(canned.address, canned.address, redis_url).coordinator_config()
        ) as coordinator,
        Client(coordinator.address) as client,
    ):
        yield client, coordinator


async def measure_rounds(options: OverheadOptions, progress: Progress) -> dict[str, Any]:
    """Figures of rounds with K draft tokens, one session after the other, by the coordinator's
    reports."""
    wanted, seed = WARM_UP_ROUNDS + options.rounds, 0
    reports: list[RoundReport] = []
    async with _canned_services() as (client, _):
        while len(reports) < wanted:
            progress(f"round {len(reports)} of {wanted}")
            request = replace(canned_request(seed, SESSION_TOKENS), include_rounds=True)
            found = await client.complete(request)
            reports += [
                one for one in found.rounds if len(one.proposed_token_ids) == NUM_DRAFT_TOKENS
            ]
            seed += 1
    return round_figures(reports[WARM_UP_ROUNDS:wanted])


def round_figures(reports: Sequence[RoundReport]) -> dict[str, Any]:
    parts = {name: [getattr(one, name) for one in reports] for name in _PARTS_OF_A_ROUND}
    whole = [sum(times) for times in zip(*parts.values(), strict=True)]
    return {
        "num_rounds": len(reports),
        "round_ms_p50": percentile(whole, 50),
        "round_ms_p99": percentile(whole, 99),
        "round_parts_ms": {name[:-3]: percentile(times, 50) for name, times in parts.items()},
    }


async def measure_capacity(options: OverheadOptions, progress: Progress) -> dict[str, Any]:
    """Rounds a second of sessions that never pause, and the coordinator's CPU time for a round."""
    progress("starting")
    num_tokens = 0

    async def decode_forever(client: Client, index: int) -> None:
        nonlocal num_tokens
        for seed in range(index, 10**9, options.sessions):
            async with aclosing(client.generate(canned_request(seed, CROWD_TOKENS))) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        num_tokens += len(event.token_ids)

    async with _canned_services(DRAFT_S, VERIFY_S) as (client, coordinator), together() as group:
        sessions = [group.create_task(decode_forever(client, i)) for i in range(options.sessions)]
        progress(f"{options.sessions} sessions, as many rounds as it can")
        await asyncio.sleep(WARM_UP_S)
        before, began = num_tokens, time.monotonic()
        cpu_s = (await coordinator.ask({}))["cpu_s"]
        await asyncio.sleep(options.seconds)
        num_tokens, elapsed_s = num_tokens - before, time.monotonic() - began
        cpu_s = (await coordinator.ask({}))["cpu_s"] - cpu_s
        for task in sessions:
            task.cancel()
    tokens_per_round = sum(ACCEPT_PROBABILITY**place for place in range(NUM_DRAFT_TOKENS + 1))
    num_rounds = num_tokens / tokens_per_round
    if not num_rounds:
        raise Unavailable("no round was played")
    return {
        "sessions": options.sessions,
        "rounds_per_second": num_rounds / elapsed_s,
        "coordinator_ms_per_round": 1e3 * cpu_s / num_rounds,
    }


class CannedReplica:
    """A `ReplicaService` that answers an item with a function of it, after `step_s` of waiting."""

    def __init__(self, answer: Callable[[Any], Any], step_s: float = 0.0) -> None:
        self._answer = answer
        self._step_s = step_s

    def connect(self, send: Callable[[Sequence[Any]], None]) -> Any:
        def receive(items: Sequence[Any]) -> None:
            answers = [self._answer(item) for item in items]
            if self._step_s:
                asyncio.get_running_loop().call_later(self._step_s, send, answers)
            else:
                send(answers)

        return SimpleNamespace(receive=receive, close=lambda: None)

    def describe(self) -> ReplicaDescription:
        return CANNED

    def release(self, session_id: str, epoch: int) -> None:
        """See `ReplicaService.release`; keeps nothing."""


@cache
def canned_proposal(size: int) -> SealedProposal:
    """A proposal of the vocabulary's last tokens, whose ids take the most bytes."""
    token_ids = tuple(range(CANNED.vocab_size - Q_ENTRIES, CANNED.vocab_size))
    q = DraftDistribution(token_ids, (COUNT_TOTAL // Q_ENTRIES,) * Q_ENTRIES)
    return SealedProposal.of(Proposal(token_ids[:size], (q,) * size))


def propose(item: DraftItem) -> ProposalReply:
    length, size = item.head.committed_length, item.num_draft_tokens
    return ProposalReply(item.head.key, canned_proposal(size), length, length + size)


def verify(item: VerifyItem) -> VerdictReply:
    size = len(item.proposal)
    verdict = Verdict((ACCEPT_PROBABILITY,) * size, (CANNED.vocab_size - 1,) * (size + 1))
    return VerdictReply(item.head.key, verdict, item.head.committed_length + size)


@asynccontextmanager
async def canned_role(setup: dict[str, Any]) -> AsyncIterator[Role]:
    """The role of a process with a canned draft and target."""
    draft: Any = CannedReplica(propose, setup["draft_s"])
    target: Any = CannedReplica(verify, setup["verify_s"])
    services = [ReplicaServicer(draft, DRAFT).grpc_service]
    services += [ReplicaServicer(target, VERIFY).grpc_service]
    server = RpcServer(services, ServerOptions())
    await server.start()
    try:
        await server.set_serving(True)
        yield Role({"address": server.address})
    finally:
        await server.stop()
