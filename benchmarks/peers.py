"""`outrider bench peers`: compares Outrider with other inference systems. All systems get the same
weights, prompts and threads. Each system has two *sides*, plain and speculative decoding. Each side
runs at each temperature and concurrency."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from outrider.errors import ConfigError, OutriderError, SettingError, Unavailable
from outrider.models.sources import cache_dir, gguf_file
from outrider.settings import checked

from . import libraries
from .libraries import PEERS, PLAIN, TRANSFORMERS, LibraryProcess, TargetInputs
from .measurement import BenchClient, Contestant, Progress, SideResult, measure
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

StartSubjects = Callable[[], AbstractAsyncContextManager[tuple[Subject, Subject]]]
"""Starts a deployment, or finds the running deployment. Yields a subject for plain decoding, and a
subject for speculative decoding. In a new deployment, the subjects share no prefix cache."""
Level = Mapping[str, Any]
"""The figures of one temperature and concurrency, as a JSON object."""


@checked()
class PeersOptions(DecodingOptions):
    """Options of `bench peers`."""

    num_prompts: NumPrompts = 16
    max_tokens: MaxTokens = 96
    temperature: tuple[Temperature, ...] = (0.0, 1.0)
    """0 = greedy."""
    concurrency: tuple[Concurrency, ...] = (1, 8)
    """Requests at a time."""
    peers: tuple[Name, ...] = get_args(Name)
    """Systems to compare with."""
    environments: Path = Path(".venv/peers")
    """Folder in which `make peers` has installed the systems."""
    sweep: bool = False
    """Search again for the fastest settings of each system, instead of using stored settings."""


async def run(options: PeersOptions, start_subjects: StartSubjects, progress: Progress) -> Report:
    """Measures Outrider and its peers. Calls `start_subjects` for each temperature and concurrency,
    because a new deployment has no prompts or answers cached."""
    prompts = options.load_prompts()
    clients: dict[str, BenchClient] = {}
    missing: dict[str, str] = {}
    levels: list[Level] = []

    def drop(side: str, error: OutriderError) -> bool:
        if clients.pop(side, None) is None:
            return False
        missing[side] = f"it failed: {error.message}"
        return True

    async with AsyncExitStack() as peers:
        for temperature, concurrency in product(options.temperature, options.concurrency):
            async with start_subjects() as (plain, speculative):
                drafted = options.drafted(speculative.num_draft_tokens, temperature)
                undrafted = replace(drafted, num_draft_tokens=0)
                if not levels:
                    found = start_peers(options, speculative, prompts, peers, progress)
                    clients, missing = await found
                progress(f"temperature {temperature:g}, {concurrency} at a time")
                contestants = [
                    Contestant(side, client, undrafted, concurrency)
                    for side, client in clients.items()
                    if concurrency == 1 or not side.startswith(TRANSFORMERS.name)
                ]
                contestants[:0] = [
                    Contestant(OURS_PLAIN, plain.client, undrafted, concurrency),
                    Contestant(OURS_SPECULATIVE, speculative.client, drafted, concurrency),
                ]
                results = await measure(prompts, contestants, progress, drop, REST_S)
                levels.append(level_of(temperature, concurrency, results))
    setup = speculative.setup(drafted) | {"num_prompts": len(prompts), "rule": options.rule}
    return report(setup, levels, missing)


async def start_peers(
    options: PeersOptions, subject: Subject, prompts: Sequence[BenchPrompt], stack: AsyncExitStack,
    progress: Progress,
) -> tuple[dict[str, BenchClient], dict[str, str]]:  # fmt: skip
    """Starts the peers. Returns the client of each side, and the reason for each missing peer."""
    if subject.target is None:
        raise SettingError(
            "server", "has a target whose files are not on this machine; peers read these files"
        )
    gguf = gguf_file(subject.model)
    inputs = TargetInputs.load(
        subject.target, prompts, options, batch=max(options.concurrency),
        gguf=str(libraries.bfloat16_gguf(gguf, cache_dir())) if gguf else "",
        environments=options.environments,
    )  # fmt: skip
    clients: dict[str, BenchClient] = {}
    missing: dict[str, str] = {}
    for peer in PEERS:
        if peer.name not in options.peers:
            continue
        try:
            stamp = options.environments / peer.name / libraries.STAMP
            if not (peer.is_ours or stamp.exists()):
                raise Unavailable("not installed; `make peers` installs it")
            if peer.needs_gguf and not gguf:
                raise Unavailable("the target does not come from a GGUF file")
            again = options.sweep
            found = await libraries.fastest_settings(peer, inputs, progress, again=again)
            for mode, setting in found.items():
                side, process = f"{peer.name} {mode}", LibraryProcess(peer, setting, inputs)
                progress(f"loading the model: {side}")
                clients[side] = await stack.enter_async_context(process)
        except (ConfigError, Unavailable) as error:
            missing[peer.name] = error.message
    return clients, missing


def level_of(temperature: float, concurrency: int, results: Mapping[str, SideResult]) -> Level:
    """The figures of sides that decoded the same prompts. `tokens_per_second` is the number of all
    tokens divided by the wall time, which includes prefill. The time to the first token is a
    median, or None if several requests run at a time. `same_tokens` counts the answers that equal
    those of Outrider's plain decoding, or is None at temperatures above 0. Where an answer begins
    to differ, Outrider's token and the other system's token should be almost equally likely."""
    ours = results[OURS_PLAIN].completions

    def figures(found: SideResult) -> dict[str, Any]:
        first_s = median(one.chunk_s[0] for one in found.completions)
        pairs = zip(found.completions, ours, strict=True)
        num_same = sum(a.token_ids == b.token_ids for a, b in pairs)
        return {
            "tokens_per_second": found.tokens_per_second,
            "num_tokens": found.num_tokens,
            "time_to_first_token_ms": 1e3 * first_s if concurrency == 1 else None,
            "same_tokens": num_same if temperature == 0 else None,
        }

    sides = {name: figures(found) for name, found in results.items()}
    names = [name for name in sides if not name.startswith("outrider ")]
    plain = [name for name in names if name.endswith(f" {PLAIN}")]

    def ratio(side: str, key: str, others: Sequence[str], best: Any) -> float | None:
        known = [sides[name][key] for name in others if sides[name][key]]
        return sides[side][key] / best(known) if known and sides[side][key] else None

    return {
        "temperature": temperature,
        "concurrency": concurrency,
        "plain_ratio": ratio(OURS_PLAIN, "tokens_per_second", plain, max),
        "speculative_ratio": ratio(OURS_SPECULATIVE, "tokens_per_second", names, max),
        "first_token_ratio": ratio(OURS_PLAIN, "time_to_first_token_ms", names, min),
        "sides": sides,
    }


def report(setup: Mapping[str, Any], levels: Sequence[Level], missing: Mapping[str, str]) -> Report:
    shown: list[Any] = [
        "{model} with {draft_model}, K <= {num_draft_tokens}, {dtype}, rule {rule}, {num_prompts} "
        "prompts, answers of at most {max_tokens} tokens, {threads} threads".format(**setup)
    ]
    for level in levels:
        rows = [{"side": name} | figures for name, figures in level["sides"].items()]
        title = "temperature {temperature:g}, {concurrency} at a time".format(**level)
        ratios = {key: ratio for key, ratio in level.items() if key.endswith("_ratio") and ratio}
        shown += [table(title, rows), *(f"{key}: {ratio:.2f}" for key, ratio in ratios.items())]
    values = {**setup, "levels": levels, "missing": missing}
    return Report(values, [*shown, *(f"{name}: {why}" for name, why in missing.items())])
