"""Proposals: draft tokens, and the sparse, quantised distributions that they were drawn from."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from outrider.errors import BadRequest, check
from outrider.limits import DRAFT_SUPPORT_ENTRIES_MAX, NUM_DRAFT_TOKENS_MAX, TREE_TOKENS_MAX
from outrider.speculation.sampling_params import Rule
from outrider.values import value

COUNT_TOTAL = 2**16
"""The counts of a draft distribution sum to this number. q(v) is v's count / `COUNT_TOTAL`."""
_SIZE_BYTES = 2
ENTRY_BYTES = 4 + 2
Q_BYTES_MAX = TREE_TOKENS_MAX * (_SIZE_BYTES + DRAFT_SUPPORT_ENTRIES_MAX * ENTRY_BYTES)
"""The largest number of bytes that `encode_q` returns."""


class UnreadableQ(BadRequest):
    """Raised if the q of a group of siblings cannot be decoded."""

    def __init__(self, group: int, message: str, *, after_draw: bool = False) -> None:
        """`group` is the index of the group, or the number of groups if bytes follow the last one.
        `after_draw` says whether the fault may depend on the values of drawn tokens."""
        super().__init__("proposal.q", message)
        self.group = group
        self.after_draw = after_draw


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
    """Draft tokens that form a chain or a tree. Group i of siblings was drawn from `q[i]` without
    replacement, or each of its draws was certain and `q[i]` is None. In a chain, each token is a
    group. If the rule does not use q, `q` is empty."""

    token_ids: tuple[int, ...] = ()
    q: tuple[DraftDistribution | None, ...] = ()
    parents: tuple[int, ...] = ()
    """`DraftTree.parents`, or empty for a chain."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def tree(self) -> DraftTree:
        return draft_tree(self.parents, len(self.token_ids))

    @property
    def spine_ids(self) -> tuple[int, ...]:
        if not self.parents:
            return self.token_ids
        return tuple(self.token_ids[index] for index in self.tree.spine)


EMPTY_PROPOSAL = Proposal()


@value(frozen=True, slots=True)
class SealedProposal:
    """A proposal as messages carry it. `q` is the result of `encode_q`."""

    token_ids: tuple[int, ...] = ()
    q: bytes = b""
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def tree(self) -> DraftTree:
        """Like `Proposal.tree`. Raises `BadRequest` for parents that `draft_tree` refuses."""
        return draft_tree(self.parents, len(self.token_ids))

    @classmethod
    def of(cls, proposal: Proposal) -> SealedProposal:
        """Encodes the q of a proposal."""
        return cls(proposal.token_ids, encode_q(proposal.q), proposal.parents)

    def cut(self, num_depths: int) -> SealedProposal:
        """The first `num_depths` tokens of each path. The tokens of a tree must be ordered by
        depth. Verifying the result is exact only if `num_depths` does not depend on the tokens."""
        tree = self.tree
        if num_depths >= tree.num_depths:
            return self
        check(list(tree.depths) == sorted(tree.depths), "only a tree listed by depth can be cut")
        num = sum(depth < num_depths for depth in tree.depths)
        groups = [group for group in tree.groups if group[0] < num]
        end = 0
        if self.q:
            for _ in groups:
                size = int.from_bytes(self.q[end : end + _SIZE_BYTES], "little")
                end += _SIZE_BYTES + size * ENTRY_BYTES
        parents = self.parents[:num] if len(groups) < num else ()
        return SealedProposal(self.token_ids[:num], self.q[:end], parents)

    def without_q(self, rule: Rule) -> SealedProposal:
        """The same tokens as certain draws, without their q."""
        q = (None,) * len(self.tree.groups) if rule.needs_q else ()
        return SealedProposal(self.token_ids, encode_q(q), self.parents)

    def readable(self) -> tuple[SealedProposal, bool]:
        """Returns the proposal, cut before the first q that cannot be decoded, and whether this cut
        may depend on a token that was cut off. Verifying the rest is then not exact."""
        try:
            self.open()
        except UnreadableQ as error:
            tree = self.tree
            if error.group >= len(tree.groups):
                return NOTHING_SEALED, True
            return self.cut(tree.depths[tree.groups[error.group][0]]), error.after_draw
        except BadRequest:
            return NOTHING_SEALED, True
        return self, False

    def open(self) -> Proposal:
        """The proposal with decoded q. Raises `BadRequest` for equal siblings and for parents that
        `draft_tree` refuses, and `UnreadableQ` for q that `decode_q` refuses."""
        drawn = [tuple(self.token_ids[index] for index in group) for group in self.tree.groups]
        for group in drawn:
            if len(set(group)) < len(group):
                raise BadRequest("proposal.token_ids", f"siblings {group} are not all different")
        return Proposal(self.token_ids, decode_q(self.q, drawn), self.parents)


NOTHING_SEALED = SealedProposal()


def require_q(proposal: SealedProposal, rule: Rule) -> None:
    """Raises `BadRequest` if `rule` uses q and the proposal has no q. If its tokens counted as
    certain draws, the target would accept fewer of them, and no error would say why."""
    if rule.needs_q and proposal.token_ids and not proposal.q:
        raise BadRequest(
            "proposal.q",
            f"is empty; rule {rule.value} needs a distribution for each of the {len(proposal)} "
            f"tokens, or for each group of a tree's siblings (0 entries for a certain draw)",
        )


def encode_q(q: Sequence[DraftDistribution | None]) -> bytes:
    """Encodes each distribution of q as its number n of entries (uint16), n ids (uint32) and n
    counts (uint16), little endian. None has n = 0."""
    parts: list[bytes] = []
    for distribution in q:
        packed = b"" if distribution is None else distribution.packed
        size = len(packed) // ENTRY_BYTES
        check(size <= DRAFT_SUPPORT_ENTRIES_MAX, f"a q has {size} entries")
        parts += (size.to_bytes(_SIZE_BYTES, "little"), packed)
    return b"".join(parts)


def decode_q(data: bytes, drawn: Sequence[Sequence[int]]) -> tuple[DraftDistribution | None, ...]:
    """The inverse of `encode_q`. `drawn` has the tokens of each group of siblings. Returns () if
    `data` is empty. Raises `UnreadableQ` if `data` has another length than its numbers of entries
    say, or if a group's distribution is invalid or lacks one of the group's tokens."""
    if not data:
        return ()
    q: list[DraftDistribution | None] = []
    offset = 0
    for index, token_ids in enumerate(drawn):
        if offset + _SIZE_BYTES > len(data):
            raise _bad_q(index, f"is missing; the field ends after {len(data)} bytes")
        size = int.from_bytes(data[offset : offset + _SIZE_BYTES], "little")
        offset += _SIZE_BYTES
        end = offset + size * ENTRY_BYTES
        if size == 1 or size > DRAFT_SUPPORT_ENTRIES_MAX:
            raise _bad_q(
                index, f"has {size} entries; 0 or 2..{DRAFT_SUPPORT_ENTRIES_MAX} are allowed"
            )
        if end > len(data):
            raise _bad_q(index, f"needs {end - offset} bytes; {len(data) - offset} are left")
        values = struct.unpack_from(f"<{size}I{size}H", data, offset)
        own = None
        if size:
            own = DraftDistribution(values[:size], values[size:], data[offset:end])
            _check_distribution(index, token_ids, own)
        q.append(own)
        offset = end
    if offset != len(data):
        raise UnreadableQ(
            len(drawn),
            f"holds {len(data) - offset} bytes after the last of {len(drawn)} positions",
            after_draw=True,
        )
    return tuple(q)


def _check_distribution(index: int, drawn: Sequence[int], q: DraftDistribution) -> None:
    ids, counts = q.token_ids, q.counts
    if len(set(ids)) != len(ids):
        raise _bad_q(index, "lists a token id twice")
    if 0 in counts:
        raise _bad_q(index, "holds a count of 0; leave the token out instead")
    if sum(counts) != COUNT_TOTAL:
        raise _bad_q(index, f"has counts that sum to {sum(counts)}, not to {COUNT_TOTAL}")
    for token_id in drawn:
        if token_id not in ids:
            raise _bad_q(index, f"does not hold the drafted token {token_id}", after_draw=True)


def _bad_q(index: int, message: str, *, after_draw: bool = False) -> UnreadableQ:
    return UnreadableQ(index, f"position {index} {message}", after_draw=after_draw)


ROOT = -1
"""The parent of tokens that follow the last committed token."""


@dataclass(frozen=True)
class DraftTree:
    """The structure of N draft tokens. Tokens are named by their index."""

    parents: tuple[int, ...]
    """[N]: the draft token that each token follows, or `ROOT`."""
    children: tuple[tuple[int, ...], ...]
    """[N + 1]: element 0 has the tokens that follow the last committed token. Element i + 1 has the
    tokens that follow draft token i."""
    depths: tuple[int, ...]
    """[N]: how many draft tokens precede each token on its path."""
    ranks: tuple[int, ...]
    """[N]: how many tokens of the same depth have a lower index. Depth and rank determine a token's
    noise."""
    groups: tuple[tuple[int, ...], ...]
    """The groups of siblings, ordered by their first token. Each group has one q."""

    @cached_property
    def spine(self) -> tuple[int, ...]:
        path: list[int] = []
        siblings = self.children[0]
        while siblings:
            path.append(siblings[0])
            siblings = self.children[siblings[0] + 1]
        return tuple(path)

    @cached_property
    def num_depths(self) -> int:
        return max(self.depths, default=-1) + 1

    def shared_with_spine(self, path: Sequence[int]) -> int:
        """The number of tokens that a path shares with the spine."""
        return sum(token == on_spine for token, on_spine in zip(path, self.spine, strict=False))


@lru_cache(maxsize=256)
def draft_tree(parents: tuple[int, ...], num_tokens: int) -> DraftTree:
    """The tree of `num_tokens` draft tokens. If `parents` is empty, the tree is a chain. Raises
    `BadRequest` if the parents form no tree, or if the tree is too large to verify."""
    if not parents:
        parents = tuple(range(ROOT, num_tokens - 1))
    if len(parents) != num_tokens:
        raise _bad(f"has {len(parents)} parents for {num_tokens} tokens; each needs one")
    if num_tokens > TREE_TOKENS_MAX:
        raise _bad(f"has {num_tokens} tokens; at most {TREE_TOKENS_MAX} are verified")
    children: list[list[int]] = [[] for _ in range(num_tokens + 1)]
    depths: list[int] = []
    ranks: list[int] = []
    for index, parent in enumerate(parents):
        if not ROOT <= parent < index:
            raise _bad(f"lets token {index} follow {parent}; allowed: -1..{index - 1}")
        children[parent + 1].append(index)
        depth = 0 if parent == ROOT else depths[parent] + 1
        ranks.append(depths.count(depth))
        depths.append(depth)
    if max(depths, default=0) >= NUM_DRAFT_TOKENS_MAX:
        raise _bad(f"has a path of more than {NUM_DRAFT_TOKENS_MAX} tokens")
    groups = sorted(tuple(group) for group in children if group)
    return DraftTree(
        parents, tuple(map(tuple, children)), tuple(depths), tuple(ranks), tuple(groups)
    )


def caterpillar_tree(siblings: Sequence[int]) -> tuple[int, ...]:
    """The parents of a tree in which token i of the spine has `siblings[i]` siblings without
    children, or () if none has siblings. Tokens are ordered by depth, the spine's token first."""
    if not any(siblings):
        return ()
    parents: list[int] = []
    last = ROOT
    for num in siblings:
        first = len(parents)
        parents += [last] * (1 + num)
        last = first
    return tuple(parents)


def _bad(message: str) -> BadRequest:
    return BadRequest("proposal.parents", message)
