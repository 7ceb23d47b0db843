"""`outrider bench peers`: speculative decoding through the services beside other systems, with the
same target and, where they take one, the same drafter, on the same prompts and threads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from outrider.drafting.registry import parse_drafter
from outrider.errors import SettingError

from .decoding_options import DecodingOptions, add_decoding_arguments, decoding_values
from .llama_cpp_side import (
    LLAMA_CPP_LOOKUP_TOKENS,
    LlamaCppModel,
    LlamaCppProcess,
    llama_cpp_version,
)
from .measurement import BenchClient, Contestant, Progress, Side, measure
from .peers_report import PeersReport, PeersSetup, summarise
from .prompts import WARM_UP_PROMPTS, BenchPrompt
from .references import PROMPT_LOOKUP_TOKENS, ReferenceModel, ReferenceProcess
from .speedup import Subject

LLAMA_CPP_SIDES: Final = (Side.LLAMA_CPP, Side.LLAMA_CPP_LOOKUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOptions(DecodingOptions):
    """What `bench peers` is asked for. Wrong values raise `SettingError`."""

    llama_cpp_python: Path | None = None
    """The interpreter of an environment with `llama_cpp`; None = llama.cpp is left out."""

    def __post_init__(self) -> None:
        DecodingOptions.__post_init__(self)
        python = self.llama_cpp_python
        if python is not None and not (python.is_file() and os.access(python, os.X_OK)):
            raise SettingError(
                "llama_cpp_python", f"{python} is wrong; it must be a Python interpreter's path"
            )

    @classmethod
    def from_arguments(
        cls, arguments: argparse.Namespace, *, num_draft_tokens: int | None = None
    ) -> PeersOptions:
        """From what a parser with `add_arguments` returned, and the bound K."""
        return cls(
            **decoding_values(arguments),
            num_draft_tokens=num_draft_tokens,
            llama_cpp_python=arguments.llama_cpp_python,
        )

    def check_llama_cpp(self) -> None:
        """Raises `SettingError` where the interpreter that was given cannot import `llama_cpp`."""
        if self.llama_cpp_python is not None:
            llama_cpp_version(self.llama_cpp_python)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench peers`, but for those that describe a deployment."""
    add_decoding_arguments(parser)
    parser.add_argument(
        "--llama-cpp-python", type=Path, metavar="PYTHON",
        help="measure llama.cpp, too, by this interpreter of an environment of its own, made by "
        "python3 -m venv DIR && DIR/bin/pip install llama-cpp-python (it builds llama.cpp, which "
        "takes a C++ compiler and some minutes): DIR/bin/python",
    )  # fmt: skip


async def run(options: PeersOptions, subject: Subject, progress: Progress) -> PeersReport:
    """Measures `subject` and its peers. Raises `SettingError` for options that are wrong, and what
    a side refuses a request with."""
    prompts = options.load_prompts()
    drafted = options.drafted(subject.num_draft_tokens)
    if subject.reference is None:
        raise SettingError("server", "the target's files are not known here; its peers need them")
    for warning in subject.replay_warnings(prompts):
        progress(warning)
    async with AsyncExitStack() as stack:
        peers = _Peers(options, subject, subject.reference, stack, progress)
        eos_token_ids = await peers.start_library()
        await peers.start_llama_cpp(prompts, eos_token_ids)
        plain = replace(drafted, num_draft_tokens=0)
        contestants = [
            Contestant(Side.SPECULATIVE, subject.client, drafted, 1),
            *(Contestant(side, client, plain, 1) for side, client in peers.clients.items()),
        ]
        results = await measure(prompts, contestants, progress)
    setup = PeersSetup(
        model=subject.model,
        draft_model=subject.draft_model,
        dtype=subject.dtype,
        num_draft_tokens=drafted.num_draft_tokens,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        rule=drafted.rule.value,
        threads=subject.reference.num_threads,
    )
    return summarise(setup, prompts, results, peers.notes)


def assisted_note(draft_model: str) -> str:
    """What the library has of a drafter, and how it is set up."""
    choice = parse_drafter(draft_model)
    given = f"the drafter {draft_model}"
    if choice.lookup is not None and choice.model is not None:
        given = f"of {draft_model} the model {choice.model.name} alone, without the look-up,"
    return (
        f"{given} as assistant_model, its logits widened to the target's vocabulary; the library's "
        "own number of assistant tokens, schedule and confidence threshold"
    )


class _Peers:
    """Starts the sides beside the services; they end with the stack."""

    def __init__(
        self,
        options: PeersOptions,
        subject: Subject,
        model: ReferenceModel,
        stack: AsyncExitStack,
        progress: Progress,
    ) -> None:
        self._options = options
        self._subject = subject
        self._model = model
        self._stack = stack
        self._progress = progress
        self.clients: dict[Side, BenchClient] = {}
        self.notes: dict[Side, str] = {}
        """Of every peer: how it is set up, or why it is not there."""

    async def start_library(self) -> tuple[int, ...]:
        """Starts the library's two, of which the look-up is always there; what ends a text."""
        missing = self._no_assistant()
        if missing is None:
            self.notes[Side.ASSISTED] = assisted_note(self._subject.draft_model)
            await self._start(self._library(Side.ASSISTED), Side.ASSISTED)
        else:
            self.notes[Side.ASSISTED] = f"not measured: {missing}"
        self.notes[Side.PROMPT_LOOKUP] = f"prompt_lookup_num_tokens={PROMPT_LOOKUP_TOKENS}"
        lookup = self._library(Side.PROMPT_LOOKUP)
        await self._start(lookup, Side.PROMPT_LOOKUP)
        return lookup.eos_token_ids

    async def start_llama_cpp(
        self, prompts: Sequence[BenchPrompt], eos_token_ids: tuple[int, ...]
    ) -> None:
        """Starts llama.cpp's two, or says in their notes why not."""
        files = self._llama_cpp_files()
        if isinstance(files, str):
            self.notes |= dict.fromkeys(LLAMA_CPP_SIDES, f"not measured: {files}")
            return
        from outrider.engine.sources import cache_dir

        from .bfloat16_gguf import bfloat16_gguf

        python, gguf = files
        built = f"llama-cpp-python {llama_cpp_version(python)}, weights in bfloat16"
        lookup = f"LlamaPromptLookupDecoding(num_pred_tokens={LLAMA_CPP_LOOKUP_TOKENS})"
        self.notes |= {Side.LLAMA_CPP: built, Side.LLAMA_CPP_LOOKUP: f"{built}, {lookup}"}
        self._progress("the target's weights for llama.cpp")
        encode = self._encoder()
        longest = max(len(encode(prompt)) for prompt in (*prompts, *WARM_UP_PROMPTS))
        model = LlamaCppModel(
            python=python,
            gguf=bfloat16_gguf(gguf, cache_dir()),
            num_threads=self._model.num_threads,
            context_tokens=longest + self._options.max_tokens + LLAMA_CPP_LOOKUP_TOKENS,
            eos_token_ids=eos_token_ids,
        )
        for side in LLAMA_CPP_SIDES:
            await self._start(LlamaCppProcess(side, model, encode), side)

    async def _start(self, process: ReferenceProcess | LlamaCppProcess, side: Side) -> None:
        self._progress(f"loading the model once more: {side.value}")
        await self._stack.enter_async_context(process)
        self.clients[side] = process

    def _library(self, side: Side) -> ReferenceProcess:
        return ReferenceProcess(side, self._model, raw=self._options.raw)

    def _no_assistant(self) -> str | None:
        """Why the library has no assistant; None where it has one."""
        if self._model.drafter is not None:
            return None
        name = self._subject.draft_model
        if parse_drafter(name).model is None:
            return f"the drafter {name} is no model"
        return f"the library has nothing like the drafter {name}"

    def _llama_cpp_files(self) -> tuple[Path, Path] | str:
        """The interpreter, and the target's GGUF file; else why llama.cpp is left out."""
        from outrider.engine.loading import resolve_device
        from outrider.engine.sources import gguf_file

        python, target = self._options.llama_cpp_python, self._subject.model
        if python is None:
            return "--llama-cpp-python is not given"
        if resolve_device(self._model.device).type != "cpu":
            return "it runs on the CPU, and the target does not"
        gguf = gguf_file(target)
        return (
            f"the target {target} does not come from a GGUF file"
            if gguf is None
            else (python, gguf)
        )

    def _encoder(self) -> Callable[[BenchPrompt], list[int]]:
        """The tokens of a prompt, as the other sides make them."""
        from outrider.text import TokenizerText

        text = TokenizerText.load(
            Path(self._model.directory), trust_remote_code=self._model.trust_remote_code
        )
        if self._options.raw:
            return lambda prompt: text.encode(prompt.text)
        return lambda prompt: text.encode_chat([{"role": "user", "content": prompt.text}])
