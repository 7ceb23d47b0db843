"""What has been said in a chat, and the figures of its answers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from outrider.request import ChatMessage, Prompt

if TYPE_CHECKING:
    from outrider.client import Completion


class Conversation:
    """The turns so far. A question counts only once it has been answered."""

    def __init__(self, system: str | None, *, raw: bool) -> None:
        """`raw`: without the model's template; a prompt is then all text so far."""
        self._system = system
        self._raw = raw
        self._turns: list[ChatMessage] = []

    def __len__(self) -> int:
        """Messages of both sides."""
        return len(self._turns)

    def prompt(self, question: str) -> Prompt:
        """What to ask for the next answer."""
        if self._raw:
            before = [] if self._system is None else [self._system]
            return "\n".join([*before, *(turn.content for turn in self._turns), question])
        system = [] if self._system is None else [ChatMessage("system", self._system)]
        return (*system, *self._turns, ChatMessage("user", question))

    def add(self, question: str, answer: str) -> None:
        """Keeps a question with its answer, or as much of that as came."""
        self._turns += [ChatMessage("user", question), ChatMessage("assistant", answer)]

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._turns.clear()


class Figures:
    """Sums over the answers of a chat, those before a reset too."""

    def __init__(self) -> None:
        self._num_answers = 0
        self._num_broken_off = 0
        self._num_tokens = 0
        self._num_rounds = 0
        self._num_proposed = 0
        self._num_accepted = 0
        self._seconds = 0.0
        self._origins: Counter[str] = Counter()
        self._last: Completion | None = None

    def add(self, completion: Completion, seconds: float) -> None:
        """Counts an answer that took so long, from the request to its last event."""
        self._num_answers += 1
        self._num_tokens += completion.usage.completion_tokens
        self._num_rounds += completion.metrics.num_rounds
        self._num_proposed += completion.metrics.num_draft_tokens
        self._num_accepted += completion.metrics.num_accepted_draft_tokens
        self._seconds += seconds
        self._origins.update(str(origin) for origin in completion.origins)
        self._last = completion

    def add_broken_off(self) -> None:
        """Counts an answer that was interrupted, whose figures never came."""
        self._num_broken_off += 1

    def lines(self) -> list[str]:
        """For people to read."""
        broken = f" and {self._num_broken_off} broken off" if self._num_broken_off else ""
        if self._last is None:
            return [f"no answers{broken} yet" if not broken else f"no whole answers{broken}"]
        last = self._last
        rounds = self._num_rounds
        rate = self._num_tokens / self._seconds if self._seconds else 0.0
        share = f"{self._num_accepted / self._num_proposed:.0%}" if self._num_proposed else "none"
        origins = ", ".join(f"{count} {name}" for name, count in sorted(self._origins.items()))
        return [
            f"{self._num_answers} answers{broken}: {self._num_tokens} tokens ({origins})",
            f"{rate:.1f} tokens/s; {rounds} rounds, "
            f"{self._num_tokens / rounds if rounds else 0:.2f} tokens per round; "
            f"acceptance {share} of {self._num_proposed} draft tokens",
            f"last answer: {last.usage.prompt_tokens} prompt tokens, "
            f"{last.usage.completion_tokens} new, first after "
            f"{last.metrics.time_to_first_token_ms:.0f} ms, {last.metrics.num_rounds} rounds, "
            f"rule {last.rule}, seed {last.seed}, {last.finish_reason}",
        ]
