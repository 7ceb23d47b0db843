"""`outrider bench overhead`: what rounds and requests cost beside the models.

rounds      a round, from the `DraftRequest`'s sending to the store's acknowledgement
            client -> coordinator -> canned draft, canned target, Redis: a process each
queueing    how long a message waits for its receiver while the steps of a model run
capacity    how many rounds one coordinator plays for many sessions, and what it adds to each
transports  what gRPC and HTTP add to a request and to each of its chunks
            clients and coordinator in this process, an emulated target in another one

Canned replicas answer at once, or at the end of a step, with well-formed answers that no model
made. Stamps are of the machine's monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from string import ascii_lowercase
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from outrider.client import Client, InProcessTransport
from outrider.config import EMULATED, CoordinatorConfig, TargetConfig, unlocked
from outrider.errors import Unavailable
from outrider.limits import DEADLINE_MS_MAX, NUM_DRAFT_TOKENS_MAX, SESSIONS_PER_COORDINATOR_MAX
from outrider.messages import (
    DraftItem,
    ProposalReply,
    ReplicaDescription,
    VerdictReply,
    VerifyItem,
)
from outrider.replica.process_setup import cores_for, use_threads
from outrider.request import Event, GenerateRequest, Tokens
from outrider.sessions.store import Append
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import (
    COUNT_TOTAL,
    DraftDistribution,
    Proposal,
    SealedProposal,
)
from outrider.speculation.sampling_params import Rule, SamplingParams

from .measurement import Progress
from .options import Options, option, words
from .processes import (
    Process,
    Role,
    coordinator_config,
    embedded_redis,
    service,
    service_process,
)
from .prompts import BenchPrompt
from .report import figures_table, percentile
from .serve import ServeOptions
from .serve_clients import (
    TEXT,
    GrpcServingClient,
    HttpServer,
    HttpServingClient,
    RequestFailed,
    ServingClient,
    StreamTimes,
)

if TYPE_CHECKING:
    from rich.table import Table

PARTS: Final = ("rounds", "queueing", "capacity", "transports")
NUM_DRAFT_TOKENS: Final = 8
PROMPT_TOKENS: Final = 64
ACCEPT_PROBABILITY: Final = 0.7
"""Of every canned draft token: a round of 8 commits some 3 tokens."""
Q_ENTRIES: Final = 64
CANNED: Final = ReplicaDescription(
    model="canned", weights_fingerprint="canned", tokenizer_fingerprint="canned",
    vocab_size=151_936, dtype="float32", max_model_len=32_768, eos_token_ids=(), max_num_seqs=1,
)  # fmt: skip
WARM_UP_ROUNDS: Final = 200
SESSION_TOKENS: Final = 512
BUSY_SESSIONS: Final = 2
"""That ask again as soon as they are answered, so that the target's steps follow each other."""
WARM_UP_PROBES: Final = 8
PAUSE_S_MAX: Final = 0.05
"""A probe comes after a time between 0 and this: more than a step. What is asked when a step ends
would always find the target at the same place."""
VERIFY_S: Final = 0.0183
"""Of a target's step; a 70B model's (`bench emulate`)."""
DRAFT_S: Final = NUM_DRAFT_TOKENS * 0.0013
"""Of all draft tokens of a step's sessions."""
STEP_SESSIONS: Final = 64
"""That share a step, where it is not the target that limits."""
CROWD_TOKENS: Final = 2_048
WARM_UP_S: Final = 3.0
WARM_UP_TURNS: Final = 3
PROMPT_WORDS: Final = 48
_WORDS: Final = tuple("".join(letters) for letters in product(ascii_lowercase[:16], repeat=3))
"""The vocabulary of the emulated target: three letters each, so that every token is text."""
now_ns: Final = time.monotonic_ns


@dataclass(frozen=True, kw_only=True)
class OverheadOptions(Options):
    """What `bench overhead` is asked for. Wrong values raise `SettingError`."""

    parts: tuple[str, ...] = option(
        PARTS[:2], f"what to measure, of {', '.join(PARTS)}", choices=PARTS, metavar="NAMES",
        parse=words,
    )  # fmt: skip
    rounds: int = option(2_000, "rounds to measure", low=1, high=100_000)
    probes: int = option(
        400, "messages to measure while the target's steps run; 0 = none", low=0, high=100_000
    )
    sessions: int = option(
        500, "capacity: sessions at a time", low=1, high=SESSIONS_PER_COORDINATOR_MAX
    )
    seconds: float = option(
        10.0, "capacity: time of each measurement", low=1, high=600, metavar="S", parse=float
    )
    load: float = option(
        0.7, "capacity: part of the most rounds a second at which waiting is measured", low=0.01,
        high=1, metavar="SHARE", parse=float,
    )  # fmt: skip
    turns: int = option(60, "transports: requests through each", low=1, high=10_000)
    max_tokens: int = option(32, "transports: tokens of each request", low=2, high=4_096)
    step_ms: float = option(
        5.0, "transports: of the emulated target", low=0, high=1_000, metavar="MS", parse=float
    )


@dataclass(frozen=True, slots=True)
class OverheadReport:
    """The result of one `bench overhead`: the figures of its parts, see their functions."""

    figures: Mapping[str, Any]

    def values(self) -> Mapping[str, Any]:
        """By names in JSON."""
        return self.figures

    def render(self) -> Table:
        """For people."""
        rows: list[tuple[str, str]] = []

        def add(figures: Mapping[str, Any], prefix: str) -> None:
            for name, value in figures.items():
                if isinstance(value, Mapping):
                    add(value, f"{prefix}{name.replace('_', ' ')}: ")
                else:
                    shown = f"{value:.3f}" if isinstance(value, float) else str(value)
                    rows.append((prefix + name.replace("_", " "), shown))

        add(self.figures, "")
        return figures_table("overhead beside the models", rows)


async def run(options: OverheadOptions, target: TargetConfig, progress: Progress) -> OverheadReport:
    """Measures; `target` is what the queueing part's target runs. Raises `Unavailable` where a
    process breaks off, and `ConfigError`."""
    figures: dict[str, Any] = {}
    if "rounds" in options.parts:
        figures |= await measure_rounds(options.rounds, progress)
    if "queueing" in options.parts and options.probes:
        figures |= await measure_queueing(options.probes, target, progress)
    if "capacity" in options.parts:
        figures["capacity"] = await measure_capacity(options, progress)
    if "transports" in options.parts:
        figures["transports"] = await measure_transports(options, progress)
    return OverheadReport(figures)


def canned_request(seed: int, max_tokens: int, first_token: int = 1) -> GenerateRequest:
    """A session of the full length, with K = `NUM_DRAFT_TOKENS` under token."""
    return GenerateRequest(
        prompt=tuple(range(first_token, first_token + PROMPT_TOKENS)),
        sampling=SamplingParams(temperature=1.0),
        max_tokens=max_tokens,
        ignore_eos=True,
        seed=seed,
        rule=Rule.TOKEN,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        deadline_ms=DEADLINE_MS_MAX,
    )


@dataclass(frozen=True, slots=True)
class _Stack:
    """The processes of a measurement."""

    draft: Process
    target: Process
    coordinator: Process
    client: Client


@asynccontextmanager
async def _stack(
    step_s: tuple[float, float] = (0.0, 0.0), target: TargetConfig | None = None
) -> AsyncIterator[_Stack]:
    """A canned draft and target with steps of so many seconds, or a target with a model; an
    embedded Redis; and a coordinator whose rounds are stamped."""
    async with AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(embedded_redis())

        async def canned(side: str, described: ReplicaDescription, seconds: float) -> Process:
            setup = {
                "side": side, "description": asdict(described), "step_s": seconds,
                "sessions_max": STEP_SESSIONS,
            }  # fmt: skip
            role = "benchmarks.overhead:canned_role"
            return await stack.enter_async_context(Process(role, f"the canned {side}", setup))

        described = CANNED
        if target is None:
            verifier = await canned("target", described, step_s[1])
        else:
            config = replace(unlocked(target), port=0, telemetry="")
            process = service_process("target", config, "benchmarks.overhead:target_role")
            verifier = await stack.enter_async_context(process)
            described = replace(
                CANNED,
                vocab_size=verifier.ready["vocab_size"],
                tokenizer_fingerprint=verifier.ready["tokenizer_fingerprint"],
            )
        draft = await canned("draft", described, step_s[0])
        asking = coordinator_config(CoordinatorConfig(), redis_url, verifier.address, draft.address)
        process = service_process("coordinator", asking, "benchmarks.overhead:coordinator_role")
        coordinator = await stack.enter_async_context(process)
        client = await stack.enter_async_context(Client(coordinator.address))
        yield _Stack(draft, verifier, coordinator, client)


async def measure_rounds(num_rounds: int, progress: Progress) -> dict[str, Any]:
    """Medians, ms, of rounds of the full length, one session after the other:

    draft     from a `DraftRequest`'s sending to its decoded answer
    between   from there to the `VerifyRequest`'s sending
    verify    from there to the decoded verdict
    decide    from there to the store's call
    commit    the store's call
    cycle     from one `DraftRequest` to the next, less than a round: a commit and the next round's
              draft overlap

    `bytes_per_round` is the mean of the frames of a session's rounds, both hops, both ways."""
    wanted = WARM_UP_ROUNDS + num_rounds
    rounds: list[dict[str, int]] = []
    num_bytes = num_all = 0
    async with _stack() as stack:
        seed = 0
        while len(rounds) < wanted:
            progress(f"round {len(rounds)} of {wanted}")
            await stack.client.complete(canned_request(seed, SESSION_TOKENS))
            seed += 1
            seen = await stack.coordinator.ask({})
            rounds += full_rounds(stamps for _, _, stamps in seen["rounds"])
            num_bytes, num_all = seen["num_bytes"], num_all + len(seen["rounds"])
    return round_figures(rounds[WARM_UP_ROUNDS:wanted]) | {"bytes_per_round": num_bytes / num_all}


_STAMPS: Final = (
    "draft_sent", "draft_heard", "verify_sent", "verdict_heard", "commit_sent", "committed",
)  # fmt: skip
_ROUND_PARTS: Final = ("draft", "between", "verify", "decide", "commit")


def full_rounds(rounds: Iterable[dict[str, int]]) -> list[dict[str, int]]:
    """The rounds that drafted K tokens. Raises `Unavailable` where one of them did not pass every
    place: one that went on without its draft must not count as a quick one."""
    full = [entry for entry in rounds if entry.get("num_draft_tokens") == NUM_DRAFT_TOKENS]
    for entry in full:
        if any(name not in entry for name in _STAMPS):
            raise Unavailable(f"a round was not played to its end: {entry}")
    return full


def round_figures(rounds: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """By names in JSON."""
    round_ms = [(entry["committed"] - entry["draft_sent"]) / 1e6 for entry in rounds]
    cycles = [after["draft_sent"] - before["draft_sent"] for before, after in pairwise(rounds)]
    parts = {
        name: percentile([(entry[end] - entry[start]) / 1e6 for entry in rounds], 50)
        for name, (start, end) in zip(_ROUND_PARTS, pairwise(_STAMPS), strict=True)
    }
    parts["cycle"] = percentile(cycles, 50) / 1e6 if cycles else 0.0
    return {
        "num_rounds": len(rounds),
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "vocab_size": CANNED.vocab_size,
        "q_entries": Q_ENTRIES,
        "round_ms_p50": percentile(round_ms, 50),
        "round_ms_p99": percentile(round_ms, 99),
        "round_parts_ms": parts,
    }


async def measure_queueing(
    num_probes: int, target: TargetConfig, progress: Progress
) -> dict[str, Any]:
    """How long messages wait while the target's steps run back to back: from the coordinator's
    sending to the place in the target's queue, and from the end of the step on its thread to the
    verdict's arrival. Two sessions keep the target busy; one more, a probe, comes again and again
    at random times, and only its messages count."""
    progress("loading the target")
    async with _stack(target=target) as stack:
        client = stack.client

        async def decode_forever(index: int) -> None:
            for seed in range(index, 10**9, BUSY_SESSIONS):
                await client.complete(canned_request(seed, SESSION_TOKENS))

        busy = [asyncio.create_task(decode_forever(index)) for index in range(BUSY_SESSIONS)]
        try:
            pauses = random.Random(0)  # noqa: S311 (times, not secrecy)
            probes = set()
            for index in range(WARM_UP_PROBES + num_probes):
                if index % 50 == 0:
                    progress(f"probe {index} of {WARM_UP_PROBES + num_probes}")
                await asyncio.sleep(pauses.uniform(0.0, PAUSE_S_MAX))
                for task in busy:
                    if task.done():
                        task.result()
                # Fewer tokens than K + 1, so that one round is the whole session.
                found = await client.complete(canned_request(index, 1, first_token=2))
                if index >= WARM_UP_PROBES:
                    probes.add(found.session_id)
            rounds = (await stack.coordinator.ask({"all": True}))["rounds"]
            seen = await stack.target.ask({})
        finally:
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)
    queued, judged = (
        {(session, index): ns for session, index, ns in seen[name]} for name in ("queued", "judged")
    )
    received, answered, steps = [], [], []
    for session, index, stamps in rounds:
        if session in probes and "verdict_heard" in stamps:
            received.append((queued[session, index] - stamps["verify_sent"]) / 1e6)
            answered.append((stamps["verdict_heard"] - judged[session, index]) / 1e6)
            steps.append(stamps["step_us"] / 1e3)
    if not received:
        raise Unavailable("no probe was answered")
    return {
        "model": target.model,
        "num_probes": len(received),
        "step_ms_p50": percentile(steps, 50),
        "receive_to_queue_ms_p50": percentile(received, 50),
        "receive_to_queue_ms_p99": percentile(received, 99),
        "verdict_to_wire_ms_p50": percentile(answered, 50),
        "verdict_to_wire_ms_p99": percentile(answered, 99),
    }


async def measure_capacity(options: OverheadOptions, progress: Progress) -> dict[str, Any]:
    """First so many sessions share a step that the coordinator is what limits; then so few that a
    stated part of that many rounds is played. What the coordinator adds to a round is the round's
    time, less what the two replicas had it for: its own work and queues, messages and the store."""
    progress("starting")
    async with _stack((DRAFT_S, VERIFY_S)) as stack:

        async def decode_forever(index: int) -> None:
            for seed in range(index, 10**9, options.sessions):
                await stack.client.complete(canned_request(seed, CROWD_TOKENS))

        progress(f"{options.sessions} sessions, as many rounds as it can")
        sessions = [asyncio.create_task(decode_forever(i)) for i in range(options.sessions)]
        try:
            most = await _watch(stack, sessions, options.seconds, STEP_SESSIONS)
            wanted = options.load * most["rounds_per_second"]
            progress(f"{wanted:.0f} rounds a second")
            step_sessions = max(1, round(wanted * VERIFY_S))
            at_load = await _watch(stack, sessions, options.seconds, step_sessions)
        finally:
            for task in sessions:
                task.cancel()
            await asyncio.gather(*sessions, return_exceptions=True)
    return {
        "sessions": options.sessions,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "load": options.load,
        "most": most,
        "at_load": at_load,
    }


async def _watch(
    stack: _Stack, sessions: Sequence[asyncio.Task[None]], seconds: float, step_sessions: int
) -> dict[str, float]:
    """What so many seconds come to, once the target's steps have room for so many sessions.
    `coordinator_cpu` is the part of a core that its process computed on; 1 = it is what limits."""
    await stack.target.ask({"sessions_max": step_sessions})

    async def seen() -> dict[str, Any]:
        # The coordinator's rounds first, which the others then know all about.
        found = await stack.coordinator.ask({})
        held = [
            entry for side in (stack.draft, stack.target) for entry in (await side.ask({}))["held"]
        ]
        return found | {"held": held}

    await asyncio.sleep(WARM_UP_S)
    before, began = await seen(), time.monotonic()
    done, _ = await asyncio.wait(sessions, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    after, elapsed_s = await seen(), time.monotonic() - began
    held: dict[tuple[str, int], float] = {}
    for session, index, span in (*before["held"], *after["held"]):
        held[session, index] = held.get((session, index), 0.0) + span
    added = [
        1e3 * ((stamps["committed"] - stamps["draft_sent"]) / 1e9 - held.get((name, index), 0.0))
        for name, index, stamps in after["rounds"]
        if "draft_sent" in stamps
    ]
    if not added:
        raise Unavailable("no round was played")
    return {
        "rounds_per_second": len(added) / elapsed_s,
        "added_ms_p50": percentile(added, 50),
        "added_ms_p99": percentile(added, 99),
        "coordinator_cpu": (after["cpu_s"] - before["cpu_s"]) / elapsed_s,
        "step_sessions": step_sessions,
    }


async def measure_transports(options: OverheadOptions, progress: Progress) -> dict[str, Any]:
    """One coordinator in this process is asked in turn by the client in this process, by gRPC and
    by HTTP, on its event loop, in an order that rotates: what is added is all of the computing on
    both sides, and the kernel's loopback between them.

    `X_ttft_added_ms_p50` is the median of TTFT through X less that of the in-process request of the
    same turn; `X_chunk_added_ms` the median time from the coordinator's having a chunk to X's
    client having read it, less the same median in-process."""
    progress("starting the target")
    asked = ServeOptions(ignore_eos=True, raw=True, num_draft_tokens=0)
    async with AsyncExitStack() as stack:
        stamps, service, grpc, http_url = await stack.enter_async_context(
            _coordinator_here(options.step_ms)
        )
        here = await stack.enter_async_context(Client(InProcessTransport(service)))
        there = await stack.enter_async_context(Client(grpc))
        server = HttpServer(base_url=http_url, endpoint=TEXT, model="emulated")
        http = await stack.enter_async_context(HttpServingClient(server, asked))
        clients: dict[str, ServingClient] = {
            "in_process": GrpcServingClient(here, asked),
            "grpc": GrpcServingClient(there, asked),
            "http": http,
        }
        gc.collect()
        gc.freeze()  # What is always there is not looked through while times are taken.
        passed = await take_turns(options, clients, stamps, progress)
    return transport_figures(options, passed)


async def take_turns(
    options: OverheadOptions,
    clients: Mapping[str, ServingClient],
    stamps: list[float],
    progress: Progress,
) -> dict[str, list[list[float]]]:
    """By client, for each turn: TTFT, then of each chunk the time from the coordinator's having it,
    which `stamps` has, to the client's; s."""
    names = list(clients)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    clock = asyncio.get_running_loop().time
    number = 0
    for turn in range(-WARM_UP_TURNS, options.turns):
        if turn % 10 == 0:
            progress(f"turn {turn} of {options.turns}")
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            number += 1
            stamps.clear()
            times = StreamTimes(clock)
            began = clock()
            try:
                prompt = BenchPrompt(words_of(number), name)
                await clients[name].answer(prompt, options.max_tokens, times)
            except RequestFailed as failure:
                raise Unavailable(f"by {name}: {failure}") from failure
            if len(times.chunk_s) != len(stamps) or not stamps:
                raise Unavailable(
                    f"by {name} came {len(times.chunk_s)} chunks where the coordinator had "
                    f"{len(stamps)}"
                )
            if turn >= 0:
                delays = [at - had for at, had in zip(times.chunk_s, stamps, strict=True)]
                found[name].append([times.chunk_s[0] - began, *delays])
    return found


def transport_figures(
    options: OverheadOptions, passed: Mapping[str, Sequence[Sequence[float]]]
) -> dict[str, float]:
    """By names in JSON; the k-th entries are of one turn."""
    ttft = {name: [1e3 * each[0] for each in found] for name, found in passed.items()}
    chunks = {name: [1e3 * s for each in found for s in each[1:]] for name, found in passed.items()}
    least = percentile(chunks["in_process"], 50)
    figures = {
        "turns": options.turns,
        "max_tokens": options.max_tokens,
        "step_ms": options.step_ms,
        "in_process_ttft_ms_p50": percentile(ttft["in_process"], 50),
        "in_process_chunk_ms": least,
    }
    for name in ("grpc", "http"):
        added = [a - b for a, b in zip(ttft[name], ttft["in_process"], strict=True)]
        figures[f"{name}_ttft_added_ms_p50"] = percentile(added, 50)
        figures[f"{name}_chunk_added_ms"] = percentile(chunks[name], 50) - least
        figures[f"{name}_chunk_added_ms_p99"] = percentile(chunks[name], 99) - least
    return figures


def words_of(number: int) -> str:
    """A prompt that no other number shares a page with."""
    size = len(_WORDS)
    digits = (number % size, number // size % size)
    return "".join(f" {_WORDS[digits[place % 2]]}" for place in range(PROMPT_WORDS))


@asynccontextmanager
async def _coordinator_here(step_ms: float) -> AsyncIterator[tuple[list[float], Any, str, str]]:
    """A coordinator in this process before an emulated target with such steps; when it had the
    tokens of its newest request, its service, and where it answers by gRPC and HTTP."""
    from coordinator.actor import CoordinatorActor
    from coordinator.service import CoordinatorService

    stamps: list[float] = []
    found: list[Any] = []
    generate, start = CoordinatorService.generate, CoordinatorService.start
    clock = asyncio.get_running_loop().time

    async def stamped(self: Any, *given: Any, **named: Any) -> AsyncGenerator[Event]:
        async with aclosing(generate(self, *given, **named)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    stamps.append(clock())
                yield event

    async def started(self: Any) -> None:
        found.append(self)
        await start(self)

    engine = f"{EMULATED}vocab_size={len(_WORDS)},verify_ms={step_ms}"
    target_config = TargetConfig(engine=engine, model="emulated", num_threads=1, port=0)
    async with AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(embedded_redis())
        target = await stack.enter_async_context(service_process("target", target_config))
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-"))
        _save_tokenizer(directory)
        config = coordinator_config(CoordinatorConfig(), redis_url, target.address)
        config = replace(
            config, http=True, tokenizer_directory=directory, served_model_name="emulated"
        )
        actor = CoordinatorActor()
        _patch(stack, CoordinatorService, "generate", stamped)
        _patch(stack, CoordinatorService, "start", started)
        address = await actor.start(config, log_directory="")
        stack.push_async_callback(actor.stop, 1.0)
        http_address = (await actor.engagement()).http_address
        yield stamps, found[0], address, f"http://{http_address}"


def _save_tokenizer(directory: str) -> None:
    """One whose every token is a word, and whose text is cut as those of models are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    space = "Ġ"  # How the byte-level alphabet writes a blank.
    vocabulary = {f"{space}{word}": place for place, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=f"{space}{_WORDS[0]}"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def _patch(stack: Any, owner: Any, name: str, value: object) -> None:
    """Observes a class of the services: its method is `value` as long as the stack lasts."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


class RoundClock:
    """When the messages of rounds passed through a coordinator's links and its store, ns."""

    def __init__(self) -> None:
        self.links: list[Any] = []
        self._rounds: dict[tuple[str, int], dict[str, int]] = {}
        self._undone: dict[str, list[int]] = {}
        """Rounds of each session whose commit has not been acknowledged."""

    def observe(self, stack: Any) -> None:
        """Stamps what passes through links and stores of this process from now on."""
        from outrider.sessions.redis_store import RedisStore
        from outrider.transport.grpc_link import GrpcLink

        send, listen, append = GrpcLink.send, GrpcLink.listen, RedisStore.append

        def sent(link: Any, item: Any) -> None:
            self.sent(item)
            send(link, item)

        def listened(link: Any, on_answer: Callable[[Any], None], on_lost: Any) -> None:
            self.links.append(link)

            def heard(answer: Any) -> None:
                self.heard(answer)
                on_answer(answer)

            listen(link, heard, on_lost)

        async def appended(store: Any, appends: Sequence[Append]) -> Any:
            covered = self.commits(appends)
            answers = await append(store, appends)
            self.stamp(covered, "committed")
            return answers

        _patch(stack, GrpcLink, "send", sent)
        _patch(stack, GrpcLink, "listen", listened)
        _patch(stack, RedisStore, "append", appended)

    def sent(self, item: DraftItem | VerifyItem) -> None:
        """A coordinator asks a replica; a draft that is asked for the prompt alone begins no
        round."""
        key = (item.head.session_id, item.head.round)
        if isinstance(item, DraftItem):
            if item.num_draft_tokens == 0 or key in self._rounds:
                return
            self._begin(key)["num_draft_tokens"] = item.num_draft_tokens
            self._rounds[key]["draft_sent"] = now_ns()
        else:
            stamps = self._rounds.get(key) or self._begin(key)
            stamps["verify_sent"] = now_ns()

    def _begin(self, key: tuple[str, int]) -> dict[str, int]:
        self._undone.setdefault(key[0], []).append(key[1])
        self._rounds[key] = {}
        return self._rounds[key]

    def heard(self, answer: object) -> None:
        """An answer is decoded."""
        if not isinstance(answer, ProposalReply | VerdictReply):
            return
        stamps = self._rounds.get((answer.key.session_id, answer.key.round))
        if stamps is None:
            return
        if isinstance(answer, ProposalReply):
            stamps["draft_heard"] = now_ns()
        else:
            stamps["verdict_heard"] = now_ns()
            stamps["step_us"] = round(1e3 * answer.compute_ms)

    def commits(self, appends: Sequence[Append]) -> list[tuple[str, int]]:
        """A coordinator calls the store; the rounds that this commits."""
        covered = []
        for entry in appends:
            undone = self._undone.get(entry.session_id, [])
            indices = [index for index in undone if index < entry.counters.num_rounds]
            self._undone[entry.session_id] = undone[len(indices) :]
            covered += [(entry.session_id, index) for index in indices]
        self.stamp(covered, "commit_sent")
        return covered

    def stamp(self, rounds: Sequence[tuple[str, int]], name: str) -> None:
        """Stamps rounds, as far as they are known."""
        for key in rounds:
            self._rounds.get(key, {})[name] = now_ns()

    def take(self, *, everything: bool) -> list[tuple[str, int, dict[str, int]]]:
        """Session, index and stamps of the rounds that are over, or of all; they are forgotten."""
        chosen = [key for key, s in self._rounds.items() if everything or "committed" in s]
        return [(*key, self._rounds.pop(key)) for key in chosen]


@asynccontextmanager
async def coordinator_role(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    """A coordinator; every later line asks for its rounds and its computing so far."""
    clock = RoundClock()

    def answer(question: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "rounds": clock.take(everything=question.get("all", False)),
            "num_bytes": sum(one.num_bytes.sent + one.num_bytes.received for one in clock.links),
            "cpu_s": time.process_time(),
        }

    async with AsyncExitStack() as stack:
        use_threads(1)
        clock.observe(stack)
        role = await stack.enter_async_context(service(setup))
        yield Role(role.ready, answer)


@asynccontextmanager
async def target_role(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    """A target with a model that notes when each item stands in its queue, and when the answers of
    a step were there: on the step's thread, before the event loop knows of them."""
    queued: list[tuple[str, int, int]] = []
    judged: list[tuple[str, int, int]] = []
    async with AsyncExitStack() as stack:
        use_threads(setup["config"]["num_threads"] or cores_for("target"))
        from outrider.replica.scheduler import ThreadExecutor
        from outrider.replica.service import SteppedService

        take, timed = SteppedService.take, ThreadExecutor._timed

        def taken(target: Any, item: VerifyItem, sender: Any) -> None:
            take(target, item, sender)
            queued.append((item.head.session_id, item.head.round, now_ns()))

        def stamped(executor: Any, step: Callable[[], Any]) -> Any:
            result = timed(executor, step)
            stamp = now_ns()
            judged.extend(
                (one.key.session_id, one.key.round, stamp)
                for one in (result if isinstance(result, list) else ())
                if isinstance(one, VerdictReply)
            )
            return result

        _patch(stack, SteppedService, "take", taken)
        _patch(stack, ThreadExecutor, "_timed", stamped)
        role = await stack.enter_async_context(service(setup))
        from outrider.transport.grpc_link import target_link

        link = target_link(str(role.ready["address"]))
        described = await link.describe(60.0)
        await link.close()
        ready = {
            "vocab_size": described.vocab_size,
            "tokenizer_fingerprint": described.tokenizer_fingerprint,
        }
        yield Role({**role.ready, **ready}, lambda _: {"queued": queued, "judged": judged})


class CannedReplica:
    """A `ReplicaService` whose answer to an item is a function of it: at once, or at the end of a
    step of a stated time that takes no computing and that some sessions share."""

    def __init__(
        self,
        description: ReplicaDescription,
        answer: Callable[[Any], Any],
        step_s: float = 0.0,
        sessions_max: int = STEP_SESSIONS,
    ) -> None:
        self._description = description
        self._answer = answer
        self._step_s = step_s
        self.sessions_max = sessions_max
        self._waiting: deque[tuple[float, Any, Callable[[Sequence[Any]], None]]] = deque()
        self._stepping: asyncio.Task[None] | None = None
        self.held: list[tuple[str, int, float]] = []
        """Session, round and seconds of the items that were answered in steps."""

    def connect(self, send: Callable[[Sequence[Any]], None]) -> Any:
        """See `ReplicaService.connect`."""

        def receive(items: Sequence[Any]) -> None:
            if not self._step_s:
                send([self._answer(item) for item in items])
                return
            loop = asyncio.get_running_loop()
            self._waiting.extend((loop.time(), item, send) for item in items)
            if self._stepping is None:
                self._stepping = loop.create_task(self._step(loop))

        return SimpleNamespace(receive=receive, close=lambda: None)

    def describe(self) -> ReplicaDescription:
        """See `ReplicaService.describe`."""
        return self._description

    def release(self, session_id: str, epoch: int) -> None:
        """See `ReplicaService.release`: nothing is kept."""

    async def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        """Steps until nothing waits. A step is of those that wait when it begins, and begins when
        the one before was due to end: what the event loop is late does not add up."""
        due = loop.time()
        while self._waiting:
            number = min(len(self._waiting), self.sessions_max)
            taken = [self._waiting.popleft() for _ in range(number)]
            due += self._step_s
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            by_receiver: dict[Callable[[Sequence[Any]], None], list[Any]] = {}
            for received, item, send in taken:
                by_receiver.setdefault(send, []).append(self._answer(item))
                self.held.append((item.head.session_id, item.head.round, now - received))
            for send, answers in by_receiver.items():
                send(answers)
        self._stepping = None


def canned_proposal(num_draft_tokens: int, vocab_size: int) -> SealedProposal:
    """`num_draft_tokens` tokens, each from a distribution of `Q_ENTRIES` entries whose counts fall
    off as those of a language model do; always the same."""
    numbers = random.Random(num_draft_tokens)  # noqa: S311 (data, not secrecy)
    q = []
    for _ in range(num_draft_tokens):
        ids = sorted(numbers.sample(range(vocab_size), Q_ENTRIES))
        counts = [COUNT_TOTAL // (2 * Q_ENTRIES * (1 + rank)) + 1 for rank in range(Q_ENTRIES)]
        counts[0] += COUNT_TOTAL - sum(counts)
        numbers.shuffle(counts)
        q.append(DraftDistribution(tuple(ids), tuple(counts)))
    likeliest = (entry.token_ids[entry.counts.index(max(entry.counts))] for entry in q)
    return SealedProposal.of(Proposal(tuple(likeliest), tuple(q)))


def canned_verdict(num_draft_tokens: int, vocab_size: int) -> Verdict:
    """Accepts each draft token with the same chance; always the same."""
    numbers = random.Random(-1 - num_draft_tokens)  # noqa: S311 (data, not secrecy)
    corrections = (numbers.randrange(vocab_size) for _ in range(num_draft_tokens + 1))
    return Verdict((ACCEPT_PROBABILITY,) * num_draft_tokens, tuple(corrections))


def canned_replica(side: str, description: ReplicaDescription, **steps: Any) -> CannedReplica:
    """A draft that has its proposals ready, or a target that has its verdicts."""
    sizes, vocab_size = range(NUM_DRAFT_TOKENS_MAX + 1), description.vocab_size
    if side == "draft":
        proposals = [canned_proposal(number, vocab_size) for number in sizes]

        def propose(item: DraftItem) -> ProposalReply:
            length = item.head.committed_length
            proposal = proposals[item.num_draft_tokens]
            return ProposalReply(item.head.key, proposal, length, length + len(proposal))

        return CannedReplica(description, propose, **steps)
    verdicts = [canned_verdict(number, vocab_size) for number in sizes]

    def verify(item: VerifyItem) -> VerdictReply:
        number = len(item.proposal)
        return VerdictReply(item.head.key, verdicts[number], item.head.committed_length + number)

    return CannedReplica(description, verify, **steps)


@asynccontextmanager
async def canned_role(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    """A canned draft or target. A later line may have `sessions_max`; it is told what was held
    since the last one."""
    use_threads(1)
    from outrider.transport.codec import DRAFT, VERIFY
    from outrider.transport.server import RpcServer, ServerOptions
    from outrider.transport.stream_server import ReplicaServicer

    described = ReplicaDescription(**setup["description"])
    steps = {name: setup[name] for name in ("step_s", "sessions_max")}
    replica: Any = canned_replica(setup["side"], described, **steps)
    servicer: Any = ReplicaServicer(replica, DRAFT if setup["side"] == "draft" else VERIFY)

    def answer(question: Mapping[str, Any]) -> dict[str, Any]:
        replica.sessions_max = question.get("sessions_max", replica.sessions_max)
        held, replica.held = replica.held, []
        return {"held": held}

    server = RpcServer([servicer.grpc_service], ServerOptions())
    await server.start()
    try:
        await server.set_serving(True)
        yield Role({"address": server.address}, answer)
    finally:
        await server.stop()
