"""From a target to a drafter's directory: corpus, the target's answers, training, card.

Everything on the way lies in `$OUTRIDER_CACHE/distillation/<target>/`, so that a run that is killed
goes on where it was, and a later one finds what an earlier one wrote:

folder              what it holds                   its key names
`measured-<key>`    the target's answers to         dtype, seed, prompts, lengths
                    prompts to measure with
`written-<key>`     what the target wrote           dtype, seed, prompts, template, lengths
`answers-<key>`     its answers about documents,    dtype, and every token of these, in order
                    of either kind
`student-<key>`     checkpoint and measurements     the answers, which of them are held out, and
                                                    all that is asked for
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from outrider.distillation.card import (
    CARD_FILE,
    PLOT_FILE,
    CardFacts,
    SourceFacts,
    render_card,
    render_plot,
)
from outrider.distillation.copying import copying_layers
from outrider.distillation.dense_attention import use_dense_attention
from outrider.distillation.documents import (
    DOCUMENT_TOKENS_MAX,
    HELD_OUT_EVERY,
    Document,
    Encode,
    corpus_files,
    fingerprint_of,
    read_corpus,
    shuffled,
    split_of,
)
from outrider.distillation.learning import Lessons
from outrider.distillation.measuring import (
    MEASURED_PROMPT_TOKENS_MAX,
    MEASURED_TEMPERATURES,
    MEASURED_TOKENS_MAX,
    Measured,
    measure,
)
from outrider.distillation.options import DRAFT_VOCAB, LAYERS, DistillOptions
from outrider.distillation.output import check_out, filled
from outrider.distillation.storage import Stopwatch, alone_in, folder_name
from outrider.distillation.student import (
    Start,
    covered_share,
    kept_layers,
    likeliest_tokens,
    load_student,
    make_student,
)
from outrider.distillation.teacher import TeacherCache, check_head
from outrider.distillation.training import Budget, Point, Trainer
from outrider.distillation.writing import Template, Wanted, WrittenCorpus
from outrider.engine.cuda.acceleration import find_acceleration
from outrider.engine.drafter_files import FORMAT, TrainedDescription, TrainedKind, as_stored
from outrider.engine.fingerprints import tensors_fingerprint
from outrider.engine.interface import ModelInfo
from outrider.engine.kv_cache import memory_budget
from outrider.engine.loading import load_model
from outrider.engine.modules.swaps import speed_up
from outrider.engine.paged_engine import PagedEngine
from outrider.engine.trained_drafters import save_drafter
from outrider.errors import SettingError

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
Report = Callable[[str, float, Point | None], None]
"""Hears which stage goes on, what part of it is done, and what was measured last."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a drafter is made for."""

    name: str
    directory: Path
    template: Template
    encode: Encode | None
    """None for a target without a tokenizer."""
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def load(self) -> tuple[Any, ModelInfo]:
        """A module of its own for each stage. Raises `ConfigError`."""
        return load_model(
            self.directory, name=self.name, dtype=self.dtype, device=self.device,
            trust_remote_code=self.trust_remote_code,
        )  # fmt: skip


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
    """One call of `distill`; each stage leaves what the next one needs."""

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
        module, info = target.load()
        check_head(module)
        use_dense_attention(module)
        self._vocab_size = module.get_input_embeddings().weight.shape[0]
        self._module, self._info = module, info
        if options.start_from is not None:
            self._drafter: Start | None = load_student(
                options.start_from,
                target.directory,
                name=options.start_name or str(options.start_from),
                target_name=target.name,
                dtype=target.dtype,
                device=target.device,
                trust_remote_code=target.trust_remote_code,
            )
        else:
            self._drafter = None
            num_layers = module.config.get_text_config().num_hidden_layers
            self._layers = kept_layers(options.layers or LAYERS, num_layers, copying_layers(module))
        self._dtype = str(module.dtype)
        self._seconds = options.minutes * 60
        self._tokens_max = min(DOCUMENT_TOKENS_MAX, info.max_model_len)
        given = read_corpus(
            files, self._vocab_size, target.encode, self._tokens_max, target.template.num_bare
        )
        self._given = shuffled(given)
        _check_prompts("prompts", options.prompts, self._tokens_max - 1)
        longest = min(MEASURED_PROMPT_TOKENS_MAX, info.max_model_len - 1)
        _check_prompts("measure", options.measure, longest)
        _check_apart(options, self._given)
        self._check_split(len(given))

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
        before = corpus.spent.seconds + sum(cache.spent.seconds for cache in caches.values())
        start = self._start(list(caches.values()))
        token_ids = start.token_ids
        lessons = Lessons(list(caches.values()), token_ids, self._vocab_size, self._module.device)
        known = [
            (cache.name, cache.num_documents, split_of(cache.known)) for cache in caches.values()
        ]
        trainer = self._train(lessons, known, start, before)
        with torch.no_grad():
            for weight in trainer.weights.values():
                weight.copy_(as_stored(weight.detach()))
        self._report("measuring", 0.0, None)
        of_prompts = None
        with measuring.working():
            measured = measure(trainer.student, lessons, lessons.held_out)
            if asked is not None:
                answers = Lessons([asked], token_ids, self._vocab_size, self._module.device)
                of_prompts = measure(trainer.student, answers, answers.held_out)
        spent = {
            "writing": corpus.spent.seconds,
            "the target's answers": before - corpus.spent.seconds,
            "training": trainer.spent.seconds,
            "measuring": measuring.seconds,
        }
        facts = CardFacts(
            target=self._target.name,
            target_fingerprint=self._fingerprint,
            start=start.name,
            is_trained=start.is_trained,
            num_layers=trainer.student.config.get_text_config().num_hidden_layers,
            num_parameters=sum(weight.numel() for weight in trainer.weights.values()),
            draft_vocab_size=len(token_ids),
            covered=covered_share(list(caches.values()), token_ids, self._vocab_size),
            sources={name: _facts(cache) for name, cache in caches.items()},
            has_texts=any(place.document.prompt is None for place in lessons.learned),
            seconds=spent,
            seed=self._options.seed,
            num_steps=trainer.num_steps,
            num_trained_tokens=trainer.num_tokens,
            measured=measured,
            of_prompts=of_prompts,
            num_prompts=len(self._options.measure),
            points=trainer.points,
        )
        self._save(trainer.student, torch.from_numpy(token_ids), facts)
        return Distilled(
            self._options.out, measured, of_prompts, trainer.num_steps, sum(spent.values())
        )

    def _start(self, caches: Sequence[TeacherCache]) -> Start:
        """What learns: the drafter that was named, else a few of the target's layers."""
        if self._drafter is not None:
            return self._drafter
        num_wanted = min(self._options.draft_vocab or DRAFT_VOCAB, self._vocab_size)
        token_ids = likeliest_tokens(caches, num_wanted, self._vocab_size)
        return make_student(self._module, self._layers, token_ids)

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
            engine = self._engine()
            together = _TOGETHER["cpu" if self._is_cpu else "cuda"]
            corpus.write(engine, together, wanted, lambda part: self._report("writing", part, None))
        return corpus

    @property
    def _missing(self) -> float:
        """Part of what should be learned from that is not given."""
        given = sum(document.num_learned for document in self._given)
        enough = TOKENS_A_SECOND["cpu" if self._is_cpu else "cuda"] * self._seconds
        return max(0.0, 1 - given / enough)

    def _check_split(self, num_texts: int) -> None:
        """Raises `SettingError` where what is given cannot do: for what is held out of it depends
        on nothing else."""
        held_out = {document.is_held_out for document in self._given}
        tokens = self._options.tokens
        writes = self._missing > 0 if tokens is None else tokens > 0
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

    @property
    def _reading_seconds(self) -> float:
        """For all sources together. Told by steps alone, a run must not depend on the time."""
        share = READING_SHARE + (1 - self._missing) * WRITING_SHARE / 2
        return float("inf") if self._options.steps is not None else share * self._seconds

    @property
    def _is_cpu(self) -> bool:
        return bool(self._module.device.type == "cpu")

    def _engine(self) -> PagedEngine:
        module, info = self._target.load()
        acceleration = find_acceleration(module.device, module.dtype)
        speed_up(module)
        num_bytes = memory_budget(module.device, _GPU_SHARE, None)
        together = _TOGETHER["cpu" if self._is_cpu else "cuda"]
        return PagedEngine(
            module,
            info,
            max_num_seqs=together,
            kv_cache_memory_bytes=num_bytes,
            acceleration=acceleration,
        )

    def _ask(self, corpus: WrittenCorpus) -> dict[str, TeacherCache]:
        sources = {
            "the target, for this": self._apart(corpus.documents(self._options.tokens)),
            "given by --corpus": self._given,
        }
        left = self._reading_seconds
        tokens_left = sum(d.num_learned for documents in sources.values() for d in documents)
        found: dict[str, TeacherCache] = {}
        for name, documents in sources.items():
            if documents:
                folder = folder_name("answers", self._dtype, fingerprint_of(documents))
                known = TeacherCache(self._place / folder, documents, self._vocab_size)
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

    def _apart(self, documents: Sequence[Document]) -> list[Document]:
        """These, of which the target may have begun some with a prompt to measure with by itself:
        they are held out."""
        measured = set(self._options.measure)
        return [
            replace(document, is_held_out=document.is_held_out or document.prompt in measured)
            for document in documents
        ]

    def _ask_to_measure(self) -> tuple[TeacherCache, float]:
        """The target's answers to prompts that are not learned from, with what it says of them; and
        the seconds that both took."""
        options, template = self._options, self._target.template
        prompts = [prompt for prompt in options.measure for _ in MEASURED_TEMPERATURES]
        longest = max(map(len, prompts)) + MEASURED_TOKENS_MAX
        eos, tokens_max = sorted(self._info.eos_token_ids), min(longest, self._info.max_model_len)
        name = folder_name("measured", self._dtype, options.seed, prompts, eos, tokens_max)
        corpus = WrittenCorpus(
            self._place / name,
            template,
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
            together = _TOGETHER["cpu" if self._is_cpu else "cuda"]
            corpus.write(engine, together, wanted, lambda part: report(_ANSWERING_PART * part))
        documents = [replace(document, is_held_out=True) for document in corpus.documents()]
        folder = folder_name("answers", self._dtype, fingerprint_of(documents))
        cache = TeacherCache(self._place / folder, documents, self._vocab_size)
        rest = 1 - _ANSWERING_PART
        cache.fill(self._module, float("inf"), lambda part: report(_ANSWERING_PART + rest * part))
        return cache, corpus.spent.seconds + cache.spent.seconds

    def _train(self, lessons: Lessons, known: object, start: Start, before: float) -> Trainer:
        options = self._options
        name = folder_name(
            "student", known, options.seed, start.key, options.minutes, options.steps
        )
        use_dense_attention(start.student)
        left = max(TRAINING_SHARE * self._seconds, self._seconds - before)
        budget = Budget(options.steps, left)
        trainer = Trainer(
            start.student, lessons, self._place / name, options.seed, budget, start.is_trained
        )
        trainer.run(lambda part, point: self._report("training", part, point))
        return trainer

    def _save(self, student: Any, token_ids: torch.Tensor, facts: CardFacts) -> None:
        """The whole directory at once, in place of an earlier drafter's."""
        description = TrainedDescription(
            format=FORMAT,
            kind=TrainedKind.STUDENT,
            target=self._target.name,
            target_fingerprint=self._fingerprint,
            vocab_size=self._vocab_size,
            draft_vocab_size=len(token_ids),
        )
        with filled(self._options.out) as directory:
            save_drafter(directory, student, token_ids, description)
            (directory / CARD_FILE).write_text(render_card(facts), encoding="utf-8")
            plot = render_plot(facts.points, facts.is_trained)
            (directory / PLOT_FILE).write_text(plot, encoding="utf-8")


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


def _facts(cache: TeacherCache) -> SourceFacts:
    learned = [document.num_learned for document in cache.known if not document.is_held_out]
    return SourceFacts(len(learned), sum(learned), cache.num_documents - len(learned))
