"""Where a session's proposals come from: what the decode loop asks, answered here by a look-up in
this process; `draft_client.py` asks replicas."""

from __future__ import annotations

import asyncio
from typing import ClassVar, Literal

from coordinator.draft_length.policy import DraftedBeside, LengthPolicy, RoundLength
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import LookupDrafter
from outrider.messages import VerdictReply
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState
from outrider.speculation.proposal import SealedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import SamplingParams
from outrider.values import value

Source = Literal["replica", "local", "fallback"]
"""Of a proposal: a draft replica; a look-up that is meant to draft, or the target itself; or a
look-up in place of a draft that does not answer."""


@value(frozen=True, slots=True)
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


@value(frozen=True, slots=True)
class NextWanted:
    """What a target is to send with its verdict, for the next round."""

    num_draft_tokens: int = 0
    siblings: tuple[int, ...] = ()
    features_from: int | None = None
    """See `VerifyItem.features_from`."""
    budget_us: int = 0
    """Time to draft, see `VerifyItem.next_budget_us`."""


NOTHING_WANTED = NextWanted()


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


class Drafts:
    """One session's proposals; of this class by a look-up alone. A round always gets one, and
    nothing here raises: a request must not suffer from a draft."""

    is_lookup: ClassVar[bool] = True
    """Whether all proposals are look-ups."""

    def __init__(self, lookup: SessionLookup) -> None:
        self.lookup = lookup

    @property
    def cache_state(self) -> CacheState | None:
        """What the store is told of the draft's side; None where no replica drafts."""
        return None

    @property
    def on_trial(self) -> bool | None:
        """Whether the replica that drafts is on trial; None where none drafts."""
        return None

    def prefill(self, num_draft_tokens: int) -> None:
        """The prompt is being read, for a first round without a proposal; the next one may want up
        to so many tokens. Waits for nothing."""

    async def propose(self, round_index: int, length: RoundLength, noise: RoundNoise) -> Drafted:
        """A proposal of at most the tokens, and the siblings beside each, of a round's length,
        drawn within its time. A look-up waits for nothing; it indexes the prompt when it is first
        asked, at about 1 us a token."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        proposal = self.lookup.propose(length.num_draft_tokens, noise)
        return Drafted(proposal, "local", loop.time() - start, length.num_draft_tokens)

    def next_wanted(self, length: RoundLength, room: int) -> NextWanted:
        """What the target is to propose for the next round with its verdict on one of this length;
        `room` is left in the target's context then."""
        return NOTHING_WANTED

    def hear(self, reply: VerdictReply) -> None:
        """A verdict has come, with what was wanted."""

    def settle(self, common_length: int) -> None:
        """Notes an outcome: the first `common_length` tokens of what was drafted are committed."""

    def reject(self) -> None:
        """What drafts sends distributions that cannot be read: this session takes no more proposals
        from it. A look-up sends none."""

    def close(self) -> None:
        """The session ends."""
        self.lookup.close()


WATCH_ROUNDS_MIN = 8
"""Rounds from one look-up to the next at least: each takes up to 0.1 ms of the coordinator ..."""
WATCH_ROUNDS_MAX = 64
"""... and at most: the number doubles with each look-up of which no token followed."""


class LookupProbe:
    """Look-ups in rounds without a draft, of which only the length control is told."""

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

    def note(self, num_asked: int, noise: RoundNoise, token_id: int) -> None:
        """A round brought tokens of which this is the first, and which the session does not have
        yet; `noise` is the round's. What was looked up before a round with a draft says nothing
        more."""
        if num_asked > 0:
            self._guess = None
            return
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
