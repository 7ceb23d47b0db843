"""What a drafter would propose at each place of the target's texts, and the rounds that follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import LookupDrafter
from outrider.planning.replay import Attempt, Rounds, replay
from outrider.planning.survival import DraftedPlace, survival
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

from .plan_reading import Sample, Text

_SURE = DraftedPlace(1.0, 1.0)
_WRONG = DraftedPlace(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class DraftKind:
    """Who proposes, as a deployment would make it."""

    make_lookup: Callable[[], LookupDrafter] | None
    """A look-up without a history; None where a model alone drafts."""
    has_model: bool
    hybrid_min_score: float
    """Where both: the tokens that the look-up must expect to be accepted ..."""
    hybrid_model_tokens: int
    """... and those that the model draws, at most."""

    @property
    def looks_ahead(self) -> bool:
        """Whether that is planned: for a model alone. A hybrid can too."""
        return self.make_lookup is None


@dataclass(frozen=True, slots=True)
class Proposed:
    """At one place: by the look-up, or as many tokens of the model."""

    token_ids: tuple[int, ...] | None
    """None = by the model."""
    num_steps: int

    @property
    def num_tokens(self) -> int:
        """Proposed."""
        return self.num_steps if self.token_ids is None else len(self.token_ids)


class Script:
    """One drafter that goes through texts as it would through sessions, one after the other: what
    it may copy from earlier answers it has seen."""

    def __init__(self, kind: DraftKind, temperature: float) -> None:
        self._kind = kind
        self._lookup = None if kind.make_lookup is None else kind.make_lookup()
        self._sampling = SamplingParams(temperature=temperature)

    def proposed(
        self, text: Text, committed: Sequence[int], num_draft_tokens: int, rule: Rule
    ) -> Proposed:
        """What it proposes when so many tokens of `committed` follow the prompt of `text`."""
        if self._lookup is None:
            return Proposed(None, num_draft_tokens)
        token_ids = (*text.prompt_ids, *committed)
        guess = self._lookup.guess(
            DraftRequest(
                session_id=_session(text),
                tenant="",
                token_ids=token_ids,
                prompt_length=len(text.prompt_ids),
                num_draft_tokens=num_draft_tokens,
                sampling=self._sampling,
                rule=rule,
                noise=RoundNoise(text.seed, rule, len(token_ids)),
            )
        )
        if not self._kind.has_model or guess.score >= self._kind.hybrid_min_score:
            return Proposed(guess.token_ids, 0)
        return Proposed(None, min(num_draft_tokens, self._kind.hybrid_model_tokens))

    def end(self, text: Text) -> None:
        """The session of the text is over."""
        if self._lookup is not None:
            self._lookup.release(_session(text))

    def rounds(self, text: Text, rule: Rule, num_draft_tokens: int) -> Rounds:
        """The expected rounds of a text with this bound K, which ends with its session."""

        def attempt_at(start: int) -> Attempt:
            # As `coordinator.draft_length.policy`: one of the tokens to come is the target's.
            wanted = min(num_draft_tokens, text.max_tokens - start - 1)
            if wanted == 0:
                return Attempt(0, 0, ())
            found = self.proposed(text, text.token_ids[:start], wanted, rule)
            left = text.token_ids[start : start + found.num_tokens]
            if found.token_ids is None:
                places: Sequence[DraftedPlace] = text.places[start : start + len(left)]
            else:
                pairs = zip(found.token_ids, left, strict=False)
                places = [_SURE if ours == theirs else _WRONG for ours, theirs in pairs]
            return Attempt(found.num_tokens, found.num_steps, survival(rule, places))

        try:
            return replay(len(text.token_ids), attempt_at, len(text.prompt_ids))
        finally:
            self.end(text)


def scripted(
    kind: DraftKind, sample: Sample, rule: Rule, num_draft_tokens: int
) -> tuple[Rounds, ...]:
    """The expected rounds of each text, for a drafter that begins with the first of them."""
    script = Script(kind, sample.temperature)
    return tuple(script.rounds(text, rule, num_draft_tokens) for text in sample.texts)


def _session(text: Text) -> str:
    return f"plan-{text.seed}"
