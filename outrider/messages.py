"""Messages between coordinators and replicas, as values; `outrider.transport` sends them.

Every message is idempotent: repeated, late and reordered ones cost only time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline
from outrider.engine.step_costs import StepCosts
from outrider.errors import BadRequest, OutriderError
from outrider.grammar.constraint import Constraint
from outrider.hidden_states import Features
from outrider.limits import NUM_DRAFT_TOKENS_MAX
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.proposal import NOTHING_SEALED, SealedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.values import value

if TYPE_CHECKING:
    from outrider.grammar.compiler import Grammar

TOKEN_BYTES = 4


@value(frozen=True, slots=True)
class RoundHead:
    """Session, round and prefix: part of every item for drafts and targets."""

    session_id: str
    """32 hexadecimal digits."""
    tenant: str
    epoch: int
    round: int
    base_length: int
    """Length of the stated prefix, which the replica must hold before it adds `append`."""
    prefix_digest: int
    """Digest of the stated prefix."""
    append: tuple[int, ...]
    """Committed tokens after the stated prefix."""
    prompt_length: int
    rule: Rule
    seed: int
    sampling: SamplingParams | None
    """None = as sent before on this stream, under `sampling_hash`."""
    sampling_hash: int
    deadline_ms: int = 0
    """The request's remaining time; 0 = no deadline."""
    traceparent: str = ""
    constraint: Constraint | None = None
    """Constraint of the completion. If it is None, `constraint_hash` says whether there is none, or
    the one sent before on this stream."""
    constraint_hash: bytes = b""
    """Empty = no constraint."""
    compiled: Grammar | OutriderError | None = field(default=None, compare=False, repr=False)
    """Not sent: the replica's compiled grammar, or the error of its compilation; set before a step
    takes the item."""

    @property
    def committed_length(self) -> int:
        """Committed tokens when the round began. The round's noise depends on this number."""
        return self.base_length + len(self.append)

    @property
    def given_hashes(self) -> tuple[int, bytes]:
        """Hashes of parameters and constraint, which are sent in full once per session and
        stream."""
        return self.sampling_hash, self.constraint_hash

    @property
    def noise(self) -> RoundNoise:
        """The round's random numbers."""
        return RoundNoise(self.seed, self.rule, self.committed_length)

    def params(self) -> SamplingParams:
        """`sampling`. Raises `BadRequest` if it is unknown or contradicts the rule."""
        if self.sampling is None:
            raise BadRequest("head.sampling", "the parameters behind the hash are not known")
        if self.sampling.greedy != (self.rule is Rule.GREEDY):
            raise BadRequest(
                "head.rule",
                f"{self.rule.value} does not go with temperature {self.sampling.temperature}",
            )
        return self.sampling

    @property
    def key(self) -> ReplyKey:
        """Key of the answer to this item."""
        return ReplyKey(self.session_id, self.epoch, self.round)


@value(frozen=True, slots=True)
class ReplyKey:
    """The round that a reply belongs to."""

    session_id: str
    epoch: int
    round: int


@value(frozen=True, slots=True)
class VerifyItem:
    """Asks a target to verify a proposal; with an empty one, to decode one token."""

    head: RoundHead
    proposal: SealedProposal = NOTHING_SEALED
    run_ahead: int = 0
    """Further rounds that the target may run, with an answer for each."""
    num_logprobs: int | None = None
    num_next_draft_tokens: int = 0
    """Most draft tokens for the next round of a target that drafts for itself."""
    next_siblings: tuple[int, ...] = ()
    """Candidates beside the first, second, ... of these tokens, as in `DraftRequest.siblings`."""
    features_from: int | None = None
    """Position from which features of committed tokens are wanted; None = none."""
    next_budget_us: int = 0
    """Time for drafting the next round's proposal, from the start of drafting; 0 = no bound."""
    audit: bool = False
    """Whether the proposal is a chain of an ended session's committed tokens, to be audited."""

    @property
    def num_rows(self) -> int:
        """Tokens that the item adds to a step, if the target holds the stated prefix."""
        return max(1, len(self.head.append) + len(self.proposal))

    @property
    def is_answered_in_bulk(self) -> bool:
        """Whether the answer is large, with features of more tokens than a round commits."""
        first = self.features_from
        return first is not None and self.head.committed_length - first > NUM_DRAFT_TOKENS_MAX + 2

    awaits_answer: ClassVar[bool] = True
    gives_way: ClassVar[bool] = False
    """Whether a newer item of the session may begin before this one ends. It may not, as the
    session waits for every verdict."""


@value(frozen=True, slots=True)
class DraftItem:
    """Asks a draft for up to `num_draft_tokens` tokens after the stated prefix and its append."""

    head: RoundHead
    num_draft_tokens: int
    look_ahead: int = 0
    """Outcomes of this round that the draft may predict: for each it sends a proposal for the next
    round, of up to `num_draft_tokens` tokens."""
    held: tuple[int, ...] | None = None
    """The round's proposal if known: the item then asks only for look-ahead."""
    siblings: tuple[int, ...] = ()
    """Candidates beside the proposal's first, second, ... token, as in `DraftRequest.siblings`.
    Empty with look-ahead."""
    features: Features | None = None
    """Features of committed tokens that the draft lacks, for drafts that read features."""
    budget_us: int = field(default=0, compare=False)
    """Time for drafting, from the item's arrival; 0 = no bound."""
    deadline: DraftDeadline = field(default=NO_DEADLINE, compare=False, repr=False)
    """Not sent: when the time of `budget_us` ends, by the draft's clock."""

    @property
    def num_rows(self) -> int:
        """Tokens that the item adds to a step, if the draft holds the stated prefix."""
        return max(1, len(self.head.append))

    @property
    def awaits_answer(self) -> bool:
        """Whether the item asks for more than look-ahead."""
        return self.held is None

    is_answered_in_bulk: ClassVar[bool] = False

    @property
    def gives_way(self) -> bool:
        """Whether the item asks only for look-ahead. A newer item of its session may then begin
        before this one ends."""
        return self.held is not None and self.look_ahead > 0


@value(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities of the raw logits at one position."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), likeliest first."""


@value(frozen=True, slots=True)
class VerdictReply:
    """A target's answer."""

    key: ReplyKey
    verdict: Verdict
    cached_length: int
    """Tokens of prefix and proposal that the replica now holds."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """[2K+1] if asked for: of the K draft tokens, then of the K+1 corrections."""
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    next_proposal: SealedProposal = NOTHING_SEALED
    """Proposal for the next round after this one's outcome, perhaps shorter than asked for."""
    next_base_length: int = 0
    """Number of committed tokens that `next_proposal` extends."""
    next_draft_ms: float = 0.0
    """Part of `compute_ms` that the step took to draft for all of its sessions."""
    next_work_ms: float = 0.0
    """This session's share of `next_draft_ms`."""
    next_out_of_time: bool = False
    """Whether the next proposal is short because its time ran out."""
    features: Features | None = None
    """If wanted: features of the tokens from `features_from` on, including those committed with
    this verdict except the last, as many as fit in a message."""
    audit: AuditSums | None = None
    """Result of an audit item."""


@value(frozen=True, slots=True)
class ProposalReply:
    """A draft's answer; with assumed tokens, a proposal for a future round."""

    key: ReplyKey
    proposal: SealedProposal
    base_length: int
    """Length of the committed prefix that assumed tokens and proposal extend."""
    cached_length: int
    """Tokens of prefix and proposal that the replica now holds."""
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    work_ms: float = 0.0
    """This session's share of `compute_ms`."""
    assumed: tuple[int, ...] = ()
    """Tokens after the prefix that are not committed, and may never be."""
    out_of_time: bool = False
    """Whether the proposal is short or empty because its time ran out."""

    @property
    def num_bytes(self) -> int:
        """Size of the proposed and assumed tokens."""
        return len(self.proposal.q) + TOKEN_BYTES * (len(self.proposal) + len(self.assumed))


@dataclass(frozen=True, slots=True)
class Resync:
    """The replica does not hold the stated prefix, but `cached_length` tokens with this digest.

    Normal after eviction, restart or migration: the coordinator sends what is missing."""

    key: ReplyKey
    cached_length: int
    prefix_digest: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica refuses to answer. `code` is a google.rpc.Code."""

    key: ReplyKey
    code: int
    message: str


RoundItem = VerifyItem | DraftItem
VerifyAnswer = VerdictReply | Resync | Refused
DraftAnswer = ProposalReply | Resync | Refused


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """What a replica runs."""

    model: str
    weights_fingerprint: str
    tokenizer_fingerprint: str
    """Empty if the replica does not depend on a tokenizer (n-gram drafting)."""
    vocab_size: int
    """Width of the logits, padding included; 0 without logits."""
    dtype: str
    max_model_len: int
    """0 = the replica sets no limit."""
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    step_costs: StepCosts | None = None
    """Times of the replica's steps; None if not measured."""
    drafts_itself: bool = False
    """Whether a target sends proposals for the next round with its verdicts."""
    shows_features: bool = False
    """Whether a target sends features of its layers if asked."""
    reads_features: bool = False
    """Whether a draft reads features of the target's layers."""
    features: str = ""
    """Identifies the target's weights and the head. It must be equal in a target and a draft that
    exchange features."""
    numerics: str = ""
    """Identifies how logits are computed. Replicas with equal values and weights compute
    bit-identical logits. Empty if a token's logits depend on the rest of its step."""
    draft_note: str = ""
    """Note for operators on a target's own drafting; empty if all is well."""

    @property
    def weights(self) -> str:
        """Identifies what must be equal for a session to continue on another replica: the weights,
        how they are run, and the maximum length."""
        return f"{self.weights_fingerprint}/{self.dtype}/{self.max_model_len}"
