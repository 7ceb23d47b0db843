"""A worker whose answers a test states."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.interfaces.engine import PageCounts
from outrider.interfaces.messages import DraftItem, ProposalReply
from outrider.replica.step_loop import Worker
from outrider.replica.step_request import StepAnswer, StepFigures, StepRequest, Unfinished
from outrider.replica.step_watch import ExpectedStep
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL

PAGES = PageCounts(10, 2, 3, 0, 0)


class ScriptedWorker(Worker[DraftItem, DraftItem]):
    """Answers an item after as many steps as its session has left; records its calls."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int]]] = []
        """The (session, round) of each item, by step."""
        self.heard: list[tuple[str, int]] = []
        self.seconds: list[float] = []
        self.crash: Exception | None = None
        self.culprits: set[int] = set()  # if not empty, only steps with these sessions crash
        self.left: dict[int, int] = {}
        self.starved: set[int] = set()
        self.figures = StepFigures(PAGES)
        self.during_step: Any = lambda: None
        self.expected_s = 0.0

    def expected(self) -> ExpectedStep:
        return ExpectedStep(1, 1, self.expected_s)

    def prepare(self, requests: Sequence[StepRequest[DraftItem]]) -> Sequence[DraftItem]:
        return [request.item for request in requests]

    def run(self, prepared: Sequence[DraftItem]) -> list[StepAnswer]:
        self.steps.append([(number(item.head.session_id), item.head.round) for item in prepared])
        self.during_step()
        sessions = {session for session, _ in self.steps[-1]}
        if self.crash is not None and (not self.culprits or sessions & self.culprits):
            raise self.crash
        return [self._answer(item) for item in prepared]

    def launch(self, prepared: Sequence[DraftItem]) -> Callable[[], Sequence[StepAnswer]]:
        return lambda: self.run(prepared)

    def _answer(self, item: DraftItem) -> StepAnswer:
        session = number(item.head.session_id)
        if session in self.starved:
            self.figures.num_starved += 1
            return Unfinished.WAITS
        self.left[session] = self.left.get(session, 0) - 1
        if self.left[session] > 0:
            return Unfinished.CONTINUES
        return ProposalReply(item.head.key, EMPTY_ENCODED_PROPOSAL, 0, 0)

    def leave(self, session_ids: Mapping[str, bool]) -> None:
        words = {True: "release", False: "evict"}
        self.heard += [(words[is_over], number(name)) for name, is_over in session_ids.items()]
        if session_ids:
            self.starved.clear()

    def note_seconds(self, seconds: float) -> None:
        self.seconds.append(seconds)


def number(session_id: str) -> int:
    """The number of a session, see `session_name`."""
    return int(session_id, 16)
