"""Starts the runs of sessions, and keeps what runs learn for later runs."""

from coordinator.decoding.committer import Committer
from coordinator.decoding.load_meter import LoadMeter
from coordinator.decoding.loop import SessionRun
from coordinator.decoding.resumption import Replayed
from coordinator.decoding.sessions import OwnedSessions
from coordinator.decoding.trial import TrialMeter
from coordinator.draft_length.controller import LengthControls
from coordinator.routing.discovery import Discovery
from coordinator.routing.draft_client import open_drafts
from coordinator.routing.replica_pool import DraftPool, SessionContext, TargetPool
from coordinator.routing.target_client import TargetClient
from outrider.config.deployment import CoordinatorConfig
from outrider.drafters.lookup import LookupDrafter
from outrider.interfaces.messages import ReplicaDescription


class RunStarter:
    """Starts the runs of one coordinator's sessions."""

    def __init__(
        self,
        config: CoordinatorConfig,
        targets: TargetPool,
        drafts: DraftPool,
        fleet: Discovery,
        fallback: LookupDrafter,
        sessions: OwnedSessions,
        committer: Committer,
        meter: LoadMeter,
    ) -> None:
        """`fallback` is the look-up that proposes if the drafter is a look-up, or if a model or
        head has no proposal. It is not used before the first draft has joined (`open_drafts`)."""
        self._config = config
        self._targets = targets
        self._drafts = drafts
        self._fleet = fleet
        self._fallback = fallback
        self._sessions = sessions
        self._committer = committer
        self._meter = meter
        self.trial = TrialMeter()
        self.lengths: LengthControls

    def begin(self, target: ReplicaDescription) -> None:
        """Must be called once, before `start`, when the replicas are known. `target` is the first
        target."""
        self.lengths = LengthControls(
            self._targets.first_kept or target,
            self._drafts.first_kept,
            self._config.run_ahead_rounds,
            delays=self._config.drafting_delays,
            adapts=self._config.length_control,
        )

    def start(self, context: SessionContext, arrived: float, replayed: Replayed) -> SessionRun:
        """Starts the run of a session after its `replayed` tokens. `arrived` is the time of the
        request on the event loop's clock. Raises `Unavailable` if the committer is closed."""
        session, parameters = context.session, context.parameters
        context.observer.opened(session.session_id, session.prompt_length, parameters.seed)
        commits = self._committer.add(session)
        try:
            target = TargetClient(self._targets, context, self._config)
            draft = open_drafts(self._drafts, target, self._fallback, self._config)
            trial = drafter = None
            num_elsewhere = sum(peer.load for peer in self._fleet.peers)
            self.lengths.update_load(
                len(self._targets.present), num_elsewhere, self._drafts.first_kept
            )
            tried = self._targets.on_trial or self._drafts.on_trial
            # If only a look-up drafts for the session, `draft.on_trial` is None.
            if tried is not None and (is_new := draft.on_trial) is not None:
                trial = self.trial.begin(tried.name, is_new)
                drafter = tried.description if is_new else None
            record = session.record
            lengths = self.lengths.open(
                record.rule, record.seed, draft.max_tokens, record.prompt_length, drafter
            )
            run = SessionRun(
                context,
                replayed,
                target,
                draft,
                commits=commits,
                stored=self._sessions.stored,
                lengths=lengths,
                meter=self._meter,
                arrived=arrived,
                reads_beside=not self._config.drafting_delays,
                trial=trial,
            )
            self._sessions.running[session.session_id] = run
        except BaseException:
            commits.remove()
            raise
        return run
