"""Several replicas of a role: which one a session gets, and when it moves."""

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.routing.replica_pool import (
    PROBE_PERIOD_S,
    ReplicaPool,
    SessionRoute,
    affinity,
    choose,
)
from coordinator.routing.target_client import RETRY_S_MAX
from outrider.errors import Incompatible, InvariantError, LinkLost, Overloaded, Unavailable
from outrider.interfaces.messages import (
    ProposalReply,
    ReplicaDescription,
    ReplyKey,
    Resync,
    VerdictReply,
)
from outrider.registry.registry import Starts
from outrider.replica.service import StaleRoundFilter
from outrider.sessions.store import CacheState
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal
from tests.support.session_links import (
    CONFIG,
    GONE_S,
    NOISE,
    PROMPT,
    START_S,
    TOY,
    ScriptedLink,
    asked,
    context_of,
    described,
    draft_of,
    play,
    pool_of,
    proposal,
    refuse,
    session,
    target_of,
    verdict,
)

pytestmark = pytest.mark.virtual

NEW = ReplicaDescription("toy", "new", "", 99, "float32", 0, (), 8)


@pytest.mark.parametrize("loss", [LinkLost("down"), refuse(Unavailable("shutting down"))])
async def test_a_target_that_is_lost_or_shuts_down_is_left_at_once(loss: Any) -> None:
    """All tokens are sent, as it is not known what the other one holds."""
    first, second = ScriptedLink(verdict, loss), ScriptedLink(verdict, verdict)
    one = session()
    target = target_of(first, second, one=one)
    await play(target, one, 0)
    await play(target, one, 1)
    assert (asyncio.get_running_loop().time(), target.cache_state.replica) == (0.0, "r1")
    assert (second.sent[0].head.base_length, second.sent[0].head.append) == (0, (*PROMPT, 9))
    await play(target, one, 2)
    assert (second.sent[1].head.base_length, second.sent[1].head.append) == (5, (9,))
    assert len(first.sent) == 2
    assert not first.released  # It may come back.
    target.close()
    assert first.released == second.released == ["0" * 32]


async def test_a_session_may_return_to_a_replica() -> None:
    """Its rounds there have new numbers, so that they are not stale, and late answers are not
    used."""
    links = [ScriptedLink(), ScriptedLink()]

    def answering(link: ScriptedLink, fence: StaleRoundFilter) -> Callable[[Any], Any]:
        def answer(item: Any) -> Any:
            if len(link.sent) > 1:
                before = link.sent[-2]
                late = replace(before.head.key, round=before.head.round + 2)
                link.on_answer(replace(verdict(before, 5), key=late))
            return fence.admit(item.head) or verdict(item)

        return answer

    for link in links:
        link.script = [answering(link, StaleRoundFilter())] * 9
    one = session()
    target = target_of(*links, one=one)
    places: list[str] = []
    for index in range(6):
        assert (await play(target, one, index, 8)).verdict.correction == (9,)
        places.append(target.cache_state.replica)
        await asyncio.sleep(1.0)  # By then the other one is there again.
        links[int(places[-1][1])].on_lost(LinkLost("reset"))
    assert places == ["r0", "r1"] * 3


async def test_if_all_replicas_are_away_the_session_waits_for_the_first_that_is_back() -> None:
    first = ScriptedLink(LinkLost("down"))
    second = ScriptedLink(LinkLost("down"), LinkLost("down"), LinkLost("down"), verdict)
    first.away_until, second.away_until = 99.0, 0.5
    target = target_of(first, second)
    await target.verify(0, EMPTY_ENCODED_PROPOSAL)
    assert 0.5 < asyncio.get_running_loop().time() < 1.0
    assert len(first.sent) == 1


async def test_a_replica_that_comes_and_goes_is_asked_at_intervals() -> None:
    links = [ScriptedLink(*[LinkLost("down")] * 999) for _ in range(2)]
    target = target_of(*links)
    with pytest.raises(Unavailable, match="no target can be reached"):
        await target.verify(0, EMPTY_ENCODED_PROPOSAL)
    assert GONE_S <= asyncio.get_running_loop().time() <= GONE_S + 2.0
    assert sum(len(link.sent) for link in links) < 2.5 * GONE_S / PROBE_PERIOD_S


STARTING = Starts("target", ("target-3",), expected=True, last_s=31.2)
GIVEN_UP = Starts("target", ("target-9",), num_failures=4)


def starting(pool: ReplicaPool, *changes: tuple[float, Starts]) -> None:
    """Sets what is known of starts at some times."""
    loop = asyncio.get_running_loop()
    for at, starts in changes:
        loop.call_at(at, setattr, pool, "starts", starts)


async def test_a_request_waits_for_a_target_that_is_being_started() -> None:
    """Although that takes longer than a target may be gone, and it is announced late."""
    lost, new = ScriptedLink(LinkLost("down")), ScriptedLink(verdict)
    lost.away_until = math.inf
    pool, loop = pool_of(lost), asyncio.get_running_loop()
    starting(pool, (GONE_S - 1, STARTING))
    loop.call_at(4 * GONE_S, pool.admit, "r1", new, TOY)
    await target_of(pool=pool).verify(0, EMPTY_ENCODED_PROPOSAL)
    assert loop.time() == pytest.approx(4 * GONE_S)
    pool = ReplicaPool("target")
    starting(pool, (loop.time(), STARTING))
    loop.call_at(8 * GONE_S, pool.admit, "r1", new, TOY)
    assert await pool.wait_for_one(CONFIG) == TOY
    assert loop.time() == pytest.approx(8 * GONE_S)


@pytest.mark.parametrize(
    ("changes", "ends_at", "reason"),
    [
        ((), GONE_S, "no start of a target is announced; waited for 4 s"),
        (((1, STARTING), (6, GIVEN_UP)), 6 + GONE_S, "target-9 is starting, after 4 failures"),
        (((1, STARTING),), START_S, "target-3 is starting, last start took 31 s; waited for 20 s"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
async def test_a_request_fails_when_no_target_is_expected_or_it_takes_too_long(
    begun: bool, changes: tuple[tuple[float, Starts], ...], ends_at: float, reason: str
) -> None:
    lost = described(away_until=math.inf)
    lost.script = [LinkLost("down")] * 999
    pool = pool_of(lost) if begun else ReplicaPool("target")
    starting(pool, *changes)
    cause = "no target can be reached: the target r0 is away" if begun else "no target is known"
    with pytest.raises(Unavailable, match=re.escape(f"{cause}; {reason}")):
        async with asyncio.timeout(2 * START_S):
            if begun:
                await target_of(pool=pool).verify(0, EMPTY_ENCODED_PROPOSAL)
            await pool.wait_for_one(CONFIG)
    assert abs(asyncio.get_running_loop().time() - ends_at) <= RETRY_S_MAX


async def test_a_request_to_a_full_stream_does_not_wait_for_a_target_that_is_being_started() -> (
    None
):
    full = ScriptedLink(*[Overloaded("4096 items wait")] * 999)
    pool = pool_of(full)
    starting(pool, (0, STARTING))
    with pytest.raises(
        Unavailable, match="the stream to the target is full: 4096 items wait; waited"
    ):
        await target_of(pool=pool).verify(0, EMPTY_ENCODED_PROPOSAL)
    assert abs(asyncio.get_running_loop().time() - GONE_S) <= RETRY_S_MAX


@pytest.mark.parametrize("alike", [1, 2])
async def test_a_session_moves_to_a_replica_with_bit_equal_logits(alike: int) -> None:
    links = [ScriptedLink(verdict, LinkLost("down")), *(ScriptedLink(verdict) for _ in "ab")]
    for link in (links[0], links[alike]):
        link.description = replace(TOY, numerics="avx")
    links[3 - alike].description = replace(TOY, numerics="sse")
    one = session()
    target = target_of(*links, weights=TOY.weights, one=one)
    await play(target, one, 0)
    await play(target, one, 1)
    assert links[alike].sent
    assert not links[3 - alike].sent


async def test_a_session_stays_with_the_weights_that_it_began_with() -> None:
    """Its own replica comes back with other weights."""
    link, other = ScriptedLink(verdict, verdict), described(NEW)
    one = session()
    target = target_of(link, other, weights=TOY.weights, one=one)
    await play(target, one, 0)
    link.description = NEW
    link.on_lost(LinkLost("reset"))
    with pytest.raises(Unavailable, match="no target can be reached"):
        await target.verify(1, EMPTY_ENCODED_PROPOSAL)
    assert (len(link.sent), other.sent) == (1, [])


async def test_a_wait_ends_when_it_is_due_whatever_the_waits_before() -> None:
    one, loop = session(), asyncio.get_running_loop()
    route = SessionRoute[Any, Any](pool_of(ScriptedLink()), context_of(one))
    for index, (wait_s, answered_s) in enumerate([(9, 1), (2, None), (9, None), (3, 1), (9, 4)]):
        number, began = route.begin(index), loop.time()
        if answered_s:
            key = ReplyKey(one.session_id, one.epoch, number)
            loop.call_later(answered_s, route.put, VerdictReply(key, Verdict((), (9,)), 0))
            await route.take(wait_s)
        else:
            with pytest.raises(TimeoutError):
                await route.take(wait_s)
        assert loop.time() - began == pytest.approx(answered_s or wait_s)
    assert route._timer is not None
    route.close()
    assert route._timer is None


async def test_a_target_that_is_to_be_left_is_left_between_two_rounds() -> None:
    first, second = ScriptedLink(verdict, verdict), ScriptedLink(verdict)
    pool, one = pool_of(first), session()
    target = target_of(pool=pool, one=one)
    await play(target, one, 0)
    pool.retire("r0")
    await play(target, one, 1)  # There is no other replica yet.
    assert target.cache_state.replica == "r0"
    pool.admit("r1", second, TOY)
    await play(target, one, 2)
    assert target.cache_state.replica == "r1"


async def test_a_draft_that_is_to_be_left_is_left_though_there_is_no_other() -> None:
    link, one = ScriptedLink(proposal), session()
    pool = pool_of(link, role="draft")
    draft = draft_of(pool=pool, one=one)
    assert (await draft.propose(1, asked(2), NOISE)).source == "replica"
    pool.retire("r0")
    for index, each in ((2, draft), (1, draft_of(pool=pool, one=session(name="1")))):
        assert (await each.propose(index, asked(2), NOISE)).source == "fallback"
    assert (len(link.sent), draft.cache_state.replica) == (1, "")
    pool.admit("r1", ScriptedLink(proposal), TOY)
    assert (await draft.propose(3, asked(2), NOISE)).source == "replica"


async def test_a_target_that_is_removed_is_left_within_the_round() -> None:
    first, second = ScriptedLink(None), ScriptedLink(verdict)
    pool = pool_of(first)
    target = target_of(pool=pool)
    pool.admit("r1", second, TOY)
    verifying = asyncio.create_task(target.verify(0, EMPTY_ENCODED_PROPOSAL))
    await asyncio.sleep(0.1)
    await pool.leave("r0")
    await verifying
    assert list(pool.replicas) == ["r1"]
    assert target.cache_state.replica == "r1"


async def test_if_the_only_draft_is_broken_the_look_up_proposes_until_there_is_another() -> None:
    """The session does not return to the broken draft, even if the other one is lost."""
    first, second = ScriptedLink(proposal), ScriptedLink(proposal, LinkLost("down"))
    pool = pool_of(first, role="draft")
    draft = draft_of(pool=pool, config=replace(CONFIG, look_ahead=2))
    assert (await draft.propose(1, asked(2), NOISE)).source != "fallback"
    draft.reject()
    for index in (2, 3):
        assert (await draft.propose(index, asked(2), NOISE)).proposal.token_ids == (1,)
    assert len(first.sent) == 1
    pool.admit("r1", second, TOY)
    assert (await draft.propose(4, asked(2), NOISE)).source != "fallback"
    for index in (5, 6):
        assert (await draft.propose(index, asked(2), NOISE)).source == "fallback"
    assert (len(first.sent), len(second.sent)) == (1, 2)


@pytest.mark.parametrize(
    ("role", "first", "other", "reason"),
    [
        ("target", TOY, replace(TOY, vocab_size=7), "another vocabulary"),
        ("draft", TOY, replace(TOY, tokenizer_fingerprint="b"), "another tokenizer"),
        ("draft", TOY, replace(TOY, reads_features=True), "which 'big' does not send"),
    ],
)
async def test_only_replicas_that_fit_join(
    role: Any, first: ReplicaDescription, other: ReplicaDescription, reason: str
) -> None:
    big = replace(TOY, model="big", tokenizer_fingerprint="a")
    pool = ReplicaPool(role, pool_of(described(big)))
    links = [described(away_until=1.0), described(first), described(other)]
    with pytest.raises(Unavailable, match="away"):
        await pool.join("a", links[0])
    assert (list(pool.replicas), pool.first) == ([], None)
    await pool.join("b", links[1])
    with pytest.raises(Incompatible, match=reason):
        await pool.join("c", links[2])
    with pytest.raises(InvariantError, match="joined already"):
        await pool.join("b", described(first))
    assert (list(pool.replicas), len(pool.present)) == (["b"], 1)
    assert [link.is_closed for link in links] == [True, False, True]


async def test_a_draft_reads_only_the_features_of_its_own_head() -> None:
    """During an upgrade there are two heads. A session without a target has no draft."""
    old, new = (described(replace(TOY, shows_features=True, features=name)) for name in "ab")
    targets = pool_of(old)
    drafts = ReplicaPool("draft", targets)
    reading = replace(TOY, reads_features=True)
    await drafts.join("b", described(replace(reading, features="b")))
    context = context_of(session())
    early: SessionRoute[Any, Any] = SessionRoute(drafts, context_of(session(name="1")))
    target: SessionRoute[Any, Any] = SessionRoute(targets, context)
    draft: SessionRoute[Any, Any] = SessionRoute(drafts, context)
    assert (early.replica, draft.replica) == ("", "")
    await drafts.join("a", described(replace(reading, features="a")))
    assert (draft.move(), draft.replica) == (True, "a")
    draft.send(None)
    targets.admit("new", new, new.description)
    assert target.move()
    with pytest.raises(LinkLost, match="sends no hidden states for the draft"):
        draft.send(None)
    assert (draft.move(), draft.replica, early.move()) == (True, "b", False)


@pytest.mark.parametrize("role", ["draft", "target"])
async def test_a_share_of_the_sessions_goes_to_a_replica_on_trial(role: str) -> None:
    """The same sessions at each coordinator, within five standard deviations of 0.25 of 1,000. A
    replica that is alone has all."""
    pools = [pool_of(described(), described(), role=role) for _ in range(2)]
    routes = []
    for pool in pools:
        early = SessionRoute[Any, Any](pool, context_of(session(name="f" * 32)))
        await pool.join("tried", described(), 0.25)
        assert pool.on_trial is pool.replicas["tried"]
        names = [f"{index:032x}" for index in range(1000)]
        routes.append([SessionRoute[Any, Any](pool, context_of(session(name=n))) for n in names])
        assert early.on_trial is False
    tried = [[route.on_trial for route in those] for those in routes]
    assert tried[0] == tried[1]
    assert 250 - 69 < sum(map(bool, tried[0])) < 250 + 69
    pools[0].retire("tried")
    assert all(route.move() for route in routes[0] if route.on_trial)
    assert (pools[0].on_trial, any(route.on_trial for route in routes[0])) == (None, False)
    for name in ("r0", "r1"):
        pools[1].retire(name)
    [other] = [route for route in routes[1] if not route.on_trial][:1]
    assert (other.move(), other.on_trial) == (True, True)


async def test_a_target_on_trial_keeps_to_its_share_where_it_differs() -> None:
    """Sessions that move prefer equal numerics. New ones get the weights of the others."""
    avx, sse = (replace(TOY, numerics=name) for name in ("avx", "sse"))
    pool = pool_of(described(avx))
    early = SessionRoute[Any, Any](pool, context_of(session(name="f" * 32)))
    await pool.join("r1", described(avx))
    await pool.join("tried", described(replace(sse, max_model_len=9)), 1.0)
    pool.retire("r0")
    assert (early.move(), early.replica) == (True, "r1")
    assert pool.newest() == pool.first_kept == avx
    new = SessionRoute[Any, Any](pool, context_of(session(name="0" * 32)))
    assert new.on_trial
    pool.retire("r1")
    assert pool.newest() == pool.replicas["tried"].description


async def test_whether_the_target_drafts_depends_on_the_sessions_own_target() -> None:
    itself = described(replace(TOY, drafts_itself=True))
    pool = pool_of(described())
    await pool.join("r1", itself)
    for name in ("r0", "r1"):
        one = session()
        one.target = CacheState(name, 0)
        route: SessionRoute[Any, Any] = SessionRoute(pool, context_of(one))
        assert route.drafts_itself is (name == "r1")
        route.close()


async def test_sessions_are_spread_evenly_and_similar_ones_share_a_replica() -> None:
    pool = pool_of(*(ScriptedLink() for _ in range(3)))
    prompts = [(number,) * 40 for number in range(12)]

    def enter(index: int, prompt: tuple[int, ...], before: str = "") -> SessionRoute[Any, Any]:
        one = session(prompt, name=f"{index:032x}")
        one.target = CacheState(before, 1)
        return SessionRoute(pool, context_of(one))

    places = [enter(index, prompt) for index, prompt in enumerate(prompts)]
    loads = Counter(place.replica for place in places)
    assert len(loads) == 3
    assert max(loads.values()) <= 5  # A quarter above the mean.
    for place in places:
        place.close()
    first, second = enter(0, PROMPT), enter(1, PROMPT)
    assert first.replica != second.replica  # More than the mean is too much for one.
    first.close()
    assert enter(2, PROMPT).replica != second.replica
    assert enter(3, PROMPT, second.replica).replica == second.replica


async def test_the_health_check_of_a_dozen_silent_targets_is_fast() -> None:
    class Silent(ScriptedLink):
        async def describe(self, timeout_s: float) -> ReplicaDescription:
            if not self.away_until:
                return await super().describe(timeout_s)
            await asyncio.sleep(timeout_s)
            raise Unavailable("no answer")

    loop = asyncio.get_running_loop()
    pool = ReplicaPool("target")
    links = [Silent() for _ in range(12)]
    for number, link in enumerate(links):
        pool.admit(f"{number}", link, TOY)
    for numbers, healthy in ((range(12), False), (range(11), True), (range(0), True)):
        for number, link in enumerate(links):
            link.away_until = float(number in numbers)
        start = loop.time()
        assert await pool.healthy() is healthy
        assert loop.time() - start == (2.0 if numbers else 0.0)


NAMES = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=8, unique=True)


@given(st.binary(min_size=1, max_size=32), NAMES)
def test_a_replica_that_leaves_moves_only_its_own_sessions(key: bytes, names: list[str]) -> None:
    found = choose(key, dict.fromkeys(names, 0), 99)
    for gone in names:
        left = [name for name in reversed(names) if name != gone]
        if gone != found:
            assert choose(key, dict.fromkeys(left, 0), 99) == found


@given(st.binary(min_size=1, max_size=32), st.dictionaries(st.text(max_size=3), st.integers(0, 99)))
def test_no_replica_gets_more_than_a_quarter_above_the_mean(
    key: bytes, loads: dict[str, int]
) -> None:
    found = choose(key, loads, 1000)
    if not loads:
        assert found is None
        return
    mean = (sum(loads.values()) + 1) / len(loads)
    assert loads[found] + 1 <= max(1.25 * mean, mean + 1)
    if len(set(loads.values())) == 1:
        assert found == choose(key, dict.fromkeys(loads, 0), 1000)


def test_beyond_the_seats_of_a_step_loads_are_equal() -> None:
    for num_seats, most in ((2, 8), (9, 9), (64, 10)):
        loads = dict.fromkeys("ab", 0)
        for _ in range(16):
            name = choose(b"the same", loads, num_seats)
            loads[name] += 1
        assert max(loads.values()) == most


def test_prompts_that_begin_alike_have_the_same_key_within_a_tenant() -> None:
    prompt = tuple(range(40))
    assert affinity("", prompt) == affinity("", (*prompt[:32], 7, 7))
    assert affinity("", prompt) != affinity("", (*prompt[:31], 7))
    assert affinity("", prompt) != affinity("b", prompt)
    assert affinity("", prompt[:5]) != affinity("", prompt[:6])


SESSION = "ab" * 16


def late_verdict(round_index: int, session_id: str = SESSION, epoch: int = 1) -> VerdictReply:
    return VerdictReply(ReplyKey(session_id, epoch, round_index), Verdict((), (1,)), 3)


def late_proposal(
    round_index: int, token_ids: tuple[int, ...] = (1, 2), assumed: tuple[int, ...] = ()
) -> ProposalReply:
    key = ReplyKey(SESSION, 1, round_index)
    return ProposalReply(key, EncodedProposal(token_ids), 3, 3, assumed=assumed)


async def test_only_late_answers_count_as_stale() -> None:
    link = ScriptedLink()
    pool = ReplicaPool("draft")
    pool.admit("d", link, TOY)
    route: SessionRoute[Any, Any] = SessionRoute(pool, context_of(session(name=SESSION)))
    route.begin(2)
    for answer in (
        late_proposal(2),
        late_proposal(3),
        Resync(ReplyKey(SESSION, 1, 1), 0, 0),
        late_proposal(1, ()),  # The answer to a prompt.
        late_proposal(1, assumed=(4,)),  # Drafted ahead for an outcome that did not happen.
    ):
        link.on_answer(answer)
    assert pool.num_stale == 0
    late = (
        late_proposal(1),
        late_verdict(0),
        late_verdict(2, epoch=2),
        late_proposal(2),
        late_verdict(5, "cd" * 16),
    )
    for num, answer in enumerate(late, start=1):
        link.on_answer(answer)
        assert pool.num_stale == num
    route.close()
    link.on_answer(late_proposal(3, assumed=(4,)))
    assert pool.num_stale == 5
    link.on_answer(late_proposal(3))
    assert pool.num_stale == 6


async def test_sums_never_fall_when_a_replica_leaves() -> None:
    pool = ReplicaPool("target")
    links = {"a": ScriptedLink(), "b": ScriptedLink()}
    for number, (name, link) in enumerate(links.items(), start=1):
        link.num_bytes = Counter(sent=10 * number, received=100 * number)
        pool.admit(name, link, TOY)
        link.on_answer(late_verdict(0))
    for left in ("", "a", "b"):
        if left:
            await pool.leave(left)
        assert (*pool.num_bytes.values(), pool.num_stale) == (30, 300, 2)


async def test_a_pool_is_full_when_all_seats_of_its_steps_are_taken() -> None:
    pool = ReplicaPool("target")
    assert pool.is_full  # There are no replicas.
    pool.admit("a", ScriptedLink(), TOY)
    pool.admit("b", ScriptedLink(), TOY)
    for number in range(2 * TOY.max_num_seqs):
        assert not pool.is_full
        SessionRoute(pool, context_of(session((number,) * 40, name=f"{number:032x}")))
    assert pool.is_full
