"""Messages survive the wire unchanged, and invalid ones are refused."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider import limits
from outrider.drafters.features import Features
from outrider.errors import BadRequest, InvariantError
from outrider.foundation.tokens import EMPTY_DIGEST
from outrider.grammar.constraint import Constraint
from outrider.interfaces import messages
from outrider.interfaces.request import GenerateRequest, ResumeRequest
from outrider.interfaces.step_costs import StepCosts
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.proposal import EncodedProposal
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport import codec, request_codec
from outrider.transport.codec import DRAFT, VERIFY
from outrider.transport.fields import from_proto, to_proto
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import types_pb2
from tests.support.rounds import item_message, make_head

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
IDS = st.integers(0, limits.TOKEN_ID_MAX)
KEYS = st.builds(messages.ReplyKey, st.from_regex(r"\A[0-9a-f]{32}\Z"), U32, U32)
FLOAT32 = st.floats(0, 1e6, width=32)


def between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


SAMPLINGS = st.builds(
    SamplingParams,
    temperature=between(0, 2),
    top_p=between(0.001, 1),
    top_k=st.integers(-1, 100_000),
    min_p=between(0, 1),
    presence_penalty=between(-2, 2),
    frequency_penalty=between(-2, 2),
    repetition_penalty=between(0.001, 10),
    logit_bias=st.dictionaries(IDS, between(-100, 100), max_size=4).map(
        lambda entries: tuple(sorted(entries.items()))
    ),
)


CONSTRAINTS = [
    None,
    Constraint.of_schema({"type": "object", "title": "é"}),
    Constraint.any_object(),
    Constraint.of_regex("[ab]+"),
    Constraint.of_choices(["x", 'y"']),
]


@st.composite
def heads(draw: st.DrawFn) -> messages.RoundHead:
    base_length = draw(st.integers(0, limits.SESSION_TOKENS_MAX - 5))
    append = tuple(draw(st.lists(IDS, min_size=0 if base_length else 1, max_size=5)))
    sampling = draw(SAMPLINGS)
    constraint = draw(st.sampled_from(CONSTRAINTS))
    return messages.RoundHead(
        session_id=draw(st.from_regex(r"\A[0-9a-f]{32}\Z")),
        tenant=draw(st.text(max_size=9)),
        epoch=draw(st.integers(1, 2**32 - 1)),
        round=draw(U32),
        base_length=base_length,
        prefix_digest=draw(U64),
        append=append,
        prompt_length=draw(st.integers(1, base_length + len(append))),
        rule=draw(st.sampled_from(list(Rule))),
        seed=draw(U64),
        sampling=sampling,
        sampling_hash=sampling.hash(),
        deadline_ms=draw(st.integers(0, limits.DEADLINE_MS_MAX)),
        traceparent=draw(st.text(max_size=9)),
        constraint=constraint,
        constraint_hash=b"" if constraint is None else constraint.digest(),
    )


@st.composite
def proposals(draw: st.DrawFn) -> EncodedProposal:
    token_ids = tuple(draw(st.lists(IDS, max_size=limits.NUM_DRAFT_TOKENS_MAX)))
    return EncodedProposal(token_ids, draw(st.binary(max_size=40)) if token_ids else b"")


DEADLINE_US_MAX = 1000 * limits.DRAFT_DEADLINE_MS_MAX
BUDGETS_US = st.integers(0, DEADLINE_US_MAX)
VERIFY_ITEMS = st.builds(
    messages.VerifyItem,
    heads(),
    proposals(),
    st.integers(0, limits.RUN_AHEAD_ROUNDS_MAX),
    st.none() | st.integers(0, limits.LOGPROBS_MAX),
    st.integers(0, limits.NUM_DRAFT_TOKENS_MAX),
    st.none() | st.integers(0, limits.SESSION_TOKENS_MAX),
    BUDGETS_US,
    st.integers(0, limits.NUM_DRAFT_TOKENS_MAX),
    st.floats(0, 1),
    st.booleans(),
    st.integers(0, limits.NUM_DRAFT_TOKENS_MAX),
    st.integers(0, limits.SESSION_TOKENS_MAX),
    st.booleans(),
    st.booleans(),
)
FEATURES = st.none() | st.builds(Features, U32, st.just(3), st.sampled_from([bytes(6), bytes(12)]))
LOGPROBS = st.builds(
    messages.PositionLogprobs,
    st.floats(max_value=0, allow_nan=False),
    st.lists(st.tuples(IDS, st.floats(max_value=0, allow_nan=False)), max_size=3).map(tuple),
)


@st.composite
def verdict_replies(draw: st.DrawFn) -> messages.VerdictReply:
    num_draft_tokens = draw(st.integers(0, limits.NUM_DRAFT_TOKENS_MAX))
    accept = tuple(draw(between(0, 1)) for _ in range(num_draft_tokens))
    correction = tuple(draw(IDS) for _ in range(num_draft_tokens + 1))
    size = draw(st.sampled_from([0, 2 * num_draft_tokens + 1]))
    following = draw(proposals())
    return messages.VerdictReply(
        draw(KEYS),
        Verdict(accept, correction),
        draw(U32),
        tuple(draw(LOGPROBS) for _ in range(size)),
        draw(FLOAT32),
        draw(FLOAT32),
        following,
        draw(U32) if following else 0,
        draw(FLOAT32),
        draw(FLOAT32),
        draw(st.booleans()),
        draw(FEATURES),
        tuple(draw(st.lists(IDS, max_size=limits.NUM_DRAFT_TOKENS_MAX))),
        draw(st.booleans()),
        tuple(draw(st.lists(IDS, max_size=limits.NUM_DRAFT_TOKENS_MAX))),
        draw(U32),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.none() | st.just(AuditSums(num_draft_tokens, entropy=1.5))),
    )


@given(VERIFY_ITEMS)
def test_verify_items_survive(item: messages.VerifyItem) -> None:
    assert VERIFY.item_from_proto(item_message(VERIFY, item)) == item
    short = item_message(VERIFY, item, hashed=True)
    without = replace(item, head=replace(item.head, sampling=None, constraint=None))
    assert VERIFY.item_from_proto(short) == without
    assert VERIFY.item_from_proto(short, item.head) == item
    other = replace(item.head, sampling_hash=item.head.sampling_hash ^ 1)
    assert VERIFY.item_from_proto(short, other) == without
    if item.head.constraint is not None:  # In full, but the known session has none.
        short.head.constraint.kind, short.head.constraint.text = "regex", "a+"
        bare = replace(item.head, constraint=None, constraint_hash=b"")
        assert VERIFY.item_from_proto(short, bare).head.sampling is None


@given(heads(), st.integers(0, limits.NUM_DRAFT_TOKENS_MAX), FEATURES, BUDGETS_US)
def test_draft_items_survive(
    head: messages.RoundHead, count: int, features: Features, budget_us: int
) -> None:
    item = messages.DraftItem(head, count, 3, (1, 2), features, budget_us)
    found: Any = DRAFT.item_from_proto(item_message(DRAFT, item))
    assert (found, found.budget_us) == (item, budget_us)


RESYNCS = st.builds(messages.Resync, KEYS, U32, U64)
REFUSALS = st.builds(messages.Refused, KEYS, st.integers(0, 16), st.text(max_size=20))
PROPOSAL_REPLIES = st.builds(
    messages.ProposalReply,
    KEYS,
    proposals(),
    U32,
    U32,
    FLOAT32,
    FLOAT32,
    FLOAT32,
    st.lists(IDS, max_size=3).map(tuple),
    st.booleans(),
)


LONGEST = Verdict((0.5,) * limits.NUM_DRAFT_TOKENS_MAX, (1,) * (limits.NUM_DRAFT_TOKENS_MAX + 1))


@given(verdict_replies() | RESYNCS | REFUSALS)
@example(messages.VerdictReply(make_head((1,)).key, LONGEST, 3))
def test_verify_answers_survive(answer: messages.VerifyAnswer) -> None:
    assert [*VERIFY.answers(VERIFY.answer_frame(answer))] == [answer]


@given(PROPOSAL_REPLIES | RESYNCS | REFUSALS)
def test_draft_answers_survive(answer: messages.DraftAnswer) -> None:
    assert [*DRAFT.answers(DRAFT.answer_frame(answer))] == [answer]


def test_descriptions_survive() -> None:
    costs = StepCosts((1, 8), (0.01, 0.02), 1e-3, 1e-6, 1e-7)
    described = messages.ReplicaDescription(
        "m",
        "w",
        "t",
        49_152,
        "bfloat16",
        2048,
        (0, 2),
        64,
        costs,
        drafts_itself=True,
        looks_up=True,
        features="f",
        dtype_note="d",
        kernels="k",
        row_coupling=0.1,
    )
    message = to_proto(described, types_pb2.ReplicaDescription)
    assert from_proto(message, messages.ReplicaDescription) == described
    message.step_costs.seconds[0] = -1.0
    with pytest.raises(BadRequest, match="step_costs"):
        from_proto(message, messages.ReplicaDescription)


def test_whole_numbers_hash_like_what_comes_out_of_the_wire() -> None:
    given_params = SamplingParams(temperature=1, min_p=0, logit_bias=((5, 2), (1, -1)))
    message = codec.sampling_to_proto(given_params)
    read = codec.sampling_from_proto(message)
    assert given_params.hash() == read.hash()


def change(message: Any, path: str, value: Any) -> None:
    """Sets a field; extends a repeated one, and clears one if the value is None."""
    *parents, name = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    if value is None:
        message.ClearField(name)
    elif isinstance(value, list):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


def refused(codec: Any, message: Any) -> str | None:
    """The field for which an item is refused; None if it is accepted."""
    try:
        codec.item_from_proto(message)
    except BadRequest as error:
        return error.field
    return None


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("head.session_id", "0" * 31, "0" * 32),
        ("head.prompt_length", 3, 2),
        ("head.append", [limits.TOKEN_ID_MAX + 1], [limits.TOKEN_ID_MAX]),
        # Two are appended.
        ("head.base_length", limits.SESSION_TOKENS_MAX - 1, limits.SESSION_TOKENS_MAX - 2),
        ("head.rule", 0, 1),
        ("head.epoch", 0, 1),
        ("head.traceparent", *("x" * (limits.TRACEPARENT_CHARS_MAX + num) for num in (1, 0))),
        ("head.constraint.kind", "x", "regex"),
        ("head.constraint_hash", b"12", b""),
        ("head.sampling_params.top_p", 0.0, 1.0),
        ("proposal.token_ids", *([1] * (limits.NUM_DRAFT_TOKENS_MAX - num) for num in (0, 1))),
        ("run_ahead", limits.RUN_AHEAD_ROUNDS_MAX + 1, limits.RUN_AHEAD_ROUNDS_MAX),
        ("next_budget_us", DEADLINE_US_MAX + 1, DEADLINE_US_MAX),
        # Of draft items.
        ("num_draft_tokens", limits.NUM_DRAFT_TOKENS_MAX + 1, limits.NUM_DRAFT_TOKENS_MAX),
        ("look_ahead", limits.LOOK_AHEAD_MAX + 1, limits.LOOK_AHEAD_MAX),
        ("budget_us", DEADLINE_US_MAX + 1, DEADLINE_US_MAX),
    ],
)
def test_item_limits_from_both_sides(field: str, bad: Any, good: Any) -> None:
    head = make_head((1, 2), rule=Rule.TOKEN)
    codec, item = VERIFY, messages.VerifyItem(head, EncodedProposal((3,), b""))
    if field in ("num_draft_tokens", "look_ahead", "budget_us"):
        codec, item = DRAFT, messages.DraftItem(head, 1)
    message = item_message(codec, item)
    if "constraint." in field:
        message.head.constraint.text = "a+"
    change(message, field, good)
    assert refused(codec, message) is None
    message = item_message(codec, item)
    change(message, field, bad)
    assert refused(codec, message) == field


@pytest.mark.parametrize(
    ("width", "num_bytes", "field"),
    [
        (2, 4 * limits.FEATURES_MAX, None),
        (2**13, limits.FEATURES_BYTES_MAX, None),
        (2**13, limits.FEATURES_BYTES_MAX + 2**14, "features.rows"),
        (2, 4 * limits.FEATURES_MAX + 4, "features.rows"),
        (2, 6, "features.rows"),
        (2, 0, "features.rows"),
        (limits.FEATURES_WIDTH_MAX, 2 * limits.FEATURES_WIDTH_MAX, None),
        (limits.FEATURES_WIDTH_MAX + 1, 2 * (limits.FEATURES_WIDTH_MAX + 1), "features.width"),
    ],
)
def test_features_are_whole_rows_and_few(width: int, num_bytes: int, field: str | None) -> None:
    message = item_message(DRAFT, messages.DraftItem(make_head((1,)), 1))
    message.features.width, message.features.rows = width, bytes(num_bytes)
    assert refused(DRAFT, message) == field


KEY = make_head((1,)).key
VERDICT = messages.VerdictReply(
    KEY, Verdict((0.5,), (1, 2)), 3, (messages.PositionLogprobs(-1.0, ((1, -1.0),)),) * 3
)
PROPOSED = messages.ProposalReply(KEY, EncodedProposal((1,), b""), 3, 4)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("session_id", {"key": messages.ReplyKey("", 1, 0)}),
        ("verdict", {"verdict": Verdict((0.5,), (1, 2, 3))}),
        ("verdict", {"verdict": Verdict((0.5,) * 17, (1,) * 18), "logprobs": ()}),  # Too many.
        ("verdict.accept_probability", {"verdict": Verdict((1.1,), (1, 2))}),
        ("verdict.accept_probability", {"verdict": Verdict((math.nan,), (1, 2))}),
        ("verdict.correction", {"verdict": Verdict((0.5,), (1, 2**31))}),
        ("verdict.logprobs", {"logprobs": VERDICT.logprobs[1:]}),
        ("verdict.logprobs", {"logprobs": (messages.PositionLogprobs(math.nan, ()),) * 3}),
        (
            "verdict.logprobs",
            {"logprobs": (messages.PositionLogprobs(-1.0, ((1, math.inf),)),) * 3},
        ),
        ("verdict.queue_ms", {"queue_ms": -1.0}),
        ("verdict.next_work_ms", {"next_work_ms": math.nan}),
        ("verdict.next_proposal.token_ids", {"next_proposal": EncodedProposal((2**31,), b"")}),
        ("verdict.audit", {"audit": AuditSums(3)}),
        ("verdict.audit", {"audit": AuditSums(1, 1, 1)}),
        ("verdict.audit.variance", {"audit": AuditSums(1, variance=-1.0)}),
        ("proposal.work_ms", {"work_ms": math.inf}),
    ],
)
def test_answers_that_cannot_be_are_refused(field: str, changed: dict[str, Any]) -> None:
    codec, answer = (DRAFT, PROPOSED) if field[0] == "p" else (VERIFY, VERDICT)
    assert [*codec.answers(codec.answer_frame(answer))] == [answer]
    with pytest.raises(BadRequest) as caught:
        next(codec.answers(codec.answer_frame(replace(answer, **changed))))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (pb.GenerateEvent(tokens={"origins": [1, 77]}), r"tokens.origins: 77 is no origin \(acc"),
        (pb.GenerateEvent(tokens={"origins": [0]}), "tokens.origins: 0 is no origin"),
        (pb.GenerateEvent(started={"rule": 0}), "started.rule: 0 is no rule"),
        (pb.GenerateEvent(finished={"finish_reason": 9}), "finish_reason: 9 is no finish reason"),
        (pb.GenerateEvent(finished={"finish_reason": 1}), "finished.usage: is missing"),
        (pb.GenerateEvent(tokens={"logprobs": [{"logprob": math.nan}]}), "no log-probability"),
    ],
)
def test_events_that_a_client_cannot_read_are_the_coordinators_fault(event: Any, said: str) -> None:
    with pytest.raises(InvariantError, match=f"the coordinator sent .*{said}"):
        request_codec.event_from_proto(event)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_requests_survive(constraint: Constraint | None) -> None:
    full = GenerateRequest(
        prompt=(1, 2),
        model="m",
        sampling=SamplingParams(temperature=0.5, logit_bias=((3, 1.0),)),
        max_tokens=7,
        stop=("a",),
        ignore_eos=True,
        seed=0,
        rule=Rule.BLOCK,
        num_draft_tokens=0,
        deadline_ms=1000,
        logprobs=0,
        include_rounds=True,
        draft_deadline_ms=20,
    )
    for request in (GenerateRequest("hello", constraint=constraint), full):
        message = pb.GenerateRequest.FromString(
            request_codec.request_to_proto(request).SerializeToString()
        )
        assert request_codec.request_from_proto(message) == request


@pytest.mark.parametrize(
    ("fields", "field"),
    [({}, "prompt"), ({"chat": {}}, "chat.messages"), ({"text": "a", "rule": 17}, "rule")],
)
def test_a_request_without_a_prompt_or_with_an_unknown_rule_is_refused(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        request_codec.request_from_proto(pb.GenerateRequest(**fields))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "request_",
    [
        ResumeRequest("a" * 32),
        ResumeRequest("a" * 32, 0, 0, tokens_digest=EMPTY_DIGEST),
        ResumeRequest("a" * 32, 2**32 - 1, 7, 1, 2**64 - 1),
    ],
)
def test_what_is_asked_arrives(request_: ResumeRequest) -> None:
    assert request_codec.resume_from_proto(request_codec.resume_to_proto(request_)) == request_


@pytest.mark.parametrize(
    ("field", "given"),
    [("constraint", CONSTRAINTS[1]), ("sampling", SamplingParams(logit_bias=((7, -0.5), (9, 2))))],
)
def test_what_all_sessions_of_a_request_have_is_read_once_for_each_tenant(
    field: str, given: Any
) -> None:
    heads = [replace(make_head((1,), tenant=tenant), **{field: given}) for tenant in "aab"]
    items = [item_message(DRAFT, messages.DraftItem(head, 1)) for head in heads]
    read: list[Any] = [DRAFT.item_from_proto(item) for item in items]
    first, again, other = (getattr(item.head, field) for item in read)
    assert first == other == given
    assert first is again is not other
