"""`outrider bench acceptance`: how much of what a target writes a draft would have proposed.

The target writes every prompt's completion twice, at temperature 0 and at temperature 1, and the
draft then reads each of them once. No round is played and nothing is timed, so the numbers belong
to the pair of models alone: not to K, not to the rule, not to the machine.

With `--hits` rounds of K tokens are played besides, by rule and temperature, and what came of each
is looked up among what look-ahead would have guessed before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from draft_service.model_drafter import ModelDrafter, Unended
from outrider.drafters.drafter import Drafter, DraftRequest
from outrider.engine.interface import Engine, FeatureEngine, SequenceStep, ShallowEngine
from outrider.errors import InvariantError, OutriderError, SettingError, check
from outrider.limits import (
    DRAFT_SUPPORT_ENTRIES,
    LOOK_AHEAD_MAX,
    SEED_MAX,
)
from outrider.models.eagle import LoadedEagle
from outrider.models.early_exit import LoadedExit
from outrider.models.medusa import LoadedHeads
from outrider.speculation.accept_reject import decide
from outrider.speculation.draft_sampling import quantise
from outrider.speculation.logits_processing import NO_HISTORY, DraftVocabulary, target_probabilities
from outrider.speculation.outcome_prediction import RANKS_MAX, OutcomeModel, guess_outcomes
from outrider.speculation.proposal import (
    COUNT_TOTAL,
    EMPTY_PROPOSAL,
    DraftDistribution,
    Proposal,
)
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.speculation.text_acceptance import NUM_DEPTHS, acceptance_of_windows
from outrider.speculation.verification import verdict_from_logits

from .measurement import Progress
from .options import AcceptanceOptions
from .prompts import BenchPrompt
from .report import Report, table

GREEDY: Final = SamplingParams(temperature=0.0)
SAMPLED: Final = SamplingParams(temperature=1.0)
OUTCOMES: Final = (4, 8, 12, 16, 24)
"""Of a whole round, the likeliest first."""
WAYS: Final = (
    (Rule.GREEDY, 0.0),
    *((rule, t) for t in (0.7, 1.0) for rule in (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)),
)
"""Rules and temperatures of the rounds."""
_SEQUENCE: Final = "bench"
_AT_ONCE: Final = 8
"""Prompts that are answered side by side; p of all their tokens is kept until they are read."""

Encode = Callable[[str], Sequence[int]]
"""A prompt's token ids, under the chat template or without."""


@dataclass(frozen=True, slots=True)
class PromptAcceptance:
    """What one prompt showed."""

    category: str
    hits: tuple[bool, ...]
    """Of each token written at temperature 0: whether the draft's likeliest is the same."""
    overlaps: tuple[float, ...]
    """Of each place of the text at temperature 1: sum over v of min(p(v), q(v))."""
    ratios: tuple[tuple[float, ...], ...]
    """Of the tokens x that the target wrote there min(1, q(x) / p(x)): as draft token 1 of a chain
    that begins at the first place, the second, ..; as draft token 2 of it; and so on. One tuple
    where the chain's beginning makes no difference."""


def summarise(
    options: AcceptanceOptions,
    found: Sequence[PromptAcceptance],
    model: str,
    draft_model: str,
    hits: Sequence[Mapping[str, Any]] | None = None,
) -> Report:
    """Places count alike, whichever prompt they are of. `greedy` is the share of the tokens at
    temperature 0 that are the draft's likeliest too; `sampled` the mean over the places at
    temperature 1 of sum min(p, q); `by_position` the chance at temperature 1 that draft token i is
    accepted given that those before it were, or None where no window came so far."""
    check(bool(found), "nothing was measured")
    by_category: dict[str, list[PromptAcceptance]] = {}
    for entry in found:
        by_category.setdefault(entry.category, []).append(entry)
    windows = []
    for entry in found:
        depths = [np.asarray(depth, dtype=np.float64) for depth in entry.ratios]
        if len(depths) == 1:
            depths = [depths[0][depth:] for depth in range(NUM_DEPTHS)]
        windows.append(depths)
    values: dict[str, Any] = {
        "model": model,
        "draft_model": draft_model,
        "num_prompts": len(found),
        "max_tokens": options.max_tokens,
        **_rates(found),
        "by_position": acceptance_of_windows(windows, NUM_DEPTHS),
        "num_positions": sum(len(entry.overlaps) for entry in found),
        "num_positions_greedy": sum(len(entry.hits) for entry in found),
        "by_category": {name: _rates(entries) for name, entries in by_category.items()},
        "hits": hits,
    }
    shown = table(
        f"{draft_model} reads {model}: {values['num_positions']} places",
        ("prompts", "greedy", "sampled"),
        [
            (name, f"{rates['greedy']:.3f}", f"{rates['sampled']:.3f}")
            for name, rates in [*values["by_category"].items(), ("all", values)]
        ],
    )
    chances = ["-" if chance is None else f"{chance:.3f}" for chance in values["by_position"]]
    line = "sampled, by place in the proposal: " + " ".join(chances)
    return Report(values, [shown, line, *([] if hits is None else [_hits_table(hits)])])


def _rates(found: Sequence[PromptAcceptance]) -> dict[str, float]:
    hits = [hit for entry in found for hit in entry.hits]
    overlaps = [overlap for entry in found for overlap in entry.overlaps]
    return {"greedy": sum(hits) / len(hits), "sampled": sum(overlaps) / len(overlaps)}


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
        self, token_ids: Sequence[int], first: int, params: SamplingParams = SAMPLED
    ) -> Sequence[Sequence[DraftDistribution | None]]:
        """q as it goes on the wire; None = it would propose nothing. [n] of draft token 1 of the
        chains that begin at each place; [n - 1] of draft token 2 of these, were token 1 the
        text's; and so on, as far as it drafts. [n] alone where q depends on nothing but the tokens
        before it, wherever the chain begins."""
        ...


class LogitsReader(ABC):
    """A `Reader` by logits."""

    def __init__(self, token_ids: Sequence[int], entries_max: int) -> None:
        """`token_ids` are those of the logits; empty = all."""
        self._vocabulary = DraftVocabulary.of(token_ids)
        self._entries_max = entries_max

    @abstractmethod
    def _logits(self, token_ids: Sequence[int], first: int) -> Iterator[torch.Tensor]:
        """[n, N], [n - 1, N], ..: what `distributions` draws from."""

    def likeliest(self, token_ids: Sequence[int], first: int) -> list[int | None]:
        """See `Reader.likeliest`."""
        columns = next(self._logits(token_ids, first)).argmax(dim=1).cpu().numpy()
        known = self._vocabulary
        return list((columns if known is None else known.token_ids[columns]).tolist())

    def distributions(
        self, token_ids: Sequence[int], first: int, params: SamplingParams = SAMPLED
    ) -> list[list[DraftDistribution]]:
        """See `Reader.distributions`."""
        return [
            [
                quantise(row, self._entries_max, self._vocabulary)
                for row in target_probabilities(logits, params)
            ]
            for logits in self._logits(token_ids, first)
        ]


class ModelReader(LogitsReader):
    """A draft model: one prefill reads everything."""

    def __init__(self, engine: Engine, entries_max: int = DRAFT_SUPPORT_ENTRIES) -> None:
        super().__init__(engine.info.logit_token_ids, entries_max)
        self._engine = engine

    def ranks(self, token_ids: Sequence[int], first: int) -> list[int | None]:
        """[n]: how many tokens the draft finds likelier than each of `token_ids[first:]`; None for
        one that it has no logit of."""
        logits = next(self._logits(token_ids, first))
        known = range(logits.shape[1]) if self._vocabulary is None else self._vocabulary.token_ids
        columns = {int(token_id): column for column, token_id in enumerate(known)}
        places = [columns.get(token_id) for token_id in token_ids[first:]]
        return [
            None if place is None else int((row > row[place]).sum())
            for row, place in zip(logits, places, strict=True)
        ]

    def _logits(self, token_ids: Sequence[int], first: int) -> Iterator[torch.Tensor]:
        yield _read(self._engine, token_ids, len(token_ids) - first)


def _read(engine: Engine, token_ids: Sequence[int], num_logits: int) -> torch.Tensor:
    """[num_logits, N] before the last so many tokens."""
    try:
        [found] = engine.forward([SequenceStep(_SEQUENCE, tuple(token_ids[:-1]), num_logits)])
    finally:
        engine.release(_SEQUENCE)
    return found


class ExitReader(LogitsReader):
    """The target's first layers, and a head behind them: one shallow pass reads everything."""

    def __init__(
        self, target: ShallowEngine, exit_head: LoadedExit, entries_max: int = DRAFT_SUPPORT_ENTRIES
    ) -> None:
        super().__init__(exit_head.token_ids, entries_max)
        self._target = target
        self._head = exit_head.module

    def _logits(self, token_ids: Sequence[int], first: int) -> Iterator[torch.Tensor]:
        step = SequenceStep(_SEQUENCE, tuple(token_ids[:-1]), num_logits=len(token_ids) - first)
        try:
            [hidden] = self._target.forward_shallow([step])
        finally:
            self._target.release(_SEQUENCE)
        yield self._head.logits(hidden)


class HeadsReader(LogitsReader):
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


class EagleReader(LogitsReader):
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
        self, token_ids: Sequence[int], first: int, params: SamplingParams = SAMPLED
    ) -> list[list[DraftDistribution | None]]:
        """See `Reader.distributions`."""
        proposed = self._proposed(token_ids, first, params, Rule.TOKEN)
        return [
            [None if t is None else DraftDistribution((t,), (COUNT_TOTAL,)) for t in proposed]
        ]  # fmt: skip

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


@dataclass(frozen=True, slots=True)
class Drafting:
    """What drafts for the target."""

    reader: Reader
    name: str
    model: Engine | None = None
    """The model behind it, if it is one."""


def measure(
    options: AcceptanceOptions, target: Engine, draft: Drafting, encode: Encode, progress: Progress
) -> Report:
    """Lets `target` write and the draft read; with `--hits` plays rounds with its model. Raises
    `SettingError` for prompts that are wrong or too long."""
    max_model_len = target.info.max_model_len
    if draft.model is not None:
        max_model_len = min(max_model_len, draft.model.info.max_model_len)
    prompts = options.load_prompts()
    asked = []
    for index, prompt in enumerate(prompts):
        ids = tuple(encode(prompt.text))
        room = max_model_len - len(ids) - (options.num_draft_tokens if options.hits else 0)
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
        last = start + len(group)
        kinds = dict.fromkeys(prompt.category for prompt in prompts[start:last])
        progress(f"prompts {start + 1} to {last} of {len(prompts)}: {', '.join(kinds)}")
        found += _read_group(target, draft.reader, prompts[start:last], group)
    played = None
    if options.hits:
        if draft.model is None:
            raise SettingError(
                "draft_model", f"{draft.name} does not guess outcomes; name a model for --hits"
            )
        played = play_rounds(target, draft.model, asked, options.num_draft_tokens, progress)
    return summarise(options, found, target.info.name, draft.name, played)


def _read_group(
    target: Engine, reader: Reader, prompts: Sequence[BenchPrompt], group: Sequence[Asked]
) -> Iterator[PromptAcceptance]:
    with torch.inference_mode():
        likely = [tokens for tokens, _ in write(target, group, GREEDY, Rule.GREEDY)]
        drawn = write(target, group, SAMPLED, Rule.TOKEN)
    for prompt, asked, written, (tokens, rows) in zip(prompts, group, likely, drawn, strict=True):
        first = len(asked.prompt_ids)
        with torch.inference_mode():
            likeliest = reader.likeliest((*asked.prompt_ids, *written), first)
            depths = reader.distributions((*asked.prompt_ids, *tokens), first)
        compared = [
            [_compare(*at) for at in zip(rows[depth:], tokens[depth:], supports, strict=True)]
            for depth, supports in enumerate(depths)
        ]
        yield PromptAcceptance(
            prompt.category,
            tuple(ours == theirs for ours, theirs in zip(likeliest, written, strict=True)),
            tuple(overlap for overlap, _ in compared[0]),
            tuple(tuple(ratio for _, ratio in pairs) for pairs in compared),
        )


def write(
    engine: Engine, group: Sequence[Asked], params: SamplingParams, rule: Rule
) -> list[tuple[list[int], list[torch.Tensor]]]:
    """The engine's own completions, decoded side by side, and p [V] of each of their tokens."""
    names = [f"{_SEQUENCE}-{i}" for i in range(len(group))]
    eos = frozenset(engine.info.eos_token_ids)
    written: list[tuple[list[int], list[torch.Tensor]]] = [([], []) for _ in group]

    def step(places: Sequence[int]) -> None:
        steps = [
            SequenceStep(names[i], tuple(written[i][0][-1:]) or group[i].prompt_ids, num_logits=1)
            for i in places
        ]
        for i, logits in zip(places, engine.forward(steps), strict=True):
            tokens, rows = written[i]
            probabilities = target_probabilities(logits, params)
            noise = RoundNoise(group[i].seed, rule, len(group[i].prompt_ids) + len(tokens))
            verdict = verdict_from_logits(logits, params, NO_HISTORY, EMPTY_PROPOSAL, noise)
            tokens.append(verdict.correction[0])
            rows.append(probabilities[0])

    try:
        for place in range(len(group)):  # One by one: prompts may be long.
            step([place])
        while going := [
            i
            for i, (tokens, _) in enumerate(written)
            if len(tokens) < group[i].max_tokens and tokens[-1] not in eos
        ]:
            step(going)
    finally:
        for name in names:
            engine.release(name)
    return written


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


def play_rounds(
    target: Engine, draft: Engine, asked: Sequence[Asked], num_draft_tokens: int, progress: Progress
) -> list[dict[str, Any]]:
    """Decodes every prompt in every way; the share of rounds that came to one of so many outcomes
    which the draft would have worked out before."""
    figures = []
    for rule, temperature in WAYS:
        fan_out = OutcomeModel()
        rounds: list[tuple[int, int | None]] = []
        for index, prompt in enumerate(asked):
            progress(f"{rule.value} at {temperature:g}, prompt {index + 1} of {len(asked)}")
            sampling = SamplingParams(temperature=temperature)
            with torch.inference_mode():
                rounds += _rounds(
                    target, draft, prompt, (sampling, rule), fan_out, num_draft_tokens
                )
        figures.append(way_figures(rule, temperature, rounds))
    return figures


def way_figures(
    rule: Rule, temperature: float, rounds: Sequence[tuple[int, int | None]]
) -> dict[str, Any]:
    """Of rounds: how many draft tokens were accepted, and the outcome's place among those that the
    draft plans for, the likeliest first; None = nowhere."""
    check(bool(rounds), "nothing was decoded")
    places = [place for _, place in rounds if place is not None]
    return {
        "rule": rule.value,
        "temperature": temperature,
        "num_rounds": len(rounds),
        "tokens_per_round": sum(accepted + 1 for accepted, _ in rounds) / len(rounds),
        "planned": {n: sum(place < n for place in places) / len(rounds) for n in OUTCOMES},
    }


def _hits_table(ways: Sequence[Mapping[str, Any]]) -> Any:
    return table(
        "rounds whose outcome is among the first that the draft plans for",
        ("rule", "temperature", "rounds", "tokens a round", *map(str, OUTCOMES)),
        [
            (
                way["rule"], f"{way['temperature']:g}", str(way["num_rounds"]),
                f"{way['tokens_per_round']:.2f}", *(f"{s:.2f}" for s in way["planned"].values()),
            )
            for way in ways
        ],
    )  # fmt: skip


def _rounds(
    target: Engine,
    draft: Engine,
    asked: Asked,
    way: tuple[SamplingParams, Rule],
    fan_out: OutcomeModel,
    num_draft_tokens: int,
) -> Iterator[tuple[int, int | None]]:
    """Decodes one prompt to the end; each round is guessed by what `fan_out` has learned so far,
    and then teaches it."""
    sampling, rule = way
    drafter, vocabulary = ModelDrafter(draft), DraftVocabulary.of(draft.info.logit_token_ids)
    eos = frozenset(target.info.eos_token_ids)
    committed = asked.prompt_ids

    def forward(engine: Engine, proposal: Proposal) -> torch.Tensor:
        """Logits after the committed tokens and after each draft token: [K + 1, N]."""
        engine.keep(_SEQUENCE, min(engine.length(_SEQUENCE), len(committed) - 1))
        tokens = (*committed[engine.length(_SEQUENCE) :], *proposal.token_ids)
        [logits] = engine.forward([SequenceStep(_SEQUENCE, tokens, len(proposal) + 1)])
        return logits

    try:
        while len(committed) < len(asked.prompt_ids) + asked.max_tokens:
            noise = RoundNoise(asked.seed, rule, len(committed))
            draft.keep(_SEQUENCE, min(draft.length(_SEQUENCE), len(committed) - 1))
            [proposal] = drafter.propose([
                DraftRequest(
                    session_id=_SEQUENCE, tenant="", token_ids=committed,
                    prompt_length=len(asked.prompt_ids), num_draft_tokens=num_draft_tokens,
                    sampling=sampling, rule=rule, noise=noise,
                )
            ])  # fmt: skip
            if isinstance(proposal, OutriderError):
                raise proposal
            if isinstance(proposal, Unended):
                raise InvariantError("a proposal without a deadline ends in its call")
            guesses = guess_outcomes(
                forward(draft, proposal), sampling, noise, proposal.token_ids, RANKS_MAX, vocabulary
            )
            logits = forward(target, proposal)
            verdict = verdict_from_logits(logits, sampling, NO_HISTORY, proposal, noise)
            uniforms = noise.accept_uniforms(len(proposal))
            outcome = decide(verdict, proposal.token_ids, rule, uniforms)
            place = outcome.num_accepted, guesses.rank(outcome.num_accepted, outcome.token_ids[-1])
            plan = [(o.num_accepted, o.rank) for o in fan_out.plan(guesses, LOOK_AHEAD_MAX)]
            fan_out.note(guesses, *place)
            yield outcome.num_accepted, plan.index(place) if place in plan else None
            committed = (*committed, *outcome.token_ids)
            if eos.intersection(outcome.token_ids):
                return
    finally:
        for engine in (target, draft):
            engine.release(_SEQUENCE)
