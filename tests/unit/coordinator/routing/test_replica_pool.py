"""Several replicas of a role: where sessions go, and when they move."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from session_links import (
    NOISE,
    PATIENCE,
    PROMPT,
    TOY,
    ScriptedLink,
    SessionLookup,
    berth,
    described,
    heads,
    proposal,
    refuse,
    session,
    verdict,
)
from virtual_time import virtually

from coordinator.routing.draft_client import DraftClient
from coordinator.routing.replica_pool import PROBE_PERIOD_S, ReplicaPool, SessionRoute
from coordinator.routing.target_client import TargetClient
from outrider.clock import run_virtually
from outrider.errors import Incompatible, InvariantError, LinkLost, Unavailable
from outrider.messages import ReplicaDescription
from outrider.replica.service import StaleRoundFilter
from outrider.sessions.store import Counters
from outrider.speculation.proposal import NOTHING_SEALED

NEW = ReplicaDescription("toy", "new", "", 99, "float32", 0, (), 8)


def with_targets(
    place: Callable[[], SessionRoute[Any, Any]], test: Callable[..., Coroutine[Any, Any, Any]]
) -> Any:
    async def main() -> Any:
        one = session()
        return await test(TargetClient(place(), heads(one), PATIENCE), one)

    return run_virtually(main())


def test_a_target_that_cannot_be_reached_is_left_at_once() -> None:
    """With all tokens: what the other one holds is not known."""
    first, second = ScriptedLink(verdict, LinkLost("down")), ScriptedLink(verdict, verdict)

    async def test(target: Any, one: Any) -> None:
        loop = asyncio.get_running_loop()
        reply = await target.verify(0, NOTHING_SEALED, 0, None)
        one.decide((9,), Counters())
        target.settle(reply, len(PROMPT))
        reply = await target.verify(1, NOTHING_SEALED, 0, None)
        assert loop.time() == 0
        assert target.cache_state.replica == "r1"
        assert second.sent[0].head.base_length == 0
        assert second.sent[0].head.append == (*PROMPT, 9)
        one.decide((9,), Counters())
        target.settle(reply, len(PROMPT) + 1)
        await target.verify(2, NOTHING_SEALED, 0, None)
        assert second.sent[1].head.append == (9,)
        assert len(first.sent) == 2
        assert not first.released  # It may come back.
        target.close()
        assert first.released == second.released == ["0" * 32]

    with_targets(lambda: berth(first, second), test)


def test_a_stream_that_breaks_while_an_answer_is_waited_for_moves_the_session() -> None:
    first, second = ScriptedLink(None), ScriptedLink(verdict)

    async def test(target: Any, one: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, lambda: first.on_lost(LinkLost("reset")))
        await target.verify(0, NOTHING_SEALED, 0, None)
        assert loop.time() == pytest.approx(0.3)
        assert target.cache_state.replica == "r1"

    with_targets(lambda: berth(first, second), test)


def test_a_target_that_runs_ahead_is_asked_again_elsewhere() -> None:
    """What the first one was to answer without being asked, the second does not know of."""
    first, second = ScriptedLink(verdict), ScriptedLink(verdict)

    async def test(target: Any, one: Any) -> None:
        reply = await target.verify(0, NOTHING_SEALED, 8, None)
        one.decide((9,), Counters())
        target.settle(reply, len(PROMPT))
        first.on_lost(LinkLost("reset"))
        await target.verify(1, NOTHING_SEALED, 8, None)
        assert [item.head.committed_length for item in second.sent] == [len(PROMPT) + 1]

    with_targets(lambda: berth(first, second), test)


def test_a_session_comes_back_to_where_it_was() -> None:
    """Its rounds there are new ones, for the replica's fence as for what was run ahead there."""
    links = [ScriptedLink(), ScriptedLink()]

    def answering(link: ScriptedLink, fence: StaleRoundFilter) -> Callable[[Any], Any]:
        def answer(item: Any) -> Any:
            if len(link.sent) > 1:
                before = link.sent[-2]
                late = replace(before.head.key, round=before.head.round + 2)
                link.on_answer(replace(verdict(before, 5), key=late))
            return fence.admit(item.head) or verdict(item)

        return answer

    async def test(target: Any, one: Any) -> None:
        places: list[str] = []
        for index in range(6):
            reply = await target.verify(index, NOTHING_SEALED, 8, None)
            assert reply.verdict.correction == (9,)
            one.decide((9,), Counters())
            target.settle(reply, one.length - 1)
            places.append(target.cache_state.replica)
            await asyncio.sleep(1.0)  # By then the other one is there again.
            links[int(places[-1][1])].on_lost(LinkLost("reset"))
        assert places == ["r0", "r1"] * 3

    for link in links:
        link.script = [answering(link, StaleRoundFilter())] * 9
    with_targets(lambda: berth(*links), test)


def test_where_all_are_away_the_session_waits_and_goes_on_with_the_first_that_is_back() -> None:
    first = ScriptedLink(LinkLost("down"))
    second = ScriptedLink(LinkLost("down"), LinkLost("down"), LinkLost("down"), verdict)
    first.away_until, second.away_until = 99.0, 0.5

    async def test(target: Any, one: Any) -> None:
        await target.verify(0, NOTHING_SEALED, 0, None)
        assert 0.5 < asyncio.get_running_loop().time() < 1.0
        assert len(first.sent) == 1

    with_targets(lambda: berth(first, second), test)


def test_a_replica_that_comes_and_goes_is_not_asked_without_rest() -> None:
    links = [ScriptedLink(*[LinkLost("down")] * 999) for _ in range(2)]

    async def test(target: Any, one: Any) -> None:
        with pytest.raises(Unavailable, match="no target can be reached"):
            await target.verify(0, NOTHING_SEALED, 0, None)
        assert sum(len(link.sent) for link in links) < 2.5 * PATIENCE.target_gone_s / PROBE_PERIOD_S

    with_targets(lambda: berth(*links), test)


def test_a_session_stays_with_the_weights_that_it_began_with() -> None:
    """Its text would be of two models otherwise."""
    first, second = ScriptedLink(*[LinkLost("down")] * 99), ScriptedLink(verdict)
    second.description = NEW

    async def test(target: Any, one: Any) -> None:
        with pytest.raises(Unavailable, match="no target can be reached"):
            await target.verify(0, NOTHING_SEALED, 0, None)
        assert not second.sent

    with_targets(lambda: berth(first, second, weights=TOY.weights), test)


def test_a_session_goes_on_where_logits_are_bit_equal() -> None:
    """Even where another replica has fewer sessions, or is preferred by its pages."""
    for alike in (1, 2):
        links = [ScriptedLink(verdict, LinkLost("down")), *(ScriptedLink(verdict) for _ in "ab")]
        for link in (links[0], links[alike]):
            link.description = replace(TOY, numerics="avx")
        links[3 - alike].description = replace(TOY, numerics="sse")

        async def test(target: Any, one: Any, links: Any = links, alike: int = alike) -> None:
            await target.verify(0, NOTHING_SEALED, 0, None)
            one.decide((9,), Counters())
            await target.verify(1, NOTHING_SEALED, 0, None)
            assert links[alike].sent
            assert not links[3 - alike].sent

        with_targets(lambda links=links: berth(*links, weights=TOY.weights), test)


def test_a_replica_that_comes_back_with_other_weights_is_sent_nothing() -> None:
    """It is asked what it runs before anything else."""
    link = ScriptedLink(verdict, verdict)

    async def test(target: Any, one: Any) -> None:
        await target.verify(0, NOTHING_SEALED, 0, None)
        link.description = NEW
        link.on_lost(LinkLost("reset"))
        one.decide((9,), Counters())
        with pytest.raises(Unavailable, match="no target can be reached"):
            await target.verify(1, NOTHING_SEALED, 0, None)
        assert len(link.sent) == 1

    with_targets(lambda: berth(link, weights=TOY.weights), test)


@virtually
async def test_a_replica_that_is_taken_out_while_it_is_looked_for_ends_nothing() -> None:
    pool: ReplicaPool[Any, Any] = ReplicaPool("target")
    link, other = described(), described()
    await pool.join("a", link)
    await pool.join("b", other)
    watching = asyncio.create_task(pool.watch())
    for one in (link, other):
        one.away_until = 2.0
        one.on_lost(LinkLost("reset"))
    await asyncio.sleep(0.5)
    await pool.leave("a")
    await asyncio.sleep(2.0)
    assert not watching.done()
    assert pool.num_present == 1
    watching.cancel()


def test_a_target_that_is_to_be_left_is_left_between_two_rounds() -> None:
    first, second = ScriptedLink(verdict, verdict), ScriptedLink(verdict)
    pool: ReplicaPool[Any, Any] = ReplicaPool("target")

    def place() -> SessionRoute[Any, Any]:
        pool.admit("r0", first, TOY)
        return SessionRoute(pool, "0" * 32, 1, b"key")

    async def test(target: Any, one: Any) -> None:
        reply = await target.verify(0, NOTHING_SEALED, 0, None)
        pool.retire("r0")
        one.decide((9,), Counters())
        target.settle(reply, len(PROMPT))
        reply = await target.verify(1, NOTHING_SEALED, 0, None)  # There is nowhere to go yet.
        assert target.cache_state.replica == "r0"
        pool.admit("r1", second, TOY)
        one.decide((9,), Counters())
        target.settle(reply, len(PROMPT) + 1)
        await target.verify(2, NOTHING_SEALED, 0, None)
        assert target.cache_state.replica == "r1"

    with_targets(place, test)


def test_a_target_that_is_taken_out_is_left_within_the_round() -> None:
    first, second = ScriptedLink(None), ScriptedLink(verdict)
    pool: ReplicaPool[Any, Any] = ReplicaPool("target")

    def place() -> SessionRoute[Any, Any]:
        pool.admit("r0", first, TOY)
        return SessionRoute(pool, "0" * 32, 1, b"key")

    async def test(target: Any, one: Any) -> None:
        pool.admit("r1", second, TOY)
        verifying = asyncio.create_task(target.verify(0, NOTHING_SEALED, 0, None))
        await asyncio.sleep(0.1)
        await pool.leave("r0")
        await verifying
        assert pool.names == ["r1"]
        assert target.cache_state.replica == "r1"

    with_targets(place, test)


@virtually
async def test_a_draft_that_is_lost_is_replaced_for_the_next_round() -> None:
    first, second = ScriptedLink(LinkLost("down")), ScriptedLink(proposal)
    one = session()
    draft = DraftClient(berth(first, second), heads(one), PATIENCE, SessionLookup())
    drafted = await draft.propose(1, 2, NOISE)
    assert drafted.source == "fallback"
    drafted = await draft.propose(2, 2, NOISE)
    assert drafted.source != "fallback"
    assert second.sent[0].head.append == PROMPT
    assert asyncio.get_running_loop().time() == 0


@virtually
async def test_a_draft_that_is_broken_is_left_for_another_one() -> None:
    first, second = ScriptedLink(proposal), ScriptedLink(proposal)
    draft = DraftClient(berth(first, second), heads(session()), PATIENCE, SessionLookup())
    assert (await draft.propose(1, 2, NOISE)).source != "fallback"
    draft.reject()
    assert (await draft.propose(2, 2, NOISE)).source != "fallback"
    assert (len(first.sent), len(second.sent)) == (1, 1)


@virtually
async def test_a_draft_that_was_found_broken_is_not_returned_to() -> None:
    """Also not when the one that took its place is lost."""
    first = ScriptedLink(proposal, proposal)
    second = ScriptedLink(proposal, LinkLost("down"))
    draft = DraftClient(berth(first, second), heads(session()), PATIENCE, SessionLookup())
    assert (await draft.propose(1, 2, NOISE)).source != "fallback"
    draft.reject()
    assert (await draft.propose(2, 2, NOISE)).source != "fallback"
    for index in (3, 4):
        assert (await draft.propose(index, 2, NOISE)).source == "fallback"
    assert len(first.sent) == 1


@virtually
async def test_the_only_draft_being_broken_the_stand_in_goes_on_until_there_is_another() -> None:
    """What it sends meanwhile, and what it has sent ahead, is not used."""
    first, second = ScriptedLink(proposal), ScriptedLink(proposal)
    pool: ReplicaPool[Any, Any] = ReplicaPool("draft")
    pool.admit("r0", first, TOY)
    place = SessionRoute(pool, "0" * 32, 1, b"key", preferred="r0", weights="")
    draft = DraftClient(place, heads(session()), PATIENCE, SessionLookup(), look_ahead=2)
    assert (await draft.propose(1, 2, NOISE)).source != "fallback"
    draft.reject()
    for index in (2, 3):
        assert (await draft.propose(index, 2, NOISE)).proposal.token_ids == (1,)
    assert len(first.sent) == 1
    pool.admit("r1", second, TOY)
    assert (await draft.propose(4, 2, NOISE)).source != "fallback"
    assert len(second.sent) == 1


@virtually
async def test_a_draft_that_is_slow_is_not_left_for_it() -> None:
    first, second = ScriptedLink(None), ScriptedLink(proposal)
    draft = DraftClient(berth(first, second), heads(session()), PATIENCE, SessionLookup())
    assert (await draft.propose(1, 2, NOISE)).source == "fallback"
    assert (await draft.propose(2, 2, NOISE)).source == "fallback"
    assert not second.sent


@virtually
async def test_only_replicas_that_fit_join() -> None:
    def fits(description: ReplicaDescription) -> None:
        if description.vocab_size != 99:
            raise Incompatible("another vocabulary")

    pool: ReplicaPool[Any, Any] = ReplicaPool("target", fits)
    other = described(ReplicaDescription("b", "v", "", 7, "float32", 0, (), 8))
    silent = described(away_until=1.0)
    with pytest.raises(Incompatible):
        await pool.join("b", other)
    with pytest.raises(Unavailable):
        await pool.join("c", silent)
    assert other.is_closed
    assert silent.is_closed
    with pytest.raises(Unavailable, match="no target is known"):
        _ = pool.description
    await pool.join("a", described())
    with pytest.raises(InvariantError, match="joined already"):
        await pool.join("a", described())
    assert pool.names == ["a"]
    assert pool.num_present == 1


@virtually
async def test_of_many_those_join_that_can() -> None:
    """One that is gone or does not fit keeps nobody else out, as long as there is one."""

    def fits(description: ReplicaDescription) -> None:
        if description.vocab_size != 99:
            raise Incompatible("another vocabulary")

    pool: ReplicaPool[Any, Any] = ReplicaPool("target", fits)
    other = ReplicaDescription("b", "v", "", 7, "float32", 0, (), 8)
    await pool.join_all({})
    assert pool.names == []
    refused = {"a": described(away_until=1.0), "b": described(other)}
    with pytest.raises(Unavailable, match="away"):  # The first one's reason.
        await pool.join_all(refused)
    assert pool.names == []
    links = {"a": described(away_until=1.0), "b": described(other), "c": described()}
    await pool.join_all(links)
    assert pool.names == ["c"]
    assert [link.is_closed for link in links.values()] == [True, True, False]
    await pool.join_all({"d": described(other)})  # There is one already.
    assert pool.names == ["c"]


@virtually
async def test_a_replica_that_is_back_is_found_by_looking_for_it() -> None:
    """Nobody sends to one that is away, so it would not be heard of."""
    pool: ReplicaPool[Any, Any] = ReplicaPool("target")
    link = described()
    await pool.join("a", link)
    await pool.join("b", described())
    watching = asyncio.create_task(pool.watch())
    link.away_until = 1.0
    link.on_lost(LinkLost("reset"))
    assert pool.num_present == 1
    await asyncio.sleep(0.9)
    assert pool.num_present == 1
    await asyncio.sleep(0.2 + PROBE_PERIOD_S)
    assert pool.num_present == 2
    watching.cancel()


@virtually
async def test_sessions_are_shared_out_evenly_and_alike_ones_meet() -> None:
    pool: ReplicaPool[Any, Any] = ReplicaPool("target")
    for name in ("a", "b", "c"):
        pool.admit(name, ScriptedLink(), TOY)
    places = [SessionRoute(pool, f"{n:032x}", 1, bytes([n])) for n in range(12)]
    loads = Counter(place.replica for place in places)
    assert len(loads) == 3
    assert max(loads.values()) <= 5  # A quarter above the mean.
    for place in places:
        place.close()
    places = [SessionRoute(pool, f"{n:032x}", 1, b"alike") for n in range(2)]
    assert places[0].replica != places[1].replica  # More than the mean is too much for one.
    places[0].close()
    assert SessionRoute(pool, "f" * 32, 1, b"alike").replica != places[1].replica
    assert SessionRoute(pool, "e" * 32, 1, b"alike", preferred=places[1].replica).replica == (
        places[1].replica
    )


def test_a_refusal_of_a_target_that_shuts_down_moves_the_session() -> None:
    first, second = ScriptedLink(refuse(Unavailable("shutting down"))), ScriptedLink(verdict)

    async def test(target: Any, one: Any) -> None:
        await target.verify(0, NOTHING_SEALED, 0, None)
        assert asyncio.get_running_loop().time() == 0
        assert target.cache_state.replica == "r1"

    with_targets(lambda: berth(first, second), test)


@virtually
async def test_a_dozen_targets_that_are_silent_are_soon_found_to_be() -> None:
    """Each would take the timeout; and among them one that answers is found."""

    class Silent(ScriptedLink):
        async def describe(self, timeout_s: float) -> ReplicaDescription:
            if not self.away_until:
                return await super().describe(timeout_s)
            await asyncio.sleep(timeout_s)
            raise Unavailable("no answer")

    loop = asyncio.get_running_loop()
    pool: ReplicaPool[Any, Any] = ReplicaPool("target")
    links = [Silent() for _ in range(12)]
    for number, link in enumerate(links):
        pool.admit(f"{number}", link, TOY)
    for numbers, healthy in ((range(12), False), (range(11), True), (range(0), True)):
        for number, link in enumerate(links):
            link.away_until = float(number in numbers)
        start = loop.time()
        assert await pool.healthy(2.0) is healthy
        assert loop.time() - start == (4.0 if numbers else 0.0)
