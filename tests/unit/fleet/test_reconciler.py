"""The reconciler: upgrades, restarts and trials, without Ray."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import ray

from coordinator.decoding.trial import DrafterSums, TrialSums
from outrider.config.deployment import DeploymentConfig, load_config
from outrider.errors import ConfigError, OutriderError, SettingError, StoreUnavailable, Unavailable
from outrider.fleet import reconciler as module
from outrider.fleet.reconciler import AWAY_S, SLOW_S, Reconciler, ReconcilerClient, changed
from outrider.fleet.replica_set import Fleet
from outrider.registry.registry import ReplicaRecord, Role
from outrider.replica.ray_actor import ActorLocation
from tests.support.fleet_world import World, resolved

pytestmark = pytest.mark.virtual


class Host:
    """The machines, files and registry around the reconcilers of one deployment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.world = World(**settings)
        self.missing: set[str] = set()
        """Names of models that cannot be found."""
        self.context = SimpleNamespace(was_current_actor_reconstructed=False)
        run = AsyncMock(side_effect=lambda task, *given: task(*given))
        for name, found in {
            "log_to": lambda *_: None,
            "Cluster": lambda *_, **__: self.world.machines,
            "RedisRegistry": lambda *_: self.world.registry,
            "resolve_models": self._resolve,
            "run_task": run,
        }.items():
            monkeypatch.setattr(module, name, found)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: self.context)

    def _resolve(self, config: DeploymentConfig) -> DeploymentConfig:
        if config.draft.model in self.missing:
            raise SettingError("draft_model", "is not to be had")
        return resolved(config)

    async def start(self) -> Reconciler:
        found = Reconciler(self.world.spec, "outrider-d")
        await found.start()
        return found

    async def restart(self, before: Reconciler) -> Reconciler:
        """Starts a new reconciler, as Ray does after the old one has died."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.context.was_current_actor_reconstructed = True
        return Reconciler(self.world.spec, "outrider-d")


@asynccontextmanager
async def playing(**settings: Any) -> AsyncIterator[tuple[Host, Reconciler]]:
    with pytest.MonkeyPatch.context() as patched:
        host = Host(patched, **settings)
        yield host, await host.start()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


@pytest.mark.virtual(False)
async def test_a_machine_without_the_password_of_redis_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a method, as Ray turns errors of a constructor into text. After a restart the reconciler
    ends: another machine may have the password."""
    monkeypatch.delenv("OUTRIDER_REDIS_PASSWORD", raising=False)
    host = Host(monkeypatch, redis_url="redis://h:1")
    config = host.world.spec.config
    asking = replace(config.coordinator.redis, asks_for_password=True)
    config = replace(config, coordinator=config.coordinator.reaching(asking))
    found = Reconciler(replace(host.world.spec, config=config), "outrider-d")
    with pytest.raises(SettingError, match="redis_password: is not known on"):
        await found.start()
    ended = asyncio.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(module, "FIRST_RETRY_DELAY_S", 0.0)
    host.context.was_current_actor_reconstructed = True
    returned = Reconciler(found._original, "outrider-d")
    async with asyncio.timeout(5):
        await ended.wait()
        await returned.close()
    assert "redis_password: is not known on" in caplog.text


async def test_only_calls_that_may_fetch_a_model_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    found = AsyncMock()
    monkeypatch.setattr(module, "find_reconciler", AsyncMock(return_value=found))
    slow = Reconciler.change, Reconciler.begin_trial
    for method in (*slow, Reconciler.want, Reconciler.overview):
        await ReconcilerClient("outrider-d").call(method.__name__)
        limit_s = SLOW_S if method in slow else AWAY_S
        found.call.assert_awaited_with(method.__name__, timeout_s=limit_s)


@pytest.mark.virtual(False)
async def test_a_start_that_fails_is_told_to_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to later callers, as an error after which they do not call again."""
    found = Reconciler(Host(monkeypatch).world.spec, "outrider-d")
    failure = Unavailable("the target-0 actor did not answer start in 1 s")
    monkeypatch.setattr(Fleet, "start", AsyncMock(side_effect=failure))
    waiting = asyncio.create_task(found.overview())
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        for asked in (found.start(), waiting, found.start(), found.overview(), found.want({})):
            with pytest.raises(OutriderError, match="not start: the target-0 actor did") as told:
                await asked
            assert not isinstance(told.value, Unavailable)
        await found.close()


@pytest.mark.virtual(False)
async def test_a_start_that_is_stopped_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Reconciler(Host(monkeypatch).world.spec, "outrider-d")
    monkeypatch.setattr(Fleet, "start", AsyncMock(side_effect=asyncio.Event().wait))
    starting = asyncio.create_task(found.start())
    await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        await found.close()
        with pytest.raises(OutriderError, match="not start: it was stopped"):
            await starting


async def test_an_upgrade_is_over_once_the_fleet_was_whole() -> None:
    """Replicas that `scale` starts later do not count, nor those that replace dead replicas."""
    async with playing() as (host, found):
        machines = host.world.machines
        await asyncio.sleep(1)
        machines.loading.clear()
        await found.change({"max_num_seqs": 5})
        for replaced in (False, True):
            assert ((await found.overview()).num_stale > 0) is not replaced
            machines.loading.set()
            await asyncio.sleep(60)
        machines.loading.clear()
        await found.want({"target": 2})
        await asyncio.sleep(60)
        overview = await found.overview()
        assert (len(overview.addresses("target")), overview.num_stale) == (1, 0)


async def test_what_was_seen_is_told_again_once_it_is_another() -> None:
    """And after `NEWS_S`. So a caller that follows the deployment calls six times a minute."""
    async with playing() as (_, found):
        loop = asyncio.get_running_loop()
        await asyncio.sleep(60)
        seen, began = await found.overview(), loop.time()
        assert await found.overview(seen) == seen
        assert loop.time() >= began + module.NEWS_S
        waiting = asyncio.create_task(found.overview(seen))
        await asyncio.sleep(1)
        began = loop.time()
        await found.want({"target": 2})
        assert (await waiting).wanted["target"] == 2
        assert loop.time() < began + 2


async def test_one_that_returns_goes_by_what_held_once_it_can() -> None:
    """Until then `overview` waits. Refused changes are not saved. Changes that another release has
    saved are not used."""
    async with playing() as (host, found):
        await found.change({"draft_model": "hybrid:suffix,emulated", "autoscale_calm_s": 5})
        await found.change({"autoscale_targets": "1:4"})
        await asyncio.sleep(60)
        spec, names = await found.spec(), [one.name for one in (await found.overview()).replicas]
        host.missing.add(spec.given.draft.model)
        found = await host.restart(found)
        await asyncio.sleep(5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await found.overview()
        host.world.machines.failure = Unavailable("away")
        await asyncio.sleep(5)
        host.world.machines.failure = None
        held = host.world.machines.text
        for text in ('{"values": {}}', "[1, 2]", "null", "{"):
            host.world.machines.text = text
            await asyncio.sleep(5)
        host.world.machines.text = held
        host.missing.clear()
        scaling = await found.want({"target": 1})
        assert (scaling.bounds, scaling.autoscale_calm_s) == ({"target": (1, 4)}, 5)
        overview = await found.overview()
        assert overview.num_stale == 0
        assert {one.name for one in overview.replicas} == {*names}
        assert await found.spec() == spec


async def test_changes_add_up_also_where_several_are_asked_for_at_once() -> None:
    async with playing(redis_url="unix:///x") as (_, found):
        await asyncio.gather(found.change({"max_num_seqs": 7}), found.change({"deadline_ms": 999}))
        before = await found.spec()
        await found.change({"max_model_len": 99})
        spec = await found.spec()
        assert (spec.given.target.max_num_seqs, spec.given.target.max_model_len) == (7, 99)
        assert spec.given.coordinator.deadline_ms == 999
        assert spec.config.coordinator.redis.url == "unix:///x"
        assert spec.plans["draft"] == before.plans["draft"]
        assert spec.plans["target"] != before.plans["target"]


async def test_what_cannot_work_is_refused_and_what_held_still_holds() -> None:
    settings = {"engine": "emulated:vocab_size=100", "host": "0.0.0.0", "insecure": True}  # noqa: S104
    async with playing(**settings) as (host, found):
        await found.change({"max_num_seqs": 7})
        await found.change({"autoscale_targets": "1:4"})
        host.missing.add("ngram")
        host.world.machines.actors[0].location = ActorLocation(1, "elsewhere")
        before, saved = await found.spec(), host.world.machines.text
        wrong: tuple[tuple[dict[str, Any], str], ...] = (
            ({"draft_model": "ngram"}, "draft_model: is not to be had"),
            ({"num_targets": 3}, r"num_targets: .*use `outrider scale`"),
            ({"engine": "emulated:vocab_size=90"}, "engine: .*=90' has another vocabulary"),
            ({"host": "127.0.0.1"}, "placed on 2 machines"),
            ({"autoscale_targets": "0:4"}, "autoscale_targets: '0:4' is wrong"),
        )
        for values, said in wrong:
            with pytest.raises(ConfigError, match=said):
                await found.change(values)
        host.world.machines.failure = Unavailable("away")
        with pytest.raises(Unavailable):
            await found.change({"max_num_seqs": 9})
        assert found._autoscaler.config.bounds == {"target": (1, 4)}
        assert (await found.spec(), host.world.machines.text) == (before, saved)
        host.world.machines.failure = None
        host.world.machines.actors[0].location = ActorLocation(1, "here")
        await found.change({"max_model_len": 99})
        assert (await found.spec()).given.target.max_num_seqs == 7


async def test_drafts_come_and_go_with_their_use() -> None:
    async with playing(draft_model="suffix") as (host, found):
        await found.change({"draft_model": "hybrid:suffix,emulated"})
        assert (await host.world.registry.wanted())["draft"] == 1
        await found.change({"draft_model": "suffix"})
        assert (await host.world.registry.wanted())["draft"] == 0


async def test_look_ups_draft_elsewhere_only_if_another_place_is_given() -> None:
    """Unset, it is the target. To give this place replaces no replica, and no other change gives
    it, so other drafters stay possible."""
    async with playing(draft_model="suffix") as (host, found):

        async def plans(**values: Any) -> tuple[str, str]:
            await found.change(values)
            plans = (await found.spec()).plans
            return plans["coordinator"], plans["target"]

        coordinator, target = await plans(max_num_seqs=7)
        assert await plans(lookup_on="target") == (coordinator, target)
        with pytest.raises(SettingError, match=r"^lookup_on: .*; give coordinator, or --d"):
            await plans(draft_model="hybrid:suffix,emulated")
        moved = await plans(lookup_on="coordinator")
        assert moved[0] != coordinator
        assert moved[1] != target
        assert await plans(lookup_on=None) == (coordinator, target)
        found = await host.restart(found)
        await found.overview()
        assert await plans(draft_model="hybrid:suffix,emulated") != (coordinator, target)
        assert await plans(draft_model="suffix") == (coordinator, target)


def sums_of(host: Host, gain: float) -> None:
    """After this call, coordinators report that the newest draft is faster by this factor. Every
    second call is not answered."""
    trial = host.world.machines.actors[-1].name
    old = DrafterSums(50, 900, 900, 1800, 90.0, 50 * 36.0**2, 50 * 1.8**2, 50 * 36.0 * 1.8)
    squares = old.square_tokens, old.square_seconds / gain**2, old.products / gain
    new = DrafterSums(50, 900, 900, 1800, 90.0 / gain, *squares)
    silent = cycle([True, False])

    def told() -> TrialSums:
        if next(silent):
            raise Unavailable("no answer")
        return TrialSums(trial, old, new)

    host.world.machines.trial_sums = told


TRIED, GONE = {"draft_num_threads": 3}, {"draft_model": "gone"}
HEADS = {"engine": "transformers", "model": "large", "draft_model": "eagle3:a"}
OTHER_HEADS = {"draft_model": "eagle3:b"}
LOOK_UP, MODEL = {"draft_model": "suffix"}, HEADS | {"draft_model": "small"}


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize(("gain", "state"), [(1.1, "taken"), (0.9, "not taken")])
async def test_a_drafter_on_trial_is_taken_only_where_it_is_better(
    gain: float, state: str, role: Role
) -> None:
    key, tried_with, settings = "num_threads", TRIED, {"num_drafts": 2}
    if role == "target":
        key, tried_with, settings = "head", OTHER_HEADS, HEADS | {"num_targets": 2}
    [value] = (str(one).removeprefix("eagle3:") for one in tried_with.values())
    async with playing(**settings) as (host, found):
        before = await found.spec()
        names = [one.name for one in (await found.overview()).of(role)]
        for _ in range(2):  # It may be asked again.
            await found.begin_trial(tried_with, 0.25, 600.0)
        await asyncio.sleep(10)
        there = (await found.overview()).of(role)
        assert [one.name for one in there if not one.on_trial] == names
        [tried] = (one for one in there if one.on_trial)
        config = host.world.actor(tried.name).config
        assert (str(getattr(config, key)), config.membership.trial_share) == (value, 0.25)
        with pytest.raises(ConfigError, match=r"on 25% of the sessions: runs: .* end it with"):
            await found.change({"deadline_ms": 999})
        await found.change({"autoscale_targets": "1:4"})
        assert (await found.spec()).plans == before.plans
        sums_of(host, gain)
        host.world.machines.loading.clear()
        await asyncio.sleep(20)
        stays = [one.leaves for one in (await found.overview()).replicas if one.on_trial]
        assert stays == ([False] if gain > 1 else [])  # Until another of its kind serves.
        host.world.machines.loading.set()
        for _ in range(600):
            overview = await found.overview()
            assert len(overview.addresses(role)) >= 2
            await asyncio.sleep(0.1)
        assert (overview.trial.state, overview.num_stale) == (state, 0)
        assert f"{gain - 1:+.1%}" in overview.trial.reason
        assert [one.name for one in overview.of(role)] == names or gain > 1
        spec = await found.spec()
        kept = before if gain < 1 else spec
        assert spec.plans == kept.plans
        assert spec.config.autoscale.bounds == {"target": (1, 4)}
        configs = [host.world.actor(one.name).config for one in overview.of(role)]
        assert len(configs) == 2
        assert all((str(getattr(one, key)) == value) == (gain > 1) for one in configs)
        assert not any(one.membership.trial_share for one in configs)


async def test_a_head_is_taken_where_no_further_target_has_a_place() -> None:
    async with playing(**HEADS) as (host, found):
        await found.begin_trial(OTHER_HEADS, 0.5, 600.0)
        await asyncio.sleep(10)
        host.world.machines.room = len(host.world.machines.actors)
        sums_of(host, 1.1)
        for _ in range(1200):
            overview = await found.overview()
            assert overview.addresses("target")
            await asyncio.sleep(0.1)
        assert overview.num_stale == 0
        [one] = overview.of("target")
        assert host.world.actor(one.name).config.head == "b"


async def test_a_head_that_leaves_room_for_other_lengths_is_not_tried() -> None:
    """Sessions could not move between this target and the others."""
    async with playing(**HEADS) as (host, found):
        kept = ReplicaRecord("target", "kept", "h:1", "h", 1, weights="w/float32/99")
        tried = replace(kept, name="tried", weights="w/float32/90", trial_share=0.5)
        await found.begin_trial(OTHER_HEADS, 0.5, 600.0)
        for _ in range(10):  # Their leases are short.
            await host.world.registry.announce(kept)
            await host.world.registry.announce(tried)
            await asyncio.sleep(1)
        trial = (await found.overview()).trial
        assert trial.state == "not taken"
        assert "give --max-model-len" in trial.reason


@pytest.mark.parametrize("ends", ["time", "command", "death", "start", "restart", "gone"])
async def test_a_trial_that_shows_nothing_leaves_all_as_it_was(ends: str) -> None:
    async with playing() as (host, found):
        before, names = await found.spec(), [one.name for one in (await found.overview()).replicas]
        if ends == "start":
            host.world.machines.failures["draft"] = ConfigError("no memory")
        await found.begin_trial(GONE if ends == "gone" else TRIED, 0.25, 100.0)
        if ends == "gone":  # Its files are, when it is to be adopted.
            await asyncio.sleep(10)
            host.missing.add("gone")
            sums_of(host, 1.1)
        await asyncio.sleep(60)
        if ends == "death":
            host.world.machines.actors[-1].end.set_exception(OutriderError("no memory"))
        if ends == "command":
            await found.end_trial()
        if ends == "restart":
            found = await host.restart(found)
        await asyncio.sleep(60)
        overview = await found.overview()
        said = {
            "time": "0 sessions",
            "command": "was ended by `outrider upgrade --trial-share 0`",
            "restart": "the reconciler died",
            "gone": "draft_model: is not to be had",
        }
        assert overview.trial.state == "not taken"
        assert said.get(ends, "no memory") in overview.trial.reason
        assert [one.name for one in overview.replicas] == names
        assert await found.spec() == before
        host.world.machines.failures.clear()
        await found.change({"deadline_ms": 999})


async def test_a_trial_outlasts_a_store_that_is_away() -> None:
    async with playing() as (host, found):
        host.world.machines.failures["draft"] = StoreUnavailable("away")
        await found.begin_trial(TRIED, 0.5, 100.0)
        await asyncio.sleep(30)
        assert host.world.machines.starts.count("draft") < 40
        host.world.machines.failures.clear()
        await asyncio.sleep(10)
        overview = await found.overview()
        assert overview.trial.state == "runs"
        assert any(one.on_trial and one.address for one in overview.replicas)


@pytest.mark.parametrize(
    ("settings", "values", "share", "said"),
    [
        ({}, {"draft_model": "suffix"}, 0.5, "on drafts and 'suffix' on targets, but a trial"),
        (LOOK_UP, {"draft_model": "emulated"}, 0.5, "'suffix' runs on targets and 'emulated' on d"),
        (
            LOOK_UP | {"lookup_on": "coordinator"},
            {"draft_model": "emulated"},
            0.5,
            "'suffix' runs on coordinators and 'emulated' on drafts",
        ),
        (
            LOOK_UP,
            {"draft_model": "ngram"},
            0.5,
            "draft replicas, or two heads on targets; without",
        ),
        (MODEL, {"draft_model": "eagle3:b"}, 0.5, "'small' runs on drafts and 'eagle3:b' on tar"),
        (HEADS, {"draft_model": "small"}, 0.5, "'eagle3:a' runs on targets and 'small' on drafts"),
        (HEADS, {"max_num_seqs": 7}, 0.5, "max_num_seqs: cannot change in a trial on targets"),
        ({}, {"max_num_seqs": 7}, 0.5, "change each coordinator and each target, too|target, t"),
        ({}, {"deadline_ms": 7}, 0.5, "nothing to try; draft replicas"),
        # Shares with which the replica on trial and the others would have unlike loads.
        ({}, TRIED, 0.2, "--trial-share: 0.2 does not suit 1 .* from 0.25 to 0.9, best 0.5, so"),
        ({"num_drafts": 3}, TRIED, 0.6, "0.6 does not suit 3 .* from 0.125 to 0.5, best 0.25,"),
    ],
)
async def test_what_replicas_of_one_role_cannot_try_is_refused(
    settings: dict[str, Any], values: dict[str, Any], share: float, said: str
) -> None:
    async with playing(**settings) as (_, found):
        with pytest.raises(ConfigError, match=said):
            await found.begin_trial(values, share, 600.0)
        assert (await found.overview()).trial is None


def test_a_draft_goes_with_the_target_that_it_was_chosen_for() -> None:
    before = load_config({"model": "demo", "draft_model": "hybrid:suffix,demo-drafter"}, {})
    assert changed(before, {"model": "other"}).draft.model == "suffix"
    assert changed(before, {"model": "demo"}).draft.model == "hybrid:suffix,demo-drafter"
    assert changed(before, {"model": "other", "draft_model": "suffix"}).draft.model == "suffix"
