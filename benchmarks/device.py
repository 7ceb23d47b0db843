"""`outrider bench device`, or `python -m benchmarks.device` where neither Ray nor gRPC is: how near
a step at batch 1 comes to what the device's memory allows, and what CUDA graphs are worth.

| figure | ms, medians |
| --- | --- |
| `weight_bytes` | that a step reads: all but an embedding that is not the head as well |
| `copy_gb_per_s` | bytes read and written by a copy of a large tensor, 10^9 a second |
| `ideal_step_ms` | `weight_bytes` at that speed |
| `decode_step_ms` | one token of one session, until its likeliest successor is known |
| `decode_over_ideal` | that over `ideal_step_ms` (goal 1.25) |
| `verify_step_ms` | K + 1 tokens of one session |
| `draft_steps_ms` | K draft tokens at temperature 1, a step and a draw each |
| `draft_replay_ms` | the same in one replay; null where that is not done |

The last five are of `graphs_on`, null where no step is recorded, and of `graphs_off`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import click
import torch

from draft_service.model_drafter import ModelDrafter
from outrider.drafters.drafter import DraftRequest
from outrider.engine.cuda.backend import DeviceBackend, find_backend
from outrider.engine.interface import Engine, ModelInfo, SequenceStep
from outrider.engine.paged_engine import PagedEngine
from outrider.errors import ConfigError, SettingError
from outrider.models.loading import DTYPES, load_model, resolve_device, resolve_dtype
from outrider.models.module_replacement import speed_up
from outrider.models.sources import resolve_model
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

from .measurement import Progress, medians_ms
from .options import RANDOM_MODEL, DeviceOptions
from .report import Report, to_json

COPIES: Final = 10
COPY_BYTES_MAX: Final = 2**30
_KV_CACHE_BYTES: Final = 2**32
_NAME: Final = "bench"


def run(options: DeviceOptions, progress: Progress) -> Report:
    """Loads or makes the model, and measures. Raises `ConfigError`."""
    device = resolve_device(options.device)
    progress(f"loading {options.model} on {device}")
    module, info = _model(options, device)
    room = info.max_model_len - options.num_draft_tokens - 1
    if options.context_tokens > room:
        raise SettingError("context_tokens", f"model {info.name} has room for {room}")
    return measure(module, info, options, find_backend(device, module.dtype), progress)


def measure(
    module: Any,
    info: ModelInfo,
    options: DeviceOptions,
    backend: DeviceBackend | None,
    progress: Progress,
) -> Report:
    """Measures a model, which belongs to the bench from now on."""
    weight = next(module.parameters())
    weight_bytes = _weight_bytes(module)
    progress("copying")
    bytes_per_s = copy_speed(weight.device, min(COPY_BYTES_MAX, weight_bytes))
    ideal_ms = weight_bytes / bytes_per_s * 1e3
    speed_up(module)
    graphs_on = None
    if backend is not None and backend.new_recorder is not None:
        progress("steps that are recorded")
        graphs_on = _figures(module, info, options, backend, ideal_ms)
        if graphs_on["draft_replay_ms"] is None:
            progress("this model's steps cannot be recorded")
            graphs_on = None
        backend = replace(backend, new_recorder=None)
    progress("steps that are not")
    values = {
        "model": info.name,
        "device": _device_name(weight.device),
        "dtype": info.dtype,
        "torch_version": torch.__version__,
        "context_tokens": options.context_tokens,
        "num_draft_tokens": options.num_draft_tokens,
        "repetitions": options.repetitions,
        "weight_bytes": weight_bytes,
        "copy_gb_per_s": bytes_per_s / 1e9,
        "ideal_step_ms": ideal_ms,
        "graphs_on": graphs_on,
        "graphs_off": _figures(module, info, options, backend, ideal_ms),
    }
    return Report.of(f"steps of {info.name}", values)


def copy_speed(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written a second by the quickest of some copies of so many bytes."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(COPIES):
        _wait(device)
        started = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return 2 * num_bytes / min(seconds)


def random_llama(device: torch.device, dtype: torch.dtype, **sizes: int) -> tuple[Any, ModelInfo]:
    """A Llama of random numbers, made on the device: of 6.7 billion parameters without `sizes`."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **{
            "vocab_size": 32_000, "hidden_size": 4_096, "intermediate_size": 11_008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 4_096, **sizes,
        },
        tie_word_embeddings=False,
    )  # fmt: skip
    with device:
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    info = ModelInfo(
        RANDOM_MODEL, config.vocab_size, config.max_position_embeddings, name, (), "", ""
    )
    return module.requires_grad_(False).eval(), info


def _model(options: DeviceOptions, device: torch.device) -> tuple[Any, ModelInfo]:
    if options.model == RANDOM_MODEL:
        dtype = resolve_dtype(options.dtype)
        return random_llama(device, DTYPES["bfloat16"] if isinstance(dtype, str) else dtype)
    return load_model(
        resolve_model(options.model), name=options.model, dtype=options.dtype, device=str(device)
    )


def _weight_bytes(module: Any) -> int:
    """Of an embedding a step reads a row or two; of one that is the head too, all."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    whole = sum(parameter.nbytes for parameter in module.parameters())
    return int(whole if tied else whole - embedding.weight.nbytes)


def _figures(
    module: Any,
    info: ModelInfo,
    options: DeviceOptions,
    backend: DeviceBackend | None,
    ideal_ms: float,
) -> dict[str, float | None]:
    engine = PagedEngine(
        module, info, max_num_seqs=2, kv_cache_memory_bytes=_KV_CACHE_BYTES,
        backend=backend,
    )  # fmt: skip
    ids = [(7_919 * i + 1) % info.vocab_size for i in range(options.context_tokens)]
    engine.forward([SequenceStep(_NAME, tuple(ids), 0)])
    decode = _step_ms(engine, ids[:1], options)
    verify = _step_ms(engine, ids[:1] * (options.num_draft_tokens + 1), options)
    request = _draft_request([*ids, ids[0]], options.num_draft_tokens)
    # An engine that is only asked for single steps.
    alone = cast(Engine, _OneStep(engine))
    by_steps = _median_ms(lambda: ModelDrafter(alone).propose([request]), engine, options)
    replay = None
    if engine.records_steps:
        replay = _median_ms(lambda: ModelDrafter(engine).propose([request]), engine, options)
    return {
        "decode_step_ms": decode,
        "decode_over_ideal": decode / ideal_ms,
        "verify_step_ms": verify,
        "draft_steps_ms": by_steps,
        "draft_replay_ms": replay if engine.records_steps else None,
    }


class _OneStep:
    """What a drafter needs of an engine, without the call for all steps at once."""

    def __init__(self, engine: Engine) -> None:
        self.info = engine.info
        self.forward = engine.forward
        self.length = engine.length
        self.keep = engine.keep
        self.release = engine.release


def _draft_request(token_ids: Sequence[int], num_draft_tokens: int) -> DraftRequest:
    return DraftRequest(
        session_id=_NAME,
        tenant="",
        token_ids=token_ids,
        prompt_length=len(token_ids),
        num_draft_tokens=num_draft_tokens,
        sampling=SamplingParams(),
        rule=Rule.TOKEN,
        noise=RoundNoise(7, Rule.TOKEN, len(token_ids)),
    )


def _step_ms(engine: Engine, token_ids: Sequence[int], options: DeviceOptions) -> float:
    """Until the likeliest token after each is known, as whoever draws waits for that."""
    step = SequenceStep(_NAME, tuple(token_ids), len(token_ids))

    def run_step() -> None:
        engine.forward([step])[0].argmax(dim=1).tolist()

    return _median_ms(run_step, engine, options)


def _median_ms(work: Callable[[], object], engine: Engine, options: DeviceOptions) -> float:
    undo = partial(engine.keep, _NAME, options.context_tokens)
    [found] = medians_ms([lambda index: work()], options.repetitions, undo)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _main(**values: Any) -> None:
    del values["json"]
    try:
        report = run(DeviceOptions(**values), partial(click.echo, err=True))
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    click.echo(to_json(report.values))


main: Final = click.Command(
    "python -m benchmarks.device", help=__doc__, callback=_main,
    params=[*DeviceOptions.params(click.Option), click.Option(["--json"], is_flag=True)],
)  # fmt: skip

if __name__ == "__main__":
    main()
