"""`outrider bench overhead`: what rounds and requests cost without the models.

*Canned* replicas give well-formed answers without a model, at once or after the time of a step.

rounds      Time of a round and of its parts, from sending the draft request to the
            acknowledgement of Redis. The coordinator reports these times.
capacity    Rounds a second of one coordinator with many sessions. Client, coordinator, canned
            replicas and Redis each have their own process.
transports  Time that gRPC and HTTP add to the first token, and to each chunk. Clients and
            coordinator run in this process. The canned target runs in another process.
steps       Tokens/s with emulated steps, and CPU time of a token: see `step_overhead.py`."""

import asyncio
import gc
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from outrider.client import Client
from outrider.errors import Unavailable
from outrider.foundation.tokens import digest_after
from outrider.interfaces.messages import (
    DraftItem,
    ProposalReply,
    ReplicaDescription,
    VerdictReply,
    VerifyItem,
)
from outrider.interfaces.request import Event, GenerateRequest, RoundReport, Tokens
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution, EncodedProposal, Proposal
from outrider.speculation.sampling_params import Rule
from outrider.transport.codec import DRAFT, VERIFY
from outrider.transport.server import RpcServer, ServerOptions
from outrider.transport.stream_server import ReplicaServicer

from .clients import GrpcClient, HttpClient
from .measurement import BenchClient, Progress, bench_request, together
from .options import OverheadOptions
from .processes import Process, Replicas, embedded_redis
from .report import Report
from .step_overhead import measure_steps, tables

NUM_DRAFT_TOKENS = 8
PROMPT_TOKENS = 64
ACCEPT_PROBABILITY = 0.7
"""Chance that a canned draft token is accepted. A round with 8 such tokens commits about 3."""
Q_ENTRIES = 64
CANNED = ReplicaDescription(
    model="canned",
    weights_fingerprint="canned",
    tokenizer_fingerprint="canned",
    vocab_size=151_936,
    dtype="float32",
    max_model_len=32_768,
    eos_token_ids=(),
    max_num_seqs=1,
)
_LAST_IDS = tuple(range(CANNED.vocab_size - Q_ENTRIES, CANNED.vocab_size))
"""The largest ids of the vocabulary, which take the most bytes in a message."""
_Q = DraftDistribution(_LAST_IDS, (COUNT_TOTAL // Q_ENTRIES,) * Q_ENTRIES)
PROPOSAL = EncodedProposal.of(Proposal(_LAST_IDS[:NUM_DRAFT_TOKENS], (_Q,) * NUM_DRAFT_TOKENS))
WARM_UP_ROUNDS = 200
SESSION_TOKENS = 512
VERIFY_S = 0.0183
"""Time of the canned target's step in `capacity`, as in `bench emulate`."""
DRAFT_S = NUM_DRAFT_TOKENS * 0.0013
CROWD = 500
"""Sessions at a time in `capacity`, by default."""
CROWD_TOKENS = 2_048
WARM_UP_S = 3.0
WARM_UP_TURNS = 3
TURNS = 60
TURN_STEP_S = 0.005
_PARTS_OF_A_ROUND = ("draft_ms", "wire_ms", "queue_ms", "verify_ms", "commit_ms")
_WORD = "word"
"""The text of the canned target's token."""
_WORDS = bench_request(f" {_WORD}" * PROMPT_TOKENS, 32, num_draft_tokens=0, ignore_eos=True)


async def run(options: OverheadOptions, progress: Progress) -> Report:
    measures = {
        "rounds": measure_rounds,
        "capacity": measure_capacity,
        "transports": measure_transports,
    }
    figures: dict[str, Any] = {
        part: await measure(options, progress)
        for part, measure in measures.items()
        if part in options.parts
    }
    values = figures.pop("rounds", {}) | figures
    shown = list(Report.of("overhead of rounds and requests", values).shown) if values else []
    if "steps" in options.parts:
        values["steps"] = await measure_steps(options, progress)
        shown += tables(values["steps"])
    return Report(values, shown)


def canned_request(seed: int, max_tokens: int) -> GenerateRequest:
    return bench_request(
        tuple(range(1, 1 + PROMPT_TOKENS)),
        max_tokens,
        1.0,
        ignore_eos=True,
        seed=seed,
        rule=Rule.TOKEN,
        num_draft_tokens=NUM_DRAFT_TOKENS,
    )


@asynccontextmanager
async def _canned_replicas(draft_s: float = 0.0, verify_s: float = 0.0) -> AsyncIterator[Replicas]:
    setup = {"draft_s": draft_s, "verify_s": verify_s}
    async with (
        embedded_redis() as redis_url,
        Process("outrider.bench.overhead:canned_role", "the canned replicas", setup) as canned,
    ):
        yield Replicas(canned.address, canned.address, redis_url)


async def measure_rounds(options: OverheadOptions, progress: Progress) -> dict[str, Any]:
    """Runs one session at a time. Measures only rounds with `NUM_DRAFT_TOKENS` draft tokens."""
    wanted, k = WARM_UP_ROUNDS + options.rounds, NUM_DRAFT_TOKENS
    reports: list[RoundReport] = []
    async with _canned_replicas() as replicas, replicas.coordinator() as (client, _):
        while len(reports) < wanted:
            progress(f"round {len(reports)} of {wanted}")
            request = replace(canned_request(len(reports), SESSION_TOKENS), include_rounds=True)
            completion = await client.complete(request)
            reports += [
                report for report in completion.rounds if len(report.proposed_token_ids) == k
            ]
    return round_figures(reports[WARM_UP_ROUNDS:wanted])


def round_figures(reports: Sequence[RoundReport]) -> dict[str, Any]:
    parts = {name: [getattr(report, name) for report in reports] for name in _PARTS_OF_A_ROUND}
    whole = [sum(times) for times in zip(*parts.values(), strict=True)]
    return {
        "num_rounds": len(reports),
        "round_ms_p50": np.percentile(whole, 50),
        "round_ms_p99": np.percentile(whole, 99),
        "round_parts_ms": {name[:-3]: np.percentile(times, 50) for name, times in parts.items()},
    }


async def measure_capacity(options: OverheadOptions, progress: Progress) -> dict[str, Any]:
    progress("starting")
    num_tokens, sessions = 0, max(options.sessions, default=CROWD)

    async def decode_forever(client: Client, index: int) -> None:
        nonlocal num_tokens
        for seed in range(index, 10**9, sessions):
            async with aclosing(client.generate(canned_request(seed, CROWD_TOKENS))) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        num_tokens += len(event.token_ids)

    async with (
        _canned_replicas(DRAFT_S, VERIFY_S) as replicas,
        replicas.coordinator() as (client, coordinator),
        together() as group,
    ):
        tasks = [group.create_task(decode_forever(client, i)) for i in range(sessions)]
        progress(f"{sessions} sessions, for {options.seconds:g} s")
        await asyncio.sleep(WARM_UP_S)
        before, began = num_tokens, time.monotonic()
        cpu_s = (await coordinator.ask({}))["cpu_s"]
        await asyncio.sleep(options.seconds)
        num_tokens, elapsed_s = num_tokens - before, time.monotonic() - began
        cpu_s = (await coordinator.ask({}))["cpu_s"] - cpu_s
        for task in tasks:
            task.cancel()
    tokens_per_round = sum(ACCEPT_PROBABILITY**place for place in range(NUM_DRAFT_TOKENS + 1))
    num_rounds = num_tokens / tokens_per_round
    if not num_rounds:
        raise Unavailable("no round ended within the measured time")
    return {
        "sessions": sessions,
        "rounds_per_second": num_rounds / elapsed_s,
        "coordinator_ms_per_round": 1e3 * cpu_s / num_rounds,
    }


async def measure_transports(_: OverheadOptions, progress: Progress) -> dict[str, Any]:
    """Calls a coordinator in this process by gRPC and HTTP in turn. Clients and coordinator share
    an event loop, so switches between processes add no time.

    `X_ttft_added_ms_p50` is the median of a difference: the time to the first token at a client of
    transport X, minus the coordinator's own time to the first token. `X_chunk_added_ms` is the
    median time from when the coordinator has a chunk to when the client has read the chunk."""
    progress("starting the services")
    added: dict[str, list[float]] = {}
    async with (
        _coordinator_here() as (stamps, address, url),
        Client(address) as client,
        HttpClient(url, raw=True, model=CANNED.model) as http,
    ):
        clients: dict[str, BenchClient] = {"grpc": GrpcClient(client, raw=True), "http": http}
        gc.collect()
        gc.freeze()  # Later garbage collections skip the objects that exist now.
        for turn in range(-WARM_UP_TURNS, TURNS):
            if turn % 10 == 0:
                progress(f"turn {turn} of {TURNS}")
            for name, asked in clients.items():
                first_ms, chunks_ms = await added_ms(asked, stamps)
                if turn >= 0:
                    added.setdefault(f"{name}_ttft_added_ms_p50", []).append(first_ms)
                    added.setdefault(f"{name}_chunk_added_ms", []).extend(chunks_ms)
    return {name: median(times) for name, times in added.items()}


async def added_ms(client: BenchClient, stamps: list[float]) -> tuple[float, list[float]]:
    """The times that a transport adds to the first token, and to each chunk, ms. The coordinator
    appends the times of the request and of each chunk to `stamps`."""
    stamps.clear()
    done = await client.generate(_WORDS)
    asked_s, *had_s = stamps
    first_s = done.chunk_s[0] - (had_s[0] - asked_s)
    delays = zip(done.chunk_s, had_s, strict=True)
    return 1e3 * first_s, [1e3 * (done.started_s + at_s - had) for at_s, had in delays]


@asynccontextmanager
async def _coordinator_here() -> AsyncIterator[tuple[list[float], str, str]]:
    """Starts a coordinator in this process. Yields a list, the coordinator's gRPC address, and its
    HTTP URL. The coordinator appends the times of requests and chunks to the list."""
    from coordinator.actor import CoordinatorActor

    stamps: list[float] = []
    clock, actor = asyncio.get_running_loop().time, CoordinatorActor()
    with tempfile.TemporaryDirectory(prefix="outrider-") as directory:
        _save_tokenizer(directory)
        async with _canned_replicas(verify_s=TURN_STEP_S) as replicas:
            config = replicas.coordinator_config(
                http=True,
                tokenizer_directory=directory,
                served_model_name=CANNED.model,
                run_ahead_rounds=0,  # A canned target answers one round at a time.
            )
            address = await actor.start(config, log_directory="")
            service: Any = actor.host and actor.host.service
            generate = service.streams.generate

            async def stamped(*given: Any, **named: Any) -> AsyncGenerator[Event]:
                stamps.append(clock())
                async with aclosing(generate(*given, **named)) as events:
                    async for event in events:
                        if isinstance(event, Tokens):
                            stamps.append(clock())
                        yield event

            service.streams.generate = stamped
            try:
                yield stamps, address, f"http://{(await actor.engagement()).http_address}"
            finally:
                await actor.stop(1.0)


def _save_tokenizer(directory: str) -> None:
    """Saves a tokenizer that knows only `_WORD`, with the byte-level decoder of real models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    word = f"Ġ{_WORD}"  # The byte-level alphabet writes a blank as "Ġ".
    tokenizer = Tokenizer(models.WordLevel({word: CANNED.vocab_size - 1}, unk_token=word))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def canned_service(answer: Callable[[Any], Any], step_s: float) -> Any:
    """A `ReplicaService` that answers each item with `answer(item)`, after `step_s`."""

    def connect(send: Callable[[Sequence[Any]], None]) -> Any:
        def receive(items: Sequence[Any]) -> None:
            answers = [answer(item) for item in items]
            if step_s:
                asyncio.get_running_loop().call_later(step_s, send, answers)
            else:
                send(answers)

        return SimpleNamespace(receive=receive, close=lambda: None)

    return SimpleNamespace(
        connect=connect, describe=lambda: CANNED, release=lambda session_id, epoch: None
    )


def propose(item: DraftItem) -> ProposalReply:
    length, size = item.head.committed_length, item.num_draft_tokens
    return ProposalReply(item.head.key, PROPOSAL.cut(size), length, length + size)


def verify(item: VerifyItem) -> VerdictReply:
    size = len(item.proposal)
    verdict = Verdict((ACCEPT_PROBABILITY,) * size, (CANNED.vocab_size - 1,) * (size + 1))
    head = item.head
    return VerdictReply(
        head.key,
        verdict,
        head.committed_length + size,
        committed_length=head.committed_length,
        prefix_digest=head.committed_digest,
        proposal_digest=digest_after(head.committed_digest, item.proposal.token_ids),
    )


@asynccontextmanager
async def canned_role(setup: dict[str, Any]) -> AsyncIterator[str]:
    draft = ReplicaServicer(canned_service(propose, setup["draft_s"]), DRAFT)
    target = ReplicaServicer(canned_service(verify, setup["verify_s"]), VERIFY)
    server = RpcServer([draft.grpc_service, target.grpc_service], ServerOptions())
    await server.start()
    try:
        await server.set_serving(True)
        yield server.address
    finally:
        await server.stop()
