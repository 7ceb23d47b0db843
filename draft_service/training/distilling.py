"""Makes a drafter for a target, from the corpus to the model card.

Each stage keeps its results in a folder of `$OUTRIDER_CACHE/distillation/<target>/`, so that a
killed run can be resumed and later runs reuse the results. A folder's name has a hash of everything
that its content depends on.

measured-<hash>     the answers that the target wrote to the prompts of `--measure`
written-<hash>      the texts that the target wrote for training
answers-<hash>      the target's distributions for the tokens of these texts and of the corpus
<kind>-<hash>       the checkpoint of a drafter"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.errors import SettingError
from outrider.foundation.settings import blaming
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.loading import load_model
from outrider.models.sources import resolve_model
from outrider.replica.engines import build_engine, load_options

from .documents import DOCUMENT_TOKENS_MAX, HELD_OUT_EVERY, Document, read_corpus, shuffled
from .learners import LEARNERS, use_plain_attention
from .measuring import MeasuredAcceptance, measure, render_card
from .options import DRAFT_VOCAB, DistillOptions
from .storage import exclusive_use, filled, folder_name
from .teacher import Dataset, Target, TeacherCache, check_head
from .training import Report, Trainer
from .writing import WrittenCorpus

WRITING_SHARE = 0.4  # share of the time in which the target writes texts
READING_SHARE = 0.15
"""Share of the time in which the target computes its distributions for the texts' tokens. With
`--tokens`, half of `WRITING_SHARE` is added."""
TRAINING_SHARE = 1 - WRITING_SHARE - READING_SHARE  # least share; training gets all the time left
MEASURED_TEMPERATURES = (0.0, 1.0)
"""The target answers each prompt of `--measure` once at each of these temperatures."""
MEASURED_TOKENS_MAX = 128  # tokens of an answer to a `--measure` prompt, as in `bench acceptance`
MEASURED_PROMPT_TOKENS_MAX = 4096
"""Limit in tokens for a `--measure` prompt. One pass reads prompt and answer, T tokens together. In
this pass, attention holds up to three tensors [heads, T, T]. With the longest prompt and 9 heads in
half precision, each tensor takes 0.3 GB."""
_TOGETHER = {"cpu": 96, "cuda": 512}  # number of conversations that are written side by side
_GPU_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class DistillResult:
    out: Path
    measured: Sequence[MeasuredAcceptance]
    """The acceptance in held-out texts, and in the answers to the prompts of `--measure`."""
    num_steps: int  # training steps, including those before an interruption
    seconds: float  # duration of this call, not of earlier calls whose files it used


def distill(options: DistillOptions, target: Target, cache: Path, report: Report) -> DistillResult:
    """Makes the drafter. Raises `SettingError` for invalid options, and `ConfigError` if another
    run for this target is in progress."""
    fingerprint = tensors_fingerprint(target.directory)
    place = cache / "distillation" / fingerprint[:16]
    with exclusive_use(place):
        return _Run(options, target, place, report).finish(fingerprint)


class _Run:
    def __init__(
        self, options: DistillOptions, target: Target, place: Path, report: Report
    ) -> None:
        self._options, self._target, self._report, self._place = options, target, report, place
        self._begin = time.monotonic()
        module: Any
        module, info = load_model(target.directory, **load_options(target.config))
        self._module, self._info = module, info
        check_head(module)
        use_plain_attention(module)
        self._learner = LEARNERS[options.kind](options, module)
        self._start = ""  # fingerprint of the drafter that is trained further; "" = none
        if options.start_from is not None:
            with blaming("start_from"):
                trust = target.config.trust_remote_code
                start = resolve_model(options.start_from, trust_remote_code=trust)
                self._start = tensors_fingerprint(start)
                self._learner.load(start, target)
        self._vocab_size = len(module.get_input_embeddings().weight)
        self._tokens_max = min(DOCUMENT_TOKENS_MAX, info.max_model_len)
        self._given = _long_enough(read_corpus(options.corpus, target.encode, self._tokens_max))
        _check_prompts(options, info.max_model_len - 1)

    def finish(self, fingerprint: str) -> DistillResult:
        """Runs all stages. Answers the prompts of `--measure` first, so that the run fails early if
        a prompt does not fit into the target's pages."""
        options, learner, seconds = self._options, self._learner, self._options.minutes * 60
        prompts = self._ask_to_measure() if options.measure else None
        tokens = options.tokens
        corpus = self._written(
            "writing",
            "written",
            options.prompts,
            self._tokens_max,
            tokens=tokens,
            seconds=None if tokens is not None else WRITING_SHARE * seconds,
        )
        # With `--steps`, the target reads all texts, because the drafter must not depend on time.
        share = READING_SHARE + (0 if tokens is None else WRITING_SHARE / 2)
        cache = self._ask(corpus, math.inf if options.steps is not None else share * seconds)
        if not self._start:
            num_tokens = min(options.draft_vocab or DRAFT_VOCAB, self._vocab_size)
            learner.make(cache.likeliest_tokens(num_tokens))
        dataset = Dataset(cache, learner.token_ids)
        datasets = {"held-out texts": dataset}
        if prompts is not None:
            datasets["answers to --measure"] = Dataset(prompts, learner.token_ids)
        left = seconds - corpus.spent.seconds - cache.spent.seconds
        trainer = self._train(dataset, max(TRAINING_SHARE * seconds, left))
        spent = [stage.spent.seconds for stage in (corpus, cache, trainer)]
        self._report("measuring", 0.0, "")
        with filled(options.out) as directory:
            learner.save(directory, self._target, fingerprint)
            learner.load(directory, self._target)  # The measured drafter must be the saved one.
            measured = {name: measure(learner, data) for name, data in datasets.items()}
            name = self._target.name
            card = render_card(options, name, fingerprint, trainer, dataset, spent, measured)
            (directory / "README.md").write_text(card, encoding="utf-8")
        num_steps = trainer.progress.num_steps
        seconds = time.monotonic() - self._begin
        return DistillResult(options.out, [*measured.values()], num_steps, seconds)

    def _ask_to_measure(self) -> TeacherCache:
        options, info = self._options, self._info
        prompts = [prompt for prompt in options.measure for _ in MEASURED_TEMPERATURES]
        tokens_max = min(max(map(len, prompts)) + MEASURED_TOKENS_MAX, info.max_model_len)
        corpus = self._written(
            "prompts",
            "measured",
            prompts,
            tokens_max,
            temperatures=MEASURED_TEMPERATURES,
            answer_tokens_max=MEASURED_TOKENS_MAX,
        )
        answered = _long_enough(corpus.documents())
        if not answered:
            raise SettingError("measure", "the target's answers are too short to measure")
        documents = [replace(document, is_held_out=True) for document in answered]
        cache = TeacherCache(self._place, documents, self._module, self._learner.taps)
        cache.fill(math.inf, lambda part: self._report("reading prompts", part, ""))
        return cache

    def _written(
        self,
        stage: str,
        kind: str,
        prompts: Sequence[Sequence[int]],
        tokens_max: int,
        **options: Any,
    ) -> WrittenCorpus:
        seed, template = self._options.seed, self._target.template
        folder = folder_name(
            kind,
            str(self._module.dtype),
            sorted(self._info.eos_token_ids),
            seed,
            template,
            prompts,
            tokens_max,
            options.get("seconds") is None,
        )
        corpus = WrittenCorpus(self._place / folder, template, prompts, seed, tokens_max, **options)
        if corpus.part < 1.0:
            together, num_threads = _TOGETHER[self._module.device.type], torch.get_num_threads()
            config = replace(
                self._target.config,
                max_num_seqs=together,
                num_threads=num_threads,
                gpu_memory_utilization=_GPU_SHARE,
                engine="transformers",
            )
            engine = build_engine(config, num_threads)
            if kind == "measured" and engine.info.max_model_len < tokens_max:
                raise SettingError(
                    "measure",
                    f"a prompt and its answer have up to {tokens_max} tokens; the memory for keys "
                    f"and values has room for {engine.info.max_model_len}",
                )
            corpus.write(engine, together, partial(self._report, stage))
        return corpus

    def _ask(self, corpus: WrittenCorpus, seconds: float) -> TeacherCache:
        """Computes the target's distributions for the written texts and the texts of `--corpus`.
        Holds out conversations whose prompt is also a prompt of `--measure`."""
        measured = set(self._options.measure)
        written = [
            replace(document, is_held_out=document.is_held_out or document.prompt in measured)
            for document in _long_enough(corpus.documents())
        ]
        documents = shuffled([*written, *self._given])
        self._check_enough(documents)
        cache = TeacherCache(self._place, documents, self._module, self._learner.taps)
        cache.fill(seconds, lambda part: self._report("reading", part, ""))
        self._check_enough(cache.known)  # The time may be over before all documents are read.
        return cache

    def _check_enough(self, documents: Sequence[Document]) -> None:
        num, num_held_out = len(documents), sum(document.is_held_out for document in documents)
        if num < HELD_OUT_EVERY:
            wrong = f"only {num} texts were written or given; at least {HELD_OUT_EVERY} are needed"
        elif num_held_out == num:
            wrong = f"all {num} texts would be held out to measure the drafter"
        else:
            return
        key = "tokens" if self._options.tokens is not None else "minutes"
        raise SettingError(key, f"{wrong}; raise --{key}, or add texts to --corpus")

    def _train(self, dataset: Dataset, seconds: float) -> Trainer:
        options, learner = self._options, self._learner
        folder = folder_name(
            options.kind,
            dataset.cache.name,
            len(dataset.cache.known),
            dataset.held_out,
            options.seed,
            self._start,
            options.layers,
            len(learner.token_ids),
            options.minutes,
            options.steps,
        )
        trainer = Trainer(learner, dataset, self._place / folder, options, seconds)
        trainer.run(lambda part, loss: self._report("training", part, f"loss {loss:.3f}"))
        return trainer


def _long_enough(documents: Sequence[Document]) -> list[Document]:
    """Drops documents with only one learned token. If this is the second token of a text, EAGLE-3
    heads cannot draft it."""
    return [document for document in documents if document.num_learned >= 2]


def _check_prompts(options: DistillOptions, longest: int) -> None:
    for number, prompt in enumerate(options.measure, start=1):
        if prompt in options.prompts:
            raise SettingError(
                "measure",
                f"prompt {number} is also prompt {options.prompts.index(prompt) + 1} of --prompts; "
                "a drafter must not be trained with prompts that measure it",
            )
    most = {
        "prompts": min(DOCUMENT_TOKENS_MAX - 1, longest),
        "measure": min(MEASURED_PROMPT_TOKENS_MAX, longest),
    }
    for name, length_max in most.items():
        for number, prompt in enumerate(getattr(options, name), start=1):
            if not 0 < len(prompt) <= length_max:
                raise SettingError(
                    name, f"prompt {number} has {len(prompt)} tokens; 1 to {length_max} are allowed"
                )
