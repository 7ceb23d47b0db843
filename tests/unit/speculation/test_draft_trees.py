"""What a tree of draft tokens is, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import BadRequest, InvariantError
from outrider.limits import NUM_DRAFT_TOKENS_MAX, TREE_TOKENS_MAX
from outrider.speculation.proposal import (
    COUNT_TOTAL,
    DraftDistribution,
    Proposal,
    SealedProposal,
    caterpillar_tree,
    draft_tree,
)
from outrider.speculation.random_streams import RoundNoise, Stream
from outrider.speculation.sampling_params import Rule


def test_a_tree() -> None:
    tree = draft_tree((-1, -1, 1, 1, 0, 3), 6)
    assert tree.children == ((0, 1), (4,), (2, 3), (), (5,), (), ())
    assert tree.depths == (0, 0, 1, 1, 1, 2)
    assert tree.ranks == (0, 1, 0, 1, 2, 0)
    assert tree.groups == ((0, 1), (2, 3), (4,), (5,))
    assert tree.spine == (0, 4)
    assert tree.num_depths == 3
    assert [tree.shared_with_spine(path) for path in ((), (0,), (0, 4), (1, 3))] == [0, 1, 2, 0]


def test_a_chain_is_a_tree() -> None:
    tree = draft_tree((), 3)
    assert tree.parents == (-1, 0, 1)
    assert tree.spine == (0, 1, 2)
    assert tree.ranks == (0, 0, 0)
    assert draft_tree((), 0).num_depths == 0


def test_combs() -> None:
    assert caterpillar_tree((2, 0, 1)) == (-1, -1, -1, 0, 3, 3)
    assert caterpillar_tree((0, 0)) == caterpillar_tree(()) == ()


@given(st.lists(st.integers(-2, 5), max_size=6), st.integers(0, 7))
def test_anything_is_a_tree_or_refused(parents: list[int], num_tokens: int) -> None:
    sound = not parents or (
        len(parents) == num_tokens and all(-1 <= p < i for i, p in enumerate(parents))
    )
    if sound:
        tree = draft_tree(tuple(parents), num_tokens)
        assert sorted(i for group in tree.groups for i in group) == list(range(num_tokens))
        return
    with pytest.raises(BadRequest) as caught:
        draft_tree(tuple(parents), num_tokens)
    assert caught.value.field == "proposal.parents"


def test_large_trees_are_refused() -> None:
    draft_tree((-1,) * TREE_TOKENS_MAX, TREE_TOKENS_MAX)
    with pytest.raises(BadRequest, match=f"at most {TREE_TOKENS_MAX}"):
        draft_tree((-1,) * (TREE_TOKENS_MAX + 1), TREE_TOKENS_MAX + 1)
    draft_tree((), NUM_DRAFT_TOKENS_MAX)
    with pytest.raises(BadRequest, match="path of more"):
        draft_tree((), NUM_DRAFT_TOKENS_MAX + 1)


def test_a_sealed_tree_opens() -> None:
    """One q for each group of siblings; each of them is among its tokens."""
    q = DraftDistribution((3, 4, 5), (COUNT_TOTAL - 2, 1, 1))
    proposal = Proposal((4, 3, 9), (q, None), (-1, -1, 0))
    assert SealedProposal.of(proposal).open() == proposal
    assert proposal.spine_ids == (4, 9)
    bare = SealedProposal.of(proposal).without_q(Rule.TOKEN)
    assert bare.open() == Proposal((4, 3, 9), (None, None), (-1, -1, 0))
    with pytest.raises(BadRequest, match="does not hold the drafted token 6"):
        SealedProposal.of(Proposal((4, 6, 9), (q, None), (-1, -1, 0))).open()


def test_a_sealed_tree_is_cut_by_places() -> None:
    """With the q of those that are left; a chain is left where no siblings are."""
    q = DraftDistribution((3, 4, 5), (COUNT_TOTAL - 2, 1, 1))
    tree = SealedProposal.of(Proposal((9, 4, 5, 7), (None, q, None), (-1, 0, 0, 1)))
    assert tree.cut(4) is tree
    assert tree.cut(2).open() == Proposal((9, 4, 5), (None, q), (-1, 0, 0))
    assert tree.cut(1).open() == Proposal((9,), (None,))
    assert tree.cut(0).open() == Proposal()
    by_path = SealedProposal.of(Proposal((4, 9, 5), (None, None), (-1, 0, -1)))
    with pytest.raises(InvariantError, match="listed by depth"):
        by_path.cut(1)


def test_every_token_has_numbers_of_its_own() -> None:
    """Acceptance: by depth and rank. What follows: a residual behind a token with children."""
    parents = (-1, -1, 0, 0, 1)
    numbers = RoundNoise(5, Rule.TOKEN, 9)
    uniforms = list(numbers.accept_uniforms(5, parents))
    assert len(set(uniforms)) == 5
    assert uniforms[:1] == list(numbers.accept_uniforms(1))
    keys = numbers.tree_keys(draft_tree(parents, 5))
    expected = [int(Stream.RESIDUAL)] * 3 + [int(Stream.TARGET)] * 3
    assert keys.stream.tolist() == expected
    assert len(set(zip(keys.b.tolist(), keys.stream.tolist(), strict=True))) == 6
    own = RoundNoise(5, Rule.COUPLED, 9).tree_keys(draft_tree(parents, 5))
    assert own.a.tolist() == [9, 10, 10, 11, 11, 11]
    assert set(own.stream.tolist()) == {int(Stream.TARGET)}
