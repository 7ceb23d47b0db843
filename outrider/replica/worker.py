"""What the workers of draft and target share: sessions, admission, and one answer for each item.

Pages and tokens decide whether a session's item runs in a step, and how far:

    every item        is aligned with its coordinator (`SessionTable.align`)
    pages, by age     the whole step fits; or younger sessions give up pages; or it waits
    tokens, in order  it runs whole, or a part of its prefix, or not yet (`TokenBudget`)

Only younger sessions lose pages. So the oldest always continues, and each becomes the oldest.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from outrider.drafters.drafter import DraftRequest
from outrider.engine.interface import Engine, FoundPrefix, SequenceStep
from outrider.errors import EngineLost, Incompatible, InvariantError, OutriderError
from outrider.grammar.compiler import Grammars
from outrider.grammar.matcher import Matchers
from outrider.grammar.token_mask import Allowed
from outrider.kv_cache.session_table import Aligned, SessionTable
from outrider.messages import Resync, RoundHead
from outrider.replica.step_request import StepFigures, Unfinished, refusal
from outrider.replica.token_budget import TokenBudget, TokenDemand
from outrider.speculation.logits_processing import allowed_early
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import SamplingParams

_ANY_TOKEN = 0
"""Placeholder for a token of which only the slot matters."""


class SlotDemand(NamedTuple):
    """Slots that an item needs."""

    head: RoundHead
    num_extra: int
    """Slots beyond its committed tokens."""
    num_last: int = 1
    """The last committed token and the extra ones that run in the same pass."""
    reach: int | None = None
    """If set, only this many of its committed tokens can run yet, and no extra slots."""


class Admitted(NamedTuple):
    """A session whose item runs."""

    aligned: Aligned
    num_granted: int
    """Tokens of `aligned.new_tokens` that run. If all do, the slots after them run, too.
    """

    @property
    def is_whole(self) -> bool:
        return self.num_granted == len(self.aligned.new_tokens)


Admission = Admitted | Resync | Unfinished | OutriderError
_Found = Aligned | Resync | Unfinished | OutriderError
_Begun = dict[str, FoundPrefix]
"""Cached prefix that each session without tokens may start from."""


class Admissions:
    """Admits items to the steps of one engine, on the executor's side."""

    def __init__(
        self,
        engine: Engine,
        table: SessionTable,
        budget: TokenBudget,
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        """`give_way` frees pages of work that no item waits for."""
        self._engine = engine
        self._give_way = give_way
        self._table = table
        self._budget = budget
        self._num_slots = engine.page_counts().num_slots
        self.figures = StepFigures()

    def admit(self, demands: Sequence[SlotDemand]) -> list[Admission]:
        """One result for each of these distinct sessions, in order of arrival. `Admitted`: it runs.
        `CONTINUES`: the step has no room left for it. `WAITS`: no pages are free for it.
        `Resync`: pages are free, but it lacks its prefix. An error: it is refused."""
        found = [_align(self._table, demand.head) for demand in demands]
        # Cached prefixes of the sessions that hold no tokens.
        begun = {
            demand.head.session_id: self._engine.find(demand.head.append, demand.head.tenant)
            for demand, entry in zip(demands, found, strict=True)
            if isinstance(entry, Aligned) and not len(entry.sequence)
        }
        wholes = {
            index: self._whole(demands[index], begun)
            for index, entry in enumerate(found)
            if isinstance(entry, Aligned | Resync)
        }
        steps = list(wholes.values())
        if not self._engine.can_hold(steps, begun=begun):
            self._give_way()
            if not self._engine.can_hold(steps, begun=begun):
                self._place(found, wholes, begun)
        return self._grant(demands, found, begun)

    def _whole(self, demand: SlotDemand, begun: _Begun) -> SequenceStep:
        """A step with slots for all that the item can run. An item that claims more tokens than all
        pages hold gets a step that is too large for them."""
        name = demand.head.session_id
        num_held = begun[name].length if name in begun else self._engine.length(name)
        length = demand.head.committed_length + demand.num_extra
        if demand.reach is not None and length <= self._num_slots:
            length = demand.reach
        num = min(max(1, length - num_held), self._num_slots + 1)
        return SequenceStep(name, (_ANY_TOKEN,) * num, 0)

    def _place(self, found: list[_Found], wholes: dict[int, SequenceStep], begun: _Begun) -> None:
        """Reserves pages by age; sessions without any get `WAITS`."""
        age_rank = self._table.age_rank
        holders = self._table.holders()
        reserved: list[SequenceStep] = []
        lost: set[str] = set()
        for index in sorted(wholes, key=lambda i: age_rank(wholes[i].sequence_id)):
            step = wholes[index]
            name = step.sequence_id
            younger = holders[bisect_right(holders, age_rank(name), key=age_rank) :]
            if name in lost:
                found[index] = Unfinished.WAITS
            elif isinstance(found[index], Resync):
                if not self._engine.can_hold([*reserved, step], younger, begun):
                    found[index] = Unfinished.WAITS
            elif self._make_room(
                [*reserved, step], begun, [v for v in younger if v not in lost], lost
            ):
                reserved.append(step)
            else:
                found[index] = Unfinished.WAITS
        self.figures.num_starved += found.count(Unfinished.WAITS)

    def _make_room(
        self, steps: Sequence[SequenceStep], begun: _Begun, younger: Sequence[str], lost: set[str]
    ) -> bool:
        """Whether there are pages for these steps. If needed, takes those of the youngest sessions,
        and adds these to `lost`; takes none in vain."""
        if self._engine.can_hold(steps, begun=begun):
            return True
        if not self._engine.can_hold(steps, younger, begun):
            return False
        for name in reversed(younger):
            self._table.free(name)
            lost.add(name)
            self.figures.num_preemptions += 1
            if self._engine.can_hold(steps, begun=begun):
                return True
        raise InvariantError("preempting every younger slot did not free enough pages")

    def _grant(
        self, demands: Sequence[SlotDemand], found: Sequence[_Found], begun: _Begun
    ) -> list[Admission]:
        """Shares out the step's tokens; begins sessions that hold none and get some."""
        aligned = {i: entry for i, entry in enumerate(found) if isinstance(entry, Aligned)}
        wanted = [self._token_demand(demands[i], entry, begun) for i, entry in aligned.items()]
        grants = self._budget.share(wanted)
        admissions: list[Any] = [*found]
        for index, token_demand, granted in zip(aligned, wanted, grants, strict=True):
            head, entry = demands[index].head, aligned[index]
            if granted == 0:
                admissions[index] = Unfinished.CONTINUES
                continue
            if head.session_id in begun:
                entry = self._table.begin(head)
            is_whole, num_new = granted == token_demand.num_tokens, len(entry.new_tokens)
            self.figures.num_prefill_chunks += not is_whole
            # Sessions that lost pages since then may have left a longer cached prefix.
            num_granted = num_new if is_whole else min(granted, num_new)
            admissions[index] = Admitted(entry, num_granted)
        return admissions

    def _token_demand(self, demand: SlotDemand, aligned: Aligned, begun: _Begun) -> TokenDemand:
        name = demand.head.session_id
        num_found = begun[name].length if name in begun else 0
        num_held = len(aligned.sequence) + num_found
        num_new = len(aligned.new_tokens) - num_found
        if demand.reach is not None:
            num_new = max(1, demand.reach - num_held)
        return TokenDemand(num_new + demand.num_last - 1, demand.num_last, num_held)


class Work:
    """An item in a step. Its `demand` is a `SlotDemand`."""

    answer: Any = None

    def __init__(self, item: Any) -> None:
        self.item = item

    @property
    def head(self) -> RoundHead:
        return self.item.head  # type: ignore[no-any-return]


class StepWorker:
    """Runs steps on the executor's side; owns an engine's sessions and knows their tokens."""

    def __init__(self, engine: Engine, budget: TokenBudget, grammars: Grammars | None) -> None:
        """`budget` bounds each step of the `engine`. `grammars` hold sessions to their
        constraints."""
        self._engine = engine
        self._table = SessionTable(engine)
        self._admissions = Admissions(engine, self._table, budget, self._give_way)
        self.grammars = grammars
        self._matchers = None if grammars is None else Matchers(grammars)
        self.figures = self._admissions.figures
        self._note_figures()

    def step(self, items: Sequence[Any]) -> list[Any]:
        """One answer for each item, or several, in order; the items' sessions are distinct and in
        order of arrival. An error of one item is answered `Refused` and affects no others. At least
        one item is not `Unfinished.CONTINUES`. Raises `EngineLost` if no more steps can run."""
        raise NotImplementedError

    def park(self, session_ids: Sequence[str]) -> None:
        """No connection waits for these sessions now: frees their slots. Their whole pages stay in
        the cache until others need them."""
        for session_id in session_ids:
            self._table.free(session_id)
        self._note_figures()

    def release(self, session_id: str) -> None:
        """Forgets a session."""
        self._table.release(session_id)
        if self._matchers is not None:
            self._matchers.release(session_id)

    def check_integrity(self) -> None:
        """For tests, while no step runs: raises `InvariantError` if tokens and slots disagree."""
        self._table.check_integrity()

    def _give_way(self) -> None:
        """Frees pages of work that no item waits for."""

    def _note_figures(self) -> None:
        self.figures.pages = self._engine.page_counts()

    def _admit(self, works: Sequence[Any]) -> None:
        """Prepares admitted work; answers other work."""
        for work in works:
            try:
                self._validate(work)
            except OutriderError as error:
                work.answer = refusal(work.head.key, error)
        valid = [work for work in works if work.answer is None]
        admissions = self._admissions.admit([work.demand for work in valid])
        for work, admission in zip(valid, admissions, strict=True):
            if isinstance(admission, Admitted):
                self._prepare(work, admission)
            elif isinstance(admission, OutriderError):
                work.answer = refusal(work.head.key, admission)
            else:
                work.answer = admission

    def _validate(self, work: Any) -> None:
        """Reads an item's parameters. Raises the error that refuses it, and then changes
        nothing."""
        raise NotImplementedError

    def _prepare(self, work: Any, admitted: Admitted) -> None:
        """Adds admitted work to the pass, or answers it."""
        raise NotImplementedError

    def _allowed(self, head: RoundHead, aligned: Aligned) -> Allowed | None:
        """What may follow the committed tokens; None = anything. Raises `Incompatible` for a
        constraint that this replica cannot apply."""
        if head.constraint is None:
            num_tokens, info = head.committed_length - head.prompt_length, self._engine.info
            return allowed_early(head.params(), num_tokens, info.eos_token_ids, info.vocab_size)
        if self._matchers is None or head.compiled is None:
            raise Incompatible(f"{head.constraint.kind}: this target has no tokenizer")
        completion = aligned.committed[head.prompt_length :]
        return self._matchers.follow(head.session_id, head.compiled, completion)

    def _run(self, works: Sequence[Any]) -> None:
        """Runs one pass for all. After an error, runs each session alone, so that only the cause of
        the error fails. Raises `EngineLost`."""
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

    def _pass(self, works: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError

    def _undo(self, work: Any) -> None:
        """Restores a session after a failed pass."""

    def _finish(self, works: Sequence[Any], found: Sequence[Any]) -> None:
        """Answers work from the result of its pass."""
        raise NotImplementedError

    def _fail(self, work: Any, error: OutriderError) -> None:
        """Forgets the session, whose state after a failed pass cannot be trusted."""
        self.release(work.head.session_id)
        work.answer = refusal(work.head.key, error)


def _align(table: SessionTable, head: RoundHead) -> _Found:
    try:
        return table.align(head)
    except OutriderError as error:
        return error


def draft_request(
    head: RoundHead, sampling: SamplingParams, token_ids: Sequence[int], length: int, **fields: Any
) -> DraftRequest:
    """A request for a proposal in the session of `head` after its first `length` tokens; the
    drafter gets `token_ids`."""
    known: dict[str, Any] = {
        "session_id": head.session_id, "tenant": head.tenant, "token_ids": token_ids,
        "prompt_length": head.prompt_length, "sampling": sampling, "rule": head.rule,
        "noise": RoundNoise(head.seed, head.rule, length),
    }  # fmt: skip
    return DraftRequest(**known | fields)
