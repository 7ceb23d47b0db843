"""`outrider bench device`: how close a step at batch size 1 comes to the limit that the memory
bandwidth sets. `python -m outrider.bench.device MODEL` measures the same without Ray and gRPC.

| figure | meaning (times are medians) |
| --- | --- |
| `weight_bytes` | bytes of all weights that a step reads |
| `copy_gb_per_s` | bytes read plus bytes written by the fastest copy of a large tensor, GB/s |
| `ideal_step_ms` | time to read `weight_bytes` at `copy_gb_per_s` |
| `decode_step_ms` | a step of one token, and the choice of the likeliest next token |
| `decode_over_ideal` | `decode_step_ms` divided by `ideal_step_ms` (goal: at most 1.25) |
| `verify_step_ms` | a step of K + 1 tokens of one session |
| `draft_steps_ms` | drafting K tokens at temperature 1 |
| `verdict_ms` | for each rule, the verdicts of 1, 16 and 64 sessions on 4 draft tokens each |

Verdicts use temperature 1, top-p 0.95, and normally distributed logits of standard deviation 3.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.utils.benchmark import Timer

from draft_service.model_drafter import ModelDrafter
from outrider.drafters.drafter import DraftRequest
from outrider.engine.cuda.table_steps import DeviceBackend, find_backend
from outrider.engine.paged_engine import PagedEngine
from outrider.errors import SettingError
from outrider.interfaces.engine import ModelInfo, SequenceStep
from outrider.models.loading import DTYPES, load_model, use_device
from outrider.models.module_replacement import speed_up
from outrider.models.sources import resolve_model
from outrider.speculation.draft_sampling import draw_from_logits
from outrider.speculation.proposal import EncodedProposal, Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import NO_HISTORY, Rule, SamplingParams
from outrider.speculation.verification import VerifyInput, verdicts_from_logits

from .measurement import Progress, medians_ms
from .options import RANDOM_MODELS, DeviceOptions
from .report import Report, to_json

COPY_S = 1.0
REPETITIONS = 50
COPY_BYTES_MAX = 2**30
_KV_CACHE_BYTES = 2**32
_NAME = "bench"
VERDICT_SESSIONS = (1, 16, 64)
VERDICT_TOKENS = 4
_SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)
_FLATTER = SamplingParams(temperature=1.25)
_OF_1B = {
    "hidden_size": 2_048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8_192,
    "vocab_size": 128_256,
    "tie_word_embeddings": True,
}


def run(options: DeviceOptions, progress: Progress) -> Report:
    device = use_device(device=options.device)
    progress(f"loading {options.model} on {device}")
    if options.model in RANDOM_MODELS:
        dtype = DTYPES.get(options.dtype, torch.bfloat16)
        module, info = random_llama(device, dtype, options.model)
    else:
        path = resolve_model(options.model)
        module, info = load_model(path, name=options.model, dtype=options.dtype, device=str(device))
    room = info.max_model_len - options.num_draft_tokens - 1
    if options.context_tokens > room:
        raise SettingError(
            "context_tokens",
            f"{options.context_tokens} is wrong; model {info.name} takes at most {room}",
        )
    return measure(module, info, options, find_backend(device, module.dtype), progress)


def measure(
    module: Any,
    info: ModelInfo,
    options: DeviceOptions,
    backend: DeviceBackend | None,
    progress: Progress,
) -> Report:
    """Replaces some modules in `module` by faster ones, and measures the result."""
    device = module.device
    weight_bytes = _weight_bytes(module)
    progress("copying")
    bytes_per_s = copy_speed(device, min(COPY_BYTES_MAX, weight_bytes))
    ideal_ms = weight_bytes / bytes_per_s * 1e3
    speed_up(module)
    progress("steps")
    figures = _figures(module, info, options, backend)
    values = asdict(options) | {
        "model": info.name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": info.dtype,
        "torch_version": torch.__version__,
        "weight_bytes": weight_bytes,
        "copy_gb_per_s": bytes_per_s / 1e9,
        "ideal_step_ms": ideal_ms,
        "decode_over_ideal": figures["decode_step_ms"] / ideal_ms,
        **figures,
    }
    progress("verdicts")
    values["verdict_ms"] = verdict_times(device, info.vocab_size)
    return Report.of(f"steps of {info.name}", values)


def copy_speed(device: torch.device, num_bytes: int) -> float:
    """Bytes read plus bytes written in a second by the fastest copy."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    names = {"source": source, "target": torch.zeros_like(source)}
    timer = Timer("target.copy_(source)", globals=names, num_threads=torch.get_num_threads())
    return 2 * num_bytes / min(timer.blocked_autorange(min_run_time=COPY_S).times)


def random_llama(
    device: torch.device, dtype: torch.dtype, name: str = "", **sizes: int
) -> tuple[Any, ModelInfo]:
    """A Llama with random weights. Its shapes are those of Llama 3.2 1B if `name` is `random-1b`,
    and otherwise those of Llama 2 7B. `sizes` override these shapes."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shapes = _OF_1B if name == RANDOM_MODELS[0] else {}
    config = LlamaConfig(**{"max_position_embeddings": 4_096} | shapes | sizes)
    with device:
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    kind = str(dtype).removeprefix("torch.")
    info = ModelInfo(name, config.vocab_size, config.max_position_embeddings, kind, (), "", "")
    return module.requires_grad_(False).eval(), info


def verdict_times(device: torch.device, vocab_size: int) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(7)
    shape = (max(VERDICT_SESSIONS), VERDICT_TOKENS + 1, vocab_size)
    rows = 3 * torch.randn(shape, generator=generator, device=device)
    times_by_rule: dict[str, Any] = {}
    for rule in Rule:
        questions = [_question(logits, rule, index) for index, logits in enumerate(rows)]
        works = [partial(_judge, questions[:num]) for num in VERDICT_SESSIONS]
        times = medians_ms(works, REPETITIONS)
        times_by_rule[rule.value] = dict(zip(map(str, VERDICT_SESSIONS), times, strict=True))
    return times_by_rule


def _judge(questions: Sequence[VerifyInput], _: int) -> None:
    with torch.inference_mode():
        verdicts_from_logits(questions)


def _question(logits: torch.Tensor, rule: Rule, index: int) -> VerifyInput:
    noise, num = RoundNoise(index, rule, 100 + index), VERDICT_TOKENS
    drawn, _ = draw_from_logits(logits[:-1], [_FLATTER] * num, [noise] * num, range(num))
    q = tuple(q for _, q in drawn) if rule.needs_q else ()
    proposal = EncodedProposal.of(Proposal(tuple(token_id for token_id, _ in drawn), q)).decode()
    return VerifyInput(logits, _SAMPLED, NO_HISTORY, proposal, noise)


def _weight_bytes(module: Any) -> int:
    """Bytes of all weights that a step reads. An embedding that is not tied to the LM head does not
    count, because a step reads only a few of its rows."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    whole = sum(parameter.nbytes for parameter in module.parameters())
    return int(whole if tied else whole - embedding.weight.nbytes)


def _figures(
    module: Any, info: ModelInfo, options: DeviceOptions, backend: DeviceBackend | None
) -> dict[str, float]:
    engine = PagedEngine(
        module, info, max_num_seqs=2, kv_cache_memory_bytes=_KV_CACHE_BYTES, backend=backend
    )
    length, k = options.context_tokens, options.num_draft_tokens
    ids = [(7_919 * i + 1) % info.vocab_size for i in range(length)]
    engine.forward([SequenceStep(_NAME, tuple(ids), 0)])
    request = DraftRequest(
        _NAME,
        "",
        [*ids, ids[0]],
        length + 1,
        k,
        SamplingParams(),
        Rule.TOKEN,
        RoundNoise(7, Rule.TOKEN, length + 1),
    )

    def step(token_ids: Sequence[int], _: int) -> None:
        steps = [SequenceStep(_NAME, tuple(token_ids), len(token_ids))]
        engine.forward(steps)[0].argmax(dim=1).tolist()

    def draft(_: int) -> None:
        drafter = ModelDrafter(engine)
        drafter.extend([drafter.begin(request)])

    works = (partial(step, ids[:1]), partial(step, ids[:1] * (k + 1)), draft)
    times = medians_ms(works, REPETITIONS, partial(engine.keep, _NAME, length))
    return dict(zip(("decode_step_ms", "verify_step_ms", "draft_steps_ms"), times, strict=True))


if __name__ == "__main__":
    report = run(DeviceOptions(model=sys.argv[1]), lambda line: None)
    sys.stdout.write(to_json(report.values) + "\n")
