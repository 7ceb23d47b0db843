"""Admission: which items of a step run, and with how many tokens. Draft and target share it.

An item is one round of a session. Pages (of keys and values) and the number of tokens in a step are
limited. So an item may have to wait, or run with only some of its tokens. In each step:

1. The tokens that this replica holds of a session are aligned with those of the coordinator
   (`SessionTable.align`). A session without tokens begins with the cached pages of its prefix.
2. Items get pages. Tenants take turns, each with its oldest session. If too few pages are free,
   sessions with later turns lose their pages. If there are still too few pages for an item, the
   item waits.
3. Items get tokens of the step, in order of arrival. An item gets all tokens that it needs, a part
   of its prefix, or no tokens in this step (`TokenBudget`).

A session in the step loses pages only to sessions with earlier turns. So a tenant's oldest session
always continues if the oldest sessions of all tenants fit, and the first of these always continues.
In time every session becomes the oldest of its tenant."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline, DraftRequest
from outrider.drafters.features import Features
from outrider.errors import EngineLost, Incompatible, InvariantError, OutriderError
from outrider.grammar.compiler import Grammar, Grammars
from outrider.grammar.matcher import Matchers
from outrider.grammar.token_mask import AllowedTokens
from outrider.interfaces.engine import Engine, SequenceStep
from outrider.interfaces.messages import DraftItem, Item, Resync, RoundHead, VerifyItem
from outrider.kv_cache.session_table import Aligned, SessionTable
from outrider.replica.step_loop import Prepared, Worker
from outrider.replica.step_request import StepAnswer, StepFigures, Unfinished, refusal
from outrider.replica.step_watch import ExpectedStep
from outrider.replica.token_budget import TokenBudget, TokenDemand
from outrider.speculation.logits_processing import allowed_by_min_tokens
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import SamplingParams

_ANY_TOKEN = 0  # token id in steps that are only passed to `can_hold` and never run


class SlotDemand(NamedTuple):
    """The slots that an item needs. A slot holds the keys and values of one token."""

    head: RoundHead
    num_extra: int  # number of slots in addition to those of the committed tokens
    num_last: int = 1  # tokens that must run in one step: the last committed token and any drafts
    reach: int | None = None  # number of committed tokens that can run now; None = no limit
    num_reserved: int = 0
    """Number of slots that the item needs later in the same step, for its next proposal. Slots that
    the replica does not have are not reserved."""
    takes_idle: bool = False
    """Whether the item may take pages from any session without an item in the step, even from an
    older one."""


class Admitted(NamedTuple):
    """A session whose item runs."""

    aligned: Aligned
    num_granted: int
    """How many of `aligned.new_tokens` run. If all of them run, the extra slots are used, too."""

    @property
    def is_whole(self) -> bool:
        return self.num_granted == len(self.aligned.new_tokens)


_Result = Admitted | Resync | Unfinished | OutriderError
_Alignment = Aligned | Resync | Unfinished | OutriderError
_NEEDS_PAGES = Aligned, Resync


class Work(ABC, Generic[Item]):
    """An item in a step."""

    answer: StepAnswer | None = None
    is_validated = False
    sampling: SamplingParams

    def __init__(self, item: Item, grammar: Grammar | OutriderError | None = None) -> None:
        """`grammar`: see `StepRequest`."""
        self.item, self.grammar = item, grammar

    @property
    def head(self) -> RoundHead:
        return self.item.head

    @property
    def result(self) -> StepAnswer:
        """The answer after the step."""
        if self.answer is None:
            raise InvariantError("a step has left an item without an answer")
        return self.answer

    @property
    @abstractmethod
    def demand(self) -> SlotDemand:
        """The slots that the item needs."""


W = TypeVar("W", bound=Work[VerifyItem] | Work[DraftItem])
Found = TypeVar("Found")


class Admission:
    """The sessions of one engine, and the admission of their items."""

    def __init__(
        self,
        engine: Engine,
        budget: TokenBudget,
        grammars: Grammars | None = None,
        free_unneeded_pages: Callable[[], None] = lambda: None,
        forget: Callable[[str], None] = lambda session_id: None,
    ) -> None:
        """`free_unneeded_pages` frees pages that no waiting item needs, before a session would lose
        its pages. `forget` drops what the role keeps of a session whose slots are freed."""
        self._engine = engine
        self._free_unneeded_pages, self._forget = free_unneeded_pages, forget
        self._matchers = None if grammars is None else Matchers(grammars)
        self._table = SessionTable(engine)
        self._budget = budget
        self.figures = StepFigures(engine.page_counts())
        self.num_slots = self.figures.pages.num_slots
        self._decoding: list[str] = []  # the sessions of the last step that ran rounds

    def choose(self, demands: Sequence[SlotDemand], num_carried: int = 0) -> list[_Result]:
        """Chooses the items that run. They are of distinct sessions, and in order of arrival. The
        step also continues `num_carried` items of earlier steps. Returns a result for each item:

            Admitted      The item runs.
            CONTINUES     The step has no room left for the item.
            WAITS         No pages are free for the item.
            Resync        Pages are free, but this replica lacks tokens of the session's prefix.
            an error      The item is refused.
        """
        names = [demand.head.session_id for demand in demands]
        new = {name for name in names if not self._engine.length(name)}
        alignments = [_align(self._table, demand.head) for demand in demands]
        wholes = {
            index: self._whole(demands[index])
            for index, entry in enumerate(alignments)
            if isinstance(entry, _NEEDS_PAGES)
        }
        steps = list(wholes.values())
        if not self._engine.can_hold(steps):
            self._free_unneeded_pages()
            if not self._engine.can_hold(steps):
                self._place(demands, alignments, wholes)
        results = self._grant(demands, alignments, num_carried)
        for name, result in zip(names, results, strict=True):
            if name in new and not isinstance(result, Admitted):
                self._engine.release(name)  # The next step may find a longer cached prefix.
        return results

    def _whole(self, demand: SlotDemand) -> SequenceStep:
        """Returns a step with all tokens that the item can run now. If the item needs more
        slots than the replica has, the step has one token too many, so it never fits."""
        name = demand.head.session_id
        num_held = self._engine.length(name)
        length = demand.head.committed_length + demand.num_extra
        length = max(length, min(length + demand.num_reserved, self.num_slots))
        if demand.reach is not None and length <= self.num_slots:
            length = demand.reach
        num = min(max(1, length - num_held), self.num_slots + 1)
        return SequenceStep(name, (_ANY_TOKEN,) * num, 0)

    def _place(
        self,
        demands: Sequence[SlotDemand],
        alignments: list[_Alignment],
        wholes: dict[int, SequenceStep],
    ) -> None:
        """Reserves pages for items, in the order of `SessionTable.ranks`. If an item gets no pages,
        its entry in `alignments` becomes `WAITS`."""
        stepping = {step.sequence_id for step in wholes.values()}
        ranks = self._table.ranks(stepping)
        holders = [name for name in ranks if self._engine.length(name)]
        reserved: list[SequenceStep] = []
        lost: set[str] = set()
        for index in sorted(wholes, key=lambda i: ranks[wholes[i].sequence_id]):
            step = wholes[index]
            name = step.sequence_id
            first_later = bisect_right(holders, ranks[name], key=ranks.__getitem__)
            losers = holders[first_later:]
            if demands[index].takes_idle:
                earlier = holders[:first_later]
                losers = [*(holder for holder in earlier if holder not in stepping), *losers]
            if name in lost:
                alignments[index] = Unfinished.WAITS
            elif isinstance(alignments[index], Resync):
                if not self._engine.can_hold([*reserved, step], losers):
                    alignments[index] = Unfinished.WAITS
            elif self._make_room([*reserved, step], [v for v in losers if v not in lost], lost):
                reserved.append(step)
            else:
                alignments[index] = Unfinished.WAITS
        self.figures.num_starved += alignments.count(Unfinished.WAITS)

    def _make_room(
        self, steps: Sequence[SequenceStep], losers: Sequence[str], lost: set[str]
    ) -> bool:
        """Returns whether there are pages for these steps. If pages of the sessions `losers` are
        needed and suffice, frees the last of these until all fit. Adds the freed to `lost`."""
        if self._engine.can_hold(steps):
            return True
        if not self._engine.can_hold(steps, losers):
            return False
        for name in reversed(losers):
            self._engine.release(name)
            lost.add(name)
            self.figures.num_preemptions += 1
            if self._engine.can_hold(steps):
                return True
        raise InvariantError("preempting every session that may lose did not free enough pages")

    def _grant(
        self, demands: Sequence[SlotDemand], alignments: Sequence[_Alignment], num_carried: int
    ) -> list[_Result]:
        if not any(map(self._engine.length, self._decoding)):
            self._budget.expect_no_rounds()
        aligned = {i: entry for i, entry in enumerate(alignments) if isinstance(entry, Aligned)}
        wanted = [_token_demand(demands[i], entry) for i, entry in aligned.items()]
        grants = self._budget.share(wanted, num_carried)
        rounds = [
            demands[i].head.session_id
            for i, demand, granted in zip(aligned, wanted, grants, strict=True)
            if demand.is_round and granted
        ]
        self._decoding = rounds or self._decoding
        results: dict[int, _Result] = {}
        for index, token_demand, granted in zip(aligned, wanted, grants, strict=True):
            if granted == 0:
                results[index] = Unfinished.CONTINUES
                continue
            entry, is_whole = aligned[index], granted == token_demand.num_tokens
            self.figures.num_prefill_chunks += not is_whole
            results[index] = Admitted(entry, len(entry.new_tokens) if is_whole else granted)
        return [
            results[index] if isinstance(entry, Aligned) else entry
            for index, entry in enumerate(alignments)
        ]

    def admit(
        self,
        works: Sequence[W],
        validate: Callable[[W], None],
        prepare: Callable[[W, Admitted], None],
        num_carried: int = 0,
    ) -> None:
        """Calls `prepare` for the works that `choose` admits, and answers the others. `prepare`
        raises the error with which an item must be refused."""
        for work in works:
            if not work.is_validated:
                self.validate(work, validate)
        valid = [work for work in works if work.answer is None]
        results = self.choose([work.demand for work in valid], num_carried)
        for work, result in zip(valid, results, strict=True):
            if isinstance(result, Admitted):
                try:
                    prepare(work, result)
                except OutriderError as error:
                    self.fail(work, error)
            elif isinstance(result, OutriderError):
                work.answer = refusal(work.head.key, result)
            else:
                work.answer = result

    def validate(self, work: W, check: Callable[[W], None]) -> None:
        """Calls `check`, which raises the error with which the item must be refused."""
        work.is_validated = True
        try:
            work.sampling = work.head.params()
            check(work)
        except OutriderError as error:
            work.answer = refusal(work.head.key, error)

    def allowed(self, work: W, aligned: Aligned) -> AllowedTokens | None:
        """Returns the tokens that may follow the committed tokens; None = all tokens. Raises
        `Incompatible` for a constraint that this replica cannot apply."""
        head = work.head
        if head.constraint is None:
            num_tokens, info = head.committed_length - head.prompt_length, self._engine.info
            return allowed_by_min_tokens(
                work.sampling, num_tokens, info.eos_token_ids, info.vocab_size
            )
        if self._matchers is None or work.grammar is None:
            raise Incompatible(f"{head.constraint.kind}: this target has no tokenizer")
        completion = aligned.committed[head.prompt_length :]
        return self._matchers.allowed_tokens(head.session_id, work.grammar, completion)

    def passes(
        self,
        works: Sequence[W],
        launch: Callable[[Sequence[W]], Callable[[], Found]],
        undo: Callable[[W], None] = lambda work: None,
    ) -> Iterator[tuple[Sequence[W], Found]]:
        """Launches all works at once. The returned iterator waits for them, and yields them with
        the result. After an error, it launches each work alone, so that only the work that causes
        the error fails. Before that, `undo` restores its session. Both raise `EngineLost`."""
        if not works:
            return iter(())
        try:
            wait = launch(works)
        except EngineLost:
            raise
        except OutriderError as error:
            return self._passes_alone(works, error, launch, undo)
        return self._waited_passes(works, wait, launch, undo)

    def _waited_passes(
        self,
        works: Sequence[W],
        wait: Callable[[], Found],
        launch: Callable[[Sequence[W]], Callable[[], Found]],
        undo: Callable[[W], None],
    ) -> Iterator[tuple[Sequence[W], Found]]:
        try:
            found = wait()
        except EngineLost:
            raise
        except OutriderError as error:
            yield from self._passes_alone(works, error, launch, undo)
        else:
            yield works, found

    def _passes_alone(
        self,
        works: Sequence[W],
        error: OutriderError,
        launch: Callable[[Sequence[W]], Callable[[], Found]],
        undo: Callable[[W], None],
    ) -> Iterator[tuple[Sequence[W], Found]]:
        if len(works) == 1:
            self.fail(works[0], error)
            return
        for work in works:
            undo(work)
            yield from self.passes([work], launch, undo)

    def fail(self, work: W, error: OutriderError) -> None:
        """Refuses an item, and forgets its session, whose state may be wrong after the error."""
        self.leave({work.head.session_id: True})
        work.answer = refusal(work.head.key, error)

    def leave(self, session_ids: Mapping[str, bool]) -> None:
        """Frees the slots of sessions. Forgets a session if it is over (value True). The other
        sessions keep their age. Filled pages stay in the cache until other sessions need pages."""
        for session_id, is_over in session_ids.items():
            self._forget(session_id)
            if not is_over:
                self._engine.release(session_id)
                continue
            self._table.release(session_id)
            if self._matchers is not None:
                self._matchers.release(session_id)
        self.note_pages()

    def note_pages(self) -> None:
        """Must be called after each step."""
        self.figures.pages = self._engine.page_counts()


class EngineWorker(Worker[Item, Prepared]):
    """A worker whose sessions an `Admission` keeps."""

    def __init__(self, budget: TokenBudget, admission: Admission) -> None:
        self._budget, self._admission = budget, admission
        self.figures = admission.figures

    def leave(self, session_ids: Mapping[str, bool]) -> None:
        self._admission.leave(session_ids)

    def note_seconds(self, seconds: float) -> None:
        self._budget.note_seconds(seconds)

    def expected(self) -> ExpectedStep:
        return self._budget.expected


def _align(table: SessionTable, head: RoundHead) -> _Alignment:
    try:
        return table.align(head)
    except OutriderError as error:
        return error


def _token_demand(demand: SlotDemand, aligned: Aligned) -> TokenDemand:
    num_held, num_new = len(aligned.sequence), len(aligned.new_tokens)
    if demand.reach is not None:
        num_new = max(1, demand.reach - num_held)
    return TokenDemand(num_new + demand.num_last - 1, demand.num_last, num_held)


def draft_request(
    head: RoundHead,
    sampling: SamplingParams,
    token_ids: Sequence[int],
    length: int,
    digest: int,
    *,
    num_draft_tokens: int,
    allowed: AllowedTokens | None,
    deadline: DraftDeadline = NO_DEADLINE,
    features: Features | None = None,
    name: str = "",
) -> DraftRequest:
    """Returns a request for a proposal after the first `length` tokens of a session, which have
    this `digest`. `token_ids` are the tokens that the drafter needs. `name` is that of the engine's
    sequence; empty = the session's id. See `DraftRequest` for the others."""
    return DraftRequest(
        session_id=name or head.session_id,
        tenant=head.tenant,
        token_ids=token_ids,
        prompt_length=head.prompt_length,
        num_draft_tokens=num_draft_tokens,
        sampling=sampling,
        rule=head.rule,
        noise=RoundNoise(head.seed, head.rule, length, digest),
        features=features,
        allowed=allowed,
        deadline=deadline,
    )
