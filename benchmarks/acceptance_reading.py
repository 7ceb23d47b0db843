"""The reading behind `bench acceptance`: a target that writes, and drafts that read it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from outrider.drafters.drafter import Drafter, DraftRequest
from outrider.engine.interface import Engine, FeatureEngine, SequenceStep, ShallowEngine
from outrider.errors import SettingError
from outrider.limits import DRAFT_SUPPORT_ENTRIES, SEED_MAX
from outrider.models.eagle import LoadedEagle
from outrider.models.early_exit import LoadedExit
from outrider.models.medusa import LoadedHeads
from outrider.speculation.draft_sampling import quantise
from outrider.speculation.logits_processing import NO_HISTORY, DraftVocabulary, target_probabilities
from outrider.speculation.proposal import COUNT_TOTAL, EMPTY_PROPOSAL, DraftDistribution
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.speculation.text_acceptance import NUM_DEPTHS
from outrider.speculation.verification import verdict_from_logits

from .acceptance import AcceptanceOptions, AcceptanceReport, PromptAcceptance, summarise
from .measurement import Progress

GREEDY: Final = SamplingParams(temperature=0.0)
SAMPLED: Final = SamplingParams(temperature=1.0)
_SEQUENCE: Final = "bench"
_AT_ONCE: Final = 8
"""Prompts that are answered side by side; p of all their tokens is kept until they are read."""

Encode = Callable[[str], Sequence[int]]
"""A prompt's token ids, under the chat template or without."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion that is wanted."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int


class Reader(Protocol):
    """A draft that reads what the target wrote: `token_ids[first:]`, n tokens."""

    def likeliest(self, token_ids: Sequence[int], first: int) -> list[int | None]:
        """[n]: what it would propose in place of each, first of all, at temperature 0; None =
        nothing."""
        ...

    def distributions(
        self, token_ids: Sequence[int], first: int
    ) -> list[list[DraftDistribution | None]]:
        """q as it goes on the wire, at temperature 1; None = it would propose nothing. [n] of draft
        token 1 of the chains that begin at each place; [n - 1] of draft token 2 of these, were
        token 1 the text's; and so on, as far as it drafts. [n] alone where q depends on nothing
        but the tokens before it, wherever the chain begins."""
        ...


class ModelReader:
    """A draft model: one prefill reads everything."""

    def __init__(self, engine: Engine, entries_max: int = DRAFT_SUPPORT_ENTRIES) -> None:
        self._engine = engine
        self._entries_max = entries_max
        self._vocabulary = DraftVocabulary.of(engine.info.logit_token_ids)

    def likeliest(self, token_ids: Sequence[int], first: int) -> list[int | None]:
        """See `Reader.likeliest`."""
        columns = self._logits(token_ids, first).argmax(dim=1).cpu().numpy()
        known = self._vocabulary
        return list((columns if known is None else known.token_ids[columns]).tolist())

    def ranks(self, token_ids: Sequence[int], first: int) -> list[int | None]:
        """[n]: how many tokens the draft finds likelier than each of `token_ids[first:]`; None for
        one that it has no logit of."""
        logits = self._logits(token_ids, first)
        columns = self._columns(token_ids[first:], logits.shape[1])
        found: list[int | None] = []
        for row, column in zip(logits, columns, strict=True):
            found.append(None if column is None else int((row > row[column]).sum()))
        return found

    def distributions(
        self, token_ids: Sequence[int], first: int
    ) -> list[list[DraftDistribution | None]]:
        """See `Reader.distributions`."""
        return [list(self.drawn_from(token_ids, first))]

    def drawn_from(
        self, token_ids: Sequence[int], first: int, params: SamplingParams = SAMPLED
    ) -> list[DraftDistribution]:
        """[n]: q in place of each of `token_ids[first:]` under these parameters."""
        rows = target_probabilities(self._logits(token_ids, first), params)
        return [quantise(row, self._entries_max, self._vocabulary) for row in rows]

    def _columns(self, token_ids: Sequence[int], width: int) -> list[int | None]:
        if self._vocabulary is None:
            return [token_id if token_id < width else None for token_id in token_ids]
        places = {token_id: i for i, token_id in enumerate(self._vocabulary.token_ids.tolist())}
        return [places.get(token_id) for token_id in token_ids]

    def _logits(self, token_ids: Sequence[int], first: int) -> torch.Tensor:
        step = SequenceStep(_SEQUENCE, tuple(token_ids[:-1]), num_logits=len(token_ids) - first)
        try:
            [logits] = self._engine.forward([step])
        finally:
            self._engine.release(_SEQUENCE)
        return logits


class ExitReader(ModelReader):
    """The target's first layers, and a head behind them: one shallow pass reads everything."""

    def __init__(
        self, target: ShallowEngine, exit_head: LoadedExit, entries_max: int = DRAFT_SUPPORT_ENTRIES
    ) -> None:
        super().__init__(target, entries_max)
        self._vocabulary = DraftVocabulary.of(exit_head.token_ids)
        self._target = target
        self._head = exit_head.module

    def _logits(self, token_ids: Sequence[int], first: int) -> torch.Tensor:
        step = SequenceStep(_SEQUENCE, tuple(token_ids[:-1]), num_logits=len(token_ids) - first)
        try:
            [hidden] = self._target.forward_shallow([step])
        finally:
            self._target.release(_SEQUENCE)
        return self._head.logits(hidden)


class _ChainReader(ABC):
    """A `Reader` whose q depends on where a chain began."""

    def __init__(self, token_ids: Sequence[int], entries_max: int) -> None:
        self._vocabulary = DraftVocabulary(np.array(token_ids, dtype=np.int64))
        self._entries_max = entries_max

    def likeliest(self, token_ids: Sequence[int], first: int) -> list[int | None]:
        """See `Reader.likeliest`."""
        columns = next(self._logits(token_ids, first)).argmax(dim=1).cpu().numpy()
        return list(self._vocabulary.token_ids[columns].tolist())

    def distributions(
        self, token_ids: Sequence[int], first: int
    ) -> list[list[DraftDistribution | None]]:
        """See `Reader.distributions`."""
        return [
            [
                quantise(row, self._entries_max, self._vocabulary)
                for row in target_probabilities(logits, SAMPLED)
            ]
            for logits in self._logits(token_ids, first)
        ]

    @abstractmethod
    def _logits(self, token_ids: Sequence[int], first: int) -> Iterator[torch.Tensor]:
        """[n, N] of the tokens that the chains from each place on begin with; [n - 1, N] of their
        second ones; .."""


class HeadsReader(_ChainReader):
    """Heads on the target, whose features of the text they read: a chain begins with those of the
    token before the newest one."""

    def __init__(
        self, target: FeatureEngine, heads: LoadedHeads, entries_max: int = DRAFT_SUPPORT_ENTRIES
    ) -> None:
        super().__init__(heads.token_ids, entries_max)
        self._target = target
        self._heads = heads.module

    def _logits(self, token_ids: Sequence[int], first: int) -> Iterator[torch.Tensor]:
        num = len(token_ids) - first
        features = _features(self._target, token_ids, first)
        text = torch.tensor(token_ids[first - 1 :], device=features.device)
        for depth in range(min(num, len(self._heads.heads))):
            windows = num - depth
            newest = text[depth : depth + windows]
            features = self._heads.advance(depth, features[:windows], newest)
            yield self._heads.logits(features)


class EagleReader(_ChainReader):
    """A head that reads the target's features of the text: those from the place before the newest
    token of the prompt on, as when an answer begins. Chains have `NUM_DEPTHS` tokens at most."""

    def __init__(
        self, target: FeatureEngine, eagle: LoadedEagle, entries_max: int = DRAFT_SUPPORT_ENTRIES
    ) -> None:
        super().__init__(eagle.token_ids, entries_max)
        self._target = target
        self._head = eagle.module

    def _logits(self, token_ids: Sequence[int], first: int) -> Iterator[torch.Tensor]:
        num = len(token_ids) - first
        features = _features(self._target, token_ids, first).to(self._head.embeddings)
        behind = torch.tensor(token_ids[first - 1 :], device=features.device)
        padded = torch.nn.functional.pad(behind, (0, NUM_DEPTHS))[: num + NUM_DEPTHS - 1]
        for depth, guessed in enumerate(
            self._head.unroll(features[None, :num], padded[None], min(num, NUM_DEPTHS))
        ):
            yield self._head.logits(guessed[0, : num - depth])


def _features(target: FeatureEngine, token_ids: Sequence[int], first: int) -> torch.Tensor:
    """[n + 1, D] of the places from that before the newest token of the prompt on."""
    if first < 2:
        raise SettingError("prompts", "one has a single token; heads go on from two or more")
    step = SequenceStep(_SEQUENCE, tuple(token_ids[:-1]), num_logits=len(token_ids) - first + 1)
    try:
        target.forward([step])
        [features] = target.features()
    finally:
        target.release(_SEQUENCE)
    return features


class LookupReader:
    """A drafter without distributions, such as prompt lookup: asked anew for one token at every
    place. What it proposes is a one-hot q."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._num_read = 0

    def likeliest(self, token_ids: Sequence[int], first: int) -> list[int | None]:
        """See `Reader.likeliest`."""
        return list(self._proposed(token_ids, first, GREEDY, Rule.GREEDY))

    def distributions(
        self, token_ids: Sequence[int], first: int
    ) -> list[list[DraftDistribution | None]]:
        """See `Reader.distributions`."""
        proposed = self._proposed(token_ids, first, SAMPLED, Rule.TOKEN)
        return [
            [
                None if token_id is None else DraftDistribution((token_id,), (COUNT_TOTAL,))
                for token_id in proposed
            ]
        ]

    def _proposed(
        self, token_ids: Sequence[int], first: int, sampling: SamplingParams, rule: Rule
    ) -> Iterator[int | None]:
        # As in a deployment every text is a session of its own, with its own seed.
        seed = self._num_read
        self._num_read += 1
        session_id = f"{_SEQUENCE}-{seed}"
        try:
            for length in range(first, len(token_ids)):
                request = DraftRequest(
                    session_id=session_id,
                    tenant=rule.value,  # So that what one pass wrote is no history of the other.
                    token_ids=token_ids[:length],
                    prompt_length=first,
                    num_draft_tokens=1,
                    sampling=sampling,
                    rule=rule,
                    noise=RoundNoise(seed, rule, length),
                )
                [proposal] = self._drafter.propose([request])
                yield proposal.token_ids[0] if proposal else None
        finally:
            self._drafter.release(session_id)


def measure(
    options: AcceptanceOptions,
    target: Engine,
    reader: Reader,
    encode: Encode,
    *,
    draft_model: str,
    max_model_len: int,
    progress: Progress,
) -> AcceptanceReport:
    """Lets `target` write and `reader` read. `max_model_len` is what both take. Raises
    `SettingError` for prompts that are wrong or too long."""
    prompts = options.load_prompts()
    asked = []
    for index, prompt in enumerate(prompts):
        ids = tuple(encode(prompt.text))
        room = max_model_len - len(ids)
        if not ids or room < 1:
            raise SettingError(
                "prompts",
                f"number {index + 1} has {len(ids)} tokens; 1 to {max_model_len - 1} leave room "
                "for a completion",
            )
        seed = (options.seed + index) & SEED_MAX
        asked.append(Asked(ids, seed, min(options.max_tokens, room)))
    found: list[PromptAcceptance] = []
    for start in range(0, len(asked), _AT_ONCE):
        group = asked[start : start + _AT_ONCE]
        kinds = dict.fromkeys(prompt.category for prompt in prompts[start : start + len(group)])
        last = start + len(group)
        progress(f"prompts {start + 1} to {last} of {len(prompts)}: {', '.join(kinds)}")
        readings = _read_group(target, reader, group)
        for prompt, (hits, depths) in zip(prompts[start:], readings, strict=False):
            overlaps = tuple(overlap for overlap, _ in depths[0])
            ratios = tuple(tuple(ratio for _, ratio in pairs) for pairs in depths)
            found.append(PromptAcceptance(prompt.category, hits, overlaps, ratios))
    return summarise(options, found, model=target.info.name, draft_model=draft_model)


def _read_group(
    target: Engine, reader: Reader, group: Sequence[Asked]
) -> Iterator[tuple[tuple[bool, ...], list[list[tuple[float, float]]]]]:
    """Of each prompt: whether the draft's likeliest is what was written at temperature 0, and what
    `_compare` says at temperature 1 of each depth that the draft tells apart."""
    with torch.inference_mode():
        likely = [tokens for tokens, _ in write(target, group, GREEDY, Rule.GREEDY)]
        drawn = write(target, group, SAMPLED, Rule.TOKEN)
    for asked, written, (tokens, rows) in zip(group, likely, drawn, strict=True):
        first = len(asked.prompt_ids)
        with torch.inference_mode():
            likeliest = reader.likeliest((*asked.prompt_ids, *written), first)
            depths = reader.distributions((*asked.prompt_ids, *tokens), first)
        hits = tuple(ours == theirs for ours, theirs in zip(likeliest, written, strict=True))
        yield (
            hits,
            [
                [
                    _compare(*place)
                    for place in zip(rows[depth:], tokens[depth:], supports, strict=True)
                ]
                for depth, supports in enumerate(depths)
            ],
        )


def write(
    engine: Engine, group: Sequence[Asked], params: SamplingParams, rule: Rule
) -> list[tuple[list[int], list[torch.Tensor]]]:
    """The engine's own completions, decoded side by side, and p [V] of each of their tokens."""
    completions = [_Completion(f"{_SEQUENCE}-{i}", asked) for i, asked in enumerate(group)]
    eos = frozenset(engine.info.eos_token_ids)
    try:
        for completion in completions:  # One by one: prompts may be long.
            [logits] = engine.forward([completion.next_step()])
            completion.take(logits, params, rule)
        while going := [c for c in completions if c.goes_on(eos)]:
            for completion, logits in zip(
                going, engine.forward([c.next_step() for c in going]), strict=True
            ):
                completion.take(logits, params, rule)
    finally:
        for completion in completions:
            engine.release(completion.name)
    return [(completion.token_ids, completion.rows) for completion in completions]


class _Completion:
    """One that is written."""

    def __init__(self, name: str, asked: Asked) -> None:
        self.name = name
        self.token_ids: list[int] = []
        self.rows: list[torch.Tensor] = []
        self._asked = asked

    def goes_on(self, eos: Collection[int]) -> bool:
        return len(self.token_ids) < self._asked.max_tokens and self.token_ids[-1] not in eos

    def next_step(self) -> SequenceStep:
        ids = tuple(self.token_ids[-1:]) or self._asked.prompt_ids
        return SequenceStep(self.name, ids, num_logits=1)

    def take(self, logits: torch.Tensor, params: SamplingParams, rule: Rule) -> None:
        probabilities = target_probabilities(logits, params)
        position = len(self._asked.prompt_ids) + len(self.token_ids)
        noise = RoundNoise(self._asked.seed, rule, position)
        verdict = verdict_from_logits(logits, params, NO_HISTORY, EMPTY_PROPOSAL, noise)
        self.token_ids.append(verdict.correction[0])
        self.rows.append(probabilities[0])


def _compare(p: torch.Tensor, token_id: int, q: DraftDistribution | None) -> tuple[float, float]:
    """sum min(p, q) and min(1, q(x) / p(x)) at one place; p [V]. A token that only one of the two
    vocabularies has adds nothing."""
    if q is None:
        return 0.0, 0.0
    inside = [i for i, v in enumerate(q.token_ids) if v < len(p)]
    mass = np.array([q.counts[i] for i in inside], dtype=np.float64) / COUNT_TOTAL
    shared = p[[q.token_ids[i] for i in inside]].cpu().numpy()
    overlap = float(np.minimum(shared, mass).sum())
    drafted = dict(zip(q.token_ids, q.counts, strict=True)).get(token_id, 0) / COUNT_TOTAL
    return overlap, min(1.0, drafted / float(p[token_id]))
