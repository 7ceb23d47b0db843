"""The encoding of q, whose decoder accepts any bytes from a peer, and trees."""

import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import BadRequest, InvariantError
from outrider.limits import NUM_DRAFT_TOKENS_MAX, TREE_TOKENS_MAX
from outrider.speculation.proposal import (
    COUNT_TOTAL,
    NOTHING_SEALED,
    DraftDistribution,
    Proposal,
    SealedProposal,
    caterpillar_tree,
    decode_q,
    draft_tree,
    encode_q,
)
from outrider.speculation.sampling_params import Rule

HALF = COUNT_TOTAL // 2


@st.composite
def distributions(draw):
    ids = draw(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=9, unique=True))
    cuts = draw(
        st.lists(
            st.integers(1, COUNT_TOTAL - 1),
            min_size=len(ids) - 1,
            max_size=len(ids) - 1,
            unique=True,
        )
    )
    edges = [0, *sorted(cuts), COUNT_TOTAL]
    counts = [high - low for low, high in itertools.pairwise(edges)]
    return DraftDistribution(tuple(ids), tuple(counts))


@settings(deadline=None)
@given(st.lists(st.none() | distributions(), max_size=5))
def test_round_trip(q):
    token_ids = [entry.token_ids[-1] if entry else 5 for entry in q]
    assert decode_q(encode_q(q), [(token_id,) for token_id in token_ids]) == tuple(q)


@settings(deadline=None)
@given(st.binary(max_size=60), st.lists(st.integers(0, 9), max_size=3))
def test_hostile_bytes_are_refused_or_sound(data, token_ids):
    try:
        q = decode_q(data, [(token_id,) for token_id in token_ids])
    except BadRequest:
        return
    assert encode_q(q) == data


def test_layout():
    """uint16 n, n uint32 ids, n uint16 counts, little endian."""
    q = (DraftDistribution((7, 70_000), (1, COUNT_TOTAL - 1)), None)
    assert encode_q(q) == bytes.fromhex("0200 07000000 70110100 0100 ffff 0000")


def packed(ids, counts):
    return struct.pack(f"<H{len(ids)}I{len(counts)}H", len(ids), *ids, *counts)


@pytest.mark.parametrize(
    ("data", "token_ids", "words"),
    [
        (packed((1, 2), (HALF, HALF))[:-1], (1,), "needs 12 bytes; 11 are left"),
        (packed((1, 2), (HALF, HALF)) + b"\0", (1,), "1 bytes after the last of 1"),
        (packed((1, 2), (HALF, HALF)), (1, 1), "position 1 is missing"),
        (packed((1, 2), (HALF, HALF)), (), "after the last of 0"),
        (b"\0", (1,), "is missing"),
        (packed((1, 2, 3), (HALF, HALF, 0)), (1,), "count of 0"),
        (packed((1, 1), (HALF, HALF)), (1,), "twice"),
        (packed((1, 2), (HALF, HALF - 1)), (1,), "sum to 65535"),
        (packed((1, 2), (HALF, HALF)), (3,), "does not hold the drafted token 3"),
        (packed((1,), (COUNT_TOTAL - 1,)), (1,), "1 entries"),
    ],
)
def test_what_is_refused(data, token_ids, words):
    with pytest.raises(BadRequest, match=words) as caught:
        decode_q(data, [(token_id,) for token_id in token_ids])
    assert caught.value.field == "proposal.q"


GOOD = packed((1, 2), (HALF, HALF))


@pytest.mark.parametrize(
    ("second", "num_readable", "is_broken"),
    [
        (GOOD, 2, False),
        (b"", 1, False),
        (GOOD[:-1], 1, False),
        (packed((1, 2), (HALF, HALF - 1)), 1, False),
        (packed((1, 1), (HALF, HALF)), 1, False),
        (packed((3, 4), (HALF, HALF)), 1, True),  # q lacks the token.
        (GOOD + b"\0", 0, True),
    ],
)
def test_how_far_a_proposal_can_be_read(second, num_readable, is_broken):
    """Only a fault that precedes the draw of a token allows an unbiased cut."""
    proposal = SealedProposal((1, 2), GOOD + second)
    cut = SealedProposal((1, 2)[:num_readable], (GOOD + second)[: len(GOOD) * num_readable])
    assert proposal.readable() == (cut, is_broken)
    assert len(cut.open().token_ids) == num_readable


def test_a_tree_is_readable_by_depths():
    """Depth 0 has one token, depth 1 two, whose q sums to too little."""
    q = packed((0,) * 0, ()) + packed((1, 2), (HALF, 1))
    tree = SealedProposal((9, 1, 2, 5), q + b"\0\0", (-1, 0, 0, 1))
    assert tree.readable() == (SealedProposal((9,), b"\0\0"), False)
    twice = SealedProposal((1, 1), GOOD, (-1, -1))
    assert twice.readable() == (NOTHING_SEALED, True)


def test_a_tree() -> None:
    tree = draft_tree((-1, -1, 1, 1, 0, 3), 6)
    assert tree.children == ((0, 1), (4,), (2, 3), (), (5,), (), ())
    assert tree.depths == (0, 0, 1, 1, 1, 2)
    assert tree.ranks == (0, 1, 0, 1, 2, 0)
    assert tree.groups == ((0, 1), (2, 3), (4,), (5,))
    assert tree.spine == (0, 4)
    assert tree.num_depths == 3
    assert [tree.shared_with_spine(path) for path in ((), (0,), (0, 4), (1, 3))] == [0, 1, 2, 0]


def test_caterpillar_trees() -> None:
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
    q = DraftDistribution((3, 4, 5), (COUNT_TOTAL - 2, 1, 1))
    proposal = Proposal((4, 3, 9), (q, None), (-1, -1, 0))
    assert SealedProposal.of(proposal).open() == proposal
    assert proposal.spine_ids == (4, 9)
    bare = SealedProposal.of(proposal).without_q(Rule.TOKEN)
    assert bare.open() == Proposal((4, 3, 9), (None, None), (-1, -1, 0))
    with pytest.raises(BadRequest, match="does not hold the drafted token 6"):
        SealedProposal.of(Proposal((4, 6, 9), (q, None), (-1, -1, 0))).open()


def test_a_sealed_tree_is_cut_by_places() -> None:
    """A cut keeps the q of the tokens that are left. Without siblings a tree becomes a chain."""
    q = DraftDistribution((3, 4, 5), (COUNT_TOTAL - 2, 1, 1))
    tree = SealedProposal.of(Proposal((9, 4, 5, 7), (None, q, None), (-1, 0, 0, 1)))
    assert tree.cut(4) is tree
    assert tree.cut(2).open() == Proposal((9, 4, 5), (None, q), (-1, 0, 0))
    assert tree.cut(1).open() == Proposal((9,), (None,))
    assert tree.cut(0).open() == Proposal()
    by_path = SealedProposal.of(Proposal((4, 9, 5), (None, None), (-1, 0, -1)))
    with pytest.raises(InvariantError, match="listed by depth"):
        by_path.cut(1)
