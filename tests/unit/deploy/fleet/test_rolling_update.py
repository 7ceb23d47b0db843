"""Other settings for a deployment that runs: what is taken, what is refused, what is remembered."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace

import pytest
from fleet_world import SavedInMemory

from deploy.fleet import rolling_update as rollout
from deploy.fleet.preflight import check_same_tokens
from deploy.fleet.rolling_update import Changes, RollingUpdate, changed
from deploy.fleet.spec import FleetSpec, plan_fleet
from outrider.clock import run_virtually
from outrider.config import DeploymentConfig, TargetConfig, load_config
from outrider.errors import ConfigError, SettingError, Unavailable
from outrider.registry.registry import MemoryRegistry

SETTINGS = {"engine": "emulated:vocab_size=100", "draft_model": "emulated"}


FITS_NOWHERE = 13
"""Sessions a step of a plan that nobody can go by."""
ON_GPUS = {"engine": "transformers", "model": "large", "draft_model": "small"}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the cluster has now, which a test may change."""
    amounts = {"CPU": 64.0}
    monkeypatch.setattr(rollout, "resources", lambda: amounts)
    return amounts


def given(**settings: object) -> DeploymentConfig:
    return load_config(SETTINGS | settings, {})


class World:
    """What a deployment keeps, its registry, and who makes plans for it."""

    def __init__(self, cluster_gpus: float = 0.0, **settings: object) -> None:
        self.kept = SavedInMemory()
        self.registry = MemoryRegistry(lambda: 0.0)
        self.cluster_gpus = cluster_gpus
        """At the start."""
        self.settings = settings
        self.plans: list[FleetSpec] = []
        self.missing: set[str] = set()
        """Models that are not to be had."""
        self.again()

    def again(self) -> None:
        """Another process."""
        config = given(**self.settings)
        found = replace(config, coordinator=replace(config.coordinator, redis_url="unix:///x"))
        amounts = {"CPU": 64, "GPU": self.cluster_gpus}
        self.original = plan_fleet(config, found, amounts, "d", local=True)
        self.rollout = RollingUpdate(
            self.kept, self.registry, self.original, self._resolve, self._check, self._go
        )

    def _go(self, plan: FleetSpec) -> None:
        if plan.given.target.max_num_seqs == FITS_NOWHERE:
            raise SettingError("max_num_seqs", "does not fit these machines")
        self.plans.append(plan)

    async def _resolve(self, config: DeploymentConfig) -> DeploymentConfig:
        if config.draft.model in self.missing:
            raise SettingError("draft_model", "is not to be had")
        return config

    async def _check(self, running: TargetConfig, other: TargetConfig) -> None:
        check_same_tokens(running, other)

    async def tell(self, **values: str | float) -> str:
        name = uuid.uuid4().hex
        await self.rollout.change(name, values)
        return name


def test_changes_add_up_and_make_a_plan() -> None:
    """Which keeps the place of the sessions, and what was not changed."""

    async def main() -> None:
        world = World()
        first = await world.tell(max_num_seqs=7)
        second = await world.tell(max_model_len=99)
        assert [plan.given.target.max_num_seqs for plan in world.plans] == [7, 7]
        assert world.plans[1].given.target.max_model_len == 99
        assert world.plans[1].config.coordinator.redis.url == "unix:///x"
        assert world.plans[0].plan("draft") == world.plans[1].plan("draft")
        assert world.plans[0].plan("target") != world.plans[1].plan("target")
        assert (world.rollout._changes.name, first != second) == (second, True)

    run_virtually(main())


def test_what_cannot_work_is_refused_and_what_held_still_holds() -> None:
    async def main() -> None:
        world = World()
        name = await world.tell(max_num_seqs=7)
        world.missing.add("ngram")
        with pytest.raises(ConfigError, match="draft_model: is not to be had"):
            await world.tell(draft_model="ngram")
        with pytest.raises(ConfigError, match=r"num_targets: .*use `outrider scale`"):
            await world.tell(num_targets=3)
        assert (len(world.plans), world.rollout._changes.name) == (1, name)
        await world.tell(max_model_len=99)
        assert world.plans[1].given.draft.model == "emulated"
        assert world.plans[1].given.target.max_num_seqs == 7

    run_virtually(main())


def test_a_target_whose_tokens_mean_something_else_is_refused() -> None:
    """Coordinators would not take it in, and the old ones would leave all the same."""

    async def main() -> None:
        world = World()
        with pytest.raises(ConfigError, match=r"engine: .*vocab_size=90' has another vocabulary"):
            await world.tell(engine="emulated:vocab_size=90")
        assert (world.plans, world.kept.texts) == ([], {})
        await world.tell(engine="emulated:vocab_size=100,seed=1")
        assert world.plans[0].given.target.engine.endswith("seed=1")

    run_virtually(main())


def test_another_process_goes_by_the_changes_that_hold() -> None:
    """Once it can: until then there is no plan. Those that were refused are none."""

    async def main() -> None:
        world = World()
        await world.rollout.restore()
        assert world.plans == []
        name = await world.tell(draft_model="ngram")
        world.again()
        world.missing.add("ngram")
        returning = asyncio.create_task(world.rollout.restore())
        await asyncio.sleep(5)
        assert (len(world.plans), returning.done()) == (1, False)
        world.kept.failure = Unavailable("away")
        await asyncio.sleep(5)
        world.kept.failure = None
        world.missing.clear()
        await returning
        assert world.plans[1] == world.plans[0]
        assert world.rollout._changes.name == name
        world.missing.add("suffix")
        with pytest.raises(ConfigError, match="is not to be had"):
            await world.tell(draft_model="suffix")
        world.again()
        await world.rollout.restore()
        assert world.plans[2] == world.plans[0]

    run_virtually(main())


@pytest.mark.parametrize("gpus_now", [0.0, 2.0])
def test_gpus_that_come_or_go_replace_no_model(machine: dict[str, float], gpus_now: float) -> None:
    """Neither when the reconciler returns nor when another setting changes."""

    async def main() -> None:
        world = World(1.0, **ON_GPUS)
        models = [world.original.plan("target"), world.original.plan("draft")]
        machine["GPU"] = gpus_now
        await world.tell(run_ahead_rounds=2)
        world.again()
        await world.rollout.restore()
        for plan in world.plans:
            assert [plan.plan("target"), plan.plan("draft")] == models
            assert plan.config.target.device == "cuda"
            assert plan.plan("coordinator") != world.original.plan("coordinator")

    run_virtually(main())


@pytest.mark.parametrize(
    ("setting", "value", "shares"),
    [
        ("device", "auto", [1.0, 1.0]),
        ("target_num_gpus", 0.25, [0.25, 1.0]),
        ("draft_num_gpus", 0.25, [1.0, 0.25]),
        ("tensor_parallel_size", 2, [0.5, 0.5]),
        ("draft_tensor_parallel_size", 2, [0.5, 0.5]),
    ],
)
def test_gpus_are_shared_out_anew_where_changes_say_how(
    machine: dict[str, float], setting: str, value: str | float, shares: list[float]
) -> None:
    """And from then on so: what is counted then is kept with the changes."""

    async def main() -> None:
        world = World(1.0, **ON_GPUS)
        machine["GPU"] = 2.0
        await world.tell(**{setting: value})
        machine["GPU"] = 8.0
        await world.tell(run_ahead_rounds=2)
        world.again()
        await world.rollout.restore()
        for plan in world.plans:
            draft = plan.demands.get("draft")
            assert draft is not None
            assert [plan.demands["target"].num_gpus, draft.num_gpus] == shares

    run_virtually(main())


def test_a_deployment_that_begins_anew_has_no_changes() -> None:
    """Whatever the one before it that had its name was told."""

    async def main() -> None:
        world = World()
        await world.tell(max_num_seqs=7)
        world.again()
        await world.rollout.forget()
        await world.rollout.restore()
        assert len(world.plans) == 1

    run_virtually(main())


def test_a_request_that_is_made_again_after_a_lost_answer_changes_nothing() -> None:
    """Also where another reconciler hears it, and one that was made since is not undone."""

    async def main() -> None:
        world = World()
        await world.rollout.change("first", {"max_num_seqs": 7})
        world.again()
        await world.rollout.restore()
        await world.rollout.change("first", {"max_num_seqs": 7})
        assert len(world.plans) == 2
        await world.rollout.change("second", {"max_num_seqs": 9})
        await world.rollout.change("first", {"max_num_seqs": 7})
        assert world.plans[-1].given.target.max_num_seqs == 9
        assert len(world.plans) == 3

    run_virtually(main())


def test_of_several_that_ask_at_once_each_is_heard() -> None:
    """And no one's settings undo another's."""

    async def main() -> None:
        world = World()
        names = await asyncio.gather(
            world.tell(max_num_seqs=7), world.tell(max_model_len=99), world.tell(run_ahead_rounds=2)
        )
        given = world.plans[-1].given
        assert (given.target.max_num_seqs, given.target.max_model_len) == (7, 99)
        assert given.coordinator.run_ahead_rounds == 2
        assert len(set(names)) == len(world.plans) == 3
        assert world.rollout._changes.name == names[-1]

    run_virtually(main())


def test_changes_that_cannot_be_kept_do_not_hold() -> None:
    """A reconciler that returns would undo them."""

    async def main() -> None:
        world = World()
        name = await world.tell(max_num_seqs=7)
        world.kept.failure = Unavailable("away")
        with pytest.raises(Unavailable):
            await world.rollout.change("lost", {"max_num_seqs": 9})
        assert world.plans[-1].given.target.max_num_seqs == 7
        assert world.rollout._changes.name == name
        world.kept.failure = None
        await world.rollout.change("lost", {"max_num_seqs": 9})
        assert world.plans[-1].given.target.max_num_seqs == 9

    run_virtually(main())


def test_a_plan_that_fits_no_machine_is_not_kept() -> None:
    async def main() -> None:
        world = World()
        name = await world.tell(max_num_seqs=7)
        with pytest.raises(SettingError, match="does not fit"):
            await world.tell(max_num_seqs=FITS_NOWHERE)
        assert world.rollout._changes.name == name
        assert Changes.from_json(world.kept.texts["changes"]).name == name

    run_virtually(main())


def test_drafts_come_where_there_were_none_for_want_of_use() -> None:
    async def main() -> None:
        world = World()
        await world.registry.want({"draft": 0, "target": 1, "coordinator": 1})
        await world.tell(draft_model="hybrid:suffix,emulated")
        assert (await world.registry.wanted())["draft"] == 1

    run_virtually(main())


def test_a_draft_goes_with_the_target_that_it_was_chosen_for() -> None:
    before = load_config({"model": "demo", "draft_model": "hybrid:suffix,demo-drafter"}, {})
    assert changed(before, {"model": "other"}).draft.model == "suffix"
    assert changed(before, {"model": "demo"}).draft.model == "hybrid:suffix,demo-drafter"
    assert changed(before, {"model": "other", "draft_model": "suffix"}).draft.model == "suffix"
    assert changed(before, {"num_targets": 1}) == before


@pytest.mark.parametrize("text", ["[]", "{}", '{"values": 3}', "{"])
def test_what_are_no_changes_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (of several kinds)
        Changes.from_json(text)
