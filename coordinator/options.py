"""What a coordinator is told once, for all its requests."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.requests.validation import RequestDefaults
from coordinator.routing.target_client import Timeouts
from outrider.limits import LOOK_AHEAD_BYTES_MAX, NUM_DRAFT_TOKENS_MAX
from outrider.speculation.sampling_params import Rule, SamplingParams


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """What a coordinator decides where a request does not."""

    name: str
    """The owner's name in the session store: of this process alone, also of those before it."""
    served_model_name: str
    """Empty = the target's own name."""
    defaults: RequestDefaults
    length_control: bool
    """Whether K is chosen round by round, up to what a request asks for; else it is just that."""
    run_ahead_rounds: int
    max_sessions: int
    timeouts: Timeouts
    follows: bool = False
    """Whether replicas may join later."""
    drafting_delays: bool = False
    """Whether a draft's work delays the target's: they share cores or a device."""
    look_ahead: int = 0
    """Outcomes of a round that the draft works out before they are known."""
    look_ahead_bytes_max: int = LOOK_AHEAD_BYTES_MAX
    """Of the proposals for them that are kept for a session."""
    resume_grace_s: float = 0.0
    """How long a session whose client is gone may be resumed before it counts as cancelled."""
    draft_siblings: int = 0
    """Candidates that a proposal may have beside each of its tokens, where the draft does not look
    ahead; without `length_control` just so many are asked for."""
    looks_up: bool = False
    """Whether the fallback is what drafts, in place of replicas."""
    confident: float | None = None
    """Tokens that the fallback must expect to be accepted to go before what else drafts; None = it
    never does."""
    model_tokens: int = NUM_DRAFT_TOKENS_MAX
    """Draft tokens of a round that a model or headers are asked for at most where the fallback was
    not confident: each takes a step, while those of a look-up cost next to nothing."""
    audit_share: float = 0.0
    """Of sessions, those whose tokens are scored once more when they are over, where anybody hears
    of it."""
    announced_as: str = ""
    """Its name in the registry, which people are shown; empty = `name`."""

    def siblings_for(self, rule: Rule, sampling: SamplingParams) -> int:
        """Candidates that a place of a session may have beside its draft token: none where only
        chains are drafted or verified."""
        is_chain = rule is Rule.BLOCK or sampling.penalised
        is_chain = is_chain or self.looks_up or self.look_ahead > 0
        return 0 if is_chain else self.draft_siblings
