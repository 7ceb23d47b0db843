"""The process behind `references.ReferenceProcess`.

Reads JSON lines: first which model to load and how, answered when it is loaded, then one request
after the other, until its input ends. An answer is `{"eos_token_ids"}`, `{"token_ids", "seconds"}`
or `{"error"}`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from outrider.config import TargetConfig
from outrider.engine.interface import Engine, ModelInfo, SequenceStep
from outrider.errors import OutriderError
from outrider.models.loading import load_model
from outrider.replica.process_setup import build_engine
from outrider.speculation.logits_processing import NO_HISTORY
from outrider.speculation.proposal import EMPTY_PROPOSAL
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.speculation.verification import verdict_from_logits
from outrider.tokenizer import TokenizerText

from .answering import LINE_BYTES_MAX, AnswerWriter
from .assistants import load_assistant
from .measurement import Side
from .references import PROMPT_LOOKUP_TOKENS

_SEQUENCE: Final = "bench"


class _Decoder(Protocol):
    """Decodes one prompt at a time."""

    def decode(self, prompt_ids: tuple[int, ...], request: dict[str, Any]) -> list[int]:
        """The completion's token ids, with the EOS if there is one."""
        ...


class EngineDecoder:
    """Plain decoding as a target replica does it, without the replica."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._eos = frozenset(engine.info.eos_token_ids)

    def decode(self, prompt_ids: tuple[int, ...], request: dict[str, Any]) -> list[int]:
        """Draws token after token from the transformed distribution, as with K = 0."""
        params = SamplingParams(temperature=request["temperature"])
        rule, seed = Rule(request["rule"]), request["seed"]
        completion: list[int] = []
        step = SequenceStep(_SEQUENCE, prompt_ids, num_logits=1)
        try:
            while True:
                [logits] = self._engine.forward([step])
                noise = RoundNoise(seed, rule, len(prompt_ids) + len(completion))
                verdict = verdict_from_logits(logits, params, NO_HISTORY, EMPTY_PROPOSAL, noise)
                token_id = verdict.correction[0]
                completion.append(token_id)
                if token_id in self._eos or len(completion) == request["max_tokens"]:
                    return completion
                step = SequenceStep(_SEQUENCE, (token_id,), num_logits=1)
        finally:
            self._engine.release(_SEQUENCE)


class LibraryDecoder:
    """The library's `generate`."""

    def __init__(self, module: Any, eos_token_ids: tuple[int, ...], **drafting: object) -> None:
        """`drafting` is what `generate` is told besides."""
        self._module = module
        self._eos = list(eos_token_ids)
        self._drafting = drafting

    def decode(self, prompt_ids: tuple[int, ...], request: dict[str, Any]) -> list[int]:
        """Greedy at rule greedy, else sampled at the temperature and nothing else."""
        torch.manual_seed(request["seed"])
        sampling: dict[str, Any] = {"do_sample": False}
        if request["rule"] != Rule.GREEDY:
            temperature = request["temperature"]
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        ids = torch.tensor([prompt_ids], device=self._module.device)
        with torch.inference_mode():
            output = self._module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request["max_tokens"],
                eos_token_id=self._eos or None,
                pad_token_id=self._eos[0] if self._eos else 0,
                **sampling,
                **self._drafting,
            )
        completion: list[int] = output[0, len(prompt_ids) :].tolist()
        return completion


@dataclass(frozen=True, slots=True)
class _Reference:
    """What a process is once it has been set up."""

    text: TokenizerText
    decoder: _Decoder
    raw: bool
    eos_token_ids: tuple[int, ...]


def main() -> None:
    """Answers lines until the input ends."""
    answers = AnswerWriter()
    requests = sys.stdin.buffer
    setup = requests.readline(LINE_BYTES_MAX)
    if not setup:
        return  # whoever started this ended first
    try:
        reference = _load(json.loads(setup))
    except OutriderError as error:
        answers.write({"error": error.message})
        return
    answers.write({"eos_token_ids": reference.eos_token_ids})
    while line := requests.readline(LINE_BYTES_MAX):
        answers.write(_decode(reference, json.loads(line)))


def _load(setup: dict[str, Any]) -> _Reference:
    side = Side(setup["side"])
    path = Path(setup["directory"])
    text = TokenizerText.load(path, trust_remote_code=setup["trust_remote_code"])
    if side is Side.ENGINE:
        engine = _engine(setup)
        return _Reference(text, EngineDecoder(engine), setup["raw"], engine.info.eos_token_ids)
    module, info = load_model(
        path,
        dtype=setup["dtype"],
        device=setup["device"],
        num_threads=None if side is Side.TRANSFORMERS else setup["num_threads"],
        trust_remote_code=setup["trust_remote_code"],
    )
    eos = info.eos_token_ids
    return _Reference(
        text, LibraryDecoder(module, eos, **_drafting(side, setup, info)), setup["raw"], eos
    )


def _drafting(side: Side, setup: dict[str, Any], target: ModelInfo) -> dict[str, object]:
    """What `generate` is told of drafts."""
    if side is Side.PROMPT_LOOKUP:
        return {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
    if side is Side.ASSISTED:
        return {"assistant_model": load_assistant(setup, target)}
    return {}


def _engine(setup: dict[str, Any]) -> Engine:
    """The engine as a replica builds it."""
    config = TargetConfig(
        model=setup["directory"],
        directory=setup["directory"],
        dtype=setup["dtype"],
        device=setup["device"],
        trust_remote_code=setup["trust_remote_code"],
        num_threads=setup["num_threads"],
    )
    return build_engine(config, "target", config.num_threads)


def _decode(reference: _Reference, request: dict[str, Any]) -> dict[str, object]:
    started_s = time.perf_counter()
    text, prompt = reference.text, request["prompt"]
    try:
        if reference.raw:
            ids = text.encode(prompt)
        else:
            ids = text.encode_chat([{"role": "user", "content": prompt}])
        token_ids = reference.decoder.decode(tuple(ids), request)
    except OutriderError as error:
        return {"error": error.message}
    return {"token_ids": token_ids, "seconds": time.perf_counter() - started_s}


if __name__ == "__main__":
    main()
