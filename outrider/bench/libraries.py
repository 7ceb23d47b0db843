"""Other inference libraries, and the target's engine alone, for comparison in benchmarks.

`make peers` installs each library in a virtual environment of its own. A *sweep* measures a few
settings of a library, and stores the fastest in a file in the library's environment. Without a
sweep, a library has the first of these settings."""

from __future__ import annotations

import ctypes.util
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.config.deployment import TargetConfig
from outrider.errors import ConfigError, Unavailable
from outrider.interfaces.request import GenerateRequest
from outrider.limits import DEADLINE_MS_MAX

from .measurement import BenchClient, Completion, Progress, bench_request
from .options import PromptOptions
from .processes import Process
from .prompts import WARM_UP_PROMPTS, BenchPrompt, encoder, read_prompts, select_prompts

STAMP = "installed"
"""`make peers` creates this file in a library's environment when the installation has ended."""
SETTINGS = "settings.json"
PLAIN = "plain"
SWEEP_TOKENS = 48
SWEEP_PROMPTS = 6
SPARE_TOKENS = 16
"""Room in a library's context for draft tokens after the longest completion."""
CONTEXT_STEP = 256
"""A context is a multiple of this number of tokens, because some caches hold only whole blocks."""

Setting = Mapping[str, Any]
"""Options of a library's class in `library_process`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInputs:
    """The target's model and the prompts, as all libraries get them."""

    setup: Mapping[str, Any]
    """The first message to each library's process: `context_tokens` (length of the context),
    `batch` (number of prompts at a time), `directory` (of the target's safetensors), `target` (the
    target's settings), `engine` (more of them, which only Outrider has), `precision` (dtype in
    which peers compute), and `gguf` (file with the same weights, or with weights of as many bits;
    empty = none)."""
    eos_token_ids: Sequence[int]
    token_ids: Mapping[str, Sequence[int]]
    """Token ids of each prompt, by the prompt's text."""
    environments: Path = Path()

    @classmethod
    def load(
        cls,
        target: TargetConfig,
        prompts: Sequence[BenchPrompt],
        options: PromptOptions,
        *,
        gguf: str = "",
        batch: int = 1,
        environments: Path = Path(),
    ) -> TargetInputs:
        """Tokenizes the prompts as Outrider does. `target.directory` must have safetensors."""
        from outrider.models.loading import load_tokenizer, stated_eos_token_ids
        from outrider.models.tokenizer import TokenizerText

        directory = Path(target.directory)
        text = TokenizerText.load(directory, trust_remote_code=target.trust_remote_code)
        encode = encoder(text, options.raw)
        asked = (*prompts, *WARM_UP_PROMPTS, *sweep_prompts())
        token_ids = {prompt.text: encode(prompt.text) for prompt in asked}
        completion = max(options.max_tokens, SWEEP_TOKENS) + SPARE_TOKENS
        context = max(map(len, token_ids.values())) + completion
        shared = ("dtype", "device", "num_threads", "trust_remote_code")
        setup = {
            "gguf": gguf,
            "batch": batch,
            "directory": target.directory,
            "context_tokens": -(-context // CONTEXT_STEP) * CONTEXT_STEP,
            "target": {name: getattr(target, name) for name in shared},
            "engine": {name: getattr(target, name) for name in ("cpu_kernels", "quantization")},
            "precision": precision_of(target),
        }
        eos = stated_eos_token_ids(directory, load_tokenizer(directory))
        return cls(setup=setup, eos_token_ids=eos, token_ids=token_ids, environments=environments)


def precision_of(target: TargetConfig) -> str:
    """The dtype in which peers compute on this machine: that of the target, but float32 in place of
    bfloat16 on a processor without instructions for bfloat16. There, some libraries refuse
    bfloat16, and others emulate it, which is slower."""
    import torch

    from outrider.kernels import processor
    from outrider.models.loading import loaded_dtype, resolve_device

    # The target may run on a GPU of another machine.
    device = target.device if torch.cuda.is_available() else "cpu"
    dtype = loaded_dtype(
        Path(target.directory),
        dtype=target.dtype,
        device=device,
        trust_remote_code=target.trust_remote_code,
    )
    is_cpu = resolve_device(device).type == "cpu"
    if dtype == torch.bfloat16 and is_cpu and not processor.has_bfloat16():
        dtype = torch.float32
    return str(dtype).removeprefix("torch.")


def sweep_prompts() -> tuple[BenchPrompt, ...]:
    return select_prompts(read_prompts(), SWEEP_PROMPTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    name: str
    """Also the name of its virtual environment, of its file in `peer_environments`, and of its
    class in `library_process.DECODERS`."""
    is_ours: bool = False
    """Whether the library runs in Outrider's environment. It then decodes one request at a time."""
    needs_gguf: bool = False
    bindings: tuple[Setting, ...] = ({},)
    """Settings that a sweep tries for plain decoding. The first is the default."""
    speculative: str = ""
    """Name of the library's speculative mode without a draft model; empty if there is none."""
    drafting: tuple[Setting, ...] = ()
    """Settings that a sweep tries for the speculative mode, added to the fastest of `bindings`. The
    first is the default."""
    preloads: tuple[str, ...] = ()
    """Shared objects that the library's manual asks to preload: names of files in the virtual
    environment, or names for the system's linker."""

    def environment(self, environments: Path) -> dict[str, str]:
        root = environments.absolute() / self.name
        preloaded: list[str] = []
        for name in self.preloads:
            paths = [str(path) for path in root.glob(f"lib/**/{name}")]
            preloaded += paths[:1] or filter(None, [ctypes.util.find_library(name)])
        return {"LD_PRELOAD": ":".join(preloaded)} if preloaded else {}


_VLLM_DRAFTS = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
VLLM = Library(
    name="vllm",
    bindings=({}, {"separate": True}, {"bind": "nobind"}, {"bind": "auto"}),
    speculative="n-gram",
    drafting=tuple(
        {"speculative_config": _VLLM_DRAFTS | {"num_speculative_tokens": number}}
        for number in (3, 5, 8)
    ),
    preloads=("tcmalloc_minimal", "libiomp5.so"),
)
ENGINE = Library(name="engine", is_ours=True)
TRANSFORMERS = Library(
    name="transformers",
    is_ours=True,
    speculative="prompt lookup",
    drafting=({"prompt_lookup_num_tokens": 10},),
)
PEERS = (
    VLLM,
    replace(VLLM, name="vllm-pace"),
    Library(
        name="openvino",
        needs_gguf=True,
        bindings=tuple({"ENABLE_CPU_PINNING": pinned} for pinned in (True, False)),
        speculative="prompt lookup",
        drafting=tuple(
            {"drafting": {"num_assistant_tokens": number, "max_ngram_size": 3}}
            for number in (5, 3, 8)
        ),
    ),
    Library(
        name="llama-cpp",
        needs_gguf=True,
        bindings=({"poll": 50}, {"poll": 100}),
        speculative="n-gram",
        drafting=tuple({"ngram_simple": {"size_n": 3, "size_m": number}} for number in (3, 5, 8)),
    ),
    TRANSFORMERS,
)


class LibraryProcess(Process, BenchClient):
    """A process that decodes with a library. Entering the context loads the model."""

    def __init__(self, library: Library, setting: Setting, inputs: TargetInputs) -> None:
        self._inputs = inputs
        command = [sys.executable, "-m", "outrider.bench.library_process"]
        if not library.is_ours:
            python = inputs.environments.absolute() / library.name / "bin" / "python"
            # With -I, this Python ignores PYTHONPATH and the modules of this repository.
            command = [str(python), "-I", str(Path(__file__).with_name("library_process.py"))]
        setup = {"library": library.name, "options": setting, **inputs.setup}
        super().__init__(command, library.name, setup, library.environment(inputs.environments))

    async def generate(self, request: GenerateRequest) -> Completion:
        [completion] = await self.generate_all([request], 1)
        return completion

    async def generate_all(
        self, requests: Sequence[GenerateRequest], concurrency: int
    ) -> list[Completion]:
        """Decodes all prompts in one call, so the library itself schedules the prompts. Ignores
        seeds, because some libraries are slow if each request has a seed."""
        question = {
            "prompts": [self._inputs.token_ids[str(request.prompt)] for request in requests],
            "eos_token_ids": self._inputs.eos_token_ids,
            "max_tokens": requests[0].max_tokens,
            "temperature": requests[0].sampling.temperature,
            "concurrency": concurrency,
        }
        started_s = time.perf_counter()
        answer = await self.ask(question, DEADLINE_MS_MAX / 1000)
        return [
            Completion(
                tuple(completion["token_ids"]),
                started_s,
                completion["seconds"],
                len(completion["token_ids"]),
                chunk_s=(completion["first_token_s"],),
            )
            for completion in answer["completions"]
        ]


def known_settings(library: Library, inputs: TargetInputs) -> dict[str, Setting]:
    """Returns a setting for each mode: the stored one if it is from a sweep with the same model,
    number of threads and precision, otherwise the default."""
    path = inputs.environments / library.name / SETTINGS
    if not library.is_ours and path.exists():
        kept = json.loads(path.read_text("utf-8"))
        # Older versions of this code wrote another format, in which `of` differs.
        if kept["of"] == _swept(inputs):
            return dict(kept["settings"])
    settings = {PLAIN: library.bindings[0]}
    if library.speculative:
        settings[library.speculative] = {**library.bindings[0], **library.drafting[0]}
    return settings


def _swept(inputs: TargetInputs) -> Mapping[str, Any]:
    """What a sweep depends on."""
    setup = inputs.setup
    return {
        "directory": setup["directory"],
        "precision": setup["precision"],
        "quantization": setup["engine"]["quantization"],
        "num_threads": setup["target"]["num_threads"],
    }


async def fastest_settings(
    library: Library, inputs: TargetInputs, progress: Progress
) -> dict[str, Setting]:
    """Runs a sweep. Stores and returns the fastest setting of each mode. Omits the speculative mode
    if none of its settings works. Raises `Unavailable` if plain decoding does not work."""
    fastest: dict[str, Setting] = {}
    for mode, settings in ((PLAIN, library.bindings), (library.speculative, library.drafting)):
        by_rate: dict[float, Setting] = {}
        for each in settings:
            setting = {**fastest.get(PLAIN, {}), **each}
            try:
                rate = await _rate(library, setting, inputs)
                by_rate[rate] = setting
                progress(f"{library.name} {mode}: {rate:.1f} tokens/s with {setting}")
            except (ConfigError, Unavailable) as error:
                failure = f"{mode} does not work: {error.message}"
                progress(f"{library.name} {failure}")
        if by_rate:
            fastest[mode] = by_rate[max(by_rate)]
        elif mode == PLAIN:
            raise Unavailable(failure)
    kept = {"of": _swept(inputs), "settings": fastest}
    (inputs.environments / library.name / SETTINGS).write_text(json.dumps(kept), encoding="utf-8")
    return fastest


async def _rate(library: Library, setting: Setting, inputs: TargetInputs) -> float:
    requests = [bench_request(prompt.text, SWEEP_TOKENS) for prompt in sweep_prompts()]
    async with LibraryProcess(library, setting, inputs) as process:
        _, *done = [await process.generate(request) for request in requests]
    return sum(completion.num_tokens for completion in done) / sum(
        completion.seconds for completion in done
    )


GGUF_TYPES = {"none": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""By the target's `quantization`, the type of matrices in the GGUF file that peers read."""


def peer_gguf(gguf: Path, cache: Path, quantization: str) -> Path:
    """Returns a cached copy of `gguf` with weights rounded to bfloat16, like those of the target.
    The copy stores matrices in the type that is nearest to those of the target (`GGUF_TYPES`):
    without a quantization as float16, because some libraries do not read bfloat16. Only numbers
    below 2**-17 in magnitude lose bits. Vectors are float32, as llama.cpp requires."""
    from outrider.models.sources import cached_path, made_once

    kind = GGUF_TYPES[quantization]
    path = cached_path(gguf, cache, f".{kind.lower()}.gguf")
    return made_once(path, lambda path: _write(gguf, path, kind))


def _write(gguf: Path, path: Path, kind: str) -> None:
    import numpy as np
    import torch
    from gguf import (
        GGML_QUANT_SIZES,
        GGMLQuantizationType,
        GGUFReader,
        GGUFValueType,
        GGUFWriter,
        LlamaFileType,
        dequantize,
        quantize,
    )

    reader = GGUFReader(str(gguf))
    architecture = reader.get_field("general.architecture").contents()
    # A temporary file holds the tensors until they are written, to save memory.
    writer = GGUFWriter(str(path), architecture, use_temp_file=True)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    own = ("general.architecture", "general.alignment", "general.file_type")
    for entry in reader.fields.values():
        if not entry.name.startswith("GGUF.") and entry.name not in own:
            of_values = entry.types[0]
            of_entries = entry.types[-1] if of_values == GGUFValueType.ARRAY else None
            writer.add_key_value(entry.name, entry.contents(), of_values, of_entries)
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    for tensor in reader.tensors:
        # `np.array` copies the memory-mapped array, because torch needs a writable array.
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        stored = "F32"
        if not tensor.name.startswith("rope_"):  # Tables of angles are not weights.
            values = values.to(torch.bfloat16).float()
            if values.dim() > 1:
                stored = "F16" if values.shape[-1] % block else kind
        raw_type = GGMLQuantizationType[stored]
        writer.add_tensor(tensor.name, quantize(values.numpy(), raw_type), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
