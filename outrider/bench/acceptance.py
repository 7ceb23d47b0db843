"""Measures how much of the target's text a draft would have proposed, for `outrider bench
acceptance` and `outrider plan`. The target answers every prompt, and the draft then reads each
answer once. No times are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from draft_service.model_drafter import parallel_token
from outrider.config.deployment import DeploymentConfig
from outrider.drafters.drafter import DraftRequest
from outrider.errors import SettingError
from outrider.interfaces.engine import Engine, SequenceStep
from outrider.limits import DRAFT_SUPPORT_ENTRIES, LOOK_AHEAD_MAX
from outrider.models.tokenizer import TokenizerText
from outrider.replica.engines import build_engine
from outrider.replica.lookups import build_lookup
from outrider.replica.threads import available_cores
from outrider.speculation.draft_sampling import quantise
from outrider.speculation.logits_processing import DraftVocabulary, target_probabilities
from outrider.speculation.outcome_prediction import RANKS_MAX
from outrider.speculation.proposal import COUNT_TOTAL, EMPTY_PROPOSAL, DraftDistribution
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import NO_HISTORY, Rule, SamplingParams
from outrider.speculation.text_acceptance import conditional_acceptance
from outrider.speculation.verification import VerifyInput, verdicts_from_logits

from .measurement import Progress
from .options import AcceptanceOptions, PromptOptions
from .prompts import BenchPrompt, encoder
from .report import Report

SAMPLED = SamplingParams(temperature=1.0)
SAMPLED_RULES = (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)
OUTCOMES = (4, 8, 12, 16, 24)
"""Numbers of predicted outcomes for which `--hits` reports the hit rate."""
AT_ONCE = 8
"""Number of prompts decoded together. It is small, because p [V] of each token stays in memory."""
_SEQUENCE = "bench"

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the target, and how well the draft predicted its tokens."""

    category: str
    seed: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    token_ids: tuple[int, ...] = ()
    """The answer's tokens, including the EOS."""
    ratios: tuple[float, ...] = ()
    """q(x) / p(x) for each token x of the answer. At temperature 0, the ratio is 1 if x is the
    draft's likeliest token, and otherwise 0."""
    overlaps: tuple[float, ...] = ()
    """At each token of the answer, the sum of min(p(v), q(v)) over all tokens v."""
    matches: tuple[float, ...] = ()
    """For each token x of the answer, P(the draft draws x | the target draws x), if both draw with
    the same noise."""

    def steps(self, rule: Rule) -> tuple[float, ...]:
        """`matches` under coupled, `ratios` under other rules. Except under block, min(1, entry i)
        is the estimated chance that a draft token in the place of token i is accepted."""
        return self.matches if rule is Rule.COUPLED else self.ratios


class Guessing:
    """How well a draft guesses corrections (`recovery`) and bonus tokens (`bonus`) under one rule.
    Entry i counts tokens guessed at rank i. The last entry counts all other tokens. Under token and
    block, `recovery` counts x with the weight 1 - q(x) / p(x), the chance of x as a correction."""

    def __init__(self) -> None:
        self.recovery, self.bonus = np.zeros(RANKS_MAX + 1), np.zeros(RANKS_MAX + 1)

    def hit_rates(self, accepted: Sequence[float]) -> tuple[float, ...]:
        """Entry n - 1 is the chance that a round's outcome is among the n outcomes that the draft
        finds likeliest, for n up to `LOOK_AHEAD_MAX`. `accepted` [K] has each draft token's chance
        of acceptance, given that all earlier draft tokens were accepted. A deployment's
        `OutcomeModel` predicts better, because it also uses the round's own q."""
        recovery, bonus = (
            counts[:-1] / max(counts.sum(), 1e-300) for counts in (self.recovery, self.bonus)
        )
        reached = np.cumprod([1.0, *accepted])
        refused = reached[:-1] * (1 - np.asarray(accepted))
        chances = np.concatenate([np.outer(refused, recovery).ravel(), reached[-1] * bonus])
        return tuple(np.cumsum(np.sort(chances)[::-1][:LOOK_AHEAD_MAX]).tolist())


def note_guess(counts: Array, rank: int | None, weight: float = 1.0) -> None:
    counts[RANKS_MAX if rank is None else min(rank, RANKS_MAX)] += weight


@dataclass(frozen=True, slots=True)
class Sample:
    """All answers at one temperature."""

    temperature: float
    texts: tuple[Answer, ...]
    guessing: Mapping[Rule, Guessing]

    def by_position(self, rule: Rule) -> tuple[float | None, ...]:
        """Entry i is the chance that draft token i + 1 is accepted, given that all earlier draft
        tokens were accepted. The chance is a mean over chains of draft tokens. One chain starts
        at each token of the answers. None = no chain has i + 1 tokens. `rule` must not be block."""
        return conditional_acceptance(
            [np.minimum(text.steps(rule), 1.0).tolist() for text in self.texts]
        )


def rules_at(temperature: float) -> tuple[Rule, ...]:
    """The rules to measure. At temperature 0, every rule is greedy."""
    return (Rule.GREEDY,) if SamplingParams(temperature=temperature).greedy else SAMPLED_RULES


class ModelReader:
    """A draft model that reads an answer of the target in one forward pass."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.max_model_len = engine.info.max_model_len

    def distributions(
        self, token_ids: Sequence[int], first: int, params: SamplingParams = SAMPLED
    ) -> list[DraftDistribution | None]:
        """The draft's quantised q at each place of `token_ids[first:]`. At temperature 0, only the
        order of q's tokens matters, so this method returns q at temperature 1."""
        vocabulary = DraftVocabulary.of(self._engine.info.logit_token_ids)
        step = SequenceStep(_SEQUENCE, tuple(token_ids[:-1]), len(token_ids) - first)
        try:
            [logits] = self._engine.forward([step])
        finally:
            self._engine.release(_SEQUENCE)
        return [
            quantise(row, DRAFT_SUPPORT_ENTRIES, vocabulary)
            for row in target_probabilities(logits, SAMPLED if params.greedy else params)
        ]


class LookupReader:
    """Asks `suffix` or `ngram` for a token at each place. q is one-hot; None = no token."""

    max_model_len = 2**31

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self._num_read = 0

    def distributions(
        self, token_ids: Sequence[int], first: int, params: SamplingParams = SAMPLED
    ) -> list[DraftDistribution | None]:
        # Every answer is a session with its own seed, as in a deployment. Each temperature has its
        # own tenant, because `suffix` copies from earlier answers to the same tenant.
        self._num_read += 1
        name = f"{_SEQUENCE}-{self._num_read}"
        rule = Rule.GREEDY if params.greedy else Rule.TOKEN
        drafts: list[DraftDistribution | None] = []
        for length in range(first, len(token_ids)):
            noise = RoundNoise(self._num_read, rule, length)
            request = DraftRequest(
                name, f"{params.temperature}", token_ids[:length], first, 1, params, rule, noise
            )
            drafted = self._drafter.guess(request).token_ids
            drafts.append(DraftDistribution(drafted, (COUNT_TOTAL,)) if drafted else None)
        self._drafter.release(name)
        return drafts


def decode(
    engine: Any, asked: Sequence[Answer], params: SamplingParams, rule: Rule, eos: Sequence[int]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Decodes answers together, without drafts. For each new token, yields the index of the answer
    in `asked`, the token, and the logits [1, V]."""
    names = [f"{_SEQUENCE}-{i}" for i in range(len(asked))]
    new = {i: each.prompt_ids for i, each in enumerate(asked)}
    try:
        # Each prompt has its own step, because several long prompts may not fit into one step.
        for i, each in enumerate(asked if len(asked) > 1 else ()):
            if len(each.prompt_ids) > 1:
                engine.forward([SequenceStep(names[i], each.prompt_ids[:-1], num_logits=0)])
                new[i] = each.prompt_ids[-1:]
        while new:
            going = tuple(new)
            logits = engine.forward([SequenceStep(names[i], new[i], num_logits=1) for i in going])
            noises = [RoundNoise(asked[i].seed, rule, engine.length(names[i])) for i in going]
            rows = zip(logits, noises, strict=True)
            verdicts = verdicts_from_logits(
                [VerifyInput(row, params, NO_HISTORY, EMPTY_PROPOSAL, noise) for row, noise in rows]
            )
            for i, row, noise, verdict in zip(going, logits, noises, verdicts, strict=True):
                new[i] = verdict.correction
                num_written = noise.committed_length + 1 - len(asked[i].prompt_ids)
                if new[i][0] in eos or num_written == asked[i].max_tokens:
                    del new[i]
                yield i, verdict.correction[0], row
    finally:
        for name in names:
            engine.release(name)


def write(
    engine: Any, asked: Sequence[Answer], params: SamplingParams
) -> list[tuple[list[int], list[torch.Tensor]]]:
    """Returns the tokens of each answer, and p [V] at each token."""
    rule = Rule.GREEDY if params.greedy else Rule.COUPLED
    written: list[tuple[list[int], list[torch.Tensor]]] = [([], []) for _ in asked]
    for i, token_id, logits in decode(engine, asked, params, rule, engine.info.eos_token_ids):
        written[i][0].append(token_id)
        written[i][1].append(target_probabilities(logits, params)[0])
    return written


def load_reading(config: DeploymentConfig, options: PromptOptions, progress: Progress) -> Reading:
    """Loads the prompts, the target and its drafter. Raises `ConfigError`."""
    draft, lookup = config.draft, build_lookup(config.draft)
    wrong = ""
    if draft.drafter.kind:
        wrong = "it must not read the target's hidden states"
    elif parallel_token(draft) is not None:
        wrong = "it drafts several tokens in one pass; use a model that drafts one token a pass"
    if wrong:
        hint = "(`outrider bench speedup` shows the acceptance of any drafter)"
        raise SettingError("draft_model", f"{draft.model} is wrong; {wrong} {hint}")
    prompts = options.load_prompts()  # A wrong file is refused before models are loaded.
    num_threads = config.target.num_threads or available_cores()
    progress("loading the target")
    target = build_engine(config.target, num_threads)
    text = TokenizerText.load(Path(config.target.directory), config.target.model)
    encode, name, reader = encoder(text, options.raw), draft.model, None
    if draft.drafter.name:
        progress("loading the draft")
        reader = ModelReader(build_engine(draft, draft.num_threads or num_threads))
        name = f"the model of {name}" if lookup is not None else name
    reads = reader or LookupReader(lookup)
    return Reading(target, reads, name, prompts, encode, options.max_tokens)


class Reading:
    """Lets the draft read the target's answers to prompts."""

    def __init__(
        self,
        target: Engine,
        reader: ModelReader | LookupReader,
        name: str,
        prompts: Sequence[BenchPrompt],
        encode: Callable[[str], Sequence[int]],
        max_tokens: int,
    ) -> None:
        """`name` is the draft's name. Raises `SettingError` for empty or too long prompts."""
        self.target, self.reader, self.name = target, reader, name
        self._generator = np.random.default_rng(0)
        self._asked: list[Answer] = []
        most = min(target.info.max_model_len, reader.max_model_len)
        for index, prompt in enumerate(prompts):
            ids = tuple(encode(prompt.text))
            if not 0 < len(ids) < most:
                raise SettingError(
                    "prompts",
                    f"prompt {index + 1} has {len(ids)} tokens; it must have 1 to {most - 1} to "
                    "leave room for an answer",
                )
            room = min(max_tokens, most - len(ids))
            self._asked.append(Answer(prompt.category, index, ids, room))

    @torch.inference_mode()
    def sample(self, temperature: float, progress: Progress) -> Sample:
        params = SamplingParams(temperature=temperature)
        guessing = {rule: Guessing() for rule in rules_at(temperature)}
        texts = []
        for start in range(0, len(self._asked), AT_ONCE):
            group = self._asked[start : start + AT_ONCE]
            number = f"prompts {start + 1} to {start + len(group)} of {len(self._asked)}"
            progress(f"temperature {temperature:g}, {number}")
            written = write(self.target, group, params)
            for asked, (token_ids, rows) in zip(group, written, strict=True):
                ids = (*asked.prompt_ids, *token_ids)
                drafted = self.reader.distributions(ids, len(asked.prompt_ids), params)
                places = [
                    self._place(*each, params, guessing)
                    for each in zip(rows, token_ids, drafted, strict=True)
                ]
                ratios, overlaps, matches = zip(*places, strict=True)
                texts.append(
                    replace(
                        asked,
                        token_ids=tuple(token_ids),
                        ratios=ratios,
                        overlaps=overlaps,
                        matches=matches,
                    )
                )
        return Sample(temperature, tuple(texts), guessing)

    def _place(
        self,
        row: torch.Tensor,
        token_id: int,
        q: DraftDistribution | None,
        params: SamplingParams,
        guessing: Mapping[Rule, Guessing],
    ) -> tuple[float, float, float]:
        """Returns a token's ratio, overlap and match (see `Answer`). `row` [V] is p at its place.
        Adds the token's rank among the draft's guesses to `guessing`, once as a bonus, and
        once as a correction of a rejected draft token. Under greedy and coupled, the rejected token
        is the draft's own draw at this place. Otherwise, this function draws it."""
        drafted, counts = (q.token_ids, q.counts) if q is not None else ((), ())
        rank = drafted.index(token_id) if token_id in drafted else None
        if params.greedy:
            drafted, counts = drafted[:1], counts and (COUNT_TOTAL,)
        ours, theirs, own = _both(row, token_id, drafted, counts)
        ratio, overlap = float(theirs[own] / ours[own]), float(np.minimum(ours, theirs).sum())
        if not params.greedy:
            rank = race_rank(ours, theirs, own, self._generator)
        lost, residual = np.maximum(theirs - ours, 0.0), np.maximum(ours - theirs, 0.0)
        for rule, guesses in guessing.items():
            note_guess(guesses.bonus, rank)
            if rule in (Rule.GREEDY, Rule.COUPLED):
                if rank != 0:
                    note_guess(guesses.recovery, rank and rank - 1)
            elif lost.sum() > 0.0 and ratio < 1.0:
                refused = int(self._generator.choice(len(lost), p=lost / lost.sum()))
                # 1 - overlap is the sum of the residual over all tokens.
                left = residual / (1.0 - overlap)
                after = race_rank(left, theirs, own, self._generator, refused)
                note_guess(guesses.recovery, after, 1.0 - ratio)
        return ratio, overlap, matched(ours, theirs, own)


def _both(
    row: torch.Tensor, token_id: int, drafted: Sequence[int], counts: Sequence[int]
) -> tuple[Array, Array, int]:
    """Returns p and q of the drafted tokens and of `token_id`, and the index of `token_id` in both
    arrays. `row` is p [V]. p is 0 for tokens beyond V."""
    ids = np.union1d(np.array(drafted, dtype=np.int64), [token_id])
    ours, theirs = np.zeros((2, len(ids)))
    known = ids < len(row)
    ours[known] = row[torch.from_numpy(ids[known])].double().cpu().numpy()
    theirs[np.searchsorted(ids, drafted)] = np.array(counts) / COUNT_TOTAL
    return ours, theirs, int(np.searchsorted(ids, token_id))


def matched(p: Array, q: Array, own: int) -> float:
    """P(argmax(log q + g) = x | argmax(log p + g) = x) for Gumbel noise g and the token x at index
    `own`. The chance that both draws are x is 1 / sum_v max(p_v / p_x, q_v / q_x) (Daliri et al.,
    arXiv 2408.07978). The chance that the draw from p is x is p_x. `p` and `q` may omit
    tokens v != x with q_v = 0, so `p` may sum to less than 1."""
    if q[own] <= 0:
        return 0.0
    both = np.maximum(p, q * (p[own] / q[own])).sum() + max(0.0, 1.0 - p.sum())
    return min(1.0, 1.0 / float(both))


def race_rank(
    p: Array, q: Array, winner: int, generator: np.random.Generator, refused: int | None = None
) -> int | None:
    """The rank, from 0, of the token at index `winner` among the draft's guesses; None if the
    token's q is 0.

    In an exponential race over `p`, token v arrives at time noise_v / p_v. This function draws the
    noise of a race that `winner` has won. The draft's guesses are the tokens in the order in which
    they arrive in a race over `q` with the same noise. The token at index `refused` is skipped. `p`
    and `q` [N] may omit tokens whose q is 0."""
    if q[winner] <= 0:
        return None
    first = generator.exponential()
    noise = p * first + generator.exponential(size=len(p))
    noise[winner] = p[winner] * first
    with np.errstate(divide="ignore"):
        arrival = np.where(q > 0, noise / q, np.inf)
    earlier = arrival < arrival[winner]
    if refused is not None:
        earlier[refused] = False
    return int(earlier.sum())


def run(options: AcceptanceOptions, config: DeploymentConfig, progress: Progress) -> Report:
    return measure(options, load_reading(config, options, progress), progress)


def measure(options: AcceptanceOptions, reading: Reading, progress: Progress) -> Report:
    """Returns the figures, in which all tokens of the answers have equal weight.

    greedy       at temperature 0: share of tokens that the draft also finds likeliest
    sampled      at temperature 1: mean of sum_v min(p(v), q(v)) over the answers' tokens
    by_position  at temperature 1: chance that draft token 1, 2, ... is accepted, given that all
                 earlier draft tokens were accepted
    hits         chance that the outcome of a round of K draft tokens is among the 4, 8, ...
                 outcomes that the draft finds likeliest
    """
    if options.hits and not isinstance(reading.reader, ModelReader):
        raise SettingError("hits", f"needs a draft model; {reading.name} predicts no outcomes")
    greedy, sampled = (reading.sample(temperature, progress) for temperature in (0.0, 1.0))

    def overlaps(sample: Sample, category: str | None) -> list[float]:
        texts = (text for text in sample.texts if category in (None, text.category))
        return [overlap for text in texts for overlap in text.overlaps]

    def shares(category: str | None) -> dict[str, float]:
        samples = {"greedy": greedy, "sampled": sampled}
        return {name: mean(overlaps(sample, category)) for name, sample in samples.items()}

    def hits(sample: Sample, rule: Rule) -> dict[str, float]:
        accepted = [chance or 0.0 for chance in sample.by_position(rule)]
        rates = sample.guessing[rule].hit_rates(accepted[: options.num_draft_tokens])
        return {str(number): rates[number - 1] for number in OUTCOMES}

    rules = {Rule.GREEDY: greedy, Rule.TOKEN: sampled, Rule.COUPLED: sampled}
    all_hits = {rule.value: hits(sample, rule) for rule, sample in rules.items()}
    values = {
        "model": reading.target.info.name,
        "draft_model": reading.name,
        "num_prompts": len(sampled.texts),
        "max_tokens": options.max_tokens,
        **shares(None),
        "by_position": sampled.by_position(Rule.TOKEN),
        "num_positions": len(overlaps(sampled, None)),
        "by_category": {text.category: shares(text.category) for text in sampled.texts},
        "hits": all_hits if options.hits else None,
    }
    return Report.of("How much of the target's text is drafted", values)
