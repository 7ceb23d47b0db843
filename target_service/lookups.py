"""Look-ups in the target: they propose the draft tokens of rounds that coordinators ask for, and of
rounds that run ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import LookupDrafter
from outrider.foundation.bounded_dict import BoundedDict
from outrider.foundation.tokens import ContinuedTokens, TokenSequence
from outrider.interfaces.messages import Prefix, RoundHead
from outrider.limits import NUM_DRAFT_TOKENS_MAX, SEQUENCES_PER_REPLICA_MAX
from outrider.speculation.proposal import Proposal
from outrider.speculation.sampling_params import SamplingParams

INDEXED_PER_STEP_MAX = 1024
"""Number of tokens that are indexed or learned during a step, so that long texts delay no step. A
session has no proposal until its text is indexed."""
_INDEXED_BEFORE_STEP_MAX = NUM_DRAFT_TOKENS_MAX + 1
"""Number of a session's tokens that are indexed before a step: those of the round before."""


class TargetLookups:
    """The look-ups of a target's sessions."""

    def __init__(self, drafter: LookupDrafter) -> None:
        self._drafter = drafter
        self._rounds: BoundedDict[str, tuple[int, int, int]] = BoundedDict(
            SEQUENCES_PER_REPLICA_MAX
        )
        """Epoch, round and committed length of each session's last look-up."""
        self._lessons: deque[Iterator[int]] = deque(maxlen=SEQUENCES_PER_REPLICA_MAX)
        """Outputs that are not or partly learned. Each yields a number of tokens when it has
        learned them. Beyond the limit, drops the oldest."""
        self._lessons_waited = False
        """Whether the last step that indexed texts had no time for the next lesson."""

    def propose(
        self,
        head: RoundHead,
        sampling: SamplingParams,
        held: TokenSequence,
        num_tokens: int,
        min_chance: float = 0.0,
    ) -> Proposal | None:
        """Returns a proposal of at most `num_tokens` tokens. `held` are the tokens that the engine
        holds of the session. Returns None if they lack a part of the stated prefix, or if the text
        is not indexed yet. `min_chance`: see `DraftRequest`."""
        if not held.holds(head.base_length, head.prefix_digest):
            return None
        # A round is looked up again if it found no pages, or if a step ran a part of its prefix.
        # Then `held` may have other tokens after the prefix.
        digests = None if self._begin(head) else held
        request = _request(head, sampling, held, digests, num_tokens, min_chance)
        guess = self._drafter.guess_soon(request, _INDEXED_BEFORE_STEP_MAX)
        return None if guess is None else guess.proposal(request)

    def index(
        self,
        texts: Sequence[tuple[RoundHead, SamplingParams]],
        held: Callable[[str], TokenSequence],
    ) -> None:
        """Indexes the committed tokens of a step's sessions, at most `INDEXED_PER_STEP_MAX` tokens
        in all. Must be called during the step, when the engine holds (`held`) the prefix that each
        head states. The text that lacks the fewest tokens comes first, and lessons come last, but
        come first if they had to wait in the step before."""
        lacking: list[tuple[int, DraftRequest]] = []
        for head, sampling in texts:
            self._begin(head)
            num = head.committed_length - self._drafter.length(head.session_id)
            if num > 0:
                tokens = held(head.session_id)
                lacking.append((num, _request(head, sampling, tokens, tokens)))
        num_left = INDEXED_PER_STEP_MAX
        if self._lessons_waited:
            num_left = max(0, num_left - self._learn_next())
        for num, request in sorted(lacking, key=lambda entry: entry[0]):
            if num_left == 0:
                break
            self._drafter.index(request, num_left)
            num_left -= min(num, num_left)
        self._lessons_waited = num_left == 0 and bool(self._lessons)
        while num_left > 0 and self._lessons:
            num_left -= self._learn_next()

    def _learn_next(self) -> int:
        """Learns a piece of the oldest lesson. Returns its number of tokens."""
        num = next(self._lessons[0], 0)
        if num == 0:
            self._lessons.popleft()
        return num

    def learn(self, session_id: str, held: TokenSequence, learned: Prefix) -> None:
        """Lets later steps learn the first tokens of a session that has ended, if they are among
        those that the engine holds of it."""
        if held.holds(learned.length, learned.digest):
            tokens = ContinuedTokens(held.ids, learned.length, ())
            self._lessons.append(self._drafter.end(session_id, tokens))

    def forget(self, session_id: str) -> None:
        """Frees the session's text, and learns nothing from it."""
        self._rounds.pop(session_id, None)
        self._drafter.forget(session_id)

    def _begin(self, head: RoundHead) -> bool:
        """Begins a round. Returns whether it was begun before."""
        place = head.epoch, head.round, head.committed_length
        is_again = self._rounds.get(head.session_id) == place
        if not is_again and self._drafter.length(head.session_id) > head.base_length:
            # The text may have tokens that an earlier run of the session has lost.
            self.forget(head.session_id)
        self._rounds[head.session_id] = place
        return is_again


def _request(
    head: RoundHead,
    sampling: SamplingParams,
    held: TokenSequence,
    digests: TokenSequence | None,
    num_tokens: int = 0,
    min_chance: float = 0.0,
) -> DraftRequest:
    return DraftRequest(
        session_id=head.session_id,
        tenant=head.tenant,
        token_ids=ContinuedTokens(held.ids, head.base_length, head.append),
        digests=digests,
        prompt_length=head.prompt_length,
        num_draft_tokens=num_tokens,
        sampling=sampling,
        rule=head.rule,
        noise=head.noise,
        min_chance=min_chance,
    )
