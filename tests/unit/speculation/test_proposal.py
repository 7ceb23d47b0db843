"""Proposals as messages carry them. The decoder of q accepts any bytes from a peer."""

import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import BadRequest
from outrider.limits import NUM_DRAFT_TOKENS_MAX
from outrider.speculation.proposal import (
    COUNT_TOTAL,
    DraftDistribution,
    EncodedProposal,
    Proposal,
    decode_q,
    encode_q,
)
from outrider.speculation.sampling_params import Rule

HALF = COUNT_TOTAL // 2


@st.composite
def distributions(draw):
    ids = draw(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=9, unique=True))
    size = len(ids) - 1
    cuts = st.lists(st.integers(1, COUNT_TOTAL - 1), min_size=size, max_size=size, unique=True)
    edges = [0, *sorted(draw(cuts)), COUNT_TOTAL]
    counts = [high - low for low, high in itertools.pairwise(edges)]
    return DraftDistribution(tuple(ids), tuple(counts))


@settings(deadline=None)
@given(st.lists(st.none() | distributions(), max_size=5))
def test_round_trip(q):
    token_ids = [entry.token_ids[-1] if entry else 5 for entry in q]
    assert decode_q(encode_q(q), token_ids) == tuple(q)


@settings(deadline=None)
@given(st.binary(max_size=60), st.lists(st.integers(0, 9), max_size=3))
def test_hostile_bytes_are_refused_or_sound(data, token_ids):
    try:
        q = decode_q(data, token_ids)
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
        decode_q(data, token_ids)
    assert caught.value.field == "proposal.q"


GOOD = packed((1, 2), (HALF, HALF))


@pytest.mark.parametrize(
    ("second", "num_readable"),
    [
        (GOOD, 2),
        (b"", 1),
        (GOOD[:-1], 1),
        (packed((1, 2), (HALF, HALF - 1)), 1),
        (packed((3, 4), (HALF, HALF)), 1),
        (GOOD + b"\0", 1),
    ],
)
def test_how_far_a_proposal_can_be_read(second, num_readable):
    part = EncodedProposal((1, 2), GOOD + second).decodable_prefix()
    assert part == EncodedProposal((1, 2)[:num_readable], GOOD * num_readable)
    assert not EncodedProposal((1, 2), b"?").decodable_prefix()


def test_long_proposals_are_refused() -> None:
    longest = EncodedProposal((1,) * NUM_DRAFT_TOKENS_MAX)
    assert longest.decode() == Proposal(longest.token_ids)
    longer = EncodedProposal((1,) * (NUM_DRAFT_TOKENS_MAX + 1))
    with pytest.raises(BadRequest, match=f"at most {NUM_DRAFT_TOKENS_MAX}") as caught:
        longer.decode()
    assert caught.value.field == "proposal.token_ids"


Q = DraftDistribution((3, 4, 5), (COUNT_TOTAL - 2, 1, 1))


def test_a_sealed_proposal_opens() -> None:
    proposal = Proposal((4, 9), (Q, None))
    encoded = EncodedProposal.of(proposal)
    assert encoded.decode() == proposal
    assert encoded.without_q(Rule.TOKEN).decode() == Proposal((4, 9), (None, None))
    assert encoded.without_q(Rule.COUPLED).decode() == Proposal((4, 9))
    with pytest.raises(BadRequest, match="does not hold the drafted token 6"):
        EncodedProposal.of(Proposal((6, 9), (Q, None))).decode()


def test_a_cut_keeps_the_q_of_the_tokens_that_are_left() -> None:
    encoded = EncodedProposal.of(Proposal((9, 4, 7), (None, Q, None)))
    assert encoded.cut(3) is encoded
    assert encoded.cut(2).decode() == Proposal((9, 4), (None, Q))
    assert encoded.cut(1).decode() == Proposal((9,), (None,))
    assert encoded.cut(0).decode() == Proposal()
    assert EncodedProposal((9, 4, 7)).cut(2) == EncodedProposal((9, 4))
