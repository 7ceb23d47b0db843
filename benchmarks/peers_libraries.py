"""Other inference libraries as sides of a measurement: which there are, and the process of each.

Every library has an environment of its own, which `make peers` installs. How it runs fastest on
this machine (thread binding, draft length) is found by a sweep over a few settings; the result is
kept in its environment.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from outrider.errors import ConfigError, Unavailable
from outrider.limits import DEADLINE_MS_MAX
from outrider.speculation.sampling_params import Rule

from .answering import AnsweringProcess
from .measurement import Completion, Decoding, Progress
from .peers_process import CACHE_GIB
from .prompts import BenchPrompt, built_in_prompts, select_prompts
from .references import reference_environment

STAMP: Final = "installed"
"""File in the environment of a peer that `make peers` has installed."""
_SWEEP_RESULT: Final = "settings.json"
_SWEEP_PROMPTS: Final = 6
"""Built-in ones, one of each category."""
SWEEP_TOKENS: Final = 48
"""Of a completion of a sweep."""
_SWEEP_DECODING: Final = Decoding(
    max_tokens=SWEEP_TOKENS, temperature=0.0, rule=Rule.GREEDY, seed=0, num_draft_tokens=0
)
PLAIN: Final = "plain"
_ISOLATED: Final = "-I"
"""Keeps this repository's modules and PYTHONPATH out of a peer's interpreter."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a library. In variables `{cpus}` stands for the numbers of the cores, and
    `{root}` for its environment."""

    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    """For the library, see its class in `peers_process`."""

    def __or__(self, other: Setting) -> Setting:
        return Setting({**self.environment, **other.environment}, {**self.options, **other.options})


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library that is measured."""

    name: str
    """Of its environment, and of its file in `peer_environments`."""
    library: str
    """Key in `peers_process.LIBRARIES`."""
    distributions: tuple[str, ...]
    """Those whose versions are reported."""
    precision: Mapping[str, str]
    """Of weights, key-value cache and computation."""
    needs_gguf: bool = False
    bindings: tuple[Setting, ...] = (Setting(),)
    """Tried by a sweep of plain decoding."""
    speculative: str = ""
    """Name of its speculative mode; empty = it has none without a draft model."""
    drafting: tuple[Setting, ...] = ()
    """Tried by a sweep of that mode, with the best binding."""
    preloads: tuple[str, ...] = ()
    """Libraries that its manual wants preloaded: file names looked for in the environment."""
    allocator: str = ""
    """The same for its allocator, a name that the system's linker knows."""
    server: tuple[tuple[str, ...], ...] = ()
    """Its server's commands, each a program in the environment and its arguments, in the order in
    which they start; the last one answers by HTTP. `{ports[0]}` is the port of the first one."""

    def python(self, environments: Path) -> Path:
        """Its interpreter."""
        return environments.absolute() / self.name / "bin" / "python"

    def versions(self, environments: Path) -> dict[str, str]:
        """Of those of `distributions` that are installed."""
        paths = [str(path) for path in (environments / self.name).glob("lib/python*/site-packages")]
        return {
            name: found.version
            for name in self.distributions
            for found in metadata.distributions(name=name, path=paths)
        }

    def is_installed(self, environments: Path) -> bool:
        """Whether `make peers` has installed it."""
        return (environments / self.name / STAMP).exists()

    def environment(self, setting: Setting, num_threads: int, environments: Path) -> dict[str, str]:
        """Variables of its processes: the setting's, and what of `preloads` and `allocator` is
        there."""
        root = environments.absolute() / self.name
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))[:num_threads]))
        found = [str(path) for name in self.preloads for path in root.glob(f"lib/**/{name}")][:1]
        allocator = ctypes.util.find_library(self.allocator) if self.allocator else None
        preloaded = ":".join([*([allocator] if allocator else []), *found])
        return {
            name: text.format(cpus=cpus, root=root) for name, text in setting.environment.items()
        } | ({"LD_PRELOAD": preloaded} if preloaded else {})


def _ngram(num_tokens: int) -> Setting:
    config = {
        "method": "ngram",
        "num_speculative_tokens": num_tokens,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    return Setting(options={"speculative_config": config})


def _openvino_lookup(num_tokens: int) -> Setting:
    drafting = {"num_assistant_tokens": num_tokens, "max_ngram_size": 3}
    return Setting(options={"drafting": drafting})


_VLLM_BINDINGS: Final = tuple(
    Setting({"VLLM_CPU_OMP_THREADS_BIND": cpus, "VLLM_ENABLE_V1_MULTIPROCESSING": separate})
    for cpus, separate in (("{cpus}", "0"), ("{cpus}", "1"), ("nobind", "0"), ("auto", "0"))
)
_VLLM_SERVER: Final = (
    # What `vllm serve` runs: that command fails where the installed distribution is `vllm-cpu`.
    (
        "python", "-m", "vllm.entrypoints.openai.api_server", "--model", "{directory}",
        "--port", "{ports[0]}", "--dtype", "bfloat16", "--max-model-len", "{context_tokens}",
        "--max-num-seqs", "{batch}",
        "--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(CACHE_GIB * 2**30),
        "--disable-uvicorn-access-log",
    ),
)  # fmt: skip
_PACE_SERVER: Final = (
    (
        "python", "-m", "pace.server.engine.frontend", "--host", "127.0.0.1",
        "--port", "{ports[0]}", "--fastapi_log_level", "None",
    ),
    (
        "python", "-m", "pace.server.router.frontend", "--server_host", "127.0.0.1",
        "--server_port", "{ports[0]}", "--router_host", "127.0.0.1", "--router_port", "{ports[1]}",
        "--model", "{directory}", "--dtype", "bfloat16", "--kv_cache_type", "{kv_cache}",
        "--serve_type", "continuous_batch", "--op_config", "{{}}", "--fastapi_log_level", "None",
        "--scheduler_metrics_enabled", "False",
    ),
)  # fmt: skip
_BFLOAT16: Final = {"weights": "bfloat16", "cache": "bfloat16", "compute": "bfloat16"}
_VLLM: Final = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": "{root}/cache",
}

_VLLM_PEER: Final = Peer(
    name="vllm",
    library="vllm",
    distributions=("vllm-cpu", "torch"),
    precision=_BFLOAT16,
    bindings=tuple(Setting(_VLLM) | binding for binding in _VLLM_BINDINGS),
    speculative="n-gram",
    drafting=(_ngram(3), _ngram(5), _ngram(8)),
    preloads=("libiomp5.so",),
    allocator="tcmalloc_minimal",
    server=_VLLM_SERVER,
)
PEERS: Final = (
    _VLLM_PEER,
    replace(_VLLM_PEER, name="vllm-pace", distributions=(*_VLLM_PEER.distributions, "pace-vllm")),
    Peer(
        name="openvino",
        library="openvino",
        needs_gguf=True,
        distributions=("openvino-genai", "openvino"),
        precision=_BFLOAT16,
        bindings=tuple(Setting(options={"ENABLE_CPU_PINNING": pinned}) for pinned in (True, False)),
        speculative="prompt lookup",
        drafting=(_openvino_lookup(5), _openvino_lookup(3), _openvino_lookup(8)),
    ),
    Peer(
        name="llama-cpp",
        library="llama-cpp",
        needs_gguf=True,
        distributions=("xllamacpp",),
        precision={"weights": "float16", "cache": "float16", "compute": "float32"},
        bindings=tuple(Setting(options={"poll": poll}) for poll in (50, 100)),
        speculative="n-gram",
        drafting=tuple(
            Setting(options={"ngram_simple": {"size_n": 3, "size_m": num_tokens}})
            for num_tokens in (3, 5, 8)
        ),
    ),
    Peer(
        name="pace",
        library="pace",
        distributions=("amd-pace", "torch"),
        precision=_BFLOAT16,
        bindings=tuple(
            Setting(binding, {"kv_cache": cache})
            for cache in ("SLAB_POOL", "PAGED", "BMC")
            for binding in ({}, {"GOMP_CPU_AFFINITY": "{cpus}"})
        ),
        server=_PACE_SERVER,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryModel:
    """What a library loads: the target of the deployment, once more."""

    directory: str
    """Its safetensors, in bfloat16."""
    gguf: str
    """The same weights, stored as float16; empty where the target comes from no GGUF file."""
    num_threads: int
    context_tokens: int
    """Room for the longest prompt and its completion."""
    batch: int
    """The most requests at a time."""
    eos_token_ids: Sequence[int]


class LibraryProcess(AnsweringProcess):
    """Decodes with a library. An async context manager: entering loads the model."""

    def __init__(
        self,
        peer: Peer,
        setting: Setting,
        model: LibraryModel,
        token_ids: Mapping[str, Sequence[int]],
        environments: Path,
    ) -> None:
        """`token_ids` are those of every prompt's text, chat template included."""
        self.environment = peer.environment(setting, model.num_threads, environments)
        setup = {
            "library": peer.library,
            "options": setting.options,
            **asdict(model),
        }
        super().__init__(
            str(Path(__file__).with_name("peers_process.py")),
            peer.name,
            setup,
            environment=reference_environment(os.environ) | self.environment,
            python=(str(peer.python(environments)), _ISOLATED),
        )
        self._token_ids = token_ids

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        """Decodes one prompt. Raises `Unavailable` where the process is gone and `ConfigError`
        where it refuses."""
        [completion] = await self.generate_all([prompt], decoding, 1)
        return completion

    async def generate_all(
        self, prompts: Sequence[BenchPrompt], decoding: Decoding, concurrency: int
    ) -> list[Completion]:
        """Decodes prompts, `concurrency` at a time; raises as `generate` does. The seed is not
        used: one for each request is slow in some libraries."""
        request = {
            "prompts": [self._token_ids[prompt.text] for prompt in prompts],
            "max_tokens": decoding.max_tokens,
            "temperature": 0.0 if decoding.rule is Rule.GREEDY else decoding.temperature,
            "concurrency": concurrency,
        }
        started_s = time.perf_counter()
        answer = await self.ask(request, DEADLINE_MS_MAX / 1000)
        return [_completion(found, started_s) for found in answer["completions"]]


def _completion(found: Mapping[str, Any], started_s: float) -> Completion:
    return Completion(
        token_ids=tuple(found["token_ids"]),
        started_s=started_s,
        seconds=found["seconds"],
        num_rounds=len(found["token_ids"]),
        num_draft_tokens=0,
        num_accepted_draft_tokens=0,
        first_token_s=found["first_token_s"],
    )


def sweep_prompts() -> tuple[BenchPrompt, ...]:
    """What settings are tried on; part of `token_ids` of every process that a sweep starts."""
    return select_prompts(built_in_prompts(), _SWEEP_PROMPTS)


class Sweep:
    """Finds the fastest setting for each mode of a peer, or remembers it."""

    def __init__(
        self,
        model: LibraryModel,
        token_ids: Mapping[str, Sequence[int]],
        environments: Path,
        progress: Progress,
    ) -> None:
        self._model = model
        self._token_ids = token_ids
        self._environments = environments
        self._progress = progress

    async def settings(self, peer: Peer, *, again: bool) -> dict[str, Setting]:
        """The fastest setting by mode, from this peer's last sweep of the same model on as many
        threads, unless `again` is set. A mode is missing where no setting works. Raises what the
        last one failed with where plain decoding does not work."""
        path = self._environments / peer.name / _SWEEP_RESULT
        key = {"model": self._model.directory, "threads": self._model.num_threads}
        if not again and path.exists():
            kept = json.loads(path.read_text("utf-8"))
            if kept["of"] == key:
                return {name: Setting(**found) for name, found in kept["settings"].items()}
        plain = await self._fastest(peer, PLAIN, peer.bindings)
        found = {PLAIN: plain}
        if peer.drafting:
            tried = tuple(plain | drafting for drafting in peer.drafting)
            try:
                found[peer.speculative] = await self._fastest(peer, peer.speculative, tried)
            except (ConfigError, Unavailable) as error:
                self._progress(f"{peer.name} {peer.speculative} does not work: {error.message}")
        settings = {name: asdict(setting) for name, setting in found.items()}
        path.write_text(json.dumps({"of": key, "settings": settings}), encoding="utf-8")
        return found

    async def _fastest(self, peer: Peer, mode: str, settings: Sequence[Setting]) -> Setting:
        if len(settings) == 1:
            return settings[0]
        rates: dict[int, float] = {}
        failure: ConfigError | Unavailable | None = None
        for place, setting in enumerate(settings):
            try:
                rates[place] = await self._rate(peer, setting)
            except (ConfigError, Unavailable) as error:
                failure = error
                continue
            self._progress(f"{peer.name} {mode}, setting {place}: {rates[place]:.1f} tokens/s")
        if not rates and failure is not None:
            raise failure
        return settings[max(rates, key=rates.__getitem__)]

    async def _rate(self, peer: Peer, setting: Setting) -> float:
        """Tokens a second, one prompt at a time, after one that is not counted."""
        first, *prompts = sweep_prompts()
        process = LibraryProcess(peer, setting, self._model, self._token_ids, self._environments)
        async with process:
            await process.generate(first, _SWEEP_DECODING)
            done = [await process.generate(prompt, _SWEEP_DECODING) for prompt in prompts]
        return sum(len(each.token_ids) for each in done) / sum(each.seconds for each in done)
