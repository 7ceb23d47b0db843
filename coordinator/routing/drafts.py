"""A session's source of proposals: the interface for the decode loop, and look-ups in this process.
`draft_client.py` asks models."""

import asyncio
from typing import ClassVar, Literal

from coordinator.draft_length.controller import LengthControl
from coordinator.draft_length.policy import DraftedBeside, RoundLength
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
"""replica: a draft replica. local: the target itself, or a look-up that is configured to draft.
fallback: a look-up in place of a draft that does not answer."""


@value(frozen=True, slots=True)
class Drafted:
    """A proposal and where it is from."""

    proposal: SealedProposal
    source: Source
    seconds: float
    """How long the round waited for it."""
    num_asked: int
    """The K that it was drafted for, at most the round's, or the tokens drawn until time ran out. 0
    if the proposal says nothing about the draft."""
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    """Computing time that the replica reports."""
    work_ms: float = 0.0
    """The part of `compute_ms` that was for this session: others may share a step."""
    ahead: bool = False
    """Whether it arrived before the round began."""
    beside: DraftedBeside | None = None
    """How it was drafted, if it came with the verdict before."""


@value(frozen=True, slots=True)
class NextWanted:
    """What the target is to send with its verdict for the next round."""

    num_draft_tokens: int = 0
    siblings: tuple[int, ...] = ()
    features_from: int | None = None
    """See `VerifyItem.features_from`."""
    budget_us: int = 0
    """See `VerifyItem.next_budget_us`."""


NOTHING_WANTED = NextWanted()


class SessionLookup:
    """The look-up of one session."""

    def __init__(self, lookup: LookupDrafter, session: Session, sampling: SamplingParams) -> None:
        self._lookup = lookup
        self._session = session
        self._sampling = sampling

    def propose(self, num_draft_tokens: int, noise: RoundNoise) -> SealedProposal:
        """A chain of at most `num_draft_tokens` that follow the committed tokens."""
        return self.guess(num_draft_tokens, noise)[0]

    def guess(self, num_draft_tokens: int, noise: RoundNoise) -> tuple[SealedProposal, float]:
        """Like `propose`, and how many of the tokens are expected to be accepted."""
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
        """Call when the session ends."""
        self._lookup.release(self._session.session_id)


class Drafts:
    """One session's proposals. This class looks them up; subclasses ask a model. Every round gets a
    proposal, and nothing here raises: a failing draft must not harm a request."""

    is_lookup: ClassVar[bool] = True
    """Whether all proposals are looked up."""
    never_drafts: ClassVar[bool] = False
    """Whether no round gets a proposal, so that `propose` must not be called."""

    def __init__(self, lookup: SessionLookup) -> None:
        self.lookup = lookup

    @property
    def cache_state(self) -> CacheState | None:
        """What the draft replica holds, for the session's record; None without a replica."""
        return None

    @property
    def on_trial(self) -> bool | None:
        """Whether the draft replica is on trial; None without a replica."""
        return None

    def prefill(self, num_draft_tokens: int) -> None:
        """Starts reading the prompt during the first round, which has no proposal. The next round
        may ask for up to `num_draft_tokens`. Does not wait."""

    async def propose(self, round_index: int, length: RoundLength, noise: RoundNoise) -> Drafted:
        """A proposal with at most the tokens and siblings of `length`, drawn within its time. A
        look-up does not wait; its first call indexes the prompt, at about 1 us per token."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        proposal = self.lookup.propose(length.num_draft_tokens, noise)
        return Drafted(proposal, "local", loop.time() - start, length.num_draft_tokens)

    def next_wanted(self, length: RoundLength, room: int) -> NextWanted:
        """What the target is to send for the next round with its verdict on a round of this
        `length`. The target's context has room for `room` more tokens then."""
        return NOTHING_WANTED

    def hear(self, reply: VerdictReply) -> None:
        """Takes from a verdict what `next_wanted` asked for."""

    def settle(self, common_length: int) -> None:
        """Notes an outcome: of the session's tokens and the drafted ones after them, the first
        `common_length` are committed."""

    def reject(self) -> None:
        """Takes no more proposals from this drafter, as it sent an unreadable distribution."""

    def close(self) -> None:
        """Call when the session ends."""
        self.lookup.close()


class NoDrafts(Drafts):
    """For a session without proposals."""

    is_lookup = False
    never_drafts = True


WATCH_ROUNDS_MIN = 8
"""Fewest rounds from one look-up to the next: each takes up to 0.1 ms of the coordinator."""
WATCH_ROUNDS_MAX = 64
"""Most rounds from one look-up to the next. Each wrong first token doubles the number."""


class LookupProbe:
    """Looks up proposals in plain rounds, to tell length control how many tokens would be
    accepted."""

    def __init__(
        self, lookup: SessionLookup, lengths: LengthControl, num_draft_tokens: int
    ) -> None:
        """Looks up at most `num_draft_tokens` tokens at a time."""
        self._lookup = lookup
        self._lengths = lengths
        self._num_draft_tokens = num_draft_tokens
        self._guess: tuple[int, ...] | None = None
        """The look-up that is compared with the tokens to come, if there is one."""
        self._num_followed = 0
        """How many of its tokens were committed since."""
        self._rounds_left = 0
        """Rounds until the next look-up."""
        self._interval = WATCH_ROUNDS_MIN
        """Rounds from one look-up to the next."""

    def note(self, num_asked: int, noise: RoundNoise, token_id: int) -> None:
        """Call after each round, before the session has its tokens, with the round's `noise` and
        first token. A round with a draft (`num_asked`) ends the comparison."""
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
