"""What the workers of draft and target share: sessions, admission, and one answer for each item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from outrider.drafters.drafter import DraftRequest
from outrider.engine.interface import Engine
from outrider.errors import EngineLost, Incompatible, OutriderError
from outrider.grammar.compiler import Grammars
from outrider.grammar.matcher import Matchers
from outrider.grammar.token_mask import Allowed
from outrider.kv_cache.session_table import Aligned, SessionTable
from outrider.messages import RoundHead
from outrider.replica.admission import Admission, Admissions, Admitted, SlotDemand
from outrider.replica.step_request import StepFigures, refusal
from outrider.replica.token_budget import TokenBudget
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import SamplingParams


class Work:
    """An item on its way through a step."""

    __slots__ = ("answer", "item")

    def __init__(self, item: Any) -> None:
        self.item = item
        self.answer: Any = None
        """None until it is known."""

    @property
    def head(self) -> RoundHead:
        return self.item.head  # type: ignore[no-any-return]


W = TypeVar("W", bound=Work)


class StepWorker(Generic[W]):
    """Does the work of a step, on the executor's side: owns the sessions of an engine, and what
    tokens they hold."""

    def __init__(
        self, engine: Engine | None, budget: TokenBudget | None, grammars: Grammars | None
    ) -> None:
        """`budget` bounds each step of the `engine`; both are None for a drafter that keeps no
        slots. By `grammars` sessions are held to their constraints."""
        self._engine = engine
        self._table = SessionTable(engine)
        self._admissions: Admissions | None = None
        if engine is not None and budget is not None:
            self._admissions = Admissions(engine, self._table, budget, self._give_way)
        self.grammars = grammars
        self._matchers = None if grammars is None else Matchers(grammars)
        self.figures = StepFigures()
        """After the last step; may be read on any thread."""
        self._note_figures()

    def step(self, items: Sequence[Any]) -> list[Any]:
        """One answer for each item, or several, in order; the items' sessions are distinct, and
        come in the order in which they arrived. What is wrong with one item is answered `Refused`
        for it and leaves the others unharmed. Not every item is `Unfinished.CONTINUES`. Raises
        `EngineLost` where no step can follow."""
        raise NotImplementedError

    def park(self, session_ids: Sequence[str]) -> None:
        """No connection waits for these sessions any more: their pages may be taken, but are kept
        as long as they are not needed."""
        for session_id in session_ids:
            self._table.park(session_id)
        self._note_figures()

    def release(self, session_id: str) -> None:
        """Forgets a session."""
        self._table.release(session_id)
        if self._matchers is not None:
            self._matchers.release(session_id)

    def recover(self, items: Sequence[Any]) -> None:
        """After `step` raised: brings the items' sessions into a sane state by forgetting them."""
        for item in items:
            self.release(item.head.session_id)

    def check_integrity(self) -> None:
        """For tests, while no step runs: raises `InvariantError` if tokens and slots disagree."""
        self._table.check_integrity()

    def _give_way(self) -> None:
        """Frees pages of work that no item waits for."""

    def _note_figures(self) -> None:
        if self._admissions is not None:
            self.figures = self._admissions.figures

    def _admit(
        self, works: Sequence[W], demands: Sequence[SlotDemand]
    ) -> Iterator[tuple[W, Admitted]]:
        """Those that go on, and how far; the others are answered."""
        admissions: Sequence[Admission]
        if self._admissions is None:
            admissions = [self._align(demand.head) for demand in demands]
        else:
            admissions = self._admissions.admit(demands)
        for work, admission in zip(works, admissions, strict=True):
            if isinstance(admission, Admitted):
                yield work, admission
            elif isinstance(admission, OutriderError):
                work.answer = refusal(work.head.key, admission)
            else:
                work.answer = admission

    def _align(self, head: RoundHead) -> Admission:
        """Where there are no pages, nothing waits for any."""
        try:
            aligned = self._table.align(head)
        except OutriderError as error:
            return error
        if isinstance(aligned, Aligned):
            return Admitted(aligned, len(aligned.new_tokens))
        return aligned

    def _allowed(self, head: RoundHead, aligned: Aligned) -> Allowed | None:
        """What may follow the committed tokens; None = anything. Raises `Incompatible` for a
        constraint that cannot be held to here."""
        if head.constraint is None:
            return None
        if self._matchers is None or head.compiled is None:
            raise Incompatible(f"{head.constraint.kind}: this target has no tokenizer")
        completion = aligned.committed[head.prompt_length :]
        return self._matchers.follow(head.session_id, head.compiled, completion)

    def _run(self, works: Sequence[W]) -> None:
        """One pass for all; where it raises an error with a name, each session alone, so that the
        one with the error hurts nobody else. Raises `EngineLost`."""
        if not works:
            return
        try:
            found = self._pass(works)
        except EngineLost:
            raise
        except OutriderError as error:
            if len(works) == 1:
                self._fail(works[0], error)
                return
            for work in works:
                self._undo(work)
                self._run([work])
        else:
            self._finish(works, found)

    def _pass(self, works: Sequence[W]) -> Sequence[Any]:
        raise NotImplementedError

    def _undo(self, work: W) -> None:
        """Takes a session back to where it stood before a pass that failed."""

    def _finish(self, works: Sequence[W], found: Sequence[Any]) -> None:
        """Answers works from what their pass has found for each."""
        raise NotImplementedError

    def _fail(self, work: W, error: OutriderError) -> None:
        """What a failed pass has left of the session cannot be trusted, so it is forgotten."""
        self.release(work.head.session_id)
        work.answer = refusal(work.head.key, error)


def draft_request(
    head: RoundHead, sampling: SamplingParams, token_ids: Sequence[int], length: int, **fields: Any
) -> DraftRequest:
    """Asks for a proposal in the session of `head` behind `length` tokens, of which a drafter is
    told `token_ids`."""
    known: dict[str, Any] = {
        "session_id": head.session_id, "tenant": head.tenant, "token_ids": token_ids,
        "prompt_length": head.prompt_length, "sampling": sampling, "rule": head.rule,
        "noise": RoundNoise(head.seed, head.rule, length),
    }  # fmt: skip
    return DraftRequest(**known | fields)
