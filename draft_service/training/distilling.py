"""From a target to a drafter's directory: corpus, the target's answers, training, card.

Everything on the way lies in `$OUTRIDER_CACHE/distillation/<target>/`, so that a run that is killed
goes on where it was, and a later one finds what an earlier one wrote:

folder              what it holds                   its key names
`measured-<key>`    the target's answers to         dtype, seed, prompts, lengths
                    prompts to measure with
`written-<key>`     what the target wrote           dtype, seed, prompts, template, lengths
`answers-<key>`     its answers about documents,    dtype, every token of these, in order, and
                    of either kind                  what is kept beside them
`<kind>-<key>`      checkpoint and measurements     the answers, which of them are held out, and
                                                    all that is asked for
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.cuda.backend import find_backend
from outrider.engine.paged_engine import PagedEngine
from outrider.errors import SettingError
from outrider.kv_cache.storage import memory_budget
from outrider.models.drafter_checkpoint import FORMAT, TrainedDescription, as_stored
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.module_replacement import speed_up

from .card import CardFacts, SourceFacts, render_card
from .dataset import Dataset, Learner, Start
from .documents import (
    DOCUMENT_TOKENS_MAX,
    HELD_OUT_EVERY,
    Document,
    corpus_files,
    fingerprint_of,
    read_corpus,
    shuffled,
    split_of,
)
from .measuring import (
    MEASURED_PROMPT_TOKENS_MAX,
    MEASURED_TEMPERATURES,
    MEASURED_TOKENS_MAX,
    Measured,
    measure,
)
from .options import DRAFT_VOCAB, DistillOptions
from .recipes import recipe_for
from .storage import (
    CARD_FILE,
    Stopwatch,
    alone_in,
    check_out,
    filled,
    folder_name,
)
from .student import use_dense_attention
from .teacher import (
    Target,
    TeacherCache,
    check_head,
    covered_share,
    likeliest_tokens,
)
from .training import Budget, Report, Trainer
from .writing import Wanted, WrittenCorpus

WRITING_SHARE: Final = 0.4
READING_SHARE: Final = 0.15
"""Parts of the time for the target: to write, and to answer about what was written or given. What
is left is for training, and never less than ..."""
TRAINING_SHARE: Final = 1 - WRITING_SHARE - READING_SHARE
"""... this part."""
TOKENS_A_SECOND: Final = {"cpu": 500, "cuda": 20_000}
"""Given texts of so many tokens for each second of the whole time are enough: writing is needless,
and half of its time is for reading them."""
_TOGETHER: Final = {"cpu": 96, "cuda": 512}
"""Conversations that are written side by side."""
_GPU_SHARE: Final = 0.6
_ANSWERING_PART: Final = 0.9
"""Of the work on prompts to measure with, the target's answers; the rest is to ask about these."""


@dataclass(frozen=True, slots=True)
class Distilled:
    """What came out."""

    out: Path
    measured: Measured
    """In held-out texts."""
    of_prompts: Measured | None
    """In answers to the prompts that it was to be measured with."""
    num_steps: int
    seconds: float
    """Of all stages, earlier parts of the same run included."""


def distill(options: DistillOptions, target: Target, cache: Path, report: Report) -> Distilled:
    """Makes the drafter. Raises `SettingError` for what cannot be had, before anything is run, and
    `ConfigError` while another run for this target goes on."""
    options = replace(options, out=check_out(options.out))
    files = [] if options.corpus is None else corpus_files(options.corpus)
    fingerprint = tensors_fingerprint(target.directory)
    place = cache / "distillation" / fingerprint[:16]
    with alone_in(place):
        return _Run(options, target, fingerprint, place, files, report).finish()


class _Run:
    """One call of `distill`. Given texts come before written ones where the time is short, and
    prompts to measure with have a corpus of their own."""

    def __init__(
        self,
        options: DistillOptions,
        target: Target,
        fingerprint: str,
        place: Path,
        files: list[Path],
        report: Report,
    ) -> None:
        self._options, self._target, self._report = options, target, report
        self._fingerprint, self._place = fingerprint, place
        module, self._info = target.load()
        check_head(module)
        use_dense_attention(module)
        self._vocab_size: int = module.get_input_embeddings().weight.shape[0]
        self._module = module
        self._dtype = str(module.dtype)
        self._device = "cpu" if module.device.type == "cpu" else "cuda"
        self._seconds = options.minutes * 60
        self._recipe = recipe_for(options, target, module)
        length_max = self._info.max_model_len
        self._tokens_max = tokens_max = min(DOCUMENT_TOKENS_MAX, length_max)
        texts = read_corpus(
            files, self._vocab_size, target.encode, tokens_max, target.template.num_bare
        )
        self._given = self._recipe.long_enough(shuffled(texts))
        _check_prompts("prompts", options.prompts, tokens_max - 1)
        longest = min(MEASURED_PROMPT_TOKENS_MAX, length_max - 1)
        _check_prompts("measure", options.measure, longest)
        _check_apart(options, self._given)
        writes = self._missing > 0 if options.tokens is None else options.tokens > 0
        _check_split(self._given, len(texts), writes)

    def finish(self) -> Distilled:
        """All stages. What is to be measured with comes first: it is the target's answers to
        prompts that may not fit its pages."""
        measuring = Stopwatch()
        asked = None
        if self._options.measure:
            asked, seconds = self._ask_to_measure()
            measuring = Stopwatch(seconds)
        corpus = self._write()
        caches = self._ask(corpus)
        answers = list(caches.values())
        before = corpus.spent.seconds + sum(cache.spent.seconds for cache in answers)
        start = self._start(answers)
        learner, token_ids = start.learner, start.token_ids
        dataset = self._dataset(answers, token_ids)
        trainer = self._train(dataset, answers, start, before)
        measured, of_prompts = self._measure(learner, dataset, asked, token_ids, measuring)
        spent = {
            "writing": corpus.spent.seconds,
            "the target's answers": before - corpus.spent.seconds,
            "training": trainer.spent.seconds,
            "measuring": measuring.seconds,
        }
        facts = CardFacts(
            target=self._target.name,
            target_fingerprint=self._fingerprint,
            start=start,
            kind=self._recipe.kind,
            covered=covered_share(answers, token_ids, self._vocab_size),
            sources={name: _facts(cache) for name, cache in caches.items()},
            has_texts=any(example.document.prompt is None for example in dataset.learned),
            seconds=spent,
            seed=self._options.seed,
            num_steps=trainer.num_steps,
            num_trained_tokens=trainer.num_tokens,
            measured=measured,
            of_prompts=of_prompts,
            num_prompts=len(self._options.measure),
            points=trainer.points,
        )
        self._save(learner, torch.from_numpy(token_ids), facts)
        return Distilled(
            self._options.out, measured, of_prompts, trainer.num_steps, sum(spent.values())
        )

    def _measure(
        self,
        learner: Learner,
        dataset: Dataset,
        asked: TeacherCache | None,
        token_ids: npt.NDArray[np.int64],
        watch: Stopwatch,
    ) -> tuple[Measured, Measured | None]:
        """What is accepted in held-out texts, and in answers to prompts; of weights as they are
        stored."""
        with torch.no_grad():
            for weight in learner.weights.values():
                weight.copy_(as_stored(weight.detach()))
        self._report("measuring", 0.0, None)
        with watch.working():
            measured = measure(learner, dataset, dataset.held_out)
            if asked is None:
                return measured, None
            prompts = self._dataset([asked], token_ids)
            return measured, measure(learner, prompts, prompts.held_out)

    @property
    def _missing(self) -> float:
        given = sum(document.num_learned for document in self._given)
        return max(0.0, 1 - given / (TOKENS_A_SECOND[self._device] * self._seconds))

    def _ask_to_measure(self) -> tuple[TeacherCache, float]:
        """The target's answers to prompts that are not learned from, with what it says of them; and
        the seconds that both took."""
        options = self._options
        prompts = [prompt for prompt in options.measure for _ in MEASURED_TEMPERATURES]
        longest = max(map(len, prompts)) + MEASURED_TOKENS_MAX
        eos, tokens_max = sorted(self._info.eos_token_ids), min(longest, self._info.max_model_len)
        name = folder_name("measured", self._dtype, options.seed, prompts, eos, tokens_max)
        corpus = WrittenCorpus(
            self._place / name,
            self._target.template,
            prompts,
            options.seed,
            tokens_max,
            MEASURED_TEMPERATURES,
            MEASURED_TOKENS_MAX,
        )

        def report(part: float) -> None:
            self._report("prompts", part, None)

        wanted = Wanted(None, float("inf"), prompts_alone=True)
        if not corpus.is_enough(wanted):
            engine = self._engine()
            if engine.info.max_model_len < tokens_max:
                raise SettingError(
                    "measure",
                    f"a prompt and its answer have up to {tokens_max} tokens; the memory for keys "
                    f"and values takes {engine.info.max_model_len}",
                )
            together = _TOGETHER[self._device]
            corpus.write(engine, together, wanted, lambda part: report(_ANSWERING_PART * part))
        answered = self._recipe.long_enough(corpus.documents())
        if not answered:
            raise SettingError("measure", "the target's answers to these are too short to measure")
        cache = self._cache([replace(document, is_held_out=True) for document in answered])
        rest = 1 - _ANSWERING_PART
        cache.fill(self._module, float("inf"), lambda part: report(_ANSWERING_PART + rest * part))
        return cache, corpus.spent.seconds + cache.spent.seconds

    def _write(self) -> WrittenCorpus:
        options = self._options
        template, eos = self._target.template, sorted(self._info.eos_token_ids)
        name = folder_name(
            "written", self._dtype, options.seed, options.prompts, template, eos, self._tokens_max
        )
        corpus = WrittenCorpus(
            self._place / name, template, options.prompts, options.seed, self._tokens_max
        )
        wanted = Wanted(options.tokens, WRITING_SHARE * self._missing * self._seconds)
        if not corpus.is_enough(wanted):
            together = _TOGETHER[self._device]
            corpus.write(
                self._engine(), together, wanted, lambda part: self._report("writing", part, None)
            )
        return corpus

    def _engine(self) -> PagedEngine:
        module, info = self._target.load()
        backend = find_backend(module.device, module.dtype)
        speed_up(module)
        return PagedEngine(
            module,
            info,
            max_num_seqs=_TOGETHER[self._device],
            kv_cache_memory_bytes=memory_budget(module.device, _GPU_SHARE, None),
            backend=backend,
        )

    def _ask(self, corpus: WrittenCorpus) -> dict[str, TeacherCache]:
        """What the target says of that and of what is given, by what wrote it. It may have begun
        with a prompt to measure with by itself: that is held out."""
        measured = set(self._options.measure)
        written = [
            replace(document, is_held_out=document.is_held_out or document.prompt in measured)
            for document in self._recipe.long_enough(corpus.documents(self._options.tokens))
        ]
        sources = {"the target, for this": written, "given by --corpus": self._given}
        # For both together. Told by steps alone, a run must not depend on the time.
        share = READING_SHARE + (1 - self._missing) * WRITING_SHARE / 2
        left = float("inf") if self._options.steps is not None else share * self._seconds
        tokens_left = sum(d.num_learned for documents in sources.values() for d in documents)
        found: dict[str, TeacherCache] = {}
        for name, documents in sources.items():
            if documents:
                known = self._cache(documents)
                tokens = sum(document.num_learned for document in documents)
                seconds = left * tokens / tokens_left
                known.fill(self._module, seconds, lambda part: self._report("reading", part, None))
                left, tokens_left = left - known.spent.seconds, tokens_left - tokens
                found[name] = known
        read = [document for cache in found.values() for document in cache.known]
        if len(read) < HELD_OUT_EVERY or len({document.is_held_out for document in read}) < 2:
            num_held_out = sum(document.is_held_out for document in read)
            raise SettingError(
                "tokens" if self._options.tokens is not None else "minutes",
                f"too few: {len(read)} texts were written or given, and read, {num_held_out} of "
                f"them held out; at least {HELD_OUT_EVERY} are needed, of which one is held out "
                "and one is not",
            )
        return found

    def _cache(self, documents: Sequence[Document]) -> TeacherCache:
        features = self._recipe.features
        more = [] if features is None else features.key
        folder = folder_name("answers", self._dtype, fingerprint_of(documents), *more)
        return TeacherCache(self._place / folder, documents, self._vocab_size, features)

    def _dataset(self, caches: Sequence[TeacherCache], token_ids: npt.NDArray[np.int64]) -> Dataset:
        return Dataset(caches, token_ids, self._vocab_size, self._module.device)

    def _start(self, caches: Sequence[TeacherCache]) -> Start:
        if self._recipe.drafter is not None:
            return self._recipe.drafter
        num_wanted = min(self._options.draft_vocab or DRAFT_VOCAB, self._vocab_size)
        return self._recipe.make(likeliest_tokens(caches, num_wanted, self._vocab_size))

    def _train(
        self, dataset: Dataset, caches: Sequence[TeacherCache], start: Start, before: float
    ) -> Trainer:
        options = self._options
        known = [(cache.name, cache.num_documents, split_of(cache.known)) for cache in caches]
        name = folder_name(
            self._recipe.kind, known, options.seed, start.key, options.minutes, options.steps
        )
        left = max(TRAINING_SHARE * self._seconds, self._seconds - before)
        trainer = Trainer(
            start.learner,
            dataset,
            self._place / name,
            options.seed,
            Budget(options.steps, left),
            start.is_trained,
        )
        trainer.run(lambda part, point: self._report("training", part, point))
        return trainer

    def _save(self, learner: Learner, token_ids: torch.Tensor, facts: CardFacts) -> None:
        description = TrainedDescription(
            format=FORMAT,
            kind=self._recipe.kind,
            target=self._target.name,
            target_fingerprint=self._fingerprint,
            vocab_size=self._vocab_size,
            draft_vocab_size=len(token_ids),
        )
        with filled(self._options.out) as directory:
            learner.save(directory, token_ids, description)
            (directory / CARD_FILE).write_text(render_card(facts), encoding="utf-8")


def _facts(cache: TeacherCache) -> SourceFacts:
    learned = [document.num_learned for document in cache.known if not document.is_held_out]
    return SourceFacts(len(learned), sum(learned), cache.num_documents - len(learned))


def _check_prompts(name: str, prompts: Sequence[Sequence[int]], length_max: int) -> None:
    """Raises `SettingError` for a prompt that is too long for the target to answer."""
    for number, prompt in enumerate(prompts, start=1):
        if not 0 < len(prompt) <= length_max:
            raise SettingError(
                name,
                f"number {number} has {len(prompt)} tokens; 1 to {length_max} are allowed",
            )


def _check_apart(options: DistillOptions, given: Sequence[Document]) -> None:
    """Raises `SettingError` for a prompt to measure with that is to be learned from."""
    numbers = {prompt: number for number, prompt in enumerate(options.prompts, start=1)}
    begun = {document.prompt for document in given}
    for number, prompt in enumerate(options.measure, start=1):
        where = None
        if prompt in numbers:
            where = f"number {numbers[prompt]} of --prompts"
        elif prompt in begun:
            where = "the prompt of a conversation in --corpus"
        if where is not None:
            raise SettingError(
                "measure",
                f"number {number} is also {where}; what is measured must not be learned from",
            )


def _check_split(given: Sequence[Document], num_texts: int, writes: bool) -> None:
    """Raises `SettingError` where what is given cannot do: for what is held out of it depends
    on nothing else."""
    held_out = {document.is_held_out for document in given}
    if held_out == {True}:
        what = "all of them held out"
    elif held_out == {False} and not writes:
        what = "none of them held out, and the target is to write nothing"
    else:
        return
    raise SettingError(
        "corpus",
        f"holds {num_texts} texts, {what}; it must hold more: about one in {HELD_OUT_EVERY} is "
        "held out, as its own words say",
    )
