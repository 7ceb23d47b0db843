"""Which replicas a session has: each coordinator places its own, by `rendezvous.choose`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from outrider.fleet_simulator.stations import Coordinator, Session, Station
from outrider.registry.affinity import choose

Side = Literal["target", "draft"]


class Places:
    """Where sessions are, by coordinator and role."""

    def __init__(
        self,
        targets: Sequence[Station],
        drafts: Sequence[Station],
        coordinators: Sequence[Coordinator],
        seats: Mapping[Side, int],
    ) -> None:
        """`seats` is how many sessions share a step of a replica."""
        self._seats = seats
        self._stations = {one.name: one for one in (*targets, *drafts)}
        self._coordinators = coordinators
        for one in coordinators:
            one.loads["target"] = {target.name: 0 for target in targets}
            one.loads["draft"] = {draft.name: 0 for draft in drafts}

    def open(self, session: Session, number: int, sessions_max: int) -> bool:
        """Gives a session, the one of this number, to a coordinator that has fewer than so many;
        False where there is none."""
        roomy = [one for one in self._present() if one.num_sessions < sessions_max]
        if not roomy:
            return False
        self._enter(session, roomy[number % len(roomy)])
        return True

    def close(self, session: Session) -> None:
        """The session is over."""
        self.leave(session, "target")
        self.leave(session, "draft")
        if session.coordinator is not None:
            session.coordinator.num_sessions -= 1
            session.coordinator = None

    def settle(self, session: Session, side: Side) -> bool:
        """Finds a place with a replica of this side; False where none is there."""
        coordinator = session.coordinator
        if coordinator is None:
            return False
        name = choose(session.key, coordinator.loads[side], self._seats[side])
        if name is None:
            return False
        coordinator.loads[side][name] += 1
        setattr(session, side, self._stations[name])
        return True

    def leave(self, session: Session, side: Side) -> None:
        """Gives its place back."""
        place: Station | None = getattr(session, side)
        self._count(session, side, place, -1)
        setattr(session, side, None)

    def resume(self, session: Session) -> bool:
        """Gives a session to another coordinator, with the replicas that hold its tokens; False
        where there is none."""
        present = self._present()
        if not present:
            return False
        target, draft = session.target, session.draft
        self.close(session)
        self._enter(session, min(present, key=lambda one: one.num_sessions))
        session.target, session.draft = target, draft
        self._count(session, "target", target, 1)
        self._count(session, "draft", draft, 1)
        return True

    def lose(self, name: str) -> None:
        """A replica is gone: nobody is sent there."""
        for coordinator in self._coordinators:
            for loads in coordinator.loads.values():
                loads.pop(name, None)

    def take_in(self, side: Side, name: str) -> None:
        """It is there again, with nobody."""
        for coordinator in self._coordinators:
            coordinator.loads[side][name] = 0

    def loads(self, side: Side) -> Sequence[Mapping[str, int]]:
        """Sessions by replica, of each coordinator."""
        return [one.loads[side] for one in self._coordinators]

    def _present(self) -> list[Coordinator]:
        return [one for one in self._coordinators if one.lost_at is None]

    def _enter(self, session: Session, coordinator: Coordinator) -> None:
        session.coordinator = coordinator
        coordinator.num_sessions += 1

    def _count(self, session: Session, side: Side, place: Station | None, change: int) -> None:
        if place is None or session.coordinator is None:
            return
        loads = session.coordinator.loads[side]
        if place.name in loads:
            loads[place.name] += change
