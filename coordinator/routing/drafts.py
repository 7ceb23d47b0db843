"""Sources of a session's proposals: the interface that the decode loop calls, and the sources
without a model. `draft_client.py` has the sources that ask a model."""

import asyncio
from collections.abc import Callable
from typing import Literal

from coordinator.draft_length.controller import LengthControl
from coordinator.draft_length.policy import DraftedBeside, RoundLength
from coordinator.routing.replica_pool import SessionContext
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import LookupDrafter
from outrider.foundation.values import value
from outrider.interfaces.messages import VerdictReply
from outrider.sessions.store import CacheState
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal
from outrider.speculation.random_streams import RoundNoise

Source = Literal["replica", "local", "fallback"]
"""replica: a draft replica. local: a head in the target, or a look-up that is configured as the
drafter. fallback: a look-up in place of a draft or head that has no proposal."""


@value(frozen=True, slots=True)
class Drafted:
    """A round's proposal, its source, and its times."""

    proposal: EncodedProposal
    source: Source
    seconds: float
    """Time for which the round waited for the proposal."""
    num_asked: int
    """Number of draft tokens that the round asked for, at most K. If drafting ran out of time, the
    number of drawn tokens. 0 if no drafter was asked, or if a look-up replaced a drafter that was
    late or not ready. At 0, length control learns no acceptance from the round."""
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    """Duration of the replica's steps for the proposal."""
    work_ms: float = 0.0
    """This session's share of `compute_ms`. Several sessions may share a step."""
    ahead: bool = False
    """Whether the proposal arrived before the round began."""
    beside: DraftedBeside | None = None
    """Set if the target drafted the proposal and sent it with the previous verdict."""
    by_target: bool = False
    """Whether the target's look-up drafts. The verdict then states the proposal."""


def drafted_by_target(length: RoundLength) -> Drafted:
    """Returns what is known of a round for which the target's look-up drafts, before its verdict
    states the proposal."""
    num_asked = length.num_draft_tokens
    return Drafted(EMPTY_ENCODED_PROPOSAL, "local", 0.0, num_asked, by_target=True)


@value(frozen=True, slots=True)
class NextRoundRequest:
    """What the target is asked to send with a verdict, for the next round. See `VerifyItem`."""

    num_draft_tokens: int = 0
    features_from: int | None = None
    budget_us: int = 0


NO_NEXT_REQUEST = NextRoundRequest()


@value(frozen=True, slots=True)
class LookupRequest:
    """What the target's look-up is asked to propose."""

    num_tokens: int = 0
    """Largest number of tokens."""
    min_chance: float = 0.0
    """See `DraftRequest.min_chance`."""
    indexes: bool = False
    """See `VerifyItem.indexes`."""
    num_probed: int = 0
    """See `VerifyItem.num_probe_tokens`."""


NO_LOOKUP = LookupRequest()


class SessionLookup:
    """A look-up for one session."""

    def __init__(self, lookup: LookupDrafter, context: SessionContext) -> None:
        self._lookup = lookup
        self._session = context.session
        self._sampling = context.parameters.sampling

    def propose(
        self, num_draft_tokens: int, noise: RoundNoise, min_chance: float = 0.0
    ) -> tuple[EncodedProposal, float]:
        """Returns a proposal of at most `num_draft_tokens` tokens, and the number of accepted
        tokens that the look-up expects. `min_chance`: see `DraftRequest`."""
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
            min_chance=min_chance,
        )
        guess = self._lookup.guess(request)
        return EncodedProposal.of(guess.proposal(request)), guess.score

    def close(self) -> None:
        """Frees the session's text. Must be called when the session ends."""
        self._lookup.release(self._session.session_id)


WATCH_ROUNDS_MIN, WATCH_ROUNDS_MAX = 8, 64
"""Bounds of the number of rounds between two look-ups of a `LookupProbe`. The number doubles if the
first token of a look-up is wrong. A look-up takes up to 0.1 ms of CPU time."""


class LookupProbe:
    """Looks up tokens during plain rounds, and compares them with the committed tokens, so that
    length control learns how many draft tokens would be accepted."""

    def __init__(self, lengths: LengthControl, num_draft_tokens: int) -> None:
        self._lengths = lengths
        self._num_draft_tokens = num_draft_tokens
        self._guess: tuple[int, ...] | None = None
        """The look-up's tokens during a comparison; None between comparisons."""
        self._num_followed = 0
        """Number of tokens of `_guess` that match the committed tokens so far."""
        self._rounds_left = 0
        """Number of rounds until the next look-up."""
        self._interval = WATCH_ROUNDS_MIN

    @property
    def num_wanted(self) -> int:
        """Number of tokens that the target's look-up should show; 0 = no comparison is due."""
        is_due = self._guess is None and self._rounds_left <= 1
        return self._num_draft_tokens if is_due else 0

    def note(
        self, num_asked: int, token_id: int, look_up: Callable[[], tuple[int, ...] | None]
    ) -> None:
        """Compares the first token of a round with what `look_up` returns (None = nothing yet),
        which is called if a comparison is due. Must be called after each round, before the round's
        tokens are added to the session. A round that asked for draft tokens (`num_asked` > 0) ends
        the comparison."""
        if num_asked > 0:
            self._guess = None
            return
        self._rounds_left -= 1
        if self._guess is None:
            if self._rounds_left > 0 or (guess := look_up()) is None:
                return
            self._guess = guess
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


class Drafts:
    """One session's source of proposals, as the decode loop calls it. No method raises an error if
    a draft fails, because a failed draft must not end a request. The methods of this base class
    suit a source that asks no replica."""

    max_tokens: int
    """Largest number of draft tokens of a round. If it is 0, `propose` is never called."""
    by_target = False
    """Whether the target's look-up should draft for timed rounds (`RoundLength.is_timed`). For
    other rounds, and for a target without a look-up, `propose` is called."""
    by_head = False
    """Whether a head in the target proposes for every round, so that such rounds may run ahead."""

    def probe(self, lengths: LengthControl) -> LookupProbe | None:
        """Returns a probe with which `lengths` learns from plain rounds; None if a replica must
        draft for that."""
        return None

    def show(self, noise: RoundNoise, min_chance: float) -> tuple[int, ...]:
        """Looks tokens up for a `probe`. Is called only if there is one."""
        raise NotImplementedError

    @property
    def cache_state(self) -> CacheState | None:
        """The draft replica, and the number of tokens that it holds; None without a replica."""
        return None

    @property
    def on_trial(self) -> bool | None:
        """Whether the replica that drafts is on trial. None if no replica drafts."""
        return None

    def prefill(self, num_draft_tokens: int) -> None:
        """Asks the draft to prefill the session's tokens while the first round runs. Does not wait.
        With look-ahead, the draft also drafts up to `num_draft_tokens` tokens for round two."""

    async def propose(self, round_index: int, length: RoundLength, noise: RoundNoise) -> Drafted:
        """Returns a proposal within the limits of `length` on tokens and time."""
        raise NotImplementedError

    def take_next(self, length: RoundLength) -> Drafted | None:
        """Returns the proposal that the newest verdict has brought for this round; None if it has
        brought none."""
        return None

    def next_round_request(self, length: RoundLength) -> NextRoundRequest:
        """Returns what the target should send with its verdict on a round of this `length`."""
        return NO_NEXT_REQUEST

    def on_verdict(self, reply: VerdictReply) -> bool:
        """Takes a verdict, which may bring the extra data that `next_round_request` asked for.
        Returns whether its proposal, if it has one, can be used for the next round."""
        return True

    def settle(self, common_length: int) -> None:
        """Records a round's outcome. `common_length` is the number of tokens that were committed
        before the round, plus the number of accepted tokens."""

    def reject(self) -> None:
        """Stops using the current drafter. Must be called if the target refuses the drafter's q."""

    def close(self) -> None:
        """Frees the session's state. Must be called when the session ends."""


class NoDrafts(Drafts):
    """The source of a session without proposals."""

    max_tokens = 0


class LookupDrafts(Drafts):
    """Proposes with a look-up in the coordinator. If `by_target` is set, the target's look-up
    should draft in its place."""

    def __init__(
        self, lookup: LookupDrafter, context: SessionContext, by_target: bool = False
    ) -> None:
        self._lookup = SessionLookup(lookup, context)
        self.max_tokens = context.parameters.num_draft_tokens
        self.by_target = by_target

    def probe(self, lengths: LengthControl) -> LookupProbe:
        return LookupProbe(lengths, self.max_tokens)

    def show(self, noise: RoundNoise, min_chance: float) -> tuple[int, ...]:
        return self._lookup.propose(self.max_tokens, noise, min_chance)[0].token_ids

    async def propose(self, round_index: int, length: RoundLength, noise: RoundNoise) -> Drafted:
        loop = asyncio.get_running_loop()
        start = loop.time()
        proposal, _ = self._lookup.propose(length.num_draft_tokens, noise, length.min_chance)
        return Drafted(proposal, "local", loop.time() - start, length.num_draft_tokens)

    def close(self) -> None:
        self._lookup.close()
