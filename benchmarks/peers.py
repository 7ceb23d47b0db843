"""`outrider bench peers`: Outrider beside other inference systems, with the same weights, prompts
and threads: plain and speculative, at each temperature and number of requests at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from outrider.errors import ConfigError, OutriderError, SettingError, Unavailable
from outrider.limits import SESSIONS_PER_COORDINATOR_MAX, TEMPERATURE_MAX
from outrider.models.sources import cache_dir, gguf_file

from .clients import HttpClient
from .libraries import (
    PEERS,
    PLAIN,
    Library,
    LibraryProcess,
    LibraryServer,
    TargetInputs,
    bfloat16_gguf,
    fastest_settings,
)
from .measurement import BenchClient, Contestant, Decoding, Progress, SideResult, measure
from .options import DecodingOptions, option
from .prompts import BenchPrompt
from .report import Report, table
from .speedup import Subject

NAMES: Final = tuple(library.name for library in PEERS)
OURS_PLAIN: Final = "outrider plain"
OURS_SPECULATIVE: Final = "outrider speculative"
REST_S: Final = 0.5
"""Between the turns of two sides: threads of Intel's OpenMP, which vLLM runs on, spin for 0.2 s
when their work is done, and would take the cores from the side that follows."""

StartSubjects = Callable[[], AbstractAsyncContextManager[tuple[Subject, Subject]]]
"""Starts a deployment to measure, or finds the one that runs: for plain and for speculative
decoding, which share no cache where they can be kept apart."""
Level = Mapping[str, Any]
"""The figures at one temperature and number of requests at a time, by names in JSON."""


@dataclass(frozen=True, kw_only=True)
class PeersOptions(DecodingOptions):
    """What `bench peers` is asked for."""

    num_prompts: int | None = 16
    max_tokens: int = 96
    temperature: tuple[float, ...] = option(
        (0.0, 1.0), "0 = always the likeliest token", low=0, high=TEMPERATURE_MAX,
        metavar="T[,T..]",
    )  # fmt: skip
    concurrency: tuple[int, ...] = option(
        (1, 8), "requests at a time", low=1, high=SESSIONS_PER_COORDINATOR_MAX, metavar="N[,N..]",
    )  # fmt: skip
    peers: tuple[str, ...] = option(NAMES, "which systems", choices=NAMES, metavar="NAMES")
    environments: Path = option(
        Path(".venv/peers"), "where `make peers` has installed them", metavar="DIR"
    )
    sweep: bool = option(
        False, "find each peer's fastest settings anew, though an earlier run has found them"
    )
    servers: bool = option(
        False, "measure servers, by one HTTP client: of Outrider, and of the peers that have one"
    )


class Peers:
    """The systems beside Outrider, as far as they run. An async context manager: leaving ends
    them."""

    def __init__(self, options: PeersOptions, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._stack = AsyncExitStack()
        self._serial: set[str] = set()
        """Sides that take one request at a time."""
        self.clients: dict[str, BenchClient] = {}
        self.settings: dict[str, Mapping[str, object]] = {}
        self.missing: dict[str, str] = {}
        """Why a peer, or one of its modes, is not measured."""

    async def start(self, subject: Subject, prompts: Sequence[BenchPrompt]) -> None:
        """Starts those that are wanted and installed, with their fastest settings. Raises
        `SettingError` where the target's files are not on this machine."""
        options = self._options
        if subject.target is None:
            raise SettingError("server", "the target's files are not known here; peers need them")
        gguf = gguf_file(subject.model)
        inputs = TargetInputs.load(
            subject.target, prompts, options, batch=max(options.concurrency),
            gguf=str(bfloat16_gguf(gguf, cache_dir())) if gguf else "",
            environments=options.environments,
        )  # fmt: skip
        for peer in PEERS:
            if peer.name not in options.peers:
                continue
            if not peer.is_installed(options.environments):
                self.missing[peer.name] = "not installed; `make peers` installs it"
            elif options.servers and not peer.server:
                self.missing[peer.name] = "it has no server"
            elif peer.needs_gguf and not gguf:
                self.missing[peer.name] = "the target does not come from a GGUF file"
            else:
                try:
                    await self._start(peer, inputs)
                except (ConfigError, Unavailable) as error:
                    self.missing[peer.name] = error.message

    async def _start(self, peer: Library, inputs: TargetInputs) -> None:
        options, kind = self._options, LibraryServer if self._options.servers else LibraryProcess
        found = await fastest_settings(peer, inputs, self._progress, again=options.sweep)
        for mode, setting in found.items():
            side = f"{peer.name} {mode}"
            self._progress(f"loading the model once more: {side}")
            client = kind(peer, setting, inputs)
            self.clients[side] = await self._stack.enter_async_context(client)
            versions = peer.versions(options.environments)
            self.settings[side] = asdict(setting) | {"versions": versions}
            if peer.is_ours:
                self._serial.add(side)

    async def __aenter__(self) -> Peers:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    def contestants(self, decoding: Decoding, concurrency: int) -> list[Contestant]:
        """Those that run and take so many requests at a time."""
        return [
            Contestant(side, client, decoding, concurrency)
            for side, client in self.clients.items()
            if concurrency == 1 or side not in self._serial
        ]

    def drop(self, side: str, error: OutriderError) -> bool:
        """Whether to go on without a side that has failed: from now on without a peer's."""
        if self.clients.pop(side, None) is None:
            return False
        self.missing[side] = f"it failed: {error.message}"
        return True


async def run(options: PeersOptions, start_subjects: StartSubjects, progress: Progress) -> Report:
    """Measures Outrider and its peers. Raises `SettingError` for options that are wrong, and what
    Outrider refuses a request with.

    Every level has a deployment of its own, so that no side finds a prompt or an answer cached."""
    prompts = options.load_prompts()
    levels: list[Level] = []
    setup: dict[str, Any] = {}
    async with Peers(options, progress) as peers:
        for temperature in options.temperature:
            for concurrency in options.concurrency:
                async with AsyncExitStack() as stack:
                    plain, speculative = await stack.enter_async_context(start_subjects())
                    drafted = options.drafted(speculative.num_draft_tokens, temperature)
                    undrafted = replace(drafted, num_draft_tokens=0)
                    if not setup:
                        await peers.start(speculative, prompts)
                        setup = asdict(drafted) | {
                            "model": speculative.model,
                            "draft_model": speculative.draft_model,
                            "dtype": speculative.dtype,
                            "num_prompts": len(prompts),
                            "rule": options.rule,
                            "threads": speculative.target and speculative.target.num_threads,
                        }
                    ours: list[BenchClient] = [plain.client, speculative.client]
                    if options.servers:
                        ours = [
                            await stack.enter_async_context(
                                _http_client(subject, decoding, options.raw)
                            )
                            for subject, decoding in ((plain, undrafted), (speculative, drafted))
                        ]
                    progress(f"temperature {temperature:g}, {concurrency} at a time")
                    contestants = [
                        Contestant(OURS_PLAIN, ours[0], undrafted, concurrency),
                        Contestant(OURS_SPECULATIVE, ours[1], drafted, concurrency),
                        *peers.contestants(undrafted, concurrency),
                    ]
                    results = await measure(prompts, contestants, progress, peers.drop, REST_S)
                    levels.append(level_of(temperature, concurrency, results))
    return report(setup, levels, peers.settings, peers.missing)


def _http_client(subject: Subject, decoding: Decoding, raw: bool) -> HttpClient:
    """Asks a deployment for as many draft tokens as `decoding` has."""
    if not subject.http_url:
        raise SettingError("servers", "the deployment that runs has no HTTP interface")
    extra = {"speculation": {"num_draft_tokens": decoding.num_draft_tokens}}
    return HttpClient(subject.http_url, raw=raw, api_key=subject.api_key, extra_body=extra)


def level_of(temperature: float, concurrency: int, results: Mapping[str, SideResult]) -> Level:
    """The figures of all sides, which decoded the same prompts. Of each side: all tokens over all
    wall time, prefill included; the median time to the first token, one at a time; and on how many
    prompts it wrote the tokens of our plain decoding: at temperature 0 all, but for near ties. None
    above it, and where ids are not known."""
    ours = results[OURS_PLAIN].completions

    def figures(found: SideResult) -> dict[str, Any]:
        times = [one.first_token_s for one in found.completions if one.first_token_s is not None]
        pairs = list(zip(found.completions, ours, strict=True))
        known = temperature == 0 and all(a.token_ids and b.token_ids for a, b in pairs)
        return {
            "tokens_per_second": found.tokens_per_second,
            "num_tokens": found.num_tokens,
            "time_to_first_token_ms": 1e3 * median(times) if times and concurrency == 1 else None,
            "same_tokens": sum(a.token_ids == b.token_ids for a, b in pairs) if known else None,
        }

    sides = {name: figures(found) for name, found in results.items()}
    theirs = [name for name in sides if name not in (OURS_PLAIN, OURS_SPECULATIVE)]
    plain = [name for name in theirs if name.endswith(f" {PLAIN}")]

    def ratio(key: str, ours: str, peer: str | None) -> float | None:
        values = [sides[name][key] for name in (ours, peer) if name]
        return values[0] / values[1] if len(values) == 2 and all(values) else None

    rate, first = "tokens_per_second", "time_to_first_token_ms"
    fastest = max(theirs, key=lambda name: sides[name][rate], default=None)
    fastest_plain = max(plain, key=lambda name: sides[name][rate], default=None)
    soonest = min(theirs, key=lambda name: sides[name][first] or math.inf, default=None)
    return {
        "temperature": temperature,
        "concurrency": concurrency,
        "fastest_plain_peer": fastest_plain,
        "plain_ratio": ratio(rate, OURS_PLAIN, fastest_plain),
        "fastest_peer": fastest,
        "speculative_ratio": ratio(rate, OURS_SPECULATIVE, fastest),
        "first_token_ratio": ratio(first, OURS_PLAIN, soonest),
        "sides": sides,
    }


def report(
    setup: Mapping[str, Any], levels: Sequence[Level],
    settings: Mapping[str, Mapping[str, object]], missing: Mapping[str, str],
) -> Report:  # fmt: skip
    """`setup` is what all sides share, `settings` those of each peer's side; `missing` says why a
    peer, or one of its modes, was not measured."""

    def cell(found: Mapping[str, Any] | None) -> str:
        if found is None:
            return "-"
        first = found["time_to_first_token_ms"]
        return f"{found['tokens_per_second']:.1f}" + ("" if first is None else f" ({first:.0f})")

    names = dict.fromkeys(name for level in levels for name in level["sides"])
    rows = [[name, *(cell(level["sides"].get(name)) for level in levels)] for name in names]
    for title, key in (
        ("plain / fastest plain peer", "plain_ratio"),
        ("speculative / fastest peer", "speculative_ratio"),
    ):
        ratios = [level[key] for level in levels]
        rows.append([title, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    shown = table(
        "{model} with {draft_model}, K <= {num_draft_tokens}, {dtype}, rule {rule}, {num_prompts} "
        "prompts of at most {max_tokens} tokens, {threads} threads; tokens/s (ms to the first "
        "token)".format(**setup),
        ("", *(f"T {one['temperature']:g}, {one['concurrency']} at a time" for one in levels)),
        rows,
    )
    values = {**setup, "levels": levels, "settings": settings, "missing": missing}
    return Report(values, [shown, *(f"{name}: {why}" for name, why in missing.items())])
