"""Which sessions of a step go on, and how far: pages by age, tokens by order of arrival.

    every item        is aligned with its coordinator (`SequenceTable.align`)
    pages, by age     its whole step fits; or younger sessions lose theirs to it; or it waits
    tokens, in order  it runs whole, or a part of its prefix, or not yet (`TokenBudget`)

Only younger sessions make room, so the oldest always goes on, and every one becomes the oldest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.interface import Engine, SequenceStep
from outrider.engine.sequences import Aligned, SequenceTable
from outrider.engine.token_budget import TokenBudget, Wish
from outrider.errors import InvariantError, OutriderError
from outrider.messages import Resync, RoundHead
from outrider.work import StepFigures, Unfinished

_ANY_TOKEN = 0
"""Stands for a token of which only the slot matters."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What an item needs."""

    head: RoundHead
    num_extra: int
    """Slots beyond its committed tokens."""
    num_last: int = 1
    """The last committed token, and those of the extra ones that are run in one pass with it."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A session that goes on."""

    aligned: Aligned
    num_granted: int
    """Of `aligned.new_tokens`: all, and then also what comes after them; or only so many."""

    @property
    def is_whole(self) -> bool:
        """Whether all is run that the item asks for."""
        return self.num_granted == len(self.aligned.new_tokens)


Admission = Admitted | Resync | Unfinished | OutriderError
_Found = Aligned | Resync | Unfinished | OutriderError


class Admissions:
    """Admits items to the steps of one engine, on the executor's side."""

    def __init__(self, engine: Engine, table: SequenceTable, budget: TokenBudget) -> None:
        self._engine = engine
        self._table = table
        self._budget = budget
        self._num_preemptions = 0
        self._num_prefill_chunks = 0
        self._num_starved = 0

    @property
    def figures(self) -> StepFigures:
        """What it has come to so far."""
        counts = self._engine.page_counts()
        return StepFigures(
            counts, self._num_preemptions, self._num_prefill_chunks, self._num_starved
        )

    def admit(self, asks: Sequence[Ask]) -> list[Admission]:
        """For each of these distinct sessions, in order of arrival: how far it goes on, `CONTINUES`
        where not at all yet; what it lacks; or what it is refused for. `WAITS` where it finds no
        pages, `Resync` where it lacks a prefix for which there would be some."""
        fresh = {ask.head.session_id for ask in asks if not self._table.length(ask.head.session_id)}
        found = [self._align(ask.head) for ask in asks]
        wholes = {
            index: self._whole(asks[index], entry)
            for index, entry in enumerate(found)
            if isinstance(entry, Aligned | Resync)
        }
        if not self._engine.can_hold(list(wholes.values())):
            self._place(found, wholes, fresh)
        return self._grant(asks, found)

    def _align(self, head: RoundHead) -> _Found:
        try:
            return self._table.align(head)
        except OutriderError as error:
            return error

    def _whole(self, ask: Ask, found: Aligned | Resync) -> SequenceStep:
        """A step that takes the slots of all that the item asks for."""
        name = ask.head.session_id
        num = ask.head.committed_length + ask.num_extra - self._engine.length(name)
        return SequenceStep(name, (_ANY_TOKEN,) * max(1, num), 0)

    def _place(self, found: list[_Found], wholes: dict[int, SequenceStep], fresh: set[str]) -> None:
        """Gives out the pages by age, and puts `WAITS` where there are none. What a session that
        waits has just been lent of others' pages is given back."""
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
                if not self._engine.can_hold([*reserved, step], younger):
                    found[index] = Unfinished.WAITS
            elif self._make_room([*reserved, step], [v for v in younger if v not in lost], lost):
                reserved.append(step)
            else:
                found[index] = Unfinished.WAITS
                if name in fresh:
                    self._table.free(name)
        self._num_starved += found.count(Unfinished.WAITS)

    def _make_room(
        self, steps: Sequence[SequenceStep], younger: Sequence[str], lost: set[str]
    ) -> bool:
        """Whether there are pages for these steps, perhaps now that the youngest have lost theirs,
        as `lost` then says; nobody loses any in vain."""
        if self._engine.can_hold(steps):
            return True
        if not self._engine.can_hold(steps, younger):
            return False
        for name in reversed(younger):
            self._table.free(name)
            lost.add(name)
            self._num_preemptions += 1
            if self._engine.can_hold(steps):
                return True
        raise InvariantError("pages that were to come free did not")

    def _grant(self, asks: Sequence[Ask], found: Sequence[_Found]) -> list[Admission]:
        """Gives out the step's tokens."""
        wishes = {
            index: Wish(
                len(entry.new_tokens) + asks[index].num_last - 1,
                asks[index].num_last,
                len(entry.sequence),
            )
            for index, entry in enumerate(found)
            if isinstance(entry, Aligned)
        }
        grants = dict(zip(wishes, self._budget.share(list(wishes.values())), strict=True))
        admissions: list[Admission] = []
        for index, entry in enumerate(found):
            if not isinstance(entry, Aligned):
                admissions.append(entry)
            elif grants[index] == wishes[index].num_tokens:
                admissions.append(Admitted(entry, len(entry.new_tokens)))
            elif grants[index] > 0:
                self._num_prefill_chunks += 1
                admissions.append(Admitted(entry, grants[index]))
            else:
                admissions.append(Unfinished.CONTINUES)
        return admissions
