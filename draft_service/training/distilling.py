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

import torch

from outrider.models.drafter_checkpoint import FORMAT, TrainedDescription, as_stored
from outrider.models.fingerprint import tensors_fingerprint

from .answering import TRAINING_SHARE, Answers
from .card import (
    CARD_FILE,
    PLOT_FILE,
    CardFacts,
    SourceFacts,
    render_card,
    render_plot,
)
from .checking import check_apart, check_prompts, check_split
from .courses import course_of
from .dense_attention import use_dense_attention
from .documents import (
    DOCUMENT_TOKENS_MAX,
    corpus_files,
    read_corpus,
    shuffled,
    split_of,
)
from .learner import Learner, Start
from .learning import Lessons
from .measuring import MEASURED_PROMPT_TOKENS_MAX, Measured, measure
from .options import DRAFT_VOCAB, DistillOptions
from .output import check_out, filled
from .storage import Stopwatch, alone_in, folder_name
from .target import Target
from .teacher import TeacherCache, check_head
from .training import Budget, Report, Trainer
from .vocabulary import covered_share, likeliest_tokens


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
        self._module = module
        self._course = course_of(options, target, module)
        tokens_max = min(DOCUMENT_TOKENS_MAX, info.max_model_len)
        texts = read_corpus(
            files, self._vocab_size, target.encode, tokens_max, target.template.num_bare
        )
        given = self._course.long_enough(shuffled(texts))
        check_prompts("prompts", options.prompts, tokens_max - 1)
        longest = min(MEASURED_PROMPT_TOKENS_MAX, info.max_model_len - 1)
        check_prompts("measure", options.measure, longest)
        check_apart(options, given)
        self._answers = Answers(
            options, target, module, info, self._course, given, tokens_max, place, report
        )
        check_split(given, len(texts), self._answers.writes)

    def finish(self) -> Distilled:
        """All stages. What is to be measured with comes first: it is the target's answers to
        prompts that may not fit its pages."""
        measuring = Stopwatch()
        asked = None
        if self._options.measure:
            asked, seconds = self._answers.ask_to_measure()
            measuring = Stopwatch(seconds)
        corpus = self._answers.write()
        caches = self._answers.ask(corpus)
        before = corpus.spent.seconds + sum(cache.spent.seconds for cache in caches.values())
        start = self._start(list(caches.values()))
        learner, token_ids = start.learner, start.token_ids
        lessons = Lessons(list(caches.values()), token_ids, self._vocab_size, self._module.device)
        known = [
            (cache.name, cache.num_documents, split_of(cache.known)) for cache in caches.values()
        ]
        trainer = self._train(lessons, known, start, before)
        with torch.no_grad():
            for weight in learner.weights.values():
                weight.copy_(as_stored(weight.detach()))
        self._report("measuring", 0.0, None)
        of_prompts = None
        with measuring.working():
            measured = measure(learner, lessons, lessons.held_out)
            if asked is not None:
                answers = Lessons([asked], token_ids, self._vocab_size, self._module.device)
                of_prompts = measure(learner, answers, answers.held_out)
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
            kind=self._course.kind,
            shape=learner.shape,
            num_parameters=sum(weight.numel() for weight in learner.weights.values()),
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
        self._save(learner, torch.from_numpy(token_ids), facts)
        return Distilled(
            self._options.out, measured, of_prompts, trainer.num_steps, sum(spent.values())
        )

    def _start(self, caches: Sequence[TeacherCache]) -> Start:
        """What learns: the drafter that was named, else a new one."""
        if self._course.drafter is not None:
            return self._course.drafter
        num_wanted = min(self._options.draft_vocab or DRAFT_VOCAB, self._vocab_size)
        token_ids = likeliest_tokens(caches, num_wanted, self._vocab_size)
        return self._course.make(token_ids)

    def _train(self, lessons: Lessons, known: object, start: Start, before: float) -> Trainer:
        options = self._options
        name = folder_name(
            self._course.kind, known, options.seed, start.key, options.minutes, options.steps
        )
        seconds = options.minutes * 60
        left = max(TRAINING_SHARE * seconds, seconds - before)
        budget = Budget(options.steps, left)
        trainer = Trainer(
            start.learner, lessons, self._place / name, options.seed, budget, start.is_trained
        )
        trainer.run(lambda part, point: self._report("training", part, point))
        return trainer

    def _save(self, learner: Learner, token_ids: torch.Tensor, facts: CardFacts) -> None:
        """The whole directory at once, in place of an earlier drafter's."""
        description = TrainedDescription(
            format=FORMAT,
            kind=self._course.kind,
            target=self._target.name,
            target_fingerprint=self._fingerprint,
            vocab_size=self._vocab_size,
            draft_vocab_size=len(token_ids),
        )
        with filled(self._options.out) as directory:
            learner.save(directory, token_ids, description)
            (directory / CARD_FILE).write_text(render_card(facts), encoding="utf-8")
            plot = render_plot(facts.points, facts.is_trained)
            (directory / PLOT_FILE).write_text(plot, encoding="utf-8")


def _facts(cache: TeacherCache) -> SourceFacts:
    learned = [document.num_learned for document in cache.known if not document.is_held_out]
    return SourceFacts(len(learned), sum(learned), cache.num_documents - len(learned))
