"""The coordinator's service: the parts that serve requests, and what they share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from coordinator.admission import Admission
from coordinator.decoding.committer import Committer
from coordinator.decoding.load_meter import LoadMeter
from coordinator.decoding.runs import RunStarter
from coordinator.decoding.sessions import OwnedSessions
from coordinator.health import Health
from coordinator.routing.discovery import Discovery, Registered
from coordinator.routing.replica_pool import DraftPool, TargetPool
from coordinator.served_model import ServedModel
from coordinator.streams import Streams
from outrider import errors
from outrider.config.deployment import CoordinatorConfig
from outrider.drafters.lookup import LookupDrafter
from outrider.interfaces.messages import ReplicaDescription
from outrider.sessions.store import SessionStore
from outrider.telemetry.observer import UNOBSERVED, Observation
from outrider.transport.link import DraftLink, TargetLink

if TYPE_CHECKING:
    from outrider.models.tokenizer import TokenizerText


class CoordinatorService:
    """Builds, starts and closes the parts of a coordinator. Independent of gRPC and Ray."""

    def __init__(
        self,
        config: CoordinatorConfig,
        owner: str,
        *,
        store: SessionStore,
        targets: Mapping[str, TargetLink] | None = None,
        drafts: Mapping[str, DraftLink] | None = None,
        fallback: LookupDrafter,
        text: TokenizerText | None = None,
        random_bits: Callable[[int], int] = secrets.randbits,
        observation: Observation = UNOBSERVED,
        registered: Registered | None = None,
    ) -> None:
        """`owner` is the coordinator's name in the session store. No other process has this name.

        `targets` and `drafts` map names to links, for a fixed set of replicas. If `registered` is
        given, the coordinator uses the replicas of its registry.

        `fallback` is the look-up that proposes if the drafter is a look-up, or if a model or head
        has no proposal. It is not used before the first draft has joined (`open_drafts`). `text` is
        the target's tokenizer. Without it, requests must contain token ids. `random_bits(n)`
        returns n random bits, for session ids and, if no seed is configured, the seeds of
        requests."""
        self.config = config
        self._store = store
        self._target_links, self._draft_links = targets or {}, drafts or {}
        self.targets = TargetPool("target")
        self.drafts = DraftPool("draft", self.targets)
        name = owner if config.membership is None else config.membership.name
        self.fleet = Discovery(name, self.targets, self.drafts, registered)
        self.text = text
        self.model = ServedModel(self.targets, config.served_model_name, text)
        self._sessions = sessions = OwnedSessions(store, owner, self.targets, random_bits, config)
        self._committer = committer = Committer(store, owner, sessions.random, sessions.end_wanted)
        meter = LoadMeter()
        self.admission = Admission(
            config, name, self.model, store, self.targets, committer, meter, random_bits
        )
        self.runs = RunStarter(
            config, self.targets, self.drafts, self.fleet, fallback, sessions, committer, meter
        )
        self.streams = Streams(
            config, self.model, store, self.admission, sessions, committer, self.runs, observation
        )
        self.health = Health(
            self.targets,
            self.drafts,
            self.fleet,
            store,
            self.admission,
            sessions,
            committer,
            meter,
            observation,
        )

    async def start(self) -> None:
        """Gets the descriptions of the replicas, and starts the commits. Raises `Unavailable` if no
        target is known, or if a replica of a fixed set does not answer. Raises `Incompatible` if a
        replica of a fixed set does not fit the others, or if the registry has replicas of a role,
        but none of them fits the pool."""
        for name, target_link in self._target_links.items():
            await self.targets.join(name, target_link)
        for name, draft_link in self._draft_links.items():
            await self.drafts.join(name, draft_link)
        if self.fleet.follows:
            await self.fleet.begin()
        target = self.targets.first
        if target is None:
            raise errors.TargetUnavailable("no target is known")
        self.model.begin(target)
        self.runs.begin(target)
        self.streams.start()
        self.health.start()

    @property
    def served(self) -> ReplicaDescription:
        """See `ServedModel.description`."""
        return self.model.description

    @property
    def num_running(self) -> int:
        return len(self._sessions.running)

    async def close(self) -> None:
        """Cancels all sessions, commits their last tokens, and closes links and store."""
        self.streams.cancel_all()
        async with AsyncExitStack() as ending:  # The stack calls these in reverse order.
            for close in (
                self._store.close,
                self.drafts.close,
                self.targets.close,
                self.health.close,
                self.streams.close,
                self.admission.close,
            ):
                ending.push_async_callback(close)

    def check_integrity(self) -> None:
        """Raises `InvariantError` if sessions, routes and commits of the idle coordinator do not
        match."""
        sessions = set(self._sessions.running)
        self.targets.check_integrity(sessions | self._sessions.scored_ids)
        self.drafts.check_integrity(sessions, every=False)
        self._committer.check_integrity()
