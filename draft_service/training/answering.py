"""What the target writes, and what it says of texts, before anything is learned.

What is made lies in folders of `distilling.py`; given texts come before written ones where the time
is short, and prompts to measure with have a corpus of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from outrider.engine.cuda.backend import find_acceleration
from outrider.engine.interface import ModelInfo
from outrider.engine.paged_engine import PagedEngine
from outrider.errors import SettingError
from outrider.kv_cache.storage import memory_budget
from outrider.models.module_replacement import speed_up

from .courses import Course
from .documents import HELD_OUT_EVERY, Document, fingerprint_of
from .measuring import MEASURED_TEMPERATURES, MEASURED_TOKENS_MAX
from .options import DistillOptions
from .storage import folder_name
from .target import Target
from .teacher import TeacherCache
from .training import Report
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


class Answers:
    """What one target writes and says for one call of `distill`."""

    def __init__(
        self,
        options: DistillOptions,
        target: Target,
        module: Any,
        info: ModelInfo,
        course: Course,
        given: Sequence[Document],
        tokens_max: int,
        place: Path,
        report: Report,
    ) -> None:
        """`module` and `info` are the target's, `given` the documents of `--corpus`; what is made
        lies in `place`."""
        self._options, self._target, self._report = options, target, report
        self._module, self._info, self._course = module, info, course
        self._given, self._tokens_max, self._place = given, tokens_max, place
        self._dtype = str(module.dtype)
        self._seconds = options.minutes * 60
        embeddings = module.get_input_embeddings().weight
        self._vocab_size: int = embeddings.shape[0]

    def write(self) -> WrittenCorpus:
        """What the target writes."""
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
    def writes(self) -> bool:
        """Whether the target is to write anything."""
        tokens = self._options.tokens
        return self._missing > 0 if tokens is None else tokens > 0

    @property
    def _missing(self) -> float:
        """Part of what should be learned from that is not given."""
        given = sum(document.num_learned for document in self._given)
        enough = TOKENS_A_SECOND["cpu" if self._is_cpu else "cuda"] * self._seconds
        return max(0.0, 1 - given / enough)

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

    def ask(self, corpus: WrittenCorpus) -> dict[str, TeacherCache]:
        """What the target says of that and of what is given, by what wrote it."""
        sources = {
            "the target, for this": self._apart(
                self._course.long_enough(corpus.documents(self._options.tokens))
            ),
            "given by --corpus": self._given,
        }
        left = self._reading_seconds
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
        """What the target says of these, as far as it is known."""
        features = self._course.features
        more = [] if features is None else features.key
        folder = folder_name("answers", self._dtype, fingerprint_of(documents), *more)
        return TeacherCache(self._place / folder, documents, self._vocab_size, features)

    def _apart(self, documents: Sequence[Document]) -> list[Document]:
        """These, of which the target may have begun some with a prompt to measure with by itself:
        they are held out."""
        measured = set(self._options.measure)
        return [
            replace(document, is_held_out=document.is_held_out or document.prompt in measured)
            for document in documents
        ]

    def ask_to_measure(self) -> tuple[TeacherCache, float]:
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
        answered = self._course.long_enough(corpus.documents())
        if not answered:
            raise SettingError("measure", "the target's answers to these are too short to measure")
        cache = self._cache([replace(document, is_held_out=True) for document in answered])
        rest = 1 - _ANSWERING_PART
        cache.fill(self._module, float("inf"), lambda part: report(_ANSWERING_PART + rest * part))
        return cache, corpus.spent.seconds + cache.spent.seconds
