"""Valid or nearly valid messages, from which hostile ones are made."""

import json
import struct
from typing import Any, Final

from google.protobuf.message import Message
from hypothesis import strategies as st

from outrider.foundation.tokens import TokenSequence
from outrider.v1 import coordinator_pb2, draft_pb2, target_pb2, types_pb2
from tests.fuzz.hostile import BYTES, SESSION_IDS, messages, mutated
from tests.fuzz.system import VOCAB_SIZE

TOKENS: Final = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)
ROUNDS_MAX: Final = 5
CONSTRAINTS: Final = (
    ("regex", "[a-z ]+"),
    ("regex", "(a|b)*c"),
    ("regex", "[a-d]*a[a-d]{15}"),
    ("choice", '["brown","brown fox"]'),
    ("json_object", ""),
    ("json_schema", '{"enum":[1,"a"]}'),
    ("json_schema", '{"properties":{"a":{"type":"string","maxLength":3}}}'),
)
"""Constraints as kinds and texts. All of them compile."""


@st.composite
def sampling(draw: st.DrawFn) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=draw(st.sampled_from((0.0, 0.7, 1.0))),
        top_p=draw(st.sampled_from((0.9, 1.0))),
        top_k=draw(st.sampled_from((-1, 4))),
        repetition_penalty=draw(st.sampled_from((1.0, 1.3))),
        logit_bias=draw(st.sampled_from(({}, {3: -5.0, 319: 100.0}))),
    )


@st.composite
def generate(draw: st.DrawFn) -> coordinator_pb2.GenerateRequest:
    request = coordinator_pb2.GenerateRequest(
        sampling=draw(sampling()), max_tokens=draw(st.integers(1, 12)), num_draft_tokens=4
    )
    match draw(st.integers(0, 2)):
        case 0:
            request.text = draw(st.text(min_size=1, max_size=12))
        case 1:
            turn = request.chat.messages.add()
            turn.role, turn.content = "user", draw(st.text(max_size=12))
        case _:
            request.token_ids.ids.extend(draw(TOKENS))
    kind, text = draw(st.sampled_from((("", ""), *CONSTRAINTS)))
    if kind == "choice":
        request.choice.texts.extend(json.loads(text))
    elif kind:
        setattr(request, kind, text or True)
    if draw(st.booleans()):
        request.stop.append("a")
        request.logprobs = 2
        request.include_rounds = True
        request.seed = 5
    return request


_session_ids: Final = st.sampled_from(SESSION_IDS)
VALID: Final[dict[str, st.SearchStrategy[Message]]] = {
    "GenerateRequest": generate(),
    "ResumeRequest": st.builds(coordinator_pb2.ResumeRequest, session_id=_session_ids),
    "CancelRequest": st.builds(coordinator_pb2.CancelRequest, session_id=_session_ids),
    "GetSessionRequest": st.builds(coordinator_pb2.GetSessionRequest, session_id=_session_ids),
    "DescribeRequest": st.builds(types_pb2.DescribeRequest),
    "ReleaseRequest": st.builds(
        types_pb2.ReleaseRequest, session_id=_session_ids, epoch=st.integers(0, 3)
    ),
}
"""Valid messages by input type, for methods that are not streams."""


def _head(draw: st.DrawFn, session_id: str, number: int, held: TokenSequence) -> Any:
    """The head of the next round. `held` grows by the tokens that the head appends."""
    base, digest = len(held), held.digest()
    append = draw(TOKENS)
    held.extend(append)
    head = types_pb2.RoundHead(
        session_id=session_id,
        tenant=draw(st.sampled_from(("", "fuzzer"))),
        epoch=1,
        round=number,
        base_length=base,
        prefix_digest=digest,
        append=append,
        prompt_length=draw(st.sampled_from((1, len(held)))),
        rule=draw(st.sampled_from((1, 2, 3, 4))),
        seed=7,
        deadline_ms=2000,
    )
    head.sampling_params.CopyFrom(draw(sampling()))
    if head.rule == types_pb2.RULE_GREEDY:
        head.sampling_params.temperature = 0.0
    kind, text = draw(st.sampled_from((("", ""), *CONSTRAINTS)))
    if kind:
        head.constraint.CopyFrom(types_pb2.Constraint(kind=kind, text=text))
    return head


@st.composite
def proposals(draw: st.DrawFn) -> types_pb2.Proposal:
    """Proposals whose q is valid or invalid."""
    ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5))
    proposal = types_pb2.Proposal(token_ids=ids)
    others = [(token + 1) % VOCAB_SIZE for token in ids]
    one_hot = b"\0\0" * len(ids)
    halves = b"".join(
        struct.pack("<H2I2H", 2, *pair, 2**15, 2**15) for pair in zip(ids, others, strict=True)
    )
    proposal.q = draw(st.sampled_from((one_hot, halves, draw(BYTES), b"")))
    return proposal


@st.composite
def rounds(draw: st.DrawFn, kind: type[Message]) -> list[Message]:
    """Frames of a stream to a target or a draft. They have the rounds of one or two sessions in
    order; some items are made hostile, left out, doubled or swapped."""
    verifies = kind is target_pb2.VerifyRequest
    held = {
        session_id: TokenSequence()
        for session_id in draw(st.lists(_session_ids, min_size=1, max_size=2, unique=True))
    }
    frames: list[Message] = []
    for number in range(draw(st.integers(1, ROUNDS_MAX))):
        frame: Any = kind()
        for session_id, sequence in held.items():
            item = frame.items.add()
            item.head.CopyFrom(_head(draw, session_id, number, sequence))
            if verifies:
                item.proposal.CopyFrom(draw(proposals()))
                item.run_ahead = draw(st.sampled_from((0, 0, 3)))
                item.num_next_draft_tokens = draw(st.sampled_from((0, 4)))
            else:
                item.num_draft_tokens = draw(st.integers(0, 6))
                item.look_ahead = draw(st.sampled_from((0, 4)))
        if draw(st.integers(0, 2)) == 0:
            frame = draw(mutated(st.just(frame)))
        frames += [frame] * draw(st.sampled_from((1, 1, 1, 0, 2)))
    if draw(st.integers(0, 4)) == 0:
        frames.reverse()
    if draw(st.integers(0, 4)) == 0:
        frames.append(draw(messages(kind.DESCRIPTOR)))
    return frames


STREAMS: Final[dict[str, st.SearchStrategy[list[Message]]]] = {
    "VerifyRequest": rounds(target_pb2.VerifyRequest),
    "DraftRequest": rounds(draft_pb2.DraftRequest),
}
"""Frames by input type, for methods that are streams."""
