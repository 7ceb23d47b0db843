"""Other inference libraries and servers as sides of a measurement: which there are, and their
processes; besides the engine of the target alone.

Every library has an environment of its own, which `make peers` installs. How it runs fastest on
this machine (thread binding, draft length) is found by a sweep over a few settings; the result is
kept in its environment.
"""

from __future__ import annotations

import asyncio
import ctypes.util
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.config import TargetConfig
from outrider.errors import ConfigError, Unavailable
from outrider.limits import DEADLINE_MS_MAX

from .clients import HttpClient
from .library_process import CACHE_GIB
from .measurement import BenchClient, Completion, Decoding, Job, Progress
from .options import PromptOptions
from .processes import START_TIMEOUT_S, Process, ending, spawn
from .prompts import WARM_UP_PROMPTS, BenchPrompt, built_in_prompts, encoder, select_prompts

STAMP = "installed"
"""File in the environment of a library that `make peers` has installed."""
PLAIN = "plain"
SWEEP_TOKENS = 48
"""Of a completion of a sweep."""
SWEEP_PROMPTS = 6
"""Built-in ones, one of each category."""
SPARE_TOKENS = 16
"""Room in a library's context for drafts behind the longest completion."""
CONTEXT_STEP = 256
"""A library's context is a multiple of it: some caches hold whole blocks only."""
_PROGRAM = Path(__file__).with_name("library_process.py")
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a library. In variables `{cpus}` stands for the numbers of the cores, and
    `{root}` for its environment."""

    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    """For the library, see its class in `library_process`."""

    def __or__(self, other: Setting) -> Setting:
        return Setting({**self.environment, **other.environment}, {**self.options, **other.options})


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInputs:
    """What all processes of libraries are told."""

    target: TargetConfig
    """With the directory of its safetensors."""
    gguf: str = ""
    """The same weights, stored as float16; empty where the target comes from no GGUF file."""
    context_tokens: int
    """Room for the longest prompt and its completion."""
    batch: int = 1
    """The most requests at a time."""
    eos_token_ids: Sequence[int]
    token_ids: Mapping[str, Sequence[int]]
    """Of every prompt's text, chat template included."""
    environments: Path = Path()
    raw: bool = False

    @classmethod
    def load(
        cls,
        target: TargetConfig,
        prompts: Sequence[BenchPrompt],
        options: PromptOptions,
        **named: Any,
    ) -> TargetInputs:
        """With the tokens of all prompts as Outrider makes them."""
        from outrider.models.loading import load_tokenizer, stated_eos_token_ids
        from outrider.tokenizer import TokenizerText

        directory = Path(target.directory)
        text = TokenizerText.load(directory, trust_remote_code=target.trust_remote_code)
        encode = encoder(text, options.raw)
        asked = (*prompts, *WARM_UP_PROMPTS, *sweep_prompts())
        token_ids = {one.text: encode(one.text) for one in asked}
        completion = max(options.max_tokens, SWEEP_TOKENS) + SPARE_TOKENS
        context = max(map(len, token_ids.values())) + completion
        return cls(
            target=target, context_tokens=-(-context // CONTEXT_STEP) * CONTEXT_STEP,
            eos_token_ids=stated_eos_token_ids(directory, load_tokenizer(directory)),
            token_ids=token_ids, raw=options.raw, **named,
        )  # fmt: skip

    def setup(self) -> dict[str, Any]:
        """What a library loads."""
        shared = "dtype", "device", "num_threads", "trust_remote_code"
        own = "gguf", "context_tokens", "batch", "eos_token_ids"
        return {name: getattr(self, name) for name in own} | {
            "directory": self.target.directory,
            "target": {name: getattr(self.target, name) for name in shared},
        }


def sweep_prompts() -> tuple[BenchPrompt, ...]:
    """What settings are tried on."""
    return select_prompts(built_in_prompts(), SWEEP_PROMPTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library that is measured."""

    name: str
    """Of its environment and its file in `peer_environments`, and in `library_process.DECODERS`."""
    is_ours: bool = False
    """Whether it runs in this interpreter's environment, and one request at a time."""
    needs_gguf: bool = False
    bindings: tuple[Setting, ...] = (Setting(),)
    """Tried by a sweep of plain decoding."""
    speculative: str = ""
    """Name of its speculative mode; empty = it has none without a draft model."""
    drafting: tuple[Setting, ...] = ()
    """Tried by a sweep of that mode, with the best binding."""
    preloads: tuple[str, ...] = ()
    """Libraries that its manual wants preloaded: files in the environment, or names that the
    system's linker knows."""
    server: tuple[str, ...] = ()
    """The arguments of the interpreter that start its server."""

    def interpreter(self, environments: Path) -> str:
        """Its path."""
        return str(environments.absolute() / self.name / "bin" / "python")

    def is_installed(self, environments: Path) -> bool:
        """Whether `make peers` has installed it."""
        return self.is_ours or (environments / self.name / STAMP).exists()

    def environment(self, setting: Setting, inputs: TargetInputs) -> dict[str, str]:
        """Variables of its processes: the setting's, and what of `preloads` is there."""
        root = inputs.environments.absolute() / self.name
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))[: inputs.target.num_threads]))
        found = {
            name: text.format(cpus=cpus, root=root) for name, text in setting.environment.items()
        }
        preloaded: list[str] = []
        for name in self.preloads:
            paths = [str(path) for path in root.glob(f"lib/**/{name}")]
            preloaded += paths[:1] or filter(None, [ctypes.util.find_library(name)])
        return found | ({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {})


_VLLM_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": "{root}/cache",
}
_VLLM_DRAFTS = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_VLLM = Library(
    name="vllm",
    bindings=tuple(
        Setting(
            _VLLM_ENVIRONMENT
            | {"VLLM_CPU_OMP_THREADS_BIND": cpus, "VLLM_ENABLE_V1_MULTIPROCESSING": separate}
        )
        for cpus, separate in (("{cpus}", "0"), ("{cpus}", "1"), ("nobind", "0"), ("auto", "0"))
    ),
    speculative="n-gram",
    drafting=tuple(
        Setting(options={"speculative_config": _VLLM_DRAFTS | {"num_speculative_tokens": number}})
        for number in (3, 5, 8)
    ),
    preloads=("tcmalloc_minimal", "libiomp5.so"),
    # What `vllm serve` runs: that command fails where the installed distribution is `vllm-cpu`.
    server=(
        "-m", "vllm.entrypoints.openai.api_server", "--model", "{directory}", "--port", "{port}",
        "--dtype", "bfloat16", "--max-model-len", "{context_tokens}", "--max-num-seqs", "{batch}",
        "--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(CACHE_GIB * 2**30),
        "--disable-uvicorn-access-log",
    ),
)  # fmt: skip
ENGINE = Library(name="engine", is_ours=True)
TRANSFORMERS = Library(
    name="transformers",
    is_ours=True,
    speculative="prompt lookup",
    drafting=(Setting(options={"prompt_lookup_num_tokens": 10}),),
)
PEERS = (
    _VLLM,
    replace(_VLLM, name="vllm-pace"),
    Library(
        name="openvino",
        needs_gguf=True,
        bindings=tuple(Setting(options={"ENABLE_CPU_PINNING": pinned}) for pinned in (True, False)),
        speculative="prompt lookup",
        drafting=tuple(
            Setting(options={"drafting": {"num_assistant_tokens": number, "max_ngram_size": 3}})
            for number in (5, 3, 8)
        ),
    ),
    Library(
        name="llama-cpp",
        needs_gguf=True,
        bindings=tuple(Setting(options={"poll": poll}) for poll in (50, 100)),
        speculative="n-gram",
        drafting=tuple(
            Setting(options={"ngram_simple": {"size_n": 3, "size_m": number}})
            for number in (3, 5, 8)
        ),
    ),
    TRANSFORMERS,
)


class LibraryProcess(Process, BenchClient):
    """Decodes with a library. An async context manager: entering loads the model."""

    def __init__(self, library: Library, setting: Setting, inputs: TargetInputs) -> None:
        self._token_ids = inputs.token_ids
        # -I keeps this repository's modules and PYTHONPATH out of another library's interpreter.
        command = (
            (sys.executable, "-m", "benchmarks.library_process")
            if library.is_ours
            else (library.interpreter(inputs.environments), "-I", str(_PROGRAM))
        )
        setup = {"library": library.name, "options": setting.options, **inputs.setup()}
        environment = library.environment(setting, inputs)
        super().__init__(command, library.name, setup, environment)

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
            "temperature": decoding.temperature,
            "concurrency": concurrency,
        }
        started_s = time.perf_counter()
        answer = await self.ask(request, DEADLINE_MS_MAX / 1000)
        return [
            Completion(
                tuple(found["token_ids"]), started_s, found["seconds"], len(found["token_ids"]),
                chunk_s=(found["first_token_s"],),
            )
            for found in answer["completions"]
        ]  # fmt: skip


async def fastest_settings(
    library: Library, inputs: TargetInputs, progress: Progress, *, again: bool
) -> dict[str, Setting]:
    """The fastest setting by mode, from this library's last sweep of the same model on as many
    threads, unless `again` is set. A mode is missing where no setting works. Raises `Unavailable`
    where plain decoding does not work."""
    if library.is_ours:
        return {PLAIN: library.bindings[0], library.speculative: library.drafting[0]}
    path = inputs.environments / library.name / "settings.json"
    key = {"model": inputs.target.directory, "threads": inputs.target.num_threads}
    if not again and path.exists():
        kept = json.loads(path.read_text("utf-8"))
        if kept["of"] == key:
            return {name: Setting(**found) for name, found in kept["settings"].items()}
    found: dict[str, Setting] = {}
    for mode, settings in ((PLAIN, library.bindings), (library.speculative, library.drafting)):
        by_rate: dict[float, Setting] = {}
        for each in settings:
            setting = found.get(PLAIN, Setting()) | each
            try:
                rate = await _rate(library, setting, inputs)
            except (ConfigError, Unavailable) as error:
                failure = f"{mode} does not work: {error.message}"
                progress(f"{library.name} {failure}")
            else:
                by_rate[rate] = setting
                progress(f"{library.name} {mode}: {rate:.1f} tokens/s with {setting}")
        if by_rate:
            found[mode] = by_rate[max(by_rate)]
        elif mode == PLAIN:
            raise Unavailable(failure)
    settings_of = {name: asdict(setting) for name, setting in found.items()}
    path.write_text(json.dumps({"of": key, "settings": settings_of}), encoding="utf-8")
    return found


async def _rate(library: Library, setting: Setting, inputs: TargetInputs) -> float:
    """Tokens a second, one prompt at a time, after one that is not counted."""
    decoding = Decoding(SWEEP_TOKENS, temperature=0.0)
    async with LibraryProcess(library, setting, inputs) as process:
        _, *done = [await process.generate(prompt, decoding) for prompt in sweep_prompts()]
    return sum(one.num_tokens for one in done) / sum(one.seconds for one in done)


@asynccontextmanager
async def library_server(
    library: Library, setting: Setting, inputs: TargetInputs
) -> AsyncIterator[HttpClient]:
    """Calls a library's server, in a process of its own. Raises `Unavailable` where it does not
    start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = HttpClient(f"http://127.0.0.1:{port}", raw=inputs.raw)
    values = inputs.setup() | {"port": port}
    command = [library.interpreter(inputs.environments)]
    command += [word.format(**values) for word in library.server]
    for name, value in setting.options.items():
        command += [f"--{name.replace('_', '-')}", json.dumps(value)]
    environment = library.environment(setting, inputs)
    async with spawn(command, environment, asyncio.subprocess.DEVNULL) as process:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not client.model:
                    with suppress(Unavailable):
                        await client.find_model()
                    if process.returncode is not None:
                        raise Unavailable(f"its server {ending(process.returncode)}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise Unavailable("its server did not start in time") from error
        async with client:
            yield client


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
    import numpy as np
    import torch
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize

    reader = GGUFReader(str(gguf))
    architecture = reader.get_field("general.architecture").contents()
    writer = GGUFWriter(str(path), architecture, use_temp_file=True)  # Else all are in memory.
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    own = ("general.architecture", "general.alignment", "general.file_type")
    for entry in reader.fields.values():
        if not entry.name.startswith("GGUF.") and entry.name not in own:
            kind = entry.types[0]
            of_entries = entry.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(entry.name, entry.contents(), kind, of_entries)
    for tensor in reader.tensors:
        # A copy: what is memory-mapped cannot be written to, and torch takes only what can be.
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        if not tensor.name.startswith("rope_"):  # These are no weights.
            rounded = values.to(torch.bfloat16)
            values = rounded.float() if rounded.dim() == 1 else rounded.to(torch.float16)
        writer.add_tensor(tensor.name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
