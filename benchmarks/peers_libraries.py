"""Other inference libraries and servers as sides of a measurement: which there are, and their
processes.

Every library has an environment of its own, which `make peers` installs. How it runs fastest on
this machine (thread binding, draft length) is found by a sweep over a few settings; the result is
kept in its environment.
"""

from __future__ import annotations

import asyncio
import ctypes.util
import json
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Self

from outrider.errors import ConfigError, Unavailable
from outrider.limits import DEADLINE_MS_MAX
from outrider.speculation.sampling_params import Rule

from .measurement import BenchClient, Completion, Decoding, Job, Progress
from .peers_process import CACHE_GIB
from .processes import START_TIMEOUT_S, STOP_TIMEOUT_S, Process, ending, unbounded_threads
from .prompts import BenchPrompt, built_in_prompts, select_prompts
from .serve import ServeOptions
from .serve_clients import CHAT, TEXT, HttpServer, HttpServingClient, RequestFailed, StreamTimes

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
_PROGRAM: Final = Path(__file__).with_name("peers_process.py")
_POLL_S: Final = 0.5
_ROTATIONS: Final = "rope_"
"""Begins the names of tensors in a GGUF file that are no weights."""
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

    def environment(self, setting: Setting, inputs: PeerInputs) -> dict[str, str]:
        """Variables of its processes: the setting's, and what of `preloads` and `allocator` is
        there."""
        root = inputs.environments.absolute() / self.name
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))[: inputs.model.num_threads]))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInputs:
    """What all processes of peers are told."""

    model: LibraryModel
    token_ids: Mapping[str, Sequence[int]]
    """Of every prompt's text, chat template included."""
    environments: Path
    raw: bool


class LibraryProcess(Process, BenchClient):
    """Decodes with a library. An async context manager: entering loads the model."""

    def __init__(self, peer: Peer, setting: Setting, inputs: PeerInputs) -> None:
        self.environment = peer.environment(setting, inputs)
        self._token_ids = inputs.token_ids
        super().__init__(
            "",
            peer.name,
            {"library": peer.library, "options": setting.options, **asdict(inputs.model)},
            environment=self.environment,
            command=(str(peer.python(inputs.environments)), _ISOLATED, str(_PROGRAM)),
        )

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        """Decodes one prompt. Raises `Unavailable` where the process is gone and `ConfigError`
        where it refuses."""
        [completion] = await self.generate_all([(prompt, decoding)], 1)
        return completion

    async def generate_all(self, jobs: Sequence[Job], concurrency: int) -> list[Completion]:
        """The library schedules them. Raises as `generate` does. Seeds are not used: one for each
        request is slow in some libraries."""
        decoding = jobs[0][1]
        request = {
            "prompts": [self._token_ids[prompt.text] for prompt, _ in jobs],
            "max_tokens": decoding.max_tokens,
            "temperature": 0.0 if decoding.rule is Rule.GREEDY else decoding.temperature,
            "concurrency": concurrency,
        }
        started_s = time.perf_counter()
        answer = await self.ask(request, DEADLINE_MS_MAX / 1000)
        return [
            Completion(
                tuple(found["token_ids"]), started_s, found["seconds"], len(found["token_ids"]),
                first_token_s=found["first_token_s"],
            )
            for found in answer["completions"]
        ]  # fmt: skip


def sweep_prompts() -> tuple[BenchPrompt, ...]:
    """What settings are tried on; part of `token_ids` of every process that a sweep starts."""
    return select_prompts(built_in_prompts(), _SWEEP_PROMPTS)


async def fastest_settings(
    peer: Peer, inputs: PeerInputs, progress: Progress, *, again: bool
) -> dict[str, Setting]:
    """The fastest setting by mode, from this peer's last sweep of the same model on as many
    threads, unless `again` is set. A mode is missing where no setting works. Raises what the last
    one failed with where plain decoding does not work."""
    path = inputs.environments / peer.name / _SWEEP_RESULT
    key = {"model": inputs.model.directory, "threads": inputs.model.num_threads}
    if not again and path.exists():
        kept = json.loads(path.read_text("utf-8"))
        if kept["of"] == key:
            return {name: Setting(**found) for name, found in kept["settings"].items()}

    async def fastest(mode: str, settings: Sequence[Setting]) -> Setting:
        if len(settings) == 1:
            return settings[0]
        rates: dict[int, float] = {}
        failure: Exception | None = None
        for place, setting in enumerate(settings):
            try:
                rates[place] = await _rate(peer, setting, inputs)
            except (ConfigError, Unavailable) as error:
                failure = error
                continue
            progress(f"{peer.name} {mode}, setting {place}: {rates[place]:.1f} tokens/s")
        if not rates and failure is not None:
            raise failure
        return settings[max(rates, key=rates.__getitem__)]

    found = {PLAIN: await fastest(PLAIN, peer.bindings)}
    if peer.drafting:
        tried = [found[PLAIN] | drafting for drafting in peer.drafting]
        try:
            found[peer.speculative] = await fastest(peer.speculative, tried)
        except (ConfigError, Unavailable) as error:
            progress(f"{peer.name} {peer.speculative} does not work: {error.message}")
    settings = {name: asdict(setting) for name, setting in found.items()}
    path.write_text(json.dumps({"of": key, "settings": settings}), encoding="utf-8")
    return found


async def _rate(peer: Peer, setting: Setting, inputs: PeerInputs) -> float:
    """Tokens a second, one prompt at a time, after one that is not counted."""
    first, *prompts = sweep_prompts()
    async with LibraryProcess(peer, setting, inputs) as process:
        await process.generate(first, _SWEEP_DECODING)
        done = [await process.generate(prompt, _SWEEP_DECODING) for prompt in prompts]
    return sum(len(each.token_ids) for each in done) / sum(each.seconds for each in done)


class HttpSide(HttpServingClient, BenchClient):
    """A server as the measurement calls it. An async context manager: entering waits until it
    lists its model, and raises `Unavailable` where it does not."""

    def __init__(self, base_url: str, *, raw: bool, api_key: str = "", plain: bool = False) -> None:
        """`plain` = ask Outrider for plain decoding."""
        extra = {"speculation": {"num_draft_tokens": 0}} if plain else {}
        server = HttpServer(
            base_url=base_url, endpoint=TEXT if raw else CHAT, api_key=api_key, extra_body=extra
        )
        super().__init__(server, ServeOptions())

    async def __aenter__(self) -> Self:
        await self.find_model()
        return self

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        """Decodes one prompt. Raises `Unavailable` where the request fails."""
        times = StreamTimes(time.perf_counter)
        started_s = time.perf_counter()
        name = self.server.address
        try:
            answer = await self.answer(prompt, decoding.max_tokens, times, decoding.temperature)
        except RequestFailed as failure:
            raise Unavailable(f"{name}: {failure}") from failure
        if times.ended_s is None or not answer.output_tokens:
            raise Unavailable(f"{name}: an answer without tokens, or without their number")
        return Completion(
            token_ids=(),
            started_s=started_s,
            seconds=times.ended_s - started_s,
            num_rounds=answer.output_tokens,
            first_token_s=times.chunk_s[0] - started_s if times.chunk_s else None,
            counted_tokens=answer.output_tokens,
        )


class ServerProcess(HttpSide):
    """Another system's server, in processes of its own."""

    def __init__(self, peer: Peer, setting: Setting, inputs: PeerInputs) -> None:
        self._ports = _free_ports(len(peer.server))
        super().__init__(f"http://127.0.0.1:{self._ports[-1]}", raw=inputs.raw)
        self._name = f"the server of {peer.name}"
        self.environment = peer.environment(setting, inputs)
        flags = [
            word
            for name, value in setting.options.items()
            if isinstance(value, dict)
            for word in (f"--{name.replace('_', '-')}", json.dumps(value))
        ]
        values = asdict(inputs.model) | dict(setting.options) | {"ports": self._ports}
        programs = peer.python(inputs.environments).parent
        self._commands = [
            [str(programs / program), *(word.format(**values) for word in words), *flags]
            for program, *words in peer.server
        ]
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                for command, port in zip(self._commands, self._ports, strict=True):
                    process = await asyncio.create_subprocess_exec(
                        *command,
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=asyncio.subprocess.DEVNULL,
                        env=unbounded_threads() | self.environment,
                        start_new_session=True,  # An interrupt is for the measurement.
                    )
                    self._processes.append(process)
                    await self._until(process, partial(_connect, port))
                await self._until(process, self.find_model)
        except (TimeoutError, OSError) as error:
            await self._stop()
            raise Unavailable(f"{self._name} did not start: {error!r}") from error
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await super().__aexit__()
        finally:
            await self._stop()

    async def _until(
        self, process: asyncio.subprocess.Process, works: Callable[[], Awaitable[None]]
    ) -> None:
        while True:
            with suppress(Unavailable):
                await works()
                return
            if process.returncode is not None:
                raise Unavailable(f"{self._name} {ending(process.returncode)} while it started")
            await asyncio.sleep(_POLL_S)

    async def _stop(self) -> None:
        """Ends the processes and all that they have started."""
        while self._processes:
            process = self._processes.pop()
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(TimeoutError):
                    async with asyncio.timeout(STOP_TIMEOUT_S):
                        await process.wait()


async def _connect(port: int) -> None:
    """Raises `Unavailable` where a local port does not accept connections."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        raise Unavailable(str(error)) from error
    writer.close()


def _free_ports(number: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def bfloat16_gguf(gguf: Path, cache: Path) -> Path:
    """`gguf` with every weight as the target has it, rounded to bfloat16, made now if the cache has
    none. Tensors of two dimensions and more are stored as float16, since not every reader knows
    bfloat16: it holds the same numbers, but for those under 2**-17 in magnitude, which lose bits.
    Those of one dimension are stored as float32, as llama.cpp wants them. Metadata, names, shapes
    and the order of rows are the file's.

    The target's own weights are the same: `gguf_conversion` dequantises the file and rounds to
    bfloat16 likewise, and how it renames tensors and reorders their rows does not change values.
    """
    from outrider.models.sources import cached_path, made_once

    path = cached_path(gguf, cache, ".f16.gguf")
    return made_once(path, lambda path: _write(gguf, path))


def _write(gguf: Path, path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType

    reader = GGUFReader(str(gguf))
    writer = GGUFWriter(str(path), reader.get_field("general.architecture").contents())
    _copy_metadata(reader, writer)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        shape = tensor.shape[::-1].tolist()  # the file has them from the innermost on
        kind = GGMLQuantizationType.F32 if len(shape) == 1 else GGMLQuantizationType.F16
        num_bytes = tensor.n_elements * (4 if kind == GGMLQuantizationType.F32 else 2)
        writer.add_tensor_info(tensor.name, shape, None, num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:  # one at a time is in memory
        writer.write_tensor_data(_rounded(tensor))
    writer.close()


def _copy_metadata(reader: Any, writer: Any) -> None:
    """All but what the writer says itself, and the type of the weights."""
    from gguf import GGUFValueType

    own = ("general.architecture", "general.alignment", "general.file_type")
    for entry in reader.fields.values():
        if entry.name.startswith("GGUF.") or entry.name in own:
            continue
        kind = entry.types[0]
        of_entries = entry.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(entry.name, entry.contents(), kind, of_entries)


def _rounded(tensor: Any) -> Any:
    """Its values as an array of float32 or float16."""
    import numpy as np
    import torch
    from gguf import dequantize

    # A copy: what is memory-mapped cannot be written to, and torch takes only what can be.
    values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
    if tensor.name.startswith(_ROTATIONS):
        return values.numpy()
    rounded = values.to(torch.bfloat16)
    return (rounded.float() if rounded.dim() == 1 else rounded.to(torch.float16)).numpy()
