"""Replicas that answer at once, with well-formed proposals and verdicts that no model made; and
what they are asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from outrider.limits import DEADLINE_MS_MAX, NUM_DRAFT_TOKENS_MAX
from outrider.messages import (
    DraftAnswer,
    DraftItem,
    ProposalReply,
    ReplicaDescription,
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.request import GenerateRequest
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import (
    COUNT_TOTAL,
    DraftDistribution,
    Proposal,
    SealedProposal,
)
from outrider.speculation.sampling_params import Rule, SamplingParams

VOCAB_SIZE: Final = 151_936
MAX_MODEL_LEN: Final = 32_768
Q_ENTRIES: Final = 64
NUM_DRAFT_TOKENS: Final = 8
PROMPT_TOKENS: Final = 64
ACCEPT_PROBABILITY: Final = 0.7
"""Of every draft token: a round of 8 commits some 3 tokens."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def canned_request(seed: int, max_tokens: int) -> GenerateRequest:
    """A session of the full length, with K = `NUM_DRAFT_TOKENS` under token."""
    return GenerateRequest(
        prompt=tuple(range(1, PROMPT_TOKENS + 1)),
        sampling=SamplingParams(temperature=1.0),
        max_tokens=max_tokens,
        ignore_eos=True,
        seed=seed,
        rule=Rule.TOKEN,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        deadline_ms=DEADLINE_MS_MAX,
    )


def canned_proposal(num_draft_tokens: int, vocab_size: int = VOCAB_SIZE) -> SealedProposal:
    """`num_draft_tokens` tokens, each from a distribution of `Q_ENTRIES` entries whose counts fall
    off as those of a language model do; always the same."""
    numbers = random.Random(num_draft_tokens)  # noqa: S311 (data, not secrecy)
    q = []
    for _ in range(num_draft_tokens):
        ids = sorted(numbers.sample(range(vocab_size), Q_ENTRIES))
        counts = [COUNT_TOTAL // (2 * Q_ENTRIES * (1 + rank)) + 1 for rank in range(Q_ENTRIES)]
        counts[0] += COUNT_TOTAL - sum(counts)
        numbers.shuffle(counts)
        q.append(DraftDistribution(tuple(ids), tuple(counts)))
    likeliest = (entry.token_ids[entry.counts.index(max(entry.counts))] for entry in q)
    return SealedProposal.of(Proposal(tuple(likeliest), tuple(q)))


def canned_verdict(num_draft_tokens: int) -> Verdict:
    """Accepts each draft token with the same chance; always the same."""
    numbers = random.Random(-1 - num_draft_tokens)  # noqa: S311 (data, not secrecy)
    corrections = (numbers.randrange(VOCAB_SIZE) for _ in range(num_draft_tokens + 1))
    return Verdict((ACCEPT_PROBABILITY,) * num_draft_tokens, tuple(corrections))


@dataclass(frozen=True, slots=True)
class CannedReplica(Generic[Item, Answer]):
    """A `ReplicaService` whose answer to an item is a function of it."""

    name: str
    answer: Callable[[Item], Answer]

    def connect(self, send: Callable[[Sequence[Answer]], None]) -> _CannedConnection[Item, Answer]:
        """See `ReplicaService.connect`."""
        return _CannedConnection(self.answer, send)

    def describe(self) -> ReplicaDescription:
        """See `ReplicaService.describe`."""
        return ReplicaDescription(
            model=self.name,
            weights_fingerprint=self.name,
            tokenizer_fingerprint="canned",
            vocab_size=VOCAB_SIZE,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(),
            max_num_seqs=1,
        )

    def release(self, session_id: str, epoch: int) -> None:
        """See `ReplicaService.release`: nothing is kept."""


@dataclass(frozen=True, slots=True)
class _CannedConnection(Generic[Item, Answer]):
    answer: Callable[[Item], Answer]
    send: Callable[[Sequence[Answer]], None]

    def receive(self, items: Sequence[Item]) -> None:
        self.send([self.answer(item) for item in items])

    def close(self) -> None:
        """Nothing waits."""


def canned_draft() -> CannedReplica[DraftItem, DraftAnswer]:
    """A draft that has its proposals ready."""
    proposals = [canned_proposal(number) for number in range(NUM_DRAFT_TOKENS_MAX + 1)]

    def answer(item: DraftItem) -> DraftAnswer:
        length = item.head.committed_length
        proposal = proposals[item.num_draft_tokens]
        return ProposalReply(item.head.key, proposal, length, length + len(proposal))

    return CannedReplica("canned-draft", answer)


def canned_target() -> CannedReplica[VerifyItem, VerifyAnswer]:
    """A target that has its verdicts ready."""
    verdicts = [canned_verdict(number) for number in range(NUM_DRAFT_TOKENS_MAX + 1)]

    def answer(item: VerifyItem) -> VerifyAnswer:
        num_draft_tokens = len(item.proposal)
        held = item.head.committed_length + num_draft_tokens
        return VerdictReply(item.head.key, verdicts[num_draft_tokens], held)

    return CannedReplica("canned-target", answer)
