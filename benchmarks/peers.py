"""`outrider bench peers`: Outrider beside other inference systems, with the same weights, prompts
and threads: plain and speculative, at each temperature and number of requests at a time."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Final

from outrider.errors import ConfigError, OutriderError, SettingError, Unavailable
from outrider.limits import SESSIONS_PER_COORDINATOR_MAX
from outrider.settings import check_range
from outrider.speculation.sampling_params import Rule

from .decoding_options import RULES, DecodingOptions
from .measurement import BenchClient, Contestant, Decoding, Progress, Side, measure
from .number_options import numbers, whole_numbers
from .peers_libraries import (
    PEERS,
    SWEEP_TOKENS,
    LibraryModel,
    LibraryProcess,
    Peer,
    Sweep,
    sweep_prompts,
)
from .peers_report import OURS_PLAIN, OURS_SPECULATIVE, Level, PeersReport, PeersSetup, level_of
from .peers_servers import HttpSide, ServerProcess
from .prompt_options import PromptOptions, add_prompt_arguments, prompt_values
from .prompts import WARM_UP_PROMPTS, BenchPrompt
from .references import PROMPT_LOOKUP_TOKENS, ReferenceProcess
from .serving import words
from .speedup import Subject

TRANSFORMERS: Final = "transformers"
NAMES: Final = (*(peer.name for peer in PEERS), TRANSFORMERS)
NOT_INSTALLED: Final = "not installed; `make peers` installs it"
SPARE_TOKENS: Final = 16
"""Room in a peer's context for drafts behind the longest completion."""
REST_S: Final = 0.5
"""Between the turns of two sides: threads of Intel's OpenMP, which vLLM runs on, spin for 0.2 s
when their work is done, and would take the cores from the side that follows."""
CONTEXT_STEP: Final = 256
"""A peer's context is a multiple of it: some caches hold whole blocks only."""

_Process = LibraryProcess | ReferenceProcess | ServerProcess
StartSubjects = Callable[[], AbstractAsyncContextManager[tuple[Subject, Subject]]]
"""Starts a deployment to measure, or finds the one that runs: for plain and for speculative
decoding, which share no cache where they can be kept apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOptions(PromptOptions):
    """What `bench peers` is asked for. Wrong values raise `SettingError`."""

    num_prompts: int | None = 16
    max_tokens: int = 96
    temperature: tuple[float, ...] = (0.0, 1.0)
    concurrency: tuple[int, ...] = (1, 8)
    """Requests at a time."""
    rule: Rule = Rule.TOKEN
    """Of a temperature above 0."""
    num_draft_tokens: int | None = None
    """Bound K; None = the deployment's own."""
    peers: tuple[str, ...] = NAMES
    """Which of `NAMES`."""
    environments: Path = Path(".venv/peers")
    """Where `make peers` has installed them."""
    sweep: bool = False
    """Whether settings are tried anew that an earlier run has found."""
    servers: bool = False
    """Whether servers are measured by HTTP, those of peers and Outrider's."""

    def __post_init__(self) -> None:
        PromptOptions.__post_init__(self)
        for number in self.concurrency:
            check_range("concurrency", number, 1, SESSIONS_PER_COORDINATOR_MAX)
        if not self.peers or not set(self.peers) <= set(NAMES):
            raise SettingError(
                "peers",
                f"{','.join(self.peers)!r} is wrong; it must be some of {', '.join(NAMES)}",
            )
        for _ in self.levels():
            pass  # Raises for a temperature, rule or number of draft tokens that is wrong.

    @classmethod
    def from_arguments(
        cls, arguments: argparse.Namespace, *, num_draft_tokens: int | None = None
    ) -> PeersOptions:
        """From what a parser with `add_arguments` returned, and the bound K."""
        own = ("temperature", "concurrency", "peers", "environments", "sweep", "servers")
        return cls(
            **prompt_values(arguments),
            **{name: getattr(arguments, name) for name in own},
            rule=Rule(arguments.rule),
            num_draft_tokens=num_draft_tokens,
        )

    def levels(self) -> Iterator[tuple[DecodingOptions, int]]:
        """Every temperature with every number of requests at a time."""
        for temperature in self.temperature:
            options = DecodingOptions(
                max_tokens=self.max_tokens,
                seed=self.seed,
                raw=self.raw,
                temperature=temperature,
                rule=self.rule,
                num_draft_tokens=self.num_draft_tokens,
            )
            for concurrency in self.concurrency:
                yield options, concurrency


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench peers`, but for those that describe a deployment."""
    defaults = PeersOptions()
    add_prompt_arguments(parser, defaults)
    parser.set_defaults(num_prompts=defaults.num_prompts)
    parser.add_argument(
        "--temperature", type=numbers, default=defaults.temperature, metavar="T[,T..]",
        help="0 = always the likeliest token [0,1]",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=whole_numbers, default=defaults.concurrency, metavar="N[,N..]",
        help="requests at a time [1,8]",
    )  # fmt: skip
    parser.add_argument(
        "--rule", choices=[rule.value for rule in RULES], default=defaults.rule.value,
        help="how Outrider accepts drafts at a temperature above 0 [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--peers", type=words, default=defaults.peers, metavar="NAMES",
        help=f"which systems [{','.join(NAMES)}]",
    )  # fmt: skip
    parser.add_argument(
        "--environments", type=Path, default=defaults.environments, metavar="DIR",
        help="where `make peers` has installed them [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--sweep", action="store_true",
        help="find each peer's fastest settings anew, though an earlier run has found them",
    )  # fmt: skip
    parser.add_argument(
        "--servers", action="store_true",
        help="measure servers, by one HTTP client: of Outrider, and of the peers that have one",
    )  # fmt: skip


async def run(
    options: PeersOptions, start_subjects: StartSubjects, progress: Progress
) -> PeersReport:
    """Measures Outrider and its peers. Raises `SettingError` for options that are wrong, and what
    Outrider refuses a request with.

    Every level has a deployment of its own, so that no side finds a prompt or an answer cached."""
    prompts = options.load_prompts()
    levels: list[Level] = []
    async with AsyncExitStack() as stack:
        peers: _Peers | None = None
        for decoding, concurrency in options.levels():
            async with (
                start_subjects() as (plain, speculative),
                _our_clients(options, plain, speculative) as ours,
            ):
                drafted = decoding.drafted(speculative.num_draft_tokens)
                undrafted = replace(drafted, num_draft_tokens=0)
                if peers is None:
                    peers = _Peers(options, speculative, prompts, stack, progress)
                    setup = peers.setup(drafted)
                    await peers.start()
                for warning in speculative.replay_warnings(prompts):
                    progress(warning)
                progress(f"temperature {decoding.temperature:g}, {concurrency} at a time")
                contestants = [
                    Contestant(OURS_PLAIN, ours[0], undrafted, concurrency),
                    Contestant(OURS_SPECULATIVE, ours[1], drafted, concurrency),
                    *(
                        Contestant(side, client, undrafted, concurrency)
                        for side, client in peers.clients.items()
                        if concurrency == 1 or not isinstance(client, ReferenceProcess)
                    ),
                ]
                results = await measure(prompts, contestants, progress, peers.drops, REST_S)
                levels.append(level_of(drafted, concurrency, results))
    if peers is None:
        raise SettingError("temperature", "there must be one, and a number of requests at a time")
    return PeersReport(
        setup=setup, settings=peers.settings, missing=peers.missing, levels=tuple(levels)
    )


@asynccontextmanager
async def _our_clients(
    options: PeersOptions, plain: Subject, speculative: Subject
) -> AsyncIterator[tuple[BenchClient, BenchClient]]:
    """How Outrider is asked for plain and for speculative decoding."""
    if not options.servers:
        yield plain.client, speculative.client
        return
    if not (plain.http_url and speculative.http_url):
        raise SettingError("servers", "the deployment that runs has no HTTP interface")
    undrafted = {"speculation": {"num_draft_tokens": 0}}
    async with (
        HttpSide(plain.http_url, raw=options.raw, api_key=plain.api_key, extra_body=undrafted) as p,
        HttpSide(speculative.http_url, raw=options.raw, api_key=speculative.api_key) as s,
    ):
        yield p, s


class _Peers:
    """Starts the systems beside Outrider; they end with the stack."""

    def __init__(
        self,
        options: PeersOptions,
        subject: Subject,
        prompts: Sequence[BenchPrompt],
        stack: AsyncExitStack,
        progress: Progress,
    ) -> None:
        """Raises `SettingError` where the target's files are not on this machine."""
        if subject.reference is None:
            raise SettingError(
                "server", "the target's files are not known here; its peers need them"
            )
        self._options = options
        self._subject = subject
        self._reference = subject.reference
        self._prompts = prompts
        self._stack = stack
        self._progress = progress
        self.clients: dict[str, BenchClient] = {}
        self.settings: dict[str, Mapping[str, object]] = {}
        """How each side is set up."""
        self.missing: dict[str, str] = {}
        """Why a system, or one of its modes, is not measured."""

    def setup(self, drafted: Decoding) -> PeersSetup:
        """What all sides share."""
        return PeersSetup(
            model=self._subject.model,
            draft_model=self._subject.draft_model,
            dtype=self._subject.dtype,
            num_draft_tokens=drafted.num_draft_tokens,
            num_prompts=len(self._prompts),
            max_tokens=self._options.max_tokens,
            rule=self._options.rule.value,
            threads=self._reference.num_threads,
        )

    async def start(self) -> None:
        """Starts those that are wanted and installed."""
        for peer in PEERS:
            if peer.name not in self._options.peers:
                continue
            if not peer.is_installed(self._options.environments):
                self.missing[peer.name] = NOT_INSTALLED
            elif self._options.servers and not peer.server:
                self.missing[peer.name] = "it has no server"
            elif peer.needs_gguf and not self._model.gguf:
                self.missing[peer.name] = "the target does not come from a GGUF file"
            else:
                await self._start_library(peer)
        if TRANSFORMERS in self._options.peers and not self._options.servers:
            await self._start_transformers()

    async def _start_library(self, peer: Peer) -> None:
        """Both modes, with the fastest settings."""
        environments = self._options.environments
        sweep = Sweep(self._model, self._token_ids, environments, self._progress)
        try:
            found = await sweep.settings(peer, again=self._options.sweep)
        except (ConfigError, Unavailable) as error:
            self.missing[peer.name] = error.message
            return
        for mode, setting in found.items():
            side = f"{peer.name} {mode}"
            process: LibraryProcess | ServerProcess
            if self._options.servers:
                process = ServerProcess(
                    peer, setting, self._model, environments, raw=self._options.raw
                )
            else:
                process = LibraryProcess(peer, setting, self._model, self._token_ids, environments)
            if await self._enter(side, process):
                self.settings[side] = {
                    "versions": peer.versions(environments),
                    "precision": peer.precision,
                    "environment": process.environment,
                    "options": setting.options,
                }

    async def _start_transformers(self) -> None:
        """The library's plain decoding, prompt lookup and, with a model as drafter, assistant."""
        lookup = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
        settings: dict[Side, Mapping[str, object]] = {
            Side.TRANSFORMERS: {},
            Side.PROMPT_LOOKUP: lookup,
        }
        if self._reference.drafter is not None:
            settings[Side.ASSISTED] = {"assistant_model": self._reference.drafter.name}
        for side, options in settings.items():
            process = ReferenceProcess(side, self._reference, raw=self._options.raw)
            if await self._enter(side, process):
                self.settings[side] = {
                    "versions": {"transformers": version("transformers")},
                    "options": options,
                }

    def drops(self, side: str, error: OutriderError) -> bool:
        """Whether to go on without a side that has failed: from now on without a peer's."""
        if side not in self.clients:
            return False
        del self.clients[side]
        self.missing[side] = f"it failed: {error.message}"
        return True

    async def _enter(self, side: str, process: _Process) -> bool:
        """Whether it has started."""
        self._progress(f"loading the model once more: {side}")
        try:
            await self._stack.enter_async_context(process)
        except (ConfigError, Unavailable) as error:
            self.missing[side] = error.message
            return False
        self.clients[side] = process
        return True

    @cached_property
    def _token_ids(self) -> dict[str, list[int]]:
        """The tokens of every prompt's text, as Outrider makes them."""
        from outrider.tokenizer import TokenizerText

        text = TokenizerText.load(
            Path(self._reference.directory), trust_remote_code=self._reference.trust_remote_code
        )

        def encode(prompt: str) -> list[int]:
            if self._options.raw:
                return text.encode(prompt)
            return text.encode_chat([{"role": "user", "content": prompt}])

        asked = (*self._prompts, *WARM_UP_PROMPTS, *sweep_prompts())
        return {prompt.text: encode(prompt.text) for prompt in asked}

    @cached_property
    def _model(self) -> LibraryModel:
        from outrider.models.loading import load_tokenizer, stated_eos_token_ids
        from outrider.models.sources import cache_dir, gguf_file

        from .bfloat16_gguf import bfloat16_gguf

        directory = Path(self._reference.directory)
        gguf = gguf_file(self._subject.model)
        return LibraryModel(
            directory=self._reference.directory,
            gguf="" if gguf is None else str(bfloat16_gguf(gguf, cache_dir())),
            num_threads=self._reference.num_threads,
            context_tokens=_rounded_up(
                max(map(len, self._token_ids.values()))
                + max(self._options.max_tokens, SWEEP_TOKENS)
                + SPARE_TOKENS
            ),
            batch=max(self._options.concurrency),
            eos_token_ids=stated_eos_token_ids(directory, load_tokenizer(directory)),
        )


def _rounded_up(num_tokens: int) -> int:
    return -(-num_tokens // CONTEXT_STEP) * CONTEXT_STEP
