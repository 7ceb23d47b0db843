"""`outrider bench peers`: compares Outrider with other inference systems. All systems get the same
weights, prompts and threads. Each system has two *sides*, plain and speculative decoding. Each side
runs at each *level*, which is a temperature and a number of requests at a time."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, get_args

from outrider.errors import ConfigError, OutriderError, SettingError, Unavailable
from outrider.foundation.settings import between, checked
from outrider.models.sources import cache_dir, gguf_file

from . import libraries
from .libraries import PEERS, PLAIN, TRANSFORMERS, Library, LibraryProcess, Setting, TargetInputs
from .measurement import Contestant, Progress, SideResult, measure
from .options import Concurrency, DecodingOptions, MaxTokens, NumPrompts, Temperature
from .prompts import BenchPrompt
from .report import Report, table
from .speedup import Subject

Name = Literal["vllm", "vllm-pace", "openvino", "llama-cpp", "transformers"]
OURS_PLAIN = "outrider plain"
OURS_SPECULATIVE = "outrider speculative"
REST_S = 0.5
"""Pause between two sides, because vLLM's OpenMP threads spin for 0.2 s after their work, and would
take cores from the next side."""
LOADING_SHARE = 0.5
"""Loading may take this share of the time, so that the rest is left to measure the other peers."""
LOADED_LATE = f"not loaded before {LOADING_SHARE:.0%} of the time (--minutes) was up"

StartSubjects = Callable[[], AbstractAsyncContextManager[tuple[Subject, Subject]]]
"""Starts a deployment, or finds the running deployment. Yields a subject for plain decoding, and a
subject for speculative decoding. In a new deployment, the subjects share no prefix cache."""
Level = Mapping[str, Any]
"""The figures of one temperature and concurrency, as a JSON object."""


@checked()
class PeersOptions(DecodingOptions):
    """Options of `bench peers`."""

    num_prompts: NumPrompts = 16
    max_tokens: MaxTokens = 64
    temperature: tuple[Temperature, ...] = (0.0, 1.0)
    """0 = greedy."""
    concurrency: tuple[Concurrency, ...] = (1, 8)
    """Requests at a time."""
    peers: tuple[Name, ...] = get_args(Name)
    """Systems to compare with."""
    environments: Path = Path(".venv/peers")
    """Folder in which `make peers` has installed the systems."""
    minutes: Annotated[float, between(1, 600)] = 22.0
    """Time for all loading and measuring. The time that is left is divided equally among the levels
    (a temperature and a concurrency) that are left. A level ends before `--num-prompts` if another
    repetition would take too long, judged by the repetitions before. A level is left out if the
    time is up before its first repetition ends. A system is left out if half of the time is up
    before it is loaded, or if it is 2 minutes late. The time of `--sweep` is not included."""
    sweep: bool = False
    """First search for the fastest settings of each system, and store them. Without this, a system
    has its stored settings, or default settings."""


class TimeLeft:
    """Divides the time of the benchmark among its levels. Times are in seconds of the event loop's
    clock."""

    def __init__(self, seconds: float, num_levels: int) -> None:
        self._now = asyncio.get_running_loop().time
        self._num_levels = num_levels
        self.ends_s = self._now() + seconds
        self.loading_ends_s = self._now() + LOADING_SHARE * seconds

    def is_after(self, time_s: float) -> bool:
        return self._now() >= time_s

    def extend(self, seconds: float) -> None:
        self.ends_s += seconds
        self.loading_ends_s += seconds

    def next_level(self) -> float:
        """The time at which the next level should end."""
        now_s = self._now()
        share_s = (self.ends_s - now_s) / self._num_levels
        self._num_levels -= 1
        return now_s + share_s


class PeerSides:
    """The sides of the peers that work, and the reasons why others are missing."""

    def __init__(self, options: PeersOptions, progress: Progress, left: TimeLeft) -> None:
        self.clients: dict[str, LibraryProcess] = {}
        self.settings: dict[str, Setting] = {}
        """Options of each library, by side."""
        self.missing: dict[str, str] = {}
        self.precision = ""
        """The dtype in which the peers compute."""
        self.warm: set[str] = set()
        """The sides that have been measured at an earlier level."""
        self._options, self._progress, self._left = options, progress, left
        self._installed = [peer for peer in PEERS if peer.name in options.peers]

    def check_installed(self) -> None:
        """Leaves out the peers that are not installed. Raises `SettingError` if all are missing."""
        asked, place = self._installed, self._options.environments
        self._installed = [
            peer for peer in asked if peer.is_ours or (place / peer.name / libraries.STAMP).exists()
        ]
        if not self._installed:
            names = ", ".join(peer.name for peer in asked)
            raise SettingError(
                "peers",
                f"nothing to compare with: not installed in {place.absolute()}: {names}. Install "
                "the peers by `make peers` in a clone of Outrider (this takes some minutes), or "
                "name the folder with --environments",
            )
        for peer in asked:
            if peer not in self._installed:
                self.leave_out(peer.name, "not installed; `make peers` installs it")

    def leave_out(self, name: str, why: str) -> None:
        """Notes that a peer or a side is missing, and says so at once."""
        self.missing[name] = why
        self._progress(f"warning: {name} is left out: {' '.join(why.split())}")

    def drop(self, side: str, error: OutriderError) -> bool:
        """Leaves out a side that has failed. Returns False if the side is not a peer's."""
        client = self.clients.pop(side, None)
        if client is None:
            return False
        client.kill()  # It may still compute, and take cores from the other sides.
        self.leave_out(side, f"it failed: {error.message}")
        return True

    def contestants(self, undrafted: Any, concurrency: int) -> list[Contestant]:
        """The peers that can run so many requests at a time."""
        return [
            Contestant(side, client, undrafted, concurrency, is_warm=side in self.warm)
            for side, client in self.clients.items()
            if concurrency == 1 or not side.startswith(TRANSFORMERS.name)
        ]

    async def start(
        self, subject: Subject, prompts: Sequence[BenchPrompt], stack: AsyncExitStack
    ) -> None:
        """Starts the peers. `stack` ends their processes. Raises `Unavailable` if none starts."""
        if subject.target is None:
            raise SettingError(
                "server", "has a target whose files are not on this machine; peers read these files"
            )
        options = self._options
        source, gguf, ready = gguf_file(subject.model), "", []
        for peer in self._installed:
            if peer.needs_gguf and source is None:
                self.leave_out(peer.name, "the target does not come from a GGUF file")
            else:
                ready.append(peer)
        readers = ", ".join(peer.name for peer in ready if peer.needs_gguf)
        if source is not None and readers:
            self._progress(f"finding or writing a GGUF file for {readers} in {cache_dir()}")
            quantization = subject.target.quantization
            gguf = str(libraries.peer_gguf(source, cache_dir(), quantization))
        inputs = TargetInputs.load(
            subject.target,
            prompts,
            options,
            batch=max(options.concurrency),
            gguf=gguf,
            environments=options.environments,
        )
        self.precision = inputs.setup["precision"]
        for peer in ready:
            try:
                self._check_time()
                settings = await self._settings_of(peer, inputs)
            except (ConfigError, Unavailable) as error:
                self.leave_out(peer.name, error.message)
                continue
            for mode, setting in settings.items():
                side, process = f"{peer.name} {mode}", LibraryProcess(peer, setting, inputs)
                try:
                    self._check_time()
                    self._progress(f"loading the model: {side}")
                    self.clients[side] = await self._load(process, stack)
                    self.settings[side] = setting
                except (ConfigError, Unavailable) as error:
                    self.leave_out(peer.name if mode == PLAIN else side, error.message)
                    break
        if not self.clients:
            raise Unavailable("nothing to compare with: no peer was loaded; see the warnings")

    def _check_time(self) -> None:
        if self._left.is_after(self._left.loading_ends_s):
            raise Unavailable(LOADED_LATE)

    async def _load(self, process: LibraryProcess, stack: AsyncExitStack) -> LibraryProcess:
        try:
            async with asyncio.timeout_at(self._left.loading_ends_s):
                return await stack.enter_async_context(process)
        except TimeoutError:
            raise Unavailable(LOADED_LATE) from None

    async def _settings_of(self, peer: Library, inputs: TargetInputs) -> dict[str, Setting]:
        if not self._options.sweep or peer.is_ours:
            return libraries.known_settings(peer, inputs)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            return await libraries.fastest_settings(peer, inputs, self._progress)
        finally:
            self._left.extend(clock() - began_s)


async def run(options: PeersOptions, start_subjects: StartSubjects, progress: Progress) -> Report:
    """Measures Outrider and its peers. Calls `start_subjects` for each temperature and concurrency,
    because a new deployment has no prompts or answers cached."""
    prompts = options.load_prompts()
    at = list(product(options.temperature, options.concurrency))
    left = TimeLeft(60 * options.minutes, len(at))
    peers = PeerSides(options, progress, left)
    peers.check_installed()
    levels: list[Level] = []
    skipped: list[Level] = []
    async with AsyncExitStack() as stack:
        for temperature, concurrency in at:
            where = f"temperature {temperature:g}, {concurrency} at a time"
            known = {"temperature": temperature, "concurrency": concurrency}
            if (levels or skipped) and left.is_after(left.ends_s):
                skipped.append(known)
                continue
            async with start_subjects() as (plain, speculative):
                drafted = options.drafted(speculative.num_draft_tokens, temperature)
                undrafted = replace(drafted, num_draft_tokens=0)
                if not levels and not skipped:
                    await peers.start(speculative, prompts, stack)
                progress(where)
                contestants = [
                    Contestant(OURS_PLAIN, plain.client, undrafted, concurrency),
                    Contestant(OURS_SPECULATIVE, speculative.client, drafted, concurrency),
                    *peers.contestants(undrafted, concurrency),
                ]
                results = await measure(
                    prompts,
                    contestants,
                    progress,
                    peers.drop,
                    REST_S,
                    left.next_level(),
                    left.ends_s,
                )
                if not results:
                    skipped.append(known)
                    continue
                peers.warm |= results.keys()
                levels.append(level_of(temperature, concurrency, results))
                for line in lines_of(levels[-1]):
                    progress(f"{where}: {line}")
    setup = speculative.setup(drafted) | {
        "num_prompts": len(prompts),
        "rule": options.rule,
        "precision": peers.precision,
        "settings": peers.settings,
    }
    return report(setup, levels, peers.missing, skipped)


def lines_of(level: Level) -> list[str]:
    """The most important figures of each side, one line each."""
    lines = []
    for side, figures in level["sides"].items():
        line = f"{side} {figures['tokens_per_second']:.1f} tokens/s"
        if figures["time_to_first_token_ms"] is not None:
            line += f", first token after {figures['time_to_first_token_ms']:.0f} ms"
        lines.append(line)
    return lines


def level_of(temperature: float, concurrency: int, results: Mapping[str, SideResult]) -> Level:
    """The figures of sides that decoded the same prompts. `tokens_per_second` is the number of all
    tokens divided by the wall time, which includes prefill. The time to the first token is a
    median, or None if several requests run at a time. `same_tokens` counts the answers that equal
    those of Outrider's plain decoding, or is None at temperatures above 0. Where an answer begins
    to differ, Outrider's token and the other system's token should be almost equally likely."""
    ours = results[OURS_PLAIN].completions

    def figures(result: SideResult) -> dict[str, Any]:
        first_s = median(completion.chunk_s[0] for completion in result.completions)
        pairs = zip(result.completions, ours, strict=True)
        num_same = sum(a.token_ids == b.token_ids for a, b in pairs)
        return {
            "tokens_per_second": result.tokens_per_second,
            "num_tokens": result.num_tokens,
            "time_to_first_token_ms": 1e3 * first_s if concurrency == 1 else None,
            "same_tokens": num_same if temperature == 0 else None,
        }

    sides = {name: figures(result) for name, result in results.items()}
    names = [name for name in sides if not name.startswith("outrider ")]
    plain = [name for name in names if name.endswith(f" {PLAIN}")]

    def ratio(side: str, key: str, others: Sequence[str], best: Any) -> float | None:
        known = [sides[name][key] for name in others if sides[name][key]]
        return sides[side][key] / best(known) if known and sides[side][key] else None

    return {
        "temperature": temperature,
        "concurrency": concurrency,
        "num_prompts": len(ours),
        "plain_ratio": ratio(OURS_PLAIN, "tokens_per_second", plain, max),
        "speculative_ratio": ratio(OURS_SPECULATIVE, "tokens_per_second", names, max),
        "first_token_ratio": ratio(OURS_PLAIN, "time_to_first_token_ms", names, min),
        "sides": sides,
    }


def report(
    setup: Mapping[str, Any],
    levels: Sequence[Level],
    missing: Mapping[str, str],
    skipped: Sequence[Level] = (),
) -> Report:
    """`skipped` has the temperature and concurrency of levels that were left out."""
    shown: list[Any] = [
        "{model} with {draft_model}, K <= {num_draft_tokens}, {dtype} (peers {precision}), rule "
        "{rule}, answers of at most {max_tokens} tokens, {threads} threads".format(**setup)
    ]
    for level in levels:
        rows = [{"side": name} | figures for name, figures in level["sides"].items()]
        title = (
            "temperature {temperature:g}, {concurrency} at a time, {num_prompts} prompts".format(
                **level
            )
        )
        ratios = {key: ratio for key, ratio in level.items() if key.endswith("_ratio") and ratio}
        shown += [table(title, rows), *(f"{key}: {ratio:.2f}" for key, ratio in ratios.items())]
    warnings = [
        "warning: not measured, because the time was up: "
        "temperature {temperature:g}, {concurrency} at a time".format(**level)
        for level in skipped
    ]
    values = {**setup, "levels": levels, "left_out_levels": skipped, "missing": missing}
    return Report(values, [*shown, *(f"{name}: {why}" for name, why in missing.items())], warnings)
