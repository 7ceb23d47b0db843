"""The reading behind `bench acceptance`: a target that writes, and drafts that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import torch

from outrider.drafting.drafter import Drafter, DraftRequest
from outrider.engine.interface import Engine, SequenceStep
from outrider.errors import SettingError
from outrider.limits import DRAFT_SUPPORT_ENTRIES, SEED_MAX
from outrider.speculation.drafting import quantise
from outrider.speculation.noise import RoundNoise
from outrider.speculation.proposal import COUNT_TOTAL, EMPTY_PROPOSAL, DraftDistribution
from outrider.speculation.reduced import ReducedVocabulary
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.scoring import score
from outrider.speculation.transforms import target_probabilities

from .acceptance import AcceptanceOptions, AcceptanceReport, PromptAcceptance, summarise
from .measurement import Progress

GREEDY: Final = SamplingParams(temperature=0.0)
SAMPLED: Final = SamplingParams(temperature=1.0)
_SEQUENCE: Final = "bench"

Encode = Callable[[str], Sequence[int]]
"""A prompt's token ids, under the chat template or without."""


class Reader(Protocol):
    """A draft that reads what the target wrote. [n] answers: one for each token of
    `token_ids[first:]`, from nothing but the tokens before it."""

    def likeliest(self, token_ids: Sequence[int], first: int) -> list[int | None]:
        """What it would propose at temperature 0; None = nothing."""
        ...

    def distributions(self, token_ids: Sequence[int], first: int) -> list[DraftDistribution | None]:
        """q as it goes on the wire, at temperature 1; None = it would propose nothing."""
        ...


class ModelReader:
    """A draft model: one prefill reads everything."""

    def __init__(self, engine: Engine, entries_max: int = DRAFT_SUPPORT_ENTRIES) -> None:
        self._engine = engine
        self._entries_max = entries_max
        self._vocabulary = ReducedVocabulary.of(engine.info.logit_token_ids)

    def likeliest(self, token_ids: Sequence[int], first: int) -> list[int | None]:
        """See `Reader.likeliest`."""
        columns = self._logits(token_ids, first).argmax(dim=1).cpu().numpy()
        known = self._vocabulary
        return list((columns if known is None else known.token_ids[columns]).tolist())

    def distributions(self, token_ids: Sequence[int], first: int) -> list[DraftDistribution | None]:
        """See `Reader.distributions`."""
        rows = target_probabilities(self._logits(token_ids, first), SAMPLED)
        return [quantise(row, self._entries_max, self._vocabulary) for row in rows]

    def _logits(self, token_ids: Sequence[int], first: int) -> torch.Tensor:
        step = SequenceStep(_SEQUENCE, tuple(token_ids[:-1]), num_logits=len(token_ids) - first)
        try:
            [logits] = self._engine.forward([step])
        finally:
            self._engine.release(_SEQUENCE)
        return logits


class LookupReader:
    """A drafter without distributions, such as prompt lookup: asked anew for one token at every
    place. What it proposes is a one-hot q."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._num_read = 0

    def likeliest(self, token_ids: Sequence[int], first: int) -> list[int | None]:
        """See `Reader.likeliest`."""
        return list(self._proposed(token_ids, first, GREEDY, Rule.GREEDY))

    def distributions(self, token_ids: Sequence[int], first: int) -> list[DraftDistribution | None]:
        """See `Reader.distributions`."""
        return [
            None if token_id is None else DraftDistribution((token_id,), (COUNT_TOTAL,))
            for token_id in self._proposed(token_ids, first, SAMPLED, Rule.TOKEN)
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
    found = []
    for index, prompt in enumerate(prompts):
        progress(f"prompt {index + 1} of {len(prompts)}: {prompt.category}")
        ids = tuple(encode(prompt.text))
        room = max_model_len - len(ids)
        if not ids or room < 1:
            raise SettingError(
                "prompts",
                f"number {index + 1} has {len(ids)} tokens; 1 to {max_model_len - 1} leave room "
                "for a completion",
            )
        seed = (options.seed + index) & SEED_MAX
        max_tokens = min(options.max_tokens, room)
        found.append(_measure_prompt(prompt.category, target, reader, ids, seed, max_tokens))
    return summarise(options, found, model=target.info.name, draft_model=draft_model)


def _measure_prompt(
    category: str, target: Engine, reader: Reader, ids: tuple[int, ...], seed: int, max_tokens: int
) -> PromptAcceptance:
    with torch.inference_mode():
        written, _ = write(target, ids, GREEDY, RoundNoise(seed, Rule.GREEDY, 0), max_tokens)
        likeliest = reader.likeliest((*ids, *written), len(ids))
        hits = tuple(ours == theirs for ours, theirs in zip(likeliest, written, strict=True))
        drawn, rows = write(target, ids, SAMPLED, RoundNoise(seed, Rule.TOKEN, 0), max_tokens)
        supports = reader.distributions((*ids, *drawn), len(ids))
        pairs = [
            _compare(row, token_id, q)
            for row, token_id, q in zip(rows, drawn, supports, strict=True)
        ]
    return PromptAcceptance(
        category, hits, tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    )


def write(
    engine: Engine,
    prompt_ids: tuple[int, ...],
    params: SamplingParams,
    noise: RoundNoise,
    max_tokens: int,
) -> tuple[list[int], list[torch.Tensor]]:
    """The engine's own completion, and p [V] of each of its tokens. `noise` gives seed and rule."""
    eos = frozenset(engine.info.eos_token_ids)
    completion: list[int] = []
    rows: list[torch.Tensor] = []
    step = SequenceStep(_SEQUENCE, prompt_ids, num_logits=1)
    try:
        while True:
            [logits] = engine.forward([step])
            probabilities = target_probabilities(logits, params)
            place = RoundNoise(noise.seed, noise.rule, len(prompt_ids) + len(completion))
            token_id = score(probabilities, EMPTY_PROPOSAL, place).correction[0]
            completion.append(token_id)
            rows.append(probabilities[0])
            if token_id in eos or len(completion) == max_tokens:
                return completion, rows
            step = SequenceStep(_SEQUENCE, (token_id,), num_logits=1)
    finally:
        engine.release(_SEQUENCE)


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
