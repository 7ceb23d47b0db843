"""The process in which one inference library runs. `libraries.LibraryProcess` starts this process.

Most libraries have a virtual environment of their own, without Outrider. So this module imports
Outrider only in `Engine` and `Transformers`, which run in Outrider's environment.

The process reads JSON lines until its input ends, and answers each line. The first line says what
to load, and the answer is `{}`. Each further line is a batch of prompts, and the answer is
`{"completions": ...}`. After an error, the answer is `{"error": ...}`."""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol

CACHE_GIB = 1
OPENVINO_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f32"}

Emit = Callable[[int, list[int]], None]
"""Called with the index of a prompt and new tokens of its answer."""


class Decoder(Protocol):
    """A library with a loaded model."""

    def decode(self, prompts: list[list[int]], request: dict[str, Any], emit: Emit) -> None:
        """Decodes prompts, `request["concurrency"]` at a time. Raises the library's exceptions."""


class Vllm:
    """vLLM on CPUs, alone or with the amd-pace plug-in."""

    def __init__(self, setup: dict[str, Any]) -> None:
        options = dict(setup["options"])
        cpus = sorted(os.sched_getaffinity(0))[: setup["target"]["num_threads"]]
        os.environ |= {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": f"{sys.prefix}/cache",
            "VLLM_CPU_OMP_THREADS_BIND": options.pop("bind", "") or ",".join(map(str, cpus)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(options.pop("separate", False))),
        }
        from vllm import LLM

        self._engine = LLM(
            model=setup["directory"],
            dtype=setup["precision"],
            max_model_len=setup["context_tokens"],
            max_num_seqs=setup["batch"],
            kv_cache_memory_bytes=CACHE_GIB * 2**30,
            enable_prefix_caching=False,
            **options,
        ).llm_engine

    def decode(self, prompts: list[list[int]], request: dict[str, Any], emit: Emit) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request["temperature"],
            max_tokens=request["max_tokens"],
            stop_token_ids=request["eos_token_ids"],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        waiting, num_running = list(enumerate(prompts))[::-1], 0
        while waiting or num_running:
            while waiting and num_running < request["concurrency"]:
                index, token_ids = waiting.pop()
                self._engine.add_request(str(index), {"prompt_token_ids": token_ids}, params)
                num_running += 1
            for output in self._engine.step():
                emit(int(output.request_id), list(output.outputs[0].token_ids))
                num_running -= output.finished


class OpenVino:
    """OpenVINO GenAI's continuous-batching pipeline, with the model of a GGUF file."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import openvino_genai as genai

        options = dict(setup["options"])
        self._drafting = options.pop("drafting", {})
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = setup["batch"]
        properties = {
            # Without instructions for bfloat16, the attention takes a cache in float32 only.
            "INFERENCE_PRECISION_HINT": OPENVINO_TYPES[setup["precision"]],
            "KV_CACHE_PRECISION": OPENVINO_TYPES[setup["precision"]],
            "INFERENCE_NUM_THREADS": setup["target"]["num_threads"],
        }
        if self._drafting:
            properties["prompt_lookup"] = True
        self._pipeline = genai.ContinuousBatchingPipeline(
            setup["gguf"], scheduler, "CPU", properties | options
        )

    def decode(self, prompts: list[list[int]], request: dict[str, Any], emit: Emit) -> None:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.stop_token_ids = set(request["eos_token_ids"])
        config.do_sample = request["temperature"] > 0
        config.temperature = request["temperature"] or 1.0
        for name, value in self._drafting.items():
            setattr(config, name, value)
        waiting, handles = list(enumerate(prompts))[::-1], dict[int, Any]()
        while waiting or handles:
            while waiting and len(handles) < request["concurrency"]:
                index, token_ids = waiting.pop()
                ids = ov.Tensor(np.array([token_ids], dtype=np.int64))
                handles[index] = self._pipeline.add_request(index, ids, config)
            self._pipeline.step()
            for index, handle in list(handles.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        emit(index, list(output.generated_ids))
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    del handles[index]


class LlamaCpp:
    """The engine of llama.cpp's server, which xllamacpp runs in this process."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import xllamacpp as llama

        params = llama.CommonParams()
        params.model.path = setup["gguf"]
        params.n_parallel = setup["batch"]
        params.n_ctx = setup["context_tokens"] * setup["batch"]
        params.verbosity = 0
        for threads in (params.cpuparams, params.cpuparams_batch):
            threads.n_threads = setup["target"]["num_threads"]
            threads.poll = setup["options"]["poll"]
        if drafting := setup["options"].get("ngram_simple"):
            kinds = llama.common_speculative_type
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            for name, value in drafting.items():
                setattr(params.speculative.ngram_simple, name, value)
        self._server = llama.Server(params)

    def decode(self, prompts: list[list[int]], request: dict[str, Any], emit: Emit) -> None:
        emits = [partial(emit, index) for index in range(len(prompts))]
        with ThreadPoolExecutor(request["concurrency"]) as pool:
            # `list` raises the errors of the threads.
            list(pool.map(self._complete, prompts, repeat(request), emits))

    def _complete(
        self, token_ids: list[int], request: dict[str, Any], emit: Callable[[list[int]], None]
    ) -> None:
        body = {
            "prompt": token_ids,
            "max_tokens": request["max_tokens"],
            "temperature": request["temperature"],
            "samplers": ["temperature"],
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
            "verbose": True,  # Only verbose chunks have token ids.
        }
        failures: list[object] = []

        def take(chunk: dict[str, Any]) -> None:
            if "choices" not in chunk:
                failures.append(chunk)
                return
            emit(chunk["__verbose"]["tokens"])
            if chunk["choices"][0]["finish_reason"] == "stop":
                emit(request["eos_token_ids"][:1])

        self._server.handle_completions(body, take)
        if failures:
            raise RuntimeError(str(failures[0]))


class Streamer:
    """Takes tokens from the `generate` of transformers. The first call of `put` has the prompt."""

    def __init__(self, emit: Callable[[list[int]], None]) -> None:
        self._emit, self._is_prompt = emit, True

    def put(self, token_ids: Any) -> None:
        if not self._is_prompt:
            self._emit(token_ids.flatten().tolist())
        self._is_prompt = False

    def end(self) -> None:
        pass


class Transformers:
    """The `generate` of transformers. Decodes one prompt after the other."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from outrider.models.loading import load_model

        self._options = setup["options"]
        options = setup["target"] | {"dtype": setup["precision"]}
        self._module: Any = load_model(Path(setup["directory"]), **options)[0]

    def decode(self, prompts: list[list[int]], request: dict[str, Any], emit: Emit) -> None:
        import torch

        eos = request["eos_token_ids"]
        sampling: dict[str, Any] = {"do_sample": False}
        if request["temperature"]:
            sampling = {
                "do_sample": True,
                "temperature": request["temperature"],
                "top_k": 0,
                "top_p": 1.0,
            }
        for index, token_ids in enumerate(prompts):
            ids = torch.tensor([token_ids], device=self._module.device)
            with torch.inference_mode():
                self._module.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=request["max_tokens"],
                    eos_token_id=eos or None,
                    pad_token_id=eos[0] if eos else 0,
                    streamer=Streamer(partial(emit, index)),
                    **sampling,
                    **self._options,
                )


class Engine:
    """The engine of a target replica, without the services around it."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from outrider.config.deployment import TargetConfig
        from outrider.replica.engines import build_engine

        directory = setup["directory"]
        settings = setup["target"] | setup["engine"]
        config = TargetConfig(model=directory, directory=directory, **settings)
        self._engine = build_engine(config, config.num_threads)

    def decode(self, prompts: list[list[int]], request: dict[str, Any], emit: Emit) -> None:
        from outrider.bench.acceptance import Answer, decode
        from outrider.speculation.sampling_params import Rule, SamplingParams

        params = SamplingParams(temperature=request["temperature"])
        rule = Rule.TOKEN if request["temperature"] else Rule.GREEDY
        for index, prompt in enumerate(prompts):
            asked = [Answer("", 0, tuple(prompt), request["max_tokens"])]
            decoded = decode(self._engine, asked, params, rule, request["eos_token_ids"])
            for _, token_id, _ in decoded:
                emit(index, [token_id])


DECODERS: dict[str, Callable[[dict[str, Any]], Decoder]] = {
    "vllm": Vllm,
    "vllm-pace": Vllm,
    "openvino": OpenVino,
    "llama-cpp": LlamaCpp,
    "transformers": Transformers,
    "engine": Engine,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Text that libraries print must go to standard error, not into the answers.
    library: Decoder | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, object] = {}
        try:
            if library is None:
                library = DECODERS[request["library"]](request)
            else:
                answer = {"completions": _decode(library, request)}
        except Exception as error:  # noqa: BLE001 - libraries raise anything
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _decode(library: Decoder, request: dict[str, Any]) -> list[dict[str, object]]:
    prompts, eos = request["prompts"], frozenset(request["eos_token_ids"])
    decoded: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    started_s = time.perf_counter()

    def emit(index: int, token_ids: list[int]) -> None:
        for token_id in token_ids:
            done = decoded[index]
            if len(done) == request["max_tokens"] or (done and done[-1] in eos):
                return
            done.append(token_id)
            times[index].append(time.perf_counter() - started_s)

    library.decode(prompts, request, emit)
    return [
        {"token_ids": ids, "first_token_s": at[0], "seconds": at[-1]}
        for ids, at in zip(decoded, times, strict=True)
    ]


if __name__ == "__main__":
    main()
