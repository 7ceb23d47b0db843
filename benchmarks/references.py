"""Sides of a measurement that are no services: the target once more, in a process of its own.

Plain decoding through the services is held against the engine alone and against the library's
`generate`, and speculative decoding against the library's own ways to it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.limits import DEADLINE_MS_MAX
from outrider.speculation.sampling_params import Rule, SamplingParams

from .measurement import BenchClient, Completion, Decoding, Side
from .processes import Process, Role
from .prompts import BenchPrompt

if TYPE_CHECKING:
    import torch

    from outrider.engine.interface import Engine, ModelInfo
    from outrider.tokenizer import TokenizerText

PROMPT_LOOKUP_TOKENS: Final = 10
"""Tokens that the library's prompt lookup copies at most; it has no default."""

Decode = Callable[[tuple[int, ...], Decoding], list[int]]
"""A prompt's completion, with the EOS if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """What a reference loads: the target of the deployment, once more."""

    directory: str
    """Where its files are."""
    dtype: str
    device: str
    num_threads: int
    """In every step, as nothing runs beside it; plain `generate` has torch's default."""
    trust_remote_code: bool = False
    drafter: str = ""
    """Files of the model that drafts, for the side `ASSISTED`, which is not there without."""
    drafter_name: str = ""
    drafter_dtype: str = ""


class ReferenceProcess(Process, BenchClient):
    """One reference. An async context manager: entering loads the model."""

    def __init__(self, side: Side, model: ReferenceModel, raw: bool, advice: str = "") -> None:
        """`side` is `ENGINE` or one of the library's; `raw` leaves the model's chat template out;
        `advice` follows the news that it has ended."""
        setup = {"side": side.value, "raw": raw, "model": asdict(model)}
        name = f"the {side.value} reference"
        super().__init__("benchmarks.references:reference", name, setup, advice=advice)

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        """Decodes one prompt; one at a time. Raises `Unavailable` where the process is gone
        and `ConfigError` where it refuses."""
        started_s = time.perf_counter()
        question = {"prompt": prompt.text, "decoding": asdict(decoding)}
        answer = await self.ask(question, DEADLINE_MS_MAX / 1000)
        token_ids = tuple(answer["token_ids"])
        # The process's own time: what the pipe between adds is not the reference's.
        return Completion(token_ids, started_s, float(answer["seconds"]), len(token_ids))


@asynccontextmanager
async def reference(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    """The process's own end. Its answer is `{"token_ids", "seconds"}`."""
    from outrider.tokenizer import TokenizerText

    model = ReferenceModel(**setup["model"])
    text = TokenizerText.load(Path(model.directory), trust_remote_code=model.trust_remote_code)
    decode, eos_token_ids = load_side(Side(setup["side"]), model)

    def answer(question: dict[str, Any]) -> dict[str, object]:
        started_s = time.perf_counter()
        ids = tuple(encoder(text, setup["raw"])(question["prompt"]))
        values = question["decoding"]
        token_ids = decode(ids, Decoding(**values | {"rule": Rule(values["rule"])}))
        return {"token_ids": token_ids, "seconds": time.perf_counter() - started_s}

    yield Role({"eos_token_ids": eos_token_ids}, answer)


def encoder(text: TokenizerText, raw: bool) -> Callable[[str], list[int]]:
    """Makes a prompt's token ids, under the chat template unless it is to go in as it is."""
    if raw:
        return text.encode
    return lambda prompt: text.encode_chat([{"role": "user", "content": prompt}])


def load_side(side: Side, model: ReferenceModel) -> tuple[Decode, Sequence[int]]:
    """How a side decodes, and what ends a completion. Raises `ConfigError`."""
    from outrider.models.loading import load_model

    if side is Side.ENGINE:
        from outrider.replica.process_setup import build_engine

        config = TargetConfig(
            model=model.directory, directory=model.directory,
            dtype=model.dtype,  # type: ignore[arg-type]  # Which the configuration checks.
            device=model.device, num_threads=model.num_threads,
            trust_remote_code=model.trust_remote_code,
        )  # fmt: skip
        engine = build_engine(config, "target", model.num_threads)
        return engine_decoder(engine), engine.info.eos_token_ids
    module, info = load_model(
        Path(model.directory), dtype=model.dtype, device=model.device,
        num_threads=None if side is Side.TRANSFORMERS else model.num_threads,
        trust_remote_code=model.trust_remote_code,
    )  # fmt: skip
    drafting: dict[str, object] = {}
    if side is Side.PROMPT_LOOKUP:
        drafting = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
    elif side is Side.ASSISTED:
        drafting = {"assistant_model": _load_assistant(model, info)}
    return library_decoder(module, info.eos_token_ids, **drafting), info.eos_token_ids


def engine_decoder(engine: Engine) -> Decode:
    """Plain decoding as a target replica does it, without the replica."""
    from .acceptance import Answer, decode

    def one(prompt_ids: tuple[int, ...], decoding: Decoding) -> list[int]:
        params = SamplingParams(temperature=decoding.temperature)
        asked = [Answer("", decoding.seed, prompt_ids, decoding.max_tokens)]
        eos = engine.info.eos_token_ids
        return [token_id for _, token_id, _ in decode(engine, asked, params, decoding.rule, eos)]

    return one


def library_decoder(module: Any, eos_token_ids: Sequence[int], **drafting: object) -> Decode:
    """The library's `generate`, which is told `drafting` besides: greedy at rule greedy, else
    sampled at the temperature and nothing else."""
    import torch

    eos = list(eos_token_ids)

    def decode(prompt_ids: tuple[int, ...], decoding: Decoding) -> list[int]:
        torch.manual_seed(decoding.seed)
        sampling: dict[str, Any] = {"do_sample": False}
        if decoding.rule is not Rule.GREEDY:
            sampling = {
                "do_sample": True, "temperature": decoding.temperature, "top_k": 0, "top_p": 1.0,
            }  # fmt: skip
        ids = torch.tensor([prompt_ids], device=module.device)
        with torch.inference_mode():
            output = module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=decoding.max_tokens,
                eos_token_id=eos or None,
                pad_token_id=eos[0] if eos else 0,
                **sampling,
                **drafting,
            )
        completion: list[int] = output[0, len(prompt_ids) :].tolist()
        return completion

    return decode


def _load_assistant(model: ReferenceModel, target: ModelInfo) -> Any:
    """The drafter, with logits over the target's vocabulary. Raises `ConfigError`."""
    from outrider.models.drafter_checkpoint import is_trained_drafter
    from outrider.models.loading import load_model
    from outrider.models.student import load_drafter

    path = Path(model.drafter)
    options: dict[str, Any] = {
        "name": model.drafter_name, "dtype": model.drafter_dtype, "device": model.device,
        "trust_remote_code": model.trust_remote_code,
    }  # fmt: skip
    if is_trained_drafter(path):
        module, info = load_drafter(path, Path(model.directory), target=target.name, **options)
    else:
        module, info = load_model(path, **options)
    token_ids = info.logit_token_ids or range(info.vocab_size)
    return widened(module, token_ids, target.vocab_size, model.drafter_name)


def widened(module: Any, token_ids: Sequence[int], vocab_size: int, name: str) -> Any:
    """The module, whose logits have a column for each of `token_ids`, with logits [.., vocab_size]:
    the library wants as many as the target has, and those without a row have minus infinity, which
    is a probability of exactly 0. Raises `ConfigError` for one with tokens beyond that, called
    `name`."""
    import torch

    if token_ids[-1] >= vocab_size:
        raise ConfigError(
            f"draft model {name} has logits for {token_ids[-1] + 1} tokens, the target for "
            f"{vocab_size}; the library takes no wider assistant than its target"
        )
    if len(token_ids) == vocab_size:
        return module
    columns = torch.tensor(token_ids, device=module.device)

    def widen(head: object, inputs: object, narrow: torch.Tensor) -> torch.Tensor:
        wide = narrow.new_full((*narrow.shape[:-1], vocab_size), -torch.inf)
        wide[..., columns] = narrow
        return wide

    module.get_output_embeddings().register_forward_hook(widen)
    module.config.get_text_config().vocab_size = vocab_size  # Which the library compares.
    return module
