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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

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
from outrider.speculation.accept_reject import Outcome, decide
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
from .report import table

if TYPE_CHECKING:
    from rich.console import Group

GREEDY: Final = SamplingParams(temperature=0.0)
SAMPLED: Final = SamplingParams(temperature=1.0)
FAN_OUTS: Final = (1, 2, 3, 5)
"""Guesses of each correction."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceReport:
    """The result of one `bench acceptance`."""

    model: str
    draft_model: str
    num_prompts: int
    max_tokens: int
    greedy: float
    """Share of the tokens at temperature 0 that are the draft's likeliest too."""
    sampled: float
    """Mean over the places at temperature 1 of sum min(p, q): a drawn draft token's chance."""
    by_position: tuple[float | None, ...]
    """At temperature 1, the chance that draft token i is accepted given that those before it were;
    None where no window came so far."""
    num_positions: int
    """Places at temperature 1."""
    num_positions_greedy: int
    by_category: Mapping[str, Mapping[str, float]]
    hits: Sequence[Mapping[str, Any]] | None = None
    """By rule and temperature, see `way_figures`; None = no rounds were played."""

    def values(self) -> dict[str, object]:
        """By names in JSON."""
        return asdict(self)

    def render(self) -> Group:
        """For people."""
        from rich.console import Group

        rows = [
            (name, f"{rates['greedy']:.3f}", f"{rates['sampled']:.3f}")
            for name, rates in self.by_category.items()
        ]
        shown = table(
            f"{self.draft_model} reads {self.model}: {self.num_positions} places",
            ("prompts", "greedy", "sampled"),
            [*rows, ("all", f"{self.greedy:.3f}", f"{self.sampled:.3f}")],
        )
        chances = ["-" if chance is None else f"{chance:.3f}" for chance in self.by_position]
        line = "sampled, by place in the proposal: " + " ".join(chances)
        return Group(shown, line, *([] if self.hits is None else [_hits_table(self.hits)]))


def summarise(
    options: AcceptanceOptions,
    found: Sequence[PromptAcceptance],
    hits: Sequence[Mapping[str, Any]] | None = None,
    *,
    model: str,
    draft_model: str,
) -> AcceptanceReport:
    """The report on all prompts; places count alike, whichever prompt they are of."""
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
    return AcceptanceReport(
        model=model,
        draft_model=draft_model,
        num_prompts=len(found),
        max_tokens=options.max_tokens,
        **_rates(found),
        by_position=acceptance_of_windows(windows, NUM_DEPTHS),
        num_positions=sum(len(entry.overlaps) for entry in found),
        num_positions_greedy=sum(len(entry.hits) for entry in found),
        by_category={name: _rates(entries) for name, entries in by_category.items()},
        hits=hits,
    )


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
        return [
            None if column is None else int((row > row[column]).sum())
            for row, column in zip(logits, columns, strict=True)
        ]

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


def measure(
    options: AcceptanceOptions,
    target: Engine,
    reader: Reader,
    encode: Encode,
    *,
    draft: Engine | None = None,
    draft_model: str,
    max_model_len: int,
    progress: Progress,
) -> AcceptanceReport:
    """Lets `target` write and `reader` read; with `--hits` plays rounds with the model `draft`.
    `max_model_len` is what both take. Raises `SettingError` for prompts that are wrong or too
    long."""
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
        readings = _read_group(target, reader, group)
        for prompt, (hits, depths) in zip(prompts[start:], readings, strict=False):
            overlaps = tuple(overlap for overlap, _ in depths[0])
            ratios = tuple(tuple(ratio for _, ratio in pairs) for pairs in depths)
            found.append(PromptAcceptance(prompt.category, hits, overlaps, ratios))
    played = None
    if options.hits:
        if draft is None:
            raise SettingError(
                "draft_model", f"{draft_model} does not guess outcomes; name a model for --hits"
            )
        played = play_rounds(target, draft, asked, options.num_draft_tokens, progress)
    return summarise(options, found, played, model=target.info.name, draft_model=draft_model)


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
        compared = [
            [_compare(*at) for at in zip(rows[depth:], tokens[depth:], supports, strict=True)]
            for depth, supports in enumerate(depths)
        ]
        yield hits, compared


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


@dataclass(frozen=True, slots=True)
class GuessedRound:
    """A round, and where what came of it stood among the guesses; None = nowhere."""

    num_accepted: int
    by_noise: int | None
    """The correction's place in the order of log q + g, from 0 ..."""
    by_q: int | None
    """... and of q."""
    planned: int | None
    """The whole outcome's place among those that a draft would work out."""


def play_rounds(
    target: Engine, draft: Engine, asked: Sequence[Asked], num_draft_tokens: int, progress: Progress
) -> list[dict[str, Any]]:
    """Decodes every prompt in every way."""
    figures = []
    for rule, temperature in WAYS:
        fan_out = OutcomeModel()
        rounds: list[GuessedRound] = []
        for index, prompt in enumerate(asked):
            progress(f"{rule.value} at {temperature:g}, prompt {index + 1} of {len(asked)}")
            session = _Session(target, draft, prompt, rule, temperature, num_draft_tokens)
            with torch.inference_mode():
                rounds += session.rounds(fan_out)
        figures.append(way_figures(rule, temperature, rounds))
    return figures


def way_figures(rule: Rule, temperature: float, rounds: Sequence[GuessedRound]) -> dict[str, Any]:
    """The share of rounds whose correction was among the first so many guesses, in the order of log
    q + g and of q; and of those whose whole outcome was among so many planned ones."""
    check(bool(rounds), "nothing was decoded")

    def shares(name: str, counts: Sequence[int]) -> dict[int, float]:
        places = [getattr(entry, name) for entry in rounds]
        return {n: sum(p is not None and p < n for p in places) / len(places) for n in counts}

    return {
        "rule": rule.value,
        "temperature": temperature,
        "num_rounds": len(rounds),
        "tokens_per_round": sum(entry.num_accepted + 1 for entry in rounds) / len(rounds),
        "by_noise": shares("by_noise", FAN_OUTS),
        "by_q": shares("by_q", FAN_OUTS),
        "planned": shares("planned", OUTCOMES),
    }


def _hits_table(ways: Sequence[Mapping[str, Any]]) -> Any:
    columns = {"log q + g": "by_noise", "q": "by_q", "outcomes": "planned"}
    counted = [f"{n}: {', '.join(map(str, ways[0][key]))}" for n, key in columns.items()]
    return table(
        "what a round comes to, among the first guesses",
        ("rule", "temperature", "rounds", "tokens a round", *counted),
        [
            (
                way["rule"], f"{way['temperature']:g}", str(way["num_rounds"]),
                f"{way['tokens_per_round']:.2f}",
                *(" ".join(f"{s:.2f}" for s in way[key].values()) for key in columns.values()),
            )
            for way in ways
        ],
    )  # fmt: skip


class _Session:
    """One prompt's completion in one way: draft and target in this process."""

    def __init__(
        self,
        target: Engine,
        draft: Engine,
        asked: Asked,
        rule: Rule,
        temperature: float,
        num_draft_tokens: int,
    ) -> None:
        self._target = target
        self._draft = draft
        self._drafter = ModelDrafter(draft)
        self._vocabulary = DraftVocabulary.of(draft.info.logit_token_ids)
        self._asked = asked
        self._committed = asked.prompt_ids
        self._rule = rule
        self._num_draft_tokens = num_draft_tokens
        self._sampling = SamplingParams(temperature=temperature)

    def rounds(self, fan_out: OutcomeModel) -> Iterator[GuessedRound]:
        """Decodes to the end; each round is guessed by what `fan_out` has learned so far, and then
        teaches it."""
        eos = frozenset(self._target.info.eos_token_ids)
        asked = self._asked
        try:
            while len(self._committed) < len(asked.prompt_ids) + asked.max_tokens:
                noise = RoundNoise(asked.seed, self._rule, len(self._committed))
                proposal = self._propose(noise)
                rows = self._run(self._draft, proposal)
                guesses = guess_outcomes(
                    rows, self._sampling, noise, proposal.token_ids, RANKS_MAX, self._vocabulary
                )
                outcome = self._outcome(proposal, noise)
                accepted, correction = outcome.num_accepted, outcome.token_ids[-1]
                by_noise = guesses.rank(accepted, correction)
                plan = [(o.num_accepted, o.rank) for o in fan_out.plan(guesses, LOOK_AHEAD_MAX)]
                place = (accepted, by_noise)
                fan_out.note(guesses, accepted, by_noise)
                refused = proposal.token_ids[accepted : accepted + 1]
                yield GuessedRound(
                    num_accepted=accepted,
                    by_noise=by_noise,
                    by_q=self._rank_by_q(rows[accepted], correction, refused),
                    planned=plan.index(place) if place in plan else None,
                )
                self._committed = (*self._committed, *outcome.token_ids)
                if eos.intersection(outcome.token_ids):
                    return
        finally:
            for engine in (self._target, self._draft):
                engine.release(_SEQUENCE)

    def _propose(self, noise: RoundNoise) -> Proposal:
        self._draft.keep(_SEQUENCE, min(self._draft.length(_SEQUENCE), len(self._committed) - 1))
        request = DraftRequest(
            session_id=_SEQUENCE,
            tenant="",
            token_ids=self._committed,
            prompt_length=len(self._asked.prompt_ids),
            num_draft_tokens=self._num_draft_tokens,
            sampling=self._sampling,
            rule=self._rule,
            noise=noise,
        )
        [proposal] = self._drafter.propose([request])
        if isinstance(proposal, OutriderError):
            raise proposal
        if isinstance(proposal, Unended):
            raise InvariantError("a proposal without a deadline ends in its call")
        return proposal

    def _run(self, engine: Engine, proposal: Proposal) -> torch.Tensor:
        """The model's logits after the committed tokens and after each draft token: [K + 1, N]."""
        engine.keep(_SEQUENCE, min(engine.length(_SEQUENCE), len(self._committed) - 1))
        tokens = (*self._committed[engine.length(_SEQUENCE) :], *proposal.token_ids)
        [logits] = engine.forward([SequenceStep(_SEQUENCE, tokens, len(proposal) + 1)])
        return logits

    def _outcome(self, proposal: Proposal, noise: RoundNoise) -> Outcome:
        logits = self._run(self._target, proposal)
        verdict = verdict_from_logits(logits, self._sampling, NO_HISTORY, proposal, noise)
        uniforms = noise.accept_uniforms(len(proposal))
        return decide(verdict, proposal.token_ids, self._rule, uniforms)

    def _rank_by_q(self, row: torch.Tensor, correction: int, refused: Sequence[int]) -> int | None:
        """The place of a token among those with the largest logits [N], without a refused one."""

        def columns(token_ids: Sequence[int]) -> list[int]:
            if self._vocabulary is None:
                return list(token_ids)
            return list(self._vocabulary.columns(token_ids)[1].tolist())

        own = columns([correction])
        if not own or own[0] >= len(row):
            return None
        larger = row > row[own[0]]
        return int(larger.count_nonzero()) - sum(int(larger[c]) for c in columns(refused))
