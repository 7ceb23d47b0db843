"""Trees of draft tokens: several candidates for one place, of which at most one is accepted.

Draft token i follows draft token `parents[i]`, which stands before it; -1 = the last committed
token. Tokens that follow the same one are siblings, in the order in which they are tried. A path
that is accepted begins behind the last committed token and goes from a token to one of its
children. A chain is a tree in which every token follows the one before it; its proposals name no
parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from outrider.errors import BadRequest
from outrider.limits import NUM_DRAFT_TOKENS_MAX, TREE_TOKENS_MAX

ROOT = -1
"""The last committed token, as a parent."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """N draft tokens and who follows whom."""

    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    """[N + 1]: what follows the last committed token; then what follows each draft token."""
    depths: tuple[int, ...]
    """[N]: tokens of the tree that stand before it on its path."""
    ranks: tuple[int, ...]
    """[N]: tokens of the same depth that are listed before it: a number for its noise. The first
    token of each depth has 0, as all of a chain have."""
    groups: tuple[tuple[int, ...], ...]
    """All siblings, in the order of the first of each; one q belongs to each group."""

    @property
    def spine(self) -> tuple[int, ...]:
        """The path of first siblings: what a draft has run of a tree, but for its last token."""
        path: list[int] = []
        siblings = self.children[0]
        while siblings:
            path.append(siblings[0])
            siblings = self.children[siblings[0] + 1]
        return tuple(path)

    @property
    def num_depths(self) -> int:
        """Tokens of the longest path."""
        return max(self.depths, default=-1) + 1

    def shared_with_spine(self, path: Sequence[int]) -> int:
        """How many tokens of a path are the spine's."""
        pairs = zip(path, self.spine, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@lru_cache(maxsize=256)
def draft_tree(parents: tuple[int, ...], num_tokens: int) -> DraftTree:
    """The tree of so many draft tokens; a chain without `parents`. Raises `BadRequest` naming
    `proposal.parents` for what is no tree, or a larger one than is verified."""
    if not parents:
        parents = tuple(range(ROOT, num_tokens - 1))
    if len(parents) != num_tokens:
        raise _bad(f"names {len(parents)} parents of {num_tokens} tokens; each has one")
    if num_tokens > TREE_TOKENS_MAX:
        raise _bad(f"is of {num_tokens} tokens; at most {TREE_TOKENS_MAX} are verified")
    children: list[list[int]] = [[] for _ in range(num_tokens + 1)]
    depths: list[int] = []
    ranks: list[int] = []
    for index, parent in enumerate(parents):
        if not ROOT <= parent < index:
            raise _bad(f"lets token {index} follow {parent}; -1..{index - 1} stand before it")
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


def comb(siblings: Sequence[int]) -> tuple[int, ...]:
    """The parents of a chain with so many other candidates beside each of its tokens, none of which
    is followed by anything; depth by depth, the chain's own token first. () for a chain alone."""
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
