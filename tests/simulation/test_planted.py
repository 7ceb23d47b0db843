"""Planted bugs, one for each check of the simulation, are found within a few seeds."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import msgpack
import pytest

from coordinator import streams
from coordinator.auth.access_control import Grant, RedisSlots
from coordinator.decoding.loop import OutputQueue, SessionRun
from coordinator.decoding.resumption import Replayed, replay
from coordinator.decoding.sessions import OwnedSessions
from coordinator.requests.validation import GenerationParameters
from coordinator.routing import draft_client
from coordinator.routing.discovery import Discovery
from coordinator.routing.replica_pool import SessionRoute
from draft_service import lookahead
from outrider.drafters.autoregressive_draft import AutoregressiveDraft
from outrider.errors import OutriderError, StoreUnavailable
from outrider.fleet.hang_watch import HangWatch
from outrider.kv_cache.block_pool import BlockPool
from outrider.limits import UNCOMMITTED_MS_MAX
from outrider.redis.connection import Script
from outrider.registry.registry import Starts
from outrider.replica.step_loop import Release, StepLoop
from outrider.replica.step_watch import StepWatch
from outrider.sessions import redis_store
from outrider.sessions.redis_store import RedisStore
from outrider.sessions.state import Session
from outrider.sessions.store import Append, SessionRecord
from outrider.speculation.accept_reject import decide
from outrider.speculation.logits_processing import raw_logprobs
from outrider.speculation.proposal import EncodedProposal
from outrider.speculation.sampling_params import Rule
from target_service import run_ahead, verifier
from target_service.lookups import TargetLookups
from target_service.run_ahead import RunAhead
from tests.simulation import nodes, plans, scenario, world
from tests.simulation.faults import GREATER
from tests.simulation.processes import Process, wall_clock_s
from tests.simulation.redis_data import Command
from tests.simulation.redis_host import RedisServer
from tests.simulation.scenario import run_seed
from tests.simulation.toy import SPEC

NUM_SEEDS = 80
Fields = dict[bytes, bytes]
Patch = pytest.MonkeyPatch
EPOCH, OWNER, LENGTH, LOGPROBS = 0, 1, 3, 4
ANY_LENGTH = b"-1"


def shown_before_committed(patch: Patch) -> None:
    decide = Session.decide

    def at_once(self: Session, *arguments: Any, **more: Any) -> None:
        decide(self, *arguments, **more)
        self.showable_length = self.length

    patch.setattr(Session, "decide", at_once)


def batch_committed_in_part(patch: Patch) -> None:
    """Of the sessions of a commit, the store keeps the tokens of one, and acknowledges all."""
    append = RedisStore.append

    async def of_one(self: RedisStore, appends: Sequence[Append]) -> list[Any]:
        acknowledged = [one.expected_length + len(one.token_ids) for one in appends[1:]]
        return await append(self, appends[:1]) + acknowledged

    patch.setattr(RedisStore, "append", of_one)


def refused_tokens_kept(patch: Patch) -> None:
    patch.setattr(BlockPool, "keep", lambda self, name, length: min(length, self.length(name)))


def running_stream_fails(patch: Patch) -> None:
    """Streams fail half-way with an error that clients take for one before the start."""
    read, reads = OutputQueue.read, itertools.count()

    async def sometimes(self: OutputQueue) -> Any:
        if next(reads) % 10 == 9:
            raise StoreUnavailable("planted")
        return await read(self)

    patch.setattr(OutputQueue, "read", sometimes)


def epochs_disregarded(patch: Patch) -> None:
    """The store accepts tokens of a coordinator that was thought dead."""

    def of_any_epoch(stored: Fields, given: list[Any]) -> None:
        given[EPOCH], given[OWNER] = int(stored[b"epoch"]), stored[b"owner"]

    change_appends(patch, of_any_epoch)


def change_appends(patch: Patch, change: Callable[[Fields, list[Any]], None]) -> None:
    """Changes what is appended to each session, depending on the stored session."""
    execute = RedisServer.execute

    def changed(self: RedisServer, command: Command) -> Any:
        if command[0] == b"EVALSHA" and command[1] == redis_store._APPEND.sha.encode():
            appends = msgpack.unpackb(command[-1], raw=True)
            for key, given in zip(command[3:-2:3], appends, strict=True):
                if (stored := self.data.get(key)) is not None:
                    change(stored, given)
            command = (*command[:-1], msgpack.packb(appends, use_bin_type=False))
        return execute(self, command)

    patch.setattr(RedisServer, "execute", changed)


def finish_by_any_owner(patch: Patch) -> None:
    """Redis gives an epoch a second time, and its first owner ends the session."""

    def of_any_owner(stored: Fields, given: list[bytes]) -> None:
        if given[EPOCH] == stored[b"epoch"]:
            given[OWNER], given[LENGTH] = stored[b"owner"], ANY_LENGTH

    change_arguments(patch, redis_store._FINISH, of_any_owner)


def leases_absolute(patch: Patch) -> None:
    """Lease ends are times of the owner's wall clock, which others compare with their own."""
    execute_for = RedisServer.execute_for

    def by_its_own_clock(self: RedisServer, client: Process, commands: Any) -> list[Any]:
        if any(command[0] != b"EVALSHA" for command in commands):
            return execute_for(self, client, commands)
        now_ms, self.data.now_ms = self.data.now_ms, lambda: wall_clock_s(client) * 1e3
        try:
            return execute_for(self, client, commands)
        finally:
            self.data.now_ms = now_ms

    patch.setattr(RedisServer, "execute_for", by_its_own_clock)


def change_arguments(
    patch: Patch, script: Script, change: Callable[[Fields, list[bytes]], None]
) -> None:
    """Changes a script's arguments, depending on the stored session."""
    execute = RedisServer.execute

    def changed(self: RedisServer, command: Command) -> Any:
        if command[0] == b"EVALSHA" and command[1] == script.sha.encode():
            first = 3 + int(command[2])
            stored = self.data.get(command[3])
            if stored is not None:
                given = list(command[first:])
                change(stored, given)
                command = (*command[:first], *given)
        return execute(self, command)

    patch.setattr(RedisServer, "execute", changed)


def deadline_after_the_draw(patch: Patch) -> None:
    """Tokens drawn too late are dropped, so the length of a proposal depends on its tokens. Each
    draft has too little time here."""
    patch.setattr(world, "HASTY_SHARE", 1.0)
    add = AutoregressiveDraft.add

    def in_time(self: AutoregressiveDraft, token_id: int, q: Any) -> None:
        if self.deadline.allows_draw():
            add(self, token_id, q)
        else:
            self.num_wanted = len(self.token_ids)

    patch.setattr(AutoregressiveDraft, "goes_on", lambda self: not self.is_whole)
    patch.setattr(AutoregressiveDraft, "add", in_time)


def outcomes_that_share_noise(patch: Patch) -> None:
    """The drafts of all outcomes of a length draw with the same numbers."""
    patch.setattr(lookahead, "digest_after", lambda digest, _: digest)


def cut_in_an_untimed_round(patch: Patch) -> None:
    """Drafts of repeated seeds get a time limit."""
    patch.setattr(plans, "REPEATED_SHARE", 1.0)
    limit = draft_client.budget_us
    patch.setattr(draft_client, "budget_us", lambda seconds: limit(min(seconds, 0.005)))


def logprobs_of_another_row(patch: Patch) -> None:
    """Corrections get the log-probabilities of the row before theirs."""
    of_rows = raw_logprobs

    def shifted(logits: Any, chosen: Any, num_top: int, rows: Sequence[int]) -> Any:
        return of_rows(logits, chosen, num_top, [max(0, row - 1) for row in rows])

    patch.setattr(verifier, "raw_logprobs", shifted)


def logprobs_stored_for_a_part(patch: Patch) -> None:
    """Of several tokens that are stored at once, only the last one has log-probabilities."""

    def last_line(stored: Fields, given: list[Any]) -> None:
        given[LOGPROBS] = b"".join(given[LOGPROBS].splitlines(keepends=True)[-1:])

    change_appends(patch, last_line)


def constraint_lost_at_a_resumption(patch: Patch) -> None:
    read = GenerationParameters.of

    def unbound(record: SessionRecord) -> GenerationParameters:
        return replace(read(record), constraint=None)

    patch.setattr(GenerationParameters, "of", unbound)


def cancel_disregarded(patch: Patch) -> None:
    """The owner answers `Cancel`, and goes on."""
    patch.setattr(SessionRun, "cancel", lambda self: None)


def cancel_lost_at_a_take_over(patch: Patch) -> None:
    """A coordinator that takes a session over in order to cancel it only releases it."""

    async def take_over(self: OwnedSessions, record: SessionRecord) -> None:
        if record.finish_reason is None:
            self.wait_for_client(await self._take_over(record, cancels=True))

    patch.setattr(OwnedSessions, "cancel", take_over)


def stop_found_too_late(patch: Patch) -> None:
    """A resumed session forgets text that was held back as the beginning of a stop string."""

    def forgetful(*arguments: Any) -> Replayed:
        replayed = replay(*arguments)
        replayed.completion._held = ""
        return replayed

    patch.setattr(streams, "replay", forgetful)


def key_disregarded(patch: Patch) -> None:
    """Each request with an idempotency key opens a session of its own."""
    claim = RedisStore.claim_key

    async def disregarded(self: RedisStore, key: str, value: str = "", replaces: str = "") -> str:
        return value and await claim(self, key, value, await claim(self, key))

    patch.setattr(RedisStore, "claim_key", disregarded)


def slot_never_freed(patch: Patch) -> None:
    """A client that leaves keeps its slot."""
    patch.setattr(Grant, "drop", lambda self: None)


def slots_not_counted(patch: Patch) -> None:
    """Each coordinator counts only its own generations."""
    key = RedisSlots._key

    def own(self: RedisSlots, name: str, what: str) -> str:
        return f"{key(self, name, what)}{id(self)}"

    patch.setattr(RedisSlots, "_key", own)


def full_store_ends_sessions(patch: Patch) -> None:
    """A stream waits for the store as long as a session decodes without it, not to its deadline."""
    begin = OutputQueue.__init__

    def impatient(self: OutputQueue, commits: Any, until: float, observer: Any) -> None:
        now = asyncio.get_running_loop().time()
        begin(self, commits, min(until, now + UNCOMMITTED_MS_MAX / 1e3), observer)

    patch.setattr(OutputQueue, "__init__", impatient)


def mailbox_left_behind(patch: Patch) -> None:
    patch.setattr(SessionRoute, "close", lambda self: setattr(self, "_replica", None))


def names_believed_for_ever(patch: Patch) -> None:
    patch.setattr(Discovery, "_check_unlisted", AsyncMock())


def hung_replicas_stay(patch: Patch) -> None:
    patch.setattr(HangWatch, "check", AsyncMock())


def steps_take_for_ever(patch: Patch) -> None:
    patch.setattr(StepWatch, "begin", lambda self: None)


def starts_unknown(patch: Patch) -> None:
    """Requests do not wait for the only target that is being started."""
    patch.setattr(scenario, "SLOW_STARTS_SHARE", 1.0)
    patch.setattr(Starts, "from_json", lambda text: {})


def target_decides_otherwise(patch: Patch) -> None:
    """A target that runs ahead accepts a draft token that the coordinator rejects."""
    patch.setattr(world, "LOOK_UP_SHARE", 1.0)
    patch.setattr(world, "LOOK_UPS_ON", ("target",))

    def accepting(verdict: Any, token_ids: Sequence[int], *rest: Any) -> Any:
        return decide(verdict, token_ids, Rule.TOKEN, [0.0 for _ in token_ids])

    patch.setattr(run_ahead, "decide", accepting)


def grant_outlives_its_session(patch: Patch) -> None:
    """A target frees a cancelled session's pages, but still runs the rounds ahead."""
    receive = StepLoop.receive

    def deaf(self: Any, message: Any) -> None:
        if isinstance(message, Release):
            self._leaving[message.session_id] = True
        else:
            receive(self, message)

    patch.setattr(StepLoop, "receive", deaf)


def history_of_dropped_rounds(patch: Patch) -> None:
    """A target learns all that it holds of a session at its end, not only what was stored."""
    patch.setattr(world, "LOOK_UP_SHARE", 1.0)
    patch.setattr(world, "LOOK_UPS_ON", ("target",))

    def learn(self: TargetLookups, session_id: str, held: Any, learned: Any) -> None:
        self._lessons.append(self._drafter.end(session_id, held.ids))

    patch.setattr(TargetLookups, "learn", learn)


def history_of_unstored_ends(patch: Patch) -> None:
    """A coordinator lets a target learn from a session that has no end yet, or is cancelled."""
    patch.setattr(world, "LOOK_UP_SHARE", 1.0)
    patch.setattr(world, "LOOK_UPS_ON", ("target",))
    learned = SessionRun._learned

    def at_once(self: SessionRun) -> Any:
        self.is_recorded, is_recorded = True, self.is_recorded
        try:
            return learned(self)
        finally:
            self.is_recorded = is_recorded

    patch.setattr(SessionRun, "_learned", at_once)


def target_continues_with_another_proposal(patch: Patch) -> None:
    """A round that a head's target runs ahead has another draft token than the verdict before
    stated."""
    patch.setattr(nodes, "KINDS", [nodes.KINDS[2]])
    later_round = RunAhead._later_round

    def other(self: RunAhead, start: Any, rounds: int) -> Any:
        first, *rest = start.proposal.token_ids or (None,)
        if first is not None:
            token_ids = ((first + 1) % SPEC.vocab_size, *rest)
            # Certain draws, whatever the rule.
            proposal = EncodedProposal(token_ids).without_q(self._item.head.rule)
            start = start._replace(proposal=proposal)
        return later_round(self, start, rounds)

    patch.setattr(RunAhead, "_later_round", other)


KINDS: dict[Callable[[Patch], None], tuple[str, ...]] = {
    shown_before_committed: (),
    batch_committed_in_part: (),
    refused_tokens_kept: (),
    running_stream_fails: (),
    epochs_disregarded: ("oust",),
    finish_by_any_owner: ("lost_take_over",),
    leases_absolute: ("clock_jump", "death", "stall"),
    deadline_after_the_draw: (),
    mailbox_left_behind: (),
    names_believed_for_ever: (),
    outcomes_that_share_noise: (),
    cut_in_an_untimed_round: (),
    hung_replicas_stay: ("hang",),
    steps_take_for_ever: ("stuck_step",),
    starts_unknown: ("crash",),
    logprobs_of_another_row: (),
    logprobs_stored_for_a_part: (),
    key_disregarded: (),
    full_store_ends_sessions: ("full_store",),
    slot_never_freed: (),
    slots_not_counted: (),
    stop_found_too_late: ("death", "hang_up"),
    constraint_lost_at_a_resumption: ("death", "hang_up"),
    cancel_disregarded: (),
    cancel_lost_at_a_take_over: ("death",),
    target_decides_otherwise: (),
    grant_outlives_its_session: (),
    history_of_dropped_rounds: (),
    history_of_unstored_ends: (),
    target_continues_with_another_proposal: (),
}
"""Greater faults with which each is searched; empty for all."""


SLOW = (finish_by_any_owner, slot_never_freed, slots_not_counted)
"""Found late, so `make test` leaves them out."""


@pytest.mark.parametrize(
    "plant", [pytest.param(one, marks=[pytest.mark.full] * (one in SLOW)) for one in KINDS]
)
def test_a_planted_bug_is_found(plant: Callable[[Patch], None]) -> None:
    kinds = KINDS[plant] or GREATER
    for seed in range(NUM_SEEDS):
        with pytest.MonkeyPatch.context() as patch, suppress(OutriderError):
            plant(patch)
            run_seed(seed, kinds=kinds)
            continue
        run_seed(seed, kinds=kinds)
        return
    pytest.fail("no seed fails")
