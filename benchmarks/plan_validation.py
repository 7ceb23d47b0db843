"""The last part of `outrider plan`: the sample's prompts through a deployment, at every K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.table import Table
from rich.text import Text

from outrider.client import Client
from outrider.errors import check
from outrider.limits import NUM_DRAFT_TOKENS_MAX, SEED_MAX
from outrider.planning.replay import Rounds, total
from outrider.planning.round_times import Load, ServiceTimes
from outrider.speculation.sampling_params import Rule
from outrider.speculation.text_acceptance import NUM_DEPTHS

from .measurement import Progress
from .plan_reading import Sample
from .plan_rehearsal import unread_tokens
from .plan_sessions import PlayedSession, play

REACHED_MIN: Final = 50
"""Rounds that came to a depth, for what was accepted there to be compared."""
WARM_UP_TOKENS: Final = 4


@dataclass(frozen=True, slots=True)
class ValidatedK:
    """One K, predicted and measured. 0 is plain decoding."""

    num_draft_tokens: int
    predicted_tokens_per_second: float
    """With prompts that were read before: each K finds them so."""
    measured_tokens_per_second: float
    predicted_tokens_per_round: float
    measured_tokens_per_round: float
    predicted_by_position: tuple[float | None, ...]
    measured_by_position: tuple[float | None, ...]
    reached: tuple[int, ...]
    """Rounds that came to each depth."""

    @property
    def error(self) -> float:
        """Of the tokens a second, as a share of those measured."""
        return self.predicted_tokens_per_second / self.measured_tokens_per_second - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """All that was tried."""

    temperature: float
    rule: Rule
    chosen_num_draft_tokens: int
    by_k: tuple[ValidatedK, ...]
    num_same: int
    """Answers that were the ones that were read, over all K; all of them but for near ties."""
    num_answers: int

    @property
    def worst_error(self) -> float:
        """Of the tokens a second, over all K."""
        return max((abs(entry.error) for entry in self.by_k), default=0.0)

    @property
    def worst_position(self) -> float | None:
        """The largest difference in acceptance at a depth that enough rounds came to."""
        return max(
            (
                abs(ours - theirs)
                for entry in self.by_k
                for ours, theirs, number in zip(
                    entry.predicted_by_position,
                    entry.measured_by_position,
                    entry.reached,
                    strict=True,
                )
                if number >= REACHED_MIN and ours is not None and theirs is not None
            ),
            default=None,
        )

    @property
    def best(self) -> ValidatedK:
        """The fastest that was measured."""
        return max(self.by_k, key=lambda entry: entry.measured_tokens_per_second)

    @property
    def loss(self) -> float:
        """What the chosen K is slower than the best one, as a share of that."""
        chosen = next(e for e in self.by_k if e.num_draft_tokens == self.chosen_num_draft_tokens)
        return 1.0 - chosen.measured_tokens_per_second / self.best.measured_tokens_per_second

    def values(self) -> dict[str, object]:
        """All of it, by its names in JSON."""
        return asdict(self) | {
            "worst_error": self.worst_error,
            "worst_position": self.worst_position,
            "best_num_draft_tokens": self.best.num_draft_tokens,
            "chosen_loss": self.loss,
        }

    def tables(self) -> list[Table | Text]:
        """For people."""
        table = Table(
            title=f"Predicted and measured, temperature {self.temperature:g}, {self.rule.value}, "
            "prompts read before"
        )
        for heading in ("K", "predicted tokens/s", "measured", "error", "a round", "measured"):
            table.add_column(heading, justify="right")
        for entry in self.by_k:
            table.add_row(
                str(entry.num_draft_tokens), f"{entry.predicted_tokens_per_second:.1f}",
                f"{entry.measured_tokens_per_second:.1f}", f"{entry.error:+.1%}",
                f"{entry.predicted_tokens_per_round:.2f}",
                f"{entry.measured_tokens_per_round:.2f}",
            )  # fmt: skip
        worst = "-" if self.worst_position is None else f"{self.worst_position:.3f}"
        return [
            table,
            self._positions(),
            Text(
                f"tokens/s are off by {self.worst_error:.1%} at most, acceptance at a position by "
                f"{worst}; K = {self.chosen_num_draft_tokens} is {self.loss:.1%} slower than the "
                f"best, K = {self.best.num_draft_tokens}; {self.num_same} of {self.num_answers} "
                "answers are the ones that were read"
            ),
        ]

    def _positions(self) -> Table:
        table = Table(title=f"Accepted, predicted/measured, where {REACHED_MIN} rounds came")
        table.add_column("K", justify="right")
        for depth in range(1, NUM_DEPTHS + 1):
            table.add_column(str(depth), justify="right")
        for entry in self.by_k:
            if entry.num_draft_tokens == 0:
                continue
            cells = [
                f"{ours:.2f}/{theirs:.2f}"
                if number >= REACHED_MIN and ours is not None and theirs is not None
                else "-"
                for ours, theirs, number in zip(
                    entry.predicted_by_position[:NUM_DEPTHS],
                    entry.measured_by_position[:NUM_DEPTHS],
                    entry.reached[:NUM_DEPTHS],
                    strict=True,
                )
            ]
            table.add_row(str(entry.num_draft_tokens), *cells)
        return table


class Trial:
    """Plays the prompts of one sample through deployments."""

    def __init__(self, sample: Sample, rule: Rule, progress: Progress) -> None:
        self._sample = sample
        self._rule = rule
        self._progress = progress
        self._sessions: dict[int, list[PlayedSession]] = {}

    async def run(self, client: Client, counts: Sequence[int]) -> None:
        """Every prompt at each K of `counts`, the order of which turns round with each prompt.
        Before, each prompt is read once: then all find it alike."""
        texts = self._sample.texts
        self._progress("warming up: every prompt is read")
        for index, _ in enumerate(texts):
            # Seeds that no prompt has, as the second session of a seed may be drafted otherwise.
            seed = (texts[0].seed - 1 - index) & SEED_MAX
            await self._play(client, index, max(counts), WARM_UP_TOKENS, seed)
        for index, text in enumerate(texts):
            self._progress(f"prompt {index + 1} of {len(texts)}: {text.category}")
            for k in counts if index % 2 == 0 else reversed(counts):
                self.note(await self._play(client, index, k, text.max_tokens, text.seed))

    def note(self, session: PlayedSession) -> None:
        """The next text's session of its K has been played."""
        self._sessions.setdefault(session.num_draft_tokens, []).append(session)

    async def _play(
        self, client: Client, index: int, k: int, max_tokens: int, seed: int
    ) -> PlayedSession:
        return await play(
            client,
            self._sample.texts[index],
            temperature=self._sample.temperature,
            rule=self._rule,
            num_draft_tokens=k,
            max_tokens=min(max_tokens, self._sample.texts[index].max_tokens),
            seed=seed,
        )

    def compared(
        self, predicted: dict[int, tuple[Rounds, ...]], times: ServiceTimes, chosen: int
    ) -> Validation:
        """What was played beside what `predicted` [K][texts] says."""
        texts = self._sample.texts
        pairs = [
            (text, session)
            for sessions in self._sessions.values()
            for text, session in zip(texts, sessions, strict=True)
        ]
        return Validation(
            temperature=self._sample.temperature,
            rule=self._rule,
            chosen_num_draft_tokens=chosen,
            by_k=tuple(
                self._compare(k, total(predicted[k]), times) for k in sorted(self._sessions)
            ),
            num_same=sum(text.token_ids == session.token_ids for text, session in pairs),
            num_answers=len(pairs),
        )

    def _compare(self, k: int, predicted: Rounds, times: ServiceTimes) -> ValidatedK:
        sessions = self._sessions[k]
        rows = [unread_tokens(len(text.prompt_ids)) for text in self._sample.texts]
        timed = times.plain_seconds if k == 0 else times.drafted_seconds
        seconds = times.first_seconds(rows) + timed(predicted, Load())
        reached, accepted = _positions(sessions)
        num_tokens = sum(len(session.token_ids) for session in sessions)
        num_rounds = sum(len(session.rounds) for session in sessions)
        check(num_rounds > 0, "tokens were committed without a round")
        return ValidatedK(
            num_draft_tokens=k,
            predicted_tokens_per_second=predicted.num_tokens / seconds,
            measured_tokens_per_second=num_tokens / sum(s.seconds for s in sessions),
            predicted_tokens_per_round=predicted.tokens_per_round,
            measured_tokens_per_round=num_tokens / num_rounds,
            predicted_by_position=predicted.by_position(),
            measured_by_position=tuple(
                taken / came if came else None
                for taken, came in zip(accepted, reached, strict=True)
            ),
            reached=tuple(reached),
        )


def _positions(sessions: Sequence[PlayedSession]) -> tuple[list[int], list[int]]:
    """Of each depth, how often a round came to it and how often it was accepted. Behind the end of
    an answer nothing is reached."""
    reached, accepted = ([0] * NUM_DRAFT_TOKENS_MAX for _ in range(2))
    for session in sessions:
        left = len(session.token_ids)
        for entry in session.rounds:
            num_reached = min(entry.num_accepted + 1, entry.num_proposed, left)
            for depth in range(num_reached):
                reached[depth] += 1
                accepted[depth] += depth < entry.num_accepted
            left -= len(entry.token_ids)
    return reached, accepted
