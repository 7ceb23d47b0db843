"""Proposals: draft tokens, and the sparse, quantised distributions that they were drawn from."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from outrider.errors import BadRequest, check
from outrider.foundation.values import value
from outrider.limits import DRAFT_SUPPORT_ENTRIES_MAX, NUM_DRAFT_TOKENS_MAX
from outrider.speculation.sampling_params import Rule

COUNT_TOTAL = 2**16
"""The counts of a draft distribution sum to this number. q(v) is v's count / `COUNT_TOTAL`."""
_SIZE_BYTES = 2
ENTRY_BYTES = 4 + 2
Q_BYTES_MAX = NUM_DRAFT_TOKENS_MAX * (_SIZE_BYTES + DRAFT_SUPPORT_ENTRIES_MAX * ENTRY_BYTES)
"""The largest number of bytes that `encode_q` returns."""


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """q, truncated to some tokens. The ids are distinct. The counts are positive and sum to
    `COUNT_TOTAL`. In a proposal, None stands for a distribution with a single token."""

    token_ids: tuple[int, ...]
    counts: tuple[int, ...]
    _sent: bytes = field(default=b"", compare=False, repr=False)

    @property
    def packed(self) -> bytes:
        """The ids (uint32), then the counts (uint16), little endian."""
        num = len(self.token_ids)
        return self._sent or struct.pack(f"<{num}I{num}H", *self.token_ids, *self.counts)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens. Token i was drawn from `q[i]`, or its draw was certain and `q[i]` is None. If
    the rule does not use q, `q` is empty."""

    token_ids: tuple[int, ...] = ()
    q: tuple[DraftDistribution | None, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


EMPTY_PROPOSAL = Proposal()


@value(frozen=True, slots=True)
class EncodedProposal:
    """A proposal as messages carry it. `q` is the result of `encode_q`."""

    token_ids: tuple[int, ...] = ()
    q: bytes = b""

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(cls, proposal: Proposal) -> EncodedProposal:
        """Encodes a proposal."""
        return cls(proposal.token_ids, encode_q(proposal.q))

    def cut(self, num: int) -> EncodedProposal:
        """The first `num` tokens. Verifying them is exact only if `num` does not depend on the
        dropped tokens."""
        if num >= len(self):
            return self
        end = 0
        for _ in range(num if self.q else 0):
            size = int.from_bytes(self.q[end : end + _SIZE_BYTES], "little")
            end += _SIZE_BYTES + size * ENTRY_BYTES
        return EncodedProposal(self.token_ids[:num], self.q[:end])

    def without_q(self, rule: Rule) -> EncodedProposal:
        """The tokens without q. If the rule uses q, each token is marked as a certain draw."""
        q = (None,) * len(self) if rule.needs_q else ()
        return EncodedProposal(self.token_ids, encode_q(q))

    def decodable_prefix(self) -> EncodedProposal:
        """The tokens before the first q that cannot be decoded. Verifying them is exact if the
        cause of the failure does not depend on the token drawn from this q."""
        for num in range(min(len(self), NUM_DRAFT_TOKENS_MAX), 0, -1):
            part = self.cut(num)
            with suppress(BadRequest):
                part.decode()
                return part
        return EMPTY_ENCODED_PROPOSAL

    def decode(self) -> Proposal:
        """Decodes q. Raises `BadRequest` for q that `decode_q` refuses, and for too many tokens."""
        if len(self) > NUM_DRAFT_TOKENS_MAX:
            reason = f"has {len(self)} tokens; at most {NUM_DRAFT_TOKENS_MAX} are verified"
            raise BadRequest("proposal.token_ids", reason)
        if not (self.token_ids or self.q):
            return EMPTY_PROPOSAL
        return Proposal(self.token_ids, decode_q(self.q, self.token_ids))


EMPTY_ENCODED_PROPOSAL = EncodedProposal()


def require_q(proposal: EncodedProposal, rule: Rule) -> None:
    """Raises `BadRequest` if `rule` uses q and the proposal has no q. If a missing q counted
    as certain draws, the target would silently accept fewer tokens."""
    if rule.needs_q and proposal.token_ids and not proposal.q:
        raise BadRequest(
            "proposal.q",
            f"is empty; rule {rule.value} needs a distribution for each of the {len(proposal)} "
            "tokens (0 entries for a certain draw)",
        )


def encode_q(q: Sequence[DraftDistribution | None]) -> bytes:
    """Encodes each distribution of q as its number n of entries (uint16), n ids (uint32) and n
    counts (uint16), little endian. None has n = 0."""
    parts: list[bytes] = []
    for distribution in q:
        packed = b"" if distribution is None else distribution.packed
        size = len(packed) // ENTRY_BYTES
        check(size <= DRAFT_SUPPORT_ENTRIES_MAX, f"a q has too many entries: {size}")
        parts += (size.to_bytes(_SIZE_BYTES, "little"), packed)
    return b"".join(parts)


def decode_q(data: bytes, drawn: Sequence[int]) -> tuple[DraftDistribution | None, ...]:
    """The inverse of `encode_q` for the tokens `drawn`; () for empty `data`. Raises `BadRequest` if
    `data` has a wrong length, or a token's distribution is invalid or lacks the token."""
    if not data:
        return ()
    q: list[DraftDistribution | None] = []
    offset = 0
    for index, token_id in enumerate(drawn):
        if offset + _SIZE_BYTES > len(data):
            raise _bad_q(index, f"is missing; the field ends after {len(data)} bytes")
        size = int.from_bytes(data[offset : offset + _SIZE_BYTES], "little")
        offset += _SIZE_BYTES
        end = offset + size * ENTRY_BYTES
        if size == 1 or size > DRAFT_SUPPORT_ENTRIES_MAX:
            allowed = f"0 or 2..{DRAFT_SUPPORT_ENTRIES_MAX} are allowed"
            raise _bad_q(index, f"has {size} entries; {allowed}")
        if end > len(data):
            raise _bad_q(index, f"needs {end - offset} bytes; {len(data) - offset} are left")
        values = struct.unpack_from(f"<{size}I{size}H", data, offset)
        ids, counts = values[:size], values[size:]
        if len(set(ids)) != size:
            raise _bad_q(index, "lists a token id twice")
        if 0 in counts:
            raise _bad_q(index, "holds a count of 0; leave the token out instead")
        if size and sum(counts) != COUNT_TOTAL:
            raise _bad_q(index, f"has counts that sum to {sum(counts)}, not to {COUNT_TOTAL}")
        if size and token_id not in ids:
            raise _bad_q(index, f"does not hold the drafted token {token_id}")
        q.append(DraftDistribution(ids, counts, data[offset:end]) if size else None)
        offset = end
    if offset != len(data):
        reason = f"holds {len(data) - offset} bytes after the last of {len(drawn)} positions"
        raise BadRequest("proposal.q", reason)
    return tuple(q)


def _bad_q(index: int, message: str) -> BadRequest:
    return BadRequest("proposal.q", f"position {index} {message}")
