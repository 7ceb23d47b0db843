"""Look-ups in the target propose the draft tokens of rounds that run without the coordinator."""

from __future__ import annotations

from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import LookupDrafter
from outrider.foundation.bounded_dict import BoundedDict
from outrider.foundation.tokens import ContinuedTokens, TokenSequence
from outrider.interfaces.messages import RoundHead
from outrider.limits import SEQUENCES_PER_REPLICA_MAX
from outrider.speculation.proposal import EMPTY_PROPOSAL, Proposal
from outrider.speculation.sampling_params import SamplingParams

INDEXED_PER_STEP_MAX = 1024
"""Number of tokens that all look-ups of a step may index, so that long prompts delay no step. A
session has no proposal until its text is indexed."""


class TargetLookups:
    """The look-ups of a target's sessions."""

    def __init__(self, drafter: LookupDrafter) -> None:
        self._drafter = drafter
        self._index_until = 0
        self._rounds: BoundedDict[str, tuple[int, int, int]] = BoundedDict(
            SEQUENCES_PER_REPLICA_MAX
        )
        """Epoch, round and committed length of each session's last look-up."""

    def begin_step(self) -> None:
        """Must be called before the look-ups of a step."""
        self._index_until = self._drafter.num_indexed + INDEXED_PER_STEP_MAX

    def propose(
        self,
        head: RoundHead,
        sampling: SamplingParams,
        held: TokenSequence,
        num_tokens: int,
        min_chance: float = 0.0,
    ) -> Proposal:
        """Returns a proposal of at most `num_tokens` tokens. `held` are the tokens that the engine
        holds of the session. If they lack a part of the stated prefix, the proposal is empty.
        `min_chance`: see `DraftRequest`."""
        if not held.holds(head.base_length, head.prefix_digest):
            return EMPTY_PROPOSAL
        place = head.epoch, head.round, head.committed_length
        # A round is looked up again if it found no pages, or if a step ran a part of its prefix.
        is_again = self._rounds.get(head.session_id) == place
        if not is_again and self._drafter.length(head.session_id) > head.base_length:
            # The text may have tokens that an earlier run of the session has lost.
            self.forget(head.session_id)
        self._rounds[head.session_id] = place
        request = DraftRequest(
            session_id=head.session_id,
            tenant=head.tenant,
            token_ids=ContinuedTokens(held.ids, head.base_length, head.append),
            digests=None if is_again else held,
            prompt_length=head.prompt_length,
            num_draft_tokens=num_tokens,
            sampling=sampling,
            rule=head.rule,
            noise=head.noise,
            min_chance=min_chance,
        )
        guess = self._drafter.guess(request, self._index_until - self._drafter.num_indexed)
        return guess.proposal(request)

    def forget(self, session_id: str) -> None:
        """Frees the session's text."""
        self._rounds.pop(session_id, None)
        self._drafter.release(session_id)
