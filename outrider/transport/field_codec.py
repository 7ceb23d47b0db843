"""Fields that several messages have: sessions, tokens, proposals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from outrider.errors import BadRequest
from outrider.grammar.constraint import DIGEST_BYTES, Constraint
from outrider.hidden_states import BYTES_OF_A_NUMBER, Features
from outrider.limits import (
    FEATURES_MAX,
    FEATURES_WIDTH_MAX,
    NUM_DRAFT_TOKENS_MAX,
    TOKEN_ID_MAX,
    TREE_TOKENS_MAX,
)
from outrider.messages import RoundHead
from outrider.speculation.proposal import NOTHING_SEALED, Q_BYTES_MAX, SealedProposal
from outrider.speculation.trees import draft_tree
from outrider.v1 import types_pb2

_SESSION_ID = re.compile(r"[0-9a-f]{32}")


def session_id_from_wire(session_id: str, field: str = "session_id") -> str:
    """Checks that a session id is 32 lower-case hexadecimal digits."""
    if _SESSION_ID.fullmatch(session_id) is None:
        raise BadRequest(
            field, f"{session_id[:64]!r} is no session id (32 hexadecimal digits, lower case)"
        )
    return session_id


def token_ids_from_wire(ids: Iterable[int], field: str) -> tuple[int, ...]:
    """Checks that token ids fit 31 bits; whether they are in a vocabulary, its owner checks."""
    token_ids = tuple(ids)
    if token_ids and (max(token_ids) > TOKEN_ID_MAX or min(token_ids) < 0):
        raise BadRequest(field, f"a token id is not in 0..{TOKEN_ID_MAX}")
    return token_ids


def drafted_from_wire(
    ids: Sequence[int], field: str, num_max: int = NUM_DRAFT_TOKENS_MAX
) -> tuple[int, ...]:
    """The tokens of a proposal."""
    if len(ids) > num_max:
        raise BadRequest(field, f"{len(ids)} tokens are more than {num_max}")
    return token_ids_from_wire(ids, field)


def proposal_to_proto(proposal: SealedProposal) -> types_pb2.Proposal:
    """`q` stays empty under rules that do not look at it, and `parents` for a chain."""
    return types_pb2.Proposal(
        token_ids=proposal.token_ids,
        q=proposal.q,
        parents=[parent + 1 for parent in proposal.parents],
    )


def proposal_from_proto(message: types_pb2.Proposal) -> SealedProposal:
    """Checks the tree, the token ids and the size of q, which is for the target to open."""
    if not (message.token_ids or message.q or message.parents):
        return NOTHING_SEALED
    num_max = TREE_TOKENS_MAX if message.parents else NUM_DRAFT_TOKENS_MAX
    token_ids = drafted_from_wire(message.token_ids, "proposal.token_ids", num_max)
    if len(message.q) > Q_BYTES_MAX:
        raise BadRequest("proposal.q", f"{len(message.q)} bytes are more than {Q_BYTES_MAX}")
    parents = tuple(parent - 1 for parent in message.parents)
    draft_tree(parents, len(token_ids))
    return SealedProposal(token_ids, message.q, parents)


def put_constraint(message: types_pb2.RoundHead, head: RoundHead, *, in_full: bool) -> None:
    """What the completion must be, if anything, or the hash of that."""
    if not in_full and head.constraint_hash:
        message.constraint_hash = head.constraint_hash
    elif head.constraint is not None:
        message.constraint.kind = head.constraint.kind
        message.constraint.text = head.constraint.text


def constraint_from_proto(
    message: types_pb2.RoundHead, field: str
) -> tuple[Constraint | None, bytes]:
    """What the completion must be, and its hash; None where only that was sent, or nothing."""
    given = message.WhichOneof("completion")
    if given is None:
        return None, b""
    if given == "constraint":
        constraint = Constraint.read(message.constraint.kind, message.constraint.text, field)
        return constraint, constraint.digest()
    if len(message.constraint_hash) != DIGEST_BYTES:
        raise BadRequest(f"{field}_hash", f"has {len(message.constraint_hash)} bytes, not 16")
    return None, message.constraint_hash


def features_to_proto(features: Features) -> types_pb2.Features:
    """Field for field."""
    return types_pb2.Features(first=features.first, width=features.width, rows=features.rows)


def features_from_proto(message: types_pb2.Features, field: str) -> Features | None:
    """Checks that they are whole rows, and few; None where none were sent."""
    if not (message.width or message.rows):
        return None
    if not 0 < message.width <= FEATURES_WIDTH_MAX:
        raise BadRequest(f"{field}.width", f"{message.width} is not in 1..{FEATURES_WIDTH_MAX}")
    num, rest = divmod(len(message.rows), message.width * BYTES_OF_A_NUMBER)
    if rest or not 0 < num <= FEATURES_MAX:
        whole = f"1 to {FEATURES_MAX} rows of {message.width} numbers"
        raise BadRequest(f"{field}.rows", f"{len(message.rows)} bytes are not {whole}")
    return Features(message.first, message.width, message.rows)


def milliseconds(value: float, field: str) -> float:
    """Checks that a duration is one."""
    if not 0.0 <= value < math.inf:
        raise BadRequest(field, f"{value!r} is no duration")
    return value
