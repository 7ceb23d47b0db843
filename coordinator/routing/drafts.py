"""Where a session's proposals come from: a protocol, and look-ups in this process.

`DraftClient` (`draft_client.py`) asks a replica for them; `SelfDraftClient` (there, too) has them
from the target; `LookupDrafts` looks them up here.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from coordinator.draft_length.policy import DraftedBeside, LengthPolicy, RoundLength
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import LookupDrafter
from outrider.errors import check
from outrider.messages import VerdictReply
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState
from outrider.speculation.proposal import SealedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import SamplingParams

Source = Literal["replica", "local", "fallback"]
"""Of a proposal: a draft replica; a look-up that is meant to draft, or the target itself; or a
look-up in place of a draft that does not answer."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """A proposal and where it came from."""

    proposal: SealedProposal
    source: Source
    seconds: float
    num_asked: int
    """K that it was drafted for, if that was settled before the round's own: the lesser of both;
    the tokens that there was time for, where that ran out; 0 where it says nothing of the draft."""
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    """The replica's own times ..."""
    work_ms: float = 0.0
    """... and of the latter what was done for this session: others may share a step."""
    ahead: bool = False
    """Whether it was there before the round began."""
    siblings: tuple[int, ...] = ()
    """Candidates that were asked for beside its tokens."""
    beside: DraftedBeside | None = None
    """Where it came with the verdict before: what it took there."""


@dataclass(frozen=True, slots=True)
class NextWanted:
    """What a target is to send with its verdict, for the next round."""

    num_draft_tokens: int = 0
    siblings: tuple[int, ...] = ()
    features: bool = False
    """Whether somebody else drafts from what its head reads."""
    budget_us: int = 0
    """Time to draft, see `VerifyItem.next_budget_us`."""


NOTHING_WANTED: Final = NextWanted()


class Drafts(Protocol):
    """One session's proposals. A round always gets one: a request must not suffer from a draft."""

    @property
    def lookup(self) -> SessionLookup | None: ...

    @property
    def cache_state(self) -> CacheState | None:
        """What the store is told of this side; None where no replica drafts."""
        ...

    def prefill(self, round_index: int, num_draft_tokens: int) -> None:
        """The prompt is being read, for a round without a proposal; the next one may want up to so
        many tokens. Waits for nothing."""
        ...

    async def propose(
        self,
        round_index: int,
        num_draft_tokens: int,
        noise: RoundNoise,
        siblings: tuple[int, ...] = (),
        draft_budget_s: float = math.inf,
        is_timed: bool = True,
    ) -> Drafted:
        """A proposal of at most `num_draft_tokens` tokens, with as many `siblings` beside each at
        most, drawn in so many seconds, or, unless it `is_timed`, without any bound of time. Never
        raises for a draft's sake."""
        ...

    def next_wanted(self, length: RoundLength, room: int) -> NextWanted:
        """What the target is to propose for the next round with its verdict on one of this length;
        `room` is left in the target's context then."""
        ...

    def hear(self, reply: VerdictReply) -> None: ...

    def settle(self, common_length: int) -> None:
        """Notes an outcome: the first `common_length` tokens of what was drafted are committed."""
        ...

    def reject(self) -> None:
        """The replica that drafts is broken: this session takes no more proposals from it."""
        ...

    def close(self) -> None: ...


class SessionLookup:
    """The look-up that proposes for one session: alone, where it is confident, or where no replica
    answers."""

    def __init__(self, lookup: LookupDrafter, session: Session, sampling: SamplingParams) -> None:
        self._lookup = lookup
        self._session = session
        self._sampling = sampling

    def propose(self, num_draft_tokens: int, noise: RoundNoise) -> SealedProposal:
        """A chain of at most so many tokens behind the committed ones."""
        return self.guess(num_draft_tokens, noise)[0]

    def guess(self, num_draft_tokens: int, noise: RoundNoise) -> tuple[SealedProposal, float]:
        """The same, and how many of its tokens are expected to be accepted."""
        session = self._session
        request = DraftRequest(
            session_id=session.session_id,
            tenant=session.record.tenant,
            token_ids=session.tokens.ids,
            digests=session.tokens,
            prompt_length=session.prompt_length,
            num_draft_tokens=num_draft_tokens,
            sampling=self._sampling,
            rule=session.record.rule,
            noise=noise,
        )
        guess = self._lookup.guess(request)
        return SealedProposal.of(guess.proposal(request)), guess.score

    def close(self) -> None:
        """The session ends."""
        self._lookup.release(self._session.session_id)


class LookupDrafts:
    """Implements `Drafts` by a look-up in this process. The proposals are chains."""

    def __init__(self, lookup: SessionLookup) -> None:
        self.lookup = lookup

    @property
    def cache_state(self) -> CacheState | None:
        return None

    def prefill(self, round_index: int, num_draft_tokens: int) -> None:
        """See `Drafts.prefill`: the first look-up indexes the prompt, about 1 us a token."""

    async def propose(
        self,
        round_index: int,
        num_draft_tokens: int,
        noise: RoundNoise,
        siblings: tuple[int, ...] = (),
        draft_budget_s: float = math.inf,
        is_timed: bool = True,
    ) -> Drafted:
        """See `Drafts.propose`. It waits for nothing."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        proposal = self.lookup.propose(num_draft_tokens, noise)
        return Drafted(proposal, "local", loop.time() - start, num_draft_tokens)

    def next_wanted(self, length: RoundLength, room: int) -> NextWanted:
        """See `Drafts.next_wanted`: the target proposes nothing."""
        return NOTHING_WANTED

    def hear(self, reply: VerdictReply) -> None:
        """See `Drafts.hear`."""

    def settle(self, common_length: int) -> None:
        """See `Drafts.settle`."""

    def reject(self) -> None:
        """See `Drafts.reject`: a look-up sends no distribution that could be unreadable."""

    def close(self) -> None:
        """See `Drafts.close`."""
        self.lookup.close()


def check_wanted(
    proposal: SealedProposal, num_draft_tokens: int, siblings: tuple[int, ...]
) -> None:
    """Raises `InvariantError` for more tokens, or other siblings, than were asked for."""
    tree = proposal.tree
    check(
        tree.num_depths <= num_draft_tokens and len(proposal) <= num_draft_tokens + sum(siblings),
        f"{len(proposal)} tokens in {tree.num_depths} places, "
        f"{num_draft_tokens} and siblings {siblings} asked",
    )
    for group in tree.groups:
        depth, others = tree.depths[group[0]], len(group) - 1
        allowed = siblings[depth] if depth < len(siblings) else 0
        different = len({proposal.token_ids[index] for index in group}) == len(group)
        check(others <= allowed and different, f"{others} siblings at {depth}, {allowed} asked")


WATCH_ROUNDS_MIN: Final = 8
"""Rounds from one look-up to the next at least: each takes up to 0.1 ms of the coordinator ..."""
WATCH_ROUNDS_MAX: Final = 64
"""... and at most: the number doubles with each look-up of which no token followed."""


class LookupProbe:
    """The look-ups of one session that nothing is drafted from."""

    def __init__(self, lookup: SessionLookup, lengths: LengthPolicy, num_draft_tokens: int) -> None:
        """Looks up at most `num_draft_tokens` tokens at a time, and tells `lengths` of them."""
        self._lookup = lookup
        self._lengths = lengths
        self._num_draft_tokens = num_draft_tokens
        self._guess: tuple[int, ...] | None = None
        """None = nothing was looked up for the tokens to come."""
        self._num_followed = 0
        """Tokens of it that were committed since."""
        self._rounds_left = 0
        """Until the next look-up ..."""
        self._interval = WATCH_ROUNDS_MIN
        """... which comes so many rounds after the last one."""

    def committed(self, noise: RoundNoise, token_id: int) -> None:
        """A round without a draft brought one token, which the session does not have yet; `noise`
        is the round's."""
        self._rounds_left -= 1
        if self._guess is None:
            if self._rounds_left > 0:
                return
            self._guess = self._lookup.propose(self._num_draft_tokens, noise).token_ids
            self._num_followed, self._rounds_left = 0, self._interval
        num_drafted = len(self._guess)
        if self._num_followed < num_drafted and self._guess[self._num_followed] == token_id:
            self._num_followed += 1
            if self._num_followed < num_drafted:
                return
        survival = tuple(float(depth < self._num_followed) for depth in range(num_drafted))
        self._guess = None
        self._interval = min(2 * self._interval, WATCH_ROUNDS_MAX)
        if self._num_followed > 0:
            self._interval = WATCH_ROUNDS_MIN
        self._lengths.note_watched(self._num_draft_tokens, survival)

    def interrupted(self) -> None:
        """A round with a draft follows: what was looked up before it says nothing more."""
        self._guess = None
