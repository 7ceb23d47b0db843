"""Other settings for a deployment that runs: its replicas are replaced one by one.

    changes     those that hold, all together since the deployment began
    asked       what they are to be
    answer      whether that could be

All three stand in the registry. Whoever looks after the fleet makes a plan of what is asked for,
and goes by it from then on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Final, Self

from outrider.config import DeploymentConfig, TargetConfig, configuration
from outrider.errors import ConfigError, OutriderError, SettingError, StoreUnavailable, Unavailable
from outrider.fleet.registry import Registry, Topic
from outrider.hosting import available_cores
from outrider.settings import Value

from .blueprint import Blueprint
from .cluster import resources
from .placement import plan_placement, share_cores

_log = logging.getLogger(__name__)

_TOPICS: Final[tuple[Topic, ...]] = ("changes", "asked", "answer")
LOOK_PERIOD_S: Final = 1.0
"""Between two looks at whether there are other changes."""
ANSWER_PERIOD_S: Final = 0.2
"""Between two looks at what has come of changes ..."""
ANSWER_S: Final = 900.0
"""... which may take so long: a model's files may have to be fetched."""
KEPT: Final = {
    "address": "a deployment stays on its cluster",
    "deployment_name": "a deployment keeps its name",
    "redis_url": "sessions stay in their Redis",
    "redis_username": "sessions stay in their Redis",
    "redis_password": "sessions stay in their Redis",
    "redis_sentinel_password": "sessions stay in their Redis",
    "redis_key_prefix": "sessions stay in their Redis",
    "api_key": "a deployment keeps its keys; those in a file may change",
    "num_targets": "use `outrider scale`",
    "num_drafts": "use `outrider scale`",
    "num_coordinators": "use `outrider scale`",
    "autoscale_targets": "use `outrider autoscale`",
    "autoscale_drafts": "use `outrider autoscale`",
    "autoscale_coordinators": "use `outrider autoscale`",
}
"""Settings that hold as long as a deployment runs, and what to do instead."""
SWITCHES: Final = ("internal_tls_dir",)
"""Settings that may be others, but neither begin nor end."""
SHARING: Final = frozenset({"device", "target_num_gpus", "draft_num_gpus", "tensor_parallel_size",
                            "draft_tensor_parallel_size"})  # fmt: skip
"""Changes that name one of these have the cluster's GPUs counted, and shared out, anew."""
STAYS: Final = ("redis_url", "redis_key_prefix")
"""Those of them without which a deployment is another one."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Settings that are others than those that the deployment was started with."""

    name: str
    """Another one for each set of them."""
    values: Mapping[str, Value]
    cluster_gpus: float | None = None
    """As of a `Placement`, where they were counted again; None = as at the start."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises `ValueError` for what is no set of changes."""
        found = json.loads(text)
        if not isinstance(found, dict) or not isinstance(found.get("values"), dict):
            raise ValueError("changes are an object with values")
        return cls(str(found.get("name", "")), found["values"], found.get("cluster_gpus"))


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether changes hold."""

    name: str
    """Of the changes."""
    refusal: str = ""
    """Why they do not; empty where they do."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises `ValueError` for what is none."""
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("an answer is an object")
        return cls(str(found.get("name", "")), str(found.get("refusal", "")))


def check_changes(given: Mapping[str, Value], changes: Mapping[str, Value]) -> None:
    """Raises `SettingError` for one of the changes that cannot be made to the `given` settings
    while a deployment runs."""
    for key, value in changes.items():
        if key in KEPT and value != given.get(key):
            raise SettingError(key, f"cannot be another one while a deployment runs: {KEPT[key]}")
        if key in SWITCHES and bool(value) != bool(given.get(key)):
            raise SettingError(
                key,
                "cannot be turned on or off while a deployment runs: its replicas would not "
                "understand each other meanwhile",
            )


def changed(given: DeploymentConfig, changes: Mapping[str, Value]) -> DeploymentConfig:
    """What was given, with these settings in its place. Raises as `check_changes`, and
    `SettingError` for values that do not go together."""
    values = given.values()
    check_changes(values, changes)
    if changes.get("model", given.target.model) != given.target.model:
        # What was chosen for the other target need not fit this one.
        del values["draft_model"]
    return configuration(values | dict(changes))


def make_blueprint(
    given: DeploymentConfig,
    found: DeploymentConfig,
    amounts: Mapping[str, float],
    deployment: str,
    logs: str,
    *,
    local: bool,
) -> Blueprint:
    """`found` is what was `given`, with the models' files and Redis; `amounts` are the cluster's
    resources. Raises as `plan_placement`."""
    if local:
        found = share_cores(found, available_cores())
    return Blueprint(
        placement=plan_placement(found, amounts),
        deployment=deployment,
        log_directory=logs,
        local=local,
        given=given,
    )


class Rollout:
    """Makes plans of the changes that the registry has."""

    def __init__(
        self,
        registry: Registry,
        blueprint: Blueprint,
        resolve: Callable[[DeploymentConfig], Awaitable[DeploymentConfig]],
        check_target: Callable[[TargetConfig, TargetConfig], Awaitable[None]],
        go_by: Callable[[Blueprint], None],
    ) -> None:
        """`blueprint` is the plan without changes; `resolve` finds the models' files, as
        `resolve_models`; `check_target` refuses a target that cannot follow the one that runs, as
        `check_same_tokens`; `go_by` hears of another plan."""
        self._registry = registry
        self._original = self._plan_that_holds = blueprint
        self._resolve = resolve
        self._check_target = check_target
        self._go_by = go_by
        self._holds = ""
        """All changes together, as text."""
        self._answers: dict[str, str] = {}
        """To those who asked, by the name of what they asked for; nothing is done twice."""
        self.name = ""
        """Of the changes that hold."""

    async def begin(self) -> None:
        """There are no changes yet, whatever a deployment of this name had before. Raises
        `StoreUnavailable`."""
        for topic in _TOPICS:
            await self._registry.note(topic, "")

    async def return_to(self) -> None:
        """Goes by the changes that held when another one had the care of the fleet; until their
        plan is known nothing is done."""
        while True:
            try:
                if text := await self._registry.noted("changes"):
                    self._go(text, await self._plan(Changes.from_json(text)))
                    self._holds = text
                    self._answers[self.name] = Answer(self.name).to_json()
                return
            except (OutriderError, ValueError) as error:
                _log.warning("the changes that hold are not known yet: %s", error)
                await asyncio.sleep(LOOK_PERIOD_S)

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            try:
                await self.look()
            except (OutriderError, ValueError) as error:
                _log.warning("there may be other settings: %s", error)
            except Exception:  # noqa: BLE001 (the fleet goes on, whatever was asked for)
                _log.exception("other settings cannot be made a plan of")

    async def look(self) -> None:
        """Once. Raises `StoreUnavailable`, and `ValueError` for changes that are none."""
        text = await self._registry.noted("asked")
        if self._holds and await self._registry.noted("changes") != self._holds:  # It has lost it.
            await self._registry.note("changes", self._holds)
        if not text:
            return
        asked, answer = Changes.from_json(text), await self._registry.noted("answer")
        if asked.name in self._answers:
            if answer != self._answers[asked.name]:  # Asked again by one who did not hear it.
                await self._registry.note("answer", self._answers[asked.name])
            return
        if answer and Answer.from_json(answer).name == asked.name:
            self._answers[asked.name] = answer  # By another one, before this one.
            return
        held = Changes.from_json(self._holds) if self._holds else Changes("", {})
        gpus = held.cluster_gpus
        if not SHARING.isdisjoint(asked.values):
            gpus = resources().get("GPU", 0.0)
        changes = Changes(asked.name, {**held.values, **asked.values}, gpus)
        try:
            plan = await self._plan(changes)
            runs, follows = self._plan_that_holds.placement.config, plan.placement.config
            await self._check_target(runs.target, follows.target)
            self._go(changes.to_json(), plan)
        except StoreUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 (whatever keeps it from being a plan)
            _log.exception("other settings are refused")
            await self._reply(Answer(asked.name, str(error)))
            return
        if "draft_model" in changes.values and plan.placement.draft is not None:
            wanted = await self._registry.wanted()
            if not wanted.get("draft"):  # There were none while the target drafted for itself.
                await self._registry.want({"draft": plan.counts["draft"]})
        await self._registry.note("changes", changes.to_json())
        self._holds = changes.to_json()
        await self._reply(Answer(asked.name))
        _log.info("other settings: %s", ", ".join(changes.values))

    async def _reply(self, answer: Answer) -> None:
        await self._registry.note("answer", answer.to_json())
        self._answers[answer.name] = answer.to_json()

    def _go(self, text: str, plan: Blueprint) -> None:
        before, self.name = self.name, Changes.from_json(text).name
        try:
            self._go_by(plan)
        except BaseException:
            self.name = before
            raise
        self._plan_that_holds = plan

    async def _plan(self, changes: Changes) -> Blueprint:
        """Raises `ConfigError` for what cannot work."""
        before, gpus = self._original, changes.cluster_gpus
        if gpus is None:
            gpus = before.placement.cluster_gpus
        given = changed(before.given, changes.values)
        config = await self._resolve(given)
        coordinator = replace(config.coordinator, redis_url=before.redis.url)
        return make_blueprint(
            given, replace(config, coordinator=coordinator), {"GPU": gpus}, before.deployment,
            before.log_directory, local=before.local,
        )  # fmt: skip


async def tell_changes(registry: Registry, changes: Mapping[str, Value]) -> str:
    """Adds to the changes that hold; their name. Of several that are told at once each is heard.
    Raises `ConfigError` where they are refused, and `Unavailable` where nobody answers."""
    asked = Changes(uuid.uuid4().hex, changes)
    await registry.note("asked", asked.to_json())
    give_up_at = asyncio.get_running_loop().time() + ANSWER_S
    while True:
        with suppress(StoreUnavailable):  # It has been asked: what is left is to wait.
            text = await registry.noted("answer")
            answer = Answer.from_json(text) if text else Answer("")
            if answer.name == asked.name:
                break
            text = await registry.noted("asked")
            if not text or Changes.from_json(text).name == answer.name:
                # Somebody else has asked, and has been answered; or what was asked is lost.
                await registry.note("asked", asked.to_json())
        if asyncio.get_running_loop().time() > give_up_at:
            raise Unavailable(f"the deployment has said nothing to that for {ANSWER_S:g} s")
        await asyncio.sleep(ANSWER_PERIOD_S)
    if answer.refusal:
        raise ConfigError(answer.refusal)
    return asked.name
