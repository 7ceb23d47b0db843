"""`outrider bench peers`: Outrider beside other inference systems, with the same weights, prompts
and threads: plain and speculative, at each temperature and number of requests at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

from outrider.errors import ConfigError, OutriderError, SettingError, Unavailable
from outrider.limits import SESSIONS_PER_COORDINATOR_MAX, TEMPERATURE_MAX
from outrider.speculation.sampling_params import Rule

from .measurement import BenchClient, Contestant, Decoding, Progress, Side, SideResult, measure
from .options import DecodingOptions, option
from .peers_libraries import (
    PEERS,
    SWEEP_TOKENS,
    HttpSide,
    LibraryModel,
    LibraryProcess,
    Peer,
    PeerInputs,
    ServerProcess,
    bfloat16_gguf,
    fastest_settings,
    sweep_prompts,
)
from .prompts import WARM_UP_PROMPTS, BenchPrompt
from .references import PROMPT_LOOKUP_TOKENS, ReferenceModel, ReferenceProcess, encoder
from .report import Report, table
from .speedup import Subject

TRANSFORMERS: Final = "transformers"
NAMES: Final = (*(peer.name for peer in PEERS), TRANSFORMERS)
OURS_PLAIN: Final = "outrider plain"
OURS_SPECULATIVE: Final = "outrider speculative"
NOT_INSTALLED: Final = "not installed; `make peers` installs it"
SPARE_TOKENS: Final = 16
"""Room in a peer's context for drafts behind the longest completion."""
REST_S: Final = 0.5
"""Between the turns of two sides: threads of Intel's OpenMP, which vLLM runs on, spin for 0.2 s
when their work is done, and would take the cores from the side that follows."""
CONTEXT_STEP: Final = 256
"""A peer's context is a multiple of it: some caches hold whole blocks only."""

StartSubjects = Callable[[], AbstractAsyncContextManager[tuple[Subject, Subject]]]
"""Starts a deployment to measure, or finds the one that runs: for plain and for speculative
decoding, which share no cache where they can be kept apart."""


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


Level = Mapping[str, Any]
"""The figures at one temperature and number of requests at a time, by names in JSON."""


async def run(options: PeersOptions, start_subjects: StartSubjects, progress: Progress) -> Report:
    """Measures Outrider and its peers. Raises `SettingError` for options that are wrong, and what
    Outrider refuses a request with.

    Every level has a deployment of its own, so that no side finds a prompt or an answer cached."""
    prompts = options.load_prompts()
    levels: list[Level] = []
    peers: _Peers | None = None
    async with AsyncExitStack() as stack:
        for temperature in options.temperature:
            for concurrency in options.concurrency:
                async with AsyncExitStack() as level:
                    subjects = await level.enter_async_context(start_subjects())
                    ours = [subject.client for subject in subjects]
                    if options.servers:
                        ours = [
                            await level.enter_async_context(_http_side(options, subject, plain))
                            for subject, plain in zip(subjects, (True, False), strict=True)
                        ]
                    speculative = subjects[1]
                    drafted = options.drafted(speculative.num_draft_tokens, temperature)
                    undrafted = replace(drafted, num_draft_tokens=0)
                    if peers is None:
                        peers = _Peers(options, speculative, prompts, stack, progress)
                        await peers.start()
                        setup = peers.setup(drafted.num_draft_tokens)
                    for warning in speculative.replay_warnings(prompts):
                        progress(warning)
                    progress(f"temperature {temperature:g}, {concurrency} at a time")
                    contestants = [
                        Contestant(OURS_PLAIN, ours[0], undrafted, concurrency),
                        Contestant(OURS_SPECULATIVE, ours[1], drafted, concurrency),
                        *peers.contestants(undrafted, concurrency),
                    ]
                    results = await measure(prompts, contestants, progress, peers.drops, REST_S)
                    levels.append(level_of(drafted, concurrency, results))
    if peers is None:
        raise SettingError("temperature", "there must be one, and a number of requests at a time")
    return report(setup, levels, peers.settings, peers.missing)


def _http_side(options: PeersOptions, subject: Subject, plain: bool) -> HttpSide:
    if not subject.http_url:
        raise SettingError("servers", "the deployment that runs has no HTTP interface")
    return HttpSide(subject.http_url, raw=options.raw, api_key=subject.api_key, plain=plain)


@dataclass(frozen=True)
class _Peers:
    """Starts the systems beside Outrider; they end with the stack."""

    options: PeersOptions
    subject: Subject
    prompts: Sequence[BenchPrompt]
    stack: AsyncExitStack
    progress: Progress
    clients: dict[str, BenchClient] = field(default_factory=dict)
    settings: dict[str, Mapping[str, object]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> ReferenceModel:
        """Raises `SettingError` where the target's files are not on this machine."""
        if self.subject.reference is None:
            raise SettingError(
                "server", "the target's files are not known here; its peers need them"
            )
        return self.subject.reference

    def setup(self, num_draft_tokens: int) -> dict[str, object]:
        """What all sides share, by name in JSON."""
        return {
            "model": self.subject.model,
            "draft_model": self.subject.draft_model,
            "dtype": self.subject.dtype,
            "num_draft_tokens": num_draft_tokens,
            "num_prompts": len(self.prompts),
            "max_tokens": self.options.max_tokens,
            "rule": self.options.rule,
            "threads": self.reference.num_threads,
        }

    def contestants(self, decoding: Decoding, concurrency: int) -> list[Contestant]:
        """Those that run and take so many requests at a time."""
        return [
            Contestant(side, client, decoding, concurrency)
            for side, client in self.clients.items()
            if concurrency == 1 or not isinstance(client, ReferenceProcess)
        ]

    def drops(self, side: str, error: OutriderError) -> bool:
        """Whether to go on without a side that has failed: from now on without a peer's."""
        if side not in self.clients:
            return False
        del self.clients[side]
        self.missing[side] = f"it failed: {error.message}"
        return True

    async def start(self) -> None:
        """Starts those that are wanted and installed."""
        servers = self.options.servers
        for peer in PEERS:
            if peer.name not in self.options.peers:
                continue
            if not peer.is_installed(self.options.environments):
                self.missing[peer.name] = NOT_INSTALLED
            elif servers and not peer.server:
                self.missing[peer.name] = "it has no server"
            elif peer.needs_gguf and not self._inputs.model.gguf:
                self.missing[peer.name] = "the target does not come from a GGUF file"
            else:
                await self._start_library(peer)
        if TRANSFORMERS in self.options.peers and not servers:
            await self._start_transformers()

    async def _start_library(self, peer: Peer) -> None:
        """Both modes, with the fastest settings."""
        inputs, again = self._inputs, self.options.sweep
        try:
            found = await fastest_settings(peer, inputs, self.progress, again=again)
        except (ConfigError, Unavailable) as error:
            self.missing[peer.name] = error.message
            return
        kind = ServerProcess if self.options.servers else LibraryProcess
        for mode, setting in found.items():
            process = kind(peer, setting, inputs)
            settings = {
                "versions": peer.versions(inputs.environments),
                "precision": peer.precision,
                "environment": process.environment,
                "options": setting.options,
            }
            await self._enter(f"{peer.name} {mode}", process, settings)

    async def _start_transformers(self) -> None:
        """The library's plain decoding, prompt lookup and, with a model as drafter, assistant."""
        sides: dict[Side, Mapping[str, object]] = {
            Side.TRANSFORMERS: {},
            Side.PROMPT_LOOKUP: {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS},
        }
        if self.reference.drafter:
            sides[Side.ASSISTED] = {"assistant_model": self.reference.drafter_name}
        versions = {"transformers": version("transformers")}
        for side, options in sides.items():
            process = ReferenceProcess(side, self.reference, self.options.raw)
            await self._enter(side, process, {"versions": versions, "options": options})

    async def _enter(
        self,
        side: str,
        process: LibraryProcess | ReferenceProcess | ServerProcess,
        settings: Mapping[str, object],
    ) -> None:
        self.progress(f"loading the model once more: {side}")
        try:
            await self.stack.enter_async_context(process)
        except (ConfigError, Unavailable) as error:
            self.missing[side] = error.message
            return
        self.clients[side] = process
        self.settings[side] = settings

    @cached_property
    def _inputs(self) -> PeerInputs:
        """With the tokens of every prompt's text as Outrider makes them."""
        from outrider.models.loading import load_tokenizer, stated_eos_token_ids
        from outrider.models.sources import cache_dir, gguf_file
        from outrider.tokenizer import TokenizerText

        options, reference = self.options, self.reference
        directory = Path(reference.directory)
        text = TokenizerText.load(directory, trust_remote_code=reference.trust_remote_code)
        encode = encoder(text, options.raw)
        asked = (*self.prompts, *WARM_UP_PROMPTS, *sweep_prompts())
        token_ids = {prompt.text: encode(prompt.text) for prompt in asked}
        gguf = gguf_file(self.subject.model)
        completion = max(options.max_tokens, SWEEP_TOKENS) + SPARE_TOKENS
        context = max(map(len, token_ids.values())) + completion
        model = LibraryModel(
            directory=reference.directory,
            gguf="" if gguf is None else str(bfloat16_gguf(gguf, cache_dir())),
            num_threads=reference.num_threads,
            context_tokens=-(-context // CONTEXT_STEP) * CONTEXT_STEP,
            batch=max(options.concurrency),
            eos_token_ids=stated_eos_token_ids(directory, load_tokenizer(directory)),
        )
        return PeerInputs(
            model=model, token_ids=token_ids, environments=options.environments, raw=options.raw
        )


def level_of(decoding: Decoding, concurrency: int, results: Mapping[str, SideResult]) -> Level:
    """The figures of all sides, which decoded the same prompts. Of each side: all tokens over all
    wall time, prefill included; the median time to the first token, one at a time, or None where
    it is not known; and on how many prompts it wrote the tokens of our plain decoding: at
    temperature 0 all, but for near ties. None above it, and where ids are not known."""
    ours = results[OURS_PLAIN]

    def figures(found: SideResult) -> dict[str, Any]:
        times = [each.first_token_s for each in found.completions if each.first_token_s is not None]
        pairs = list(zip(found.completions, ours.completions, strict=True))
        known = decoding.rule is Rule.GREEDY and all(a.token_ids and b.token_ids for a, b in pairs)
        return {
            "tokens_per_second": found.tokens_per_second,
            "num_tokens": found.num_tokens,
            "time_to_first_token_ms": 1e3 * median(times) if times and concurrency == 1 else None,
            "same_tokens": sum(a.token_ids == b.token_ids for a, b in pairs) if known else None,
        }

    sides = {name: figures(found) for name, found in results.items()}
    theirs = {
        name: found for name, found in sides.items() if name not in (OURS_PLAIN, OURS_SPECULATIVE)
    }
    plain = [name for name in theirs if name.endswith((" plain", TRANSFORMERS))]

    def fastest(names: Iterable[str]) -> str | None:
        return max(names, key=lambda name: sides[name]["tokens_per_second"], default=None)

    def ratio(ours: str, peer: str | None) -> float | None:
        if peer is None:
            return None
        found: float = sides[ours]["tokens_per_second"] / sides[peer]["tokens_per_second"]
        return found

    first_s = [one["time_to_first_token_ms"] for one in theirs.values()]
    known_s = [time for time in first_s if time]
    own_s = sides[OURS_PLAIN]["time_to_first_token_ms"]
    return {
        "temperature": decoding.temperature,
        "concurrency": concurrency,
        "fastest_plain_peer": fastest(plain),
        "plain_ratio": ratio(OURS_PLAIN, fastest(plain)),
        "fastest_peer": fastest(theirs),
        "speculative_ratio": ratio(OURS_SPECULATIVE, fastest(theirs)),
        "first_token_ratio": own_s / min(known_s) if own_s and known_s else None,
        "sides": sides,
    }


def report(
    setup: Mapping[str, Any],
    levels: Sequence[Level],
    settings: Mapping[str, Mapping[str, object]],
    missing: Mapping[str, str],
) -> Report:
    """`setup` is what all sides share, `settings` those of each peer's side; `missing` says why a
    peer, or one of its modes, was not measured."""
    names = dict.fromkeys(name for level in levels for name in level["sides"])
    shown = table(
        "{model} with {draft_model}, K <= {num_draft_tokens}, {dtype}, rule {rule}, {num_prompts} "
        "prompts of at most {max_tokens} tokens, {threads} threads; tokens/s (ms to the first "
        "token)".format(**setup),
        (
            "",
            *(f"T {level['temperature']:g}, {level['concurrency']} at a time" for level in levels),
        ),
        [
            *([name, *(_cell(level["sides"].get(name)) for level in levels)] for name in names),
            *([name, *("missing" for _ in levels)] for name in missing),
        ],
    )
    shown.add_section()
    for name, key in (
        ("plain / fastest plain peer", "plain_ratio"),
        ("speculative / fastest peer", "speculative_ratio"),
    ):
        ratios = [level[key] for level in levels]
        shown.add_row(name, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
    values = {**setup, "levels": levels, "settings": settings, "missing": missing}
    return Report(values, [shown, *(f"{name}: {why}" for name, why in missing.items())])


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    first = found["time_to_first_token_ms"]
    return f"{found['tokens_per_second']:.1f}" + ("" if first is None else f" ({first:.0f})")
