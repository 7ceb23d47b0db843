"""What coordinators and replicas say to each other, as values; `outrider.transport` sends them.

Every message is idempotent: repeated, late or reordered ones change nothing but time.
"""

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
    """Which session, which round, which prefix: what drafts and targets both get."""

    session_id: str
    """32 hexadecimal digits."""
    tenant: str
    epoch: int
    round: int
    base_length: int
    """Length of the stated prefix, which the replica must hold ..."""
    prefix_digest: int
    """... with this digest, before `append`."""
    append: tuple[int, ...]
    """Committed tokens after the stated prefix."""
    prompt_length: int
    rule: Rule
    seed: int
    sampling: SamplingParams | None
    """None = as sent before on this stream, under `sampling_hash`."""
    sampling_hash: int
    deadline_ms: int = 0
    """What is left of the request's time; 0 = no deadline."""
    traceparent: str = ""
    constraint: Constraint | None = None
    """What the completion must be. None = nothing; or, with a hash, as sent before on this
    stream."""
    constraint_hash: bytes = b""
    """Empty = nothing."""
    compiled: Grammar | OutriderError | None = field(default=None, compare=False, repr=False)
    """Not sent: what a replica that compiles constraints has made of it, or why it could not. Held
    by the item, it is there when a step comes to it."""

    @property
    def committed_length(self) -> int:
        """Committed tokens when the round began: the place of its noise."""
        return self.base_length + len(self.append)

    @property
    def given_hashes(self) -> tuple[int, bytes]:
        """Of parameters and constraint, which come in full once for each session on a stream."""
        return self.sampling_hash, self.constraint_hash

    @property
    def noise(self) -> RoundNoise:
        """The round's numbers."""
        return RoundNoise(self.seed, self.rule, self.committed_length)

    def params(self) -> SamplingParams:
        """`sampling`. Raises `BadRequest` where it is not known or does not go with the rule."""
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
        """What an answer to this item must carry."""
        return ReplyKey(self.session_id, self.epoch, self.round)


@value(frozen=True, slots=True)
class ReplyKey:
    """The round that a reply belongs to."""

    session_id: str
    epoch: int
    round: int


@value(frozen=True, slots=True)
class VerifyItem:
    """Asks a target to score a proposal (an empty one = to decode one token)."""

    head: RoundHead
    proposal: SealedProposal = NOTHING_SEALED
    run_ahead: int = 0
    """Rounds after this one that the target may run unasked, each answered on its own."""
    num_logprobs: int | None = None
    num_next_draft_tokens: int = 0
    """Tokens that a target which drafts itself may propose for the next round."""
    next_siblings: tuple[int, ...] = ()
    """Candidates beside its first, second, ... token: see `DraftRequest.siblings`."""
    features_from: int | None = None
    """The place from which on features of committed tokens are wanted; None = they are not."""
    next_budget_us: int = 0
    """Time to draft the next round's proposal, from when its drafting begins; 0 = no bound."""
    audit: bool = False
    """Whether the proposal is a chain of committed tokens of a session that has ended, of which is
    asked how they look under the target's law."""

    @property
    def num_rows(self) -> int:
        """Tokens that it has for a step, if the target holds the stated prefix."""
        return max(1, len(self.head.append) + len(self.proposal))

    @property
    def is_answered_in_bulk(self) -> bool:
        """Whether features of more tokens are wanted than a round commits."""
        first = self.features_from
        return first is not None and self.head.committed_length - first > NUM_DRAFT_TOKENS_MAX + 2

    awaits_answer: ClassVar[bool] = True
    gives_way: ClassVar[bool] = False
    """Every verdict is waited for."""


@value(frozen=True, slots=True)
class DraftItem:
    """Asks a draft for up to `num_draft_tokens` tokens after the stated prefix and its append."""

    head: RoundHead
    num_draft_tokens: int
    look_ahead: int = 0
    """Outcomes of this round that the draft may guess: for each it pushes a proposal of the next
    round, of up to `num_draft_tokens` tokens."""
    held: tuple[int, ...] | None = None
    """The round's proposal where it is known: then nothing is asked for but to look ahead."""
    siblings: tuple[int, ...] = ()
    """Candidates beside the first, second, ... token that the proposal may have: see
    `DraftRequest.siblings`. Not where the draft looks ahead."""
    features: Features | None = None
    """Of committed tokens that the draft lacks, where it reads features."""
    budget_us: int = field(default=0, compare=False)
    """Time left to draft it, from when the item arrives; 0 = no bound."""
    deadline: DraftDeadline = field(default=NO_DEADLINE, compare=False, repr=False)
    """Not sent: when that is over, on the draft's clock."""

    @property
    def num_rows(self) -> int:
        """Tokens that it has for a step, if the draft holds the stated prefix."""
        return max(1, len(self.head.append))

    @property
    def awaits_answer(self) -> bool:
        """Whether it asks for anything but guesses of later rounds."""
        return self.held is None

    is_answered_in_bulk: ClassVar[bool] = False

    @property
    def gives_way(self) -> bool:
        """Whether it need not be finished before a newer item of its session is begun: nothing is
        asked for but to look ahead."""
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
    """Where asked for, [2K+1]: of the K draft tokens, then of the K+1 corrections."""
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    next_proposal: SealedProposal = NOTHING_SEALED
    """Of the next round, behind this one's outcome; what was asked for, or less."""
    next_base_length: int = 0
    """Committed tokens that it extends."""
    next_draft_ms: float = 0.0
    """What of `compute_ms` it took to draft, for all sessions of the step ..."""
    next_work_ms: float = 0.0
    """... and this session's part of that."""
    next_out_of_time: bool = False
    """Whether it is short because its time had run out."""
    features: Features | None = None
    """Where wanted: from there on, as many as a message has, of the tokens that are committed with
    this verdict but the last one."""
    audit: AuditSums | None = None
    """Of an item that audits."""


@value(frozen=True, slots=True)
class ProposalReply:
    """A draft's answer; or, where it assumes tokens, one of a round that has not come yet."""

    key: ReplyKey
    proposal: SealedProposal
    base_length: int
    """Length of the committed prefix that the proposal, or what it assumes, extends."""
    cached_length: int
    """Tokens of prefix and proposal that the replica now holds."""
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    work_ms: float = 0.0
    """This session's part of `compute_ms`: others shared its step."""
    assumed: tuple[int, ...] = ()
    """Tokens behind the prefix that are not committed yet, and may never be."""
    out_of_time: bool = False
    """Whether it is short, or empty, because its time had run out."""

    @property
    def num_bytes(self) -> int:
        """Of what it proposes and assumes."""
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
    """The replica will not answer. `code` is a google.rpc.Code."""

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
    """Empty where the replica's work does not depend on a tokenizer (n-gram drafting)."""
    vocab_size: int
    """Width of the logits, padding included; 0 where there are none."""
    dtype: str
    max_model_len: int
    """0 = no bound of its own."""
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    step_costs: StepCosts | None = None
    """How long its steps take; None where they were not measured."""
    drafts_itself: bool = False
    """Whether a target proposes the next round's tokens with its verdicts."""
    shows_features: bool = False
    """Whether a target keeps what a head makes of its layers, and says it where asked ..."""
    reads_features: bool = False
    """... and a draft proposes from that."""
    features: str = ""
    """Of either: names the target's weights and the head, which must be the same."""
    numerics: str = ""
    """Names how logits are computed, where those of a token are bit-equal whatever else is in its
    step: with equal names and weights logits are equal. Empty where they depend on the step."""
    draft_note: str = ""
    """What people should know of how a target drafts for itself; empty where all is well."""

    @property
    def weights(self) -> str:
        """Names what a session that began with it needs to go on elsewhere: what logits are a
        function of beside tokens, which is weights and how they are run, and how long it may be."""
        return f"{self.weights_fingerprint}/{self.dtype}/{self.max_model_len}"
