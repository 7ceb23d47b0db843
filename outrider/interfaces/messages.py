"""Messages between coordinators and replicas. `outrider.transport` encodes and sends them.

Every message is idempotent: a repeated, late or reordered message costs only time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from outrider.drafters.features import Features
from outrider.errors import BadRequest
from outrider.foundation.tokens import digest_after
from outrider.foundation.values import value
from outrider.grammar.constraint import Constraint
from outrider.interfaces.step_costs import StepCosts
from outrider.limits import NUM_DRAFT_TOKENS_MAX
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

TOKEN_BYTES = 4


@value(frozen=True, slots=True)
class RoundHead:
    """Session, round and prefix of a request to a draft or target."""

    session_id: str
    """32 hexadecimal digits."""
    tenant: str
    epoch: int
    round: int
    base_length: int
    """Length, in tokens, of the *stated prefix*, which the replica must hold already."""
    prefix_digest: int
    append: tuple[int, ...]
    """Committed tokens that follow the stated prefix."""
    prompt_length: int
    rule: Rule
    seed: int
    sampling: SamplingParams | None
    """None = this stream has already sent the parameters with this `sampling_hash`."""
    sampling_hash: int
    deadline_ms: int = 0
    """The request's remaining time; 0 = no deadline."""
    traceparent: str = ""
    constraint: Constraint | None = None
    """None = no constraint, or a constraint that this stream has already sent."""
    constraint_hash: bytes = b""
    """Empty = no constraint."""

    @property
    def committed_length(self) -> int:
        """Number of committed tokens at the start of the round."""
        return self.base_length + len(self.append)

    @property
    def committed_digest(self) -> int:
        """Digest of these tokens."""
        return digest_after(self.prefix_digest, self.append)

    @property
    def given_hashes(self) -> tuple[int, bytes]:
        return self.sampling_hash, self.constraint_hash

    @property
    def noise(self) -> RoundNoise:
        return RoundNoise(self.seed, self.rule, self.committed_length)

    def params(self) -> SamplingParams:
        """Returns `sampling`. Raises `BadRequest` if `sampling` is None or contradicts the rule."""
        if self.sampling is None:
            raise BadRequest("head.sampling", "no parameters with this hash are known")
        if self.sampling.greedy != (self.rule is Rule.GREEDY):
            raise BadRequest(
                "head.rule",
                f"{self.rule.value} does not fit temperature {self.sampling.temperature}",
            )
        return self.sampling

    @property
    def key(self) -> ReplyKey:
        return ReplyKey(self.session_id, self.epoch, self.round)


@value(frozen=True, slots=True)
class ReplyKey:
    """Identifies the round that a reply answers."""

    session_id: str
    epoch: int
    round: int


@value(frozen=True, slots=True)
class VerifyItem:
    """Asks a target to verify a proposal. An empty proposal asks for one decoded token."""

    head: RoundHead
    proposal: EncodedProposal = EMPTY_ENCODED_PROPOSAL
    run_ahead: int = 0
    """Number of later rounds that the target may run and answer without further items. They are
    plain, unless `num_lookup_tokens` or `num_next_draft_tokens` is set."""
    num_logprobs: int | None = None
    num_next_draft_tokens: int = 0
    """Largest number of tokens to draft for the next round, if the target drafts for itself. In
    rounds that the target runs ahead, `next_proposal` of the verdict before is the proposal. A
    verdict without a `next_proposal` is then the last one."""
    features_from: int | None = None
    """Asks for the `Features` of the committed tokens from this position on; None = no features."""
    next_budget_us: int = 0
    """Time limit for drafting the next round, counted from the start of drafting; 0 = no limit."""
    num_lookup_tokens: int = 0
    """Without a proposal: the largest number of tokens that the target's look-up proposes for this
    round, and for each round that it runs ahead."""
    lookup_min_chance: float = 0.0
    """See `DraftRequest.min_chance`."""
    indexes: bool = False
    """Whether the target's look-up drafts for this session, in this or later rounds. The target
    then indexes the session's text."""
    num_probe_tokens: int = 0
    """For a round without draft tokens: the largest number of tokens that the target's look-up
    shows, without verifying them. If the target runs ahead and has run this round, it shows them
    for the next round that begins."""
    num_tokens_left: int = 0
    """Number of tokens that the completion has room for; 0 = not stated."""
    ignores_eos: bool = False
    """Whether the completion does not end with an EOS token."""
    audit: bool = False
    """True for an audit: `proposal` is then a part of the completion of an ended session."""

    @property
    def num_rows(self) -> int:
        """Number of tokens that the item adds to a step if the target holds the stated prefix."""
        num_drafted = len(self.proposal.token_ids) or self.num_lookup_tokens
        return max(1, len(self.head.append) + num_drafted)

    @property
    def is_answered_in_bulk(self) -> bool:
        """Whether the answer is large: it has features of more tokens than a round can add."""
        first = self.features_from
        return first is not None and self.head.committed_length - first > NUM_DRAFT_TOKENS_MAX + 2

    gives_way: ClassVar[bool] = False
    """See `DraftItem.gives_way`. Always false, because a session waits for every verdict."""


@value(frozen=True, slots=True)
class DraftItem:
    """Asks a draft for up to `num_draft_tokens` tokens after the committed tokens."""

    head: RoundHead
    num_draft_tokens: int
    look_ahead: int = 0
    """Largest number of outcomes of this round to predict. For each outcome, the draft sends a
    proposal of up to `num_draft_tokens` tokens for the next round."""
    held: tuple[int, ...] | None = None
    """The round's proposal, in an item that does not ask for it; None in other items. The draft
    reads the prefix and this proposal, and drafts ahead unless `look_ahead` or `num_draft_tokens`
    is 0. (): the round has no proposal. Such an item prefills a prompt, or brings features."""
    features: Features | None = None
    """Features that the draft may lack."""
    budget_us: int = field(default=0, compare=False)
    """Time limit for drafting, counted from the item's arrival; 0 = no limit."""

    @property
    def num_rows(self) -> int:
        """Number of tokens that the item adds to a step if the draft holds the stated prefix."""
        return max(1, len(self.head.append))

    is_answered_in_bulk: ClassVar[bool] = False

    @property
    def gives_way(self) -> bool:
        """Whether a newer item of the session may begin before this item has ended."""
        return self.held is not None and self.look_ahead > 0


@value(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position, from logits without any sampling transform. If these have
    NaN or +inf, or only -inf, `logprob` is -inf and `top` is empty."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """Pairs (token id, log-probability), the likeliest token first."""


@value(frozen=True, slots=True)
class VerdictReply:
    """A target's answer to a `VerifyItem`."""

    key: ReplyKey
    verdict: Verdict
    cached_length: int
    """Number of tokens of prefix and proposal that the replica now holds."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """[2K+1]: of the K draft tokens, then of the K+1 corrections; empty if not requested."""
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    next_proposal: EncodedProposal = EMPTY_ENCODED_PROPOSAL
    """Proposal for the next round. May have fewer tokens than the item asked for."""
    next_base_length: int = 0
    """Number of committed tokens that `next_proposal` extends."""
    next_draft_ms: float = 0.0
    """The part of `compute_ms` in which the target drafted for all sessions of the step."""
    next_work_ms: float = 0.0
    """This session's share of `next_draft_ms`."""
    next_out_of_time: bool = False
    """Whether a time limit has shortened `next_proposal`."""
    features: Features | None = None
    """Features from `VerifyItem.features_from` on, as many as limits allow. The last token that the
    verdict commits has none, because the target has not run that token."""
    looked_up: tuple[int, ...] = ()
    """The proposal of the target's look-up, which this verdict is about."""
    has_looked_up: bool = False
    """Whether the target's look-up has searched the session's text, perhaps in vain. It has not if
    the text is not indexed yet, or if it was not asked."""
    probed: tuple[int, ...] = ()
    """The tokens that the look-up shows (`VerifyItem.num_probe_tokens`)."""
    committed_length: int = 0
    """Number of committed tokens at the start of the round."""
    prefix_digest: int = 0
    """Digest of these tokens."""
    proposal_digest: int = 0
    """Digest of these tokens and the draft tokens that this verdict is about."""
    audit: AuditSums | None = None
    """None if the item did not ask for an audit."""


@value(frozen=True, slots=True)
class ProposalReply:
    """A draft's answer. If `assumed` is not empty, the proposal is for a future round."""

    key: ReplyKey
    proposal: EncodedProposal
    base_length: int
    """Length of the committed prefix, without the `assumed` tokens."""
    cached_length: int
    """Number of tokens of prefix and proposal that the replica now holds."""
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    work_ms: float = 0.0
    """This session's share of `compute_ms`."""
    assumed: tuple[int, ...] = ()
    """Tokens between the committed prefix and the proposal, as the draft predicts them."""
    out_of_time: bool = False
    """Whether a time limit has shortened or emptied the proposal."""

    @property
    def num_bytes(self) -> int:
        return len(self.proposal.q) + TOKEN_BYTES * (len(self.proposal) + len(self.assumed))


@dataclass(frozen=True, slots=True)
class Resync:
    """The replica lacks a part of the stated prefix, for example after an eviction or a restart.
    `prefix_digest` is the digest of the `cached_length` tokens that the replica holds."""

    key: ReplyKey
    cached_length: int
    prefix_digest: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica refuses an item. `code` is a google.rpc.Code."""

    key: ReplyKey
    code: int
    message: str


@value(frozen=True, slots=True)
class Prefix:
    """The first tokens of a session."""

    length: int
    digest: int


RoundItem = VerifyItem | DraftItem
VerifyAnswer = VerdictReply | Resync | Refused
DraftAnswer = ProposalReply | Resync | Refused
RoundAnswer = VerifyAnswer | DraftAnswer
Item = TypeVar("Item", bound=RoundItem)
Answer = TypeVar("Answer", bound=RoundAnswer)


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """What a replica runs."""

    model: str
    weights_fingerprint: str
    tokenizer_fingerprint: str
    """Empty if the replica does not depend on a tokenizer."""
    vocab_size: int
    """Width of the logits, padding included; 0 if the replica computes no logits."""
    dtype: str
    max_model_len: int
    """0 = no limit."""
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    step_costs: StepCosts | None = None
    """None if the replica has not measured them."""
    drafts_itself: bool = False
    """Whether the replica is a target that sends proposals for the next round with its verdicts."""
    looks_up: bool = False
    """Whether the replica is a target with a look-up (`VerifyItem.num_lookup_tokens`)."""
    shows_features: bool = False
    """Whether the replica is a target that can send features."""
    reads_features: bool = False
    """Whether the replica is a draft that needs the target's features."""
    features: str = ""
    """Identifies the target's weights and the head. To exchange features, target and draft must
    have the same value."""
    numerics: str = ""
    """Identifies how logits are computed. Replicas with equal `numerics` and weights compute
    bit-identical logits. Empty if a token's logits depend on the other tokens in the same step."""
    draft_note: str = ""
    """Note for operators about how a target drafts for itself."""
    dtype_note: str = ""
    """Note for operators if the processor has no instructions for the dtype of the weights."""
    kernels: str = ""
    """For operators: what runs the steps, and if it is torch, why. Empty on a GPU."""
    row_coupling: float = 0.0
    """Whether the logits of a target's token depend on the draft tokens after it. 0 = not at all in
    the test at start-up; otherwise the relative change of the logits in this test."""

    @property
    def weights(self) -> str:
        """Weights, dtype, length limit. A session moves only to targets with an equal value."""
        return f"{self.weights_fingerprint}/{self.dtype}/{self.max_model_len}"


def coupling_note(row_coupling: float) -> str:
    """Says what `ReplicaDescription.row_coupling` means for the output. Empty if it is 0."""
    if not row_coupling:
        return ""
    return (
        "the logits of a token depend on the draft tokens after it (in a test, they changed by "
        f"{row_coupling:.1e} of their norm), so output has the law of the target as each batch "
        "computes it"
    )
