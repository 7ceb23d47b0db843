"""Whatever replicas there are, the steps lead to as many as are wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deploy.fleet.replica_set import Steps, next_steps
from deploy.fleet.status import ReplicaView
from outrider.registry.registry import ROLES, Role

WANTED = st.dictionaries(st.sampled_from(ROLES), st.integers(0, 5))
HELD_BACK = st.sets(st.sampled_from(ROLES))


def view(
    role: Role, age: int, serves: bool = True, leaves: bool = False, stale: bool = False
) -> ReplicaView:
    return ReplicaView(f"{role}-{age}", role, "h:1" if serves else "", leaves, stale)


@st.composite
def fleets(draw: st.DrawFn) -> list[ReplicaView]:
    kinds = draw(
        st.lists(st.tuples(st.sampled_from(ROLES), st.booleans(), st.booleans()), max_size=12)
    )
    return [view(role, age, serves, leaves) for age, (role, serves, leaves) in enumerate(kinds)]


def after(fleet: Sequence[ReplicaView], steps: Steps) -> list[ReplicaView]:
    """The fleet once the steps are done."""
    age = 1 + max((int(one.name.rpartition("-")[2]) for one in fleet), default=0)
    left = [replace(one, leaves=one.leaves or one.name in steps.leaves) for one in fleet]
    return left + [view(role, age + n, serves=False) for n, role in enumerate(steps.starts)]


def staying(fleet: Sequence[ReplicaView]) -> Counter[Role]:
    return Counter(one.role for one in fleet if not one.leaves)


@given(WANTED, fleets())
def test_then_there_are_as_many_as_are_wanted(
    wanted: Mapping[Role, int], fleet: list[ReplicaView]
) -> None:
    """None of a role that nobody wants; those that leave already are not counted."""
    done = after(fleet, next_steps(wanted, fleet))
    assert staying(done) == Counter(wanted)
    assert next_steps(wanted, done) == Steps((), ())


@given(WANTED, fleets())
def test_no_more_is_done_than_is_needed(
    wanted: Mapping[Role, int], fleet: list[ReplicaView]
) -> None:
    before, steps = staying(fleet), next_steps(wanted, fleet)
    num_other = sum(abs(wanted.get(role, 0) - before[role]) for role in ROLES)
    assert len(steps.starts) + len(steps.leaves) == num_other
    assert len(set(steps.leaves)) == len(steps.leaves)
    assert set(steps.leaves) <= {one.name for one in fleet if not one.leaves}


@given(WANTED, fleets(), HELD_BACK)
def test_what_is_held_back_is_not_started_but_may_leave(
    wanted: Mapping[Role, int], fleet: list[ReplicaView], held_back: Collection[Role]
) -> None:
    freely, held = next_steps(wanted, fleet), next_steps(wanted, fleet, held_back)
    assert held.starts == tuple(role for role in freely.starts if role not in held_back)
    assert held.leaves == freely.leaves


@given(st.lists(st.booleans(), min_size=2, max_size=6))
def test_those_that_serve_stay_before_others_and_then_the_oldest(serving: list[bool]) -> None:
    """However many stay."""
    fleet = [view("draft", age, serves) for age, serves in enumerate(serving)]
    for num_wanted in range(1, len(fleet)):
        left = next_steps({"draft": num_wanted}, fleet).leaves
        worth = {one.name: (bool(one.address), -age) for age, one in enumerate(fleet)}
        assert max(worth[name] for name in left) < min(
            value for name, value in worth.items() if name not in left
        )


def test_coordinators_come_first_and_a_role_that_is_too_many_changes_no_other() -> None:
    fleet = [view("draft", 0), view("draft", 1, serves=False), view("draft", 2)]
    assert next_steps({"draft": 1, "target": 2, "coordinator": 1}, fleet) == Steps(
        ("coordinator", "target", "target"), ("draft-1", "draft-2")
    )


class Rolling:
    """A fleet of which the plan has changed."""

    def __init__(
        self, in_place: Collection[Role] = (), room: int | None = None, **counts: int
    ) -> None:
        """`room`: how many replicas of a role there can be, where that is fewer than are wanted;
        others, once they are started, have gone when the next step is done."""
        self.wanted: dict[Role, int] = dict(counts)  # type: ignore[arg-type]
        self.in_place = in_place
        self.room = room
        roles = [role for role in ROLES for _ in range(self.wanted.get(role, 0))[:room]]
        self.fleet = [view(role, age, stale=True) for age, role in enumerate(roles)]

    def step(self) -> Steps:
        """What is done next; whatever was begun before has ended."""
        there = [one for one in self.fleet if not one.leaves]
        placed = {
            one for role in ROLES for one in [one for one in there if one.role == role][: self.room]
        }
        self.fleet = [replace(one, address="h:1") for one in there if one in placed]
        crowded = {one.role for one in there if one not in placed}
        steps = next_steps(self.wanted, self.fleet, (), self.in_place, crowded)
        self.fleet = after(self.fleet, steps)
        return steps

    def serving(self, role: Role) -> int:
        return sum(one.role == role and bool(one.address) and not one.leaves for one in self.fleet)


def test_stale_ones_are_replaced_one_by_one_and_role_by_role() -> None:
    """Never fewer serve than are wanted, nor are there more than one more; while the new one loads
    nothing else is done."""
    world = Rolling(draft=1, target=2, coordinator=1)
    order: list[str] = []
    while (steps := world.step()) != Steps((), ()):
        order += [f"+{role}" for role in steps.starts] + [f"-{name}" for name in steps.leaves]
        if steps.starts:
            assert next_steps(world.wanted, world.fleet) == Steps((), ())
        assert all(world.serving(role) >= world.wanted[role] for role in ROLES)
    assert order == [
        "+draft", "-draft-3", "+target", "-target-2", "+target", "-target-1", "+coordinator",
        "-coordinator-0",
    ]  # fmt: skip
    assert not any(one.stale for one in world.fleet)


def test_where_there_is_no_room_one_leaves_before_another_comes() -> None:
    world = Rolling(["target"], target=2)
    order: list[Steps] = []
    for _ in range(4):
        order.append(world.step())
        assert next_steps(world.wanted, world.fleet, (), ["target"]) == Steps((), ())
        assert world.serving("target") >= 1
    assert order == [
        Steps((), ("target-1",)), Steps(("target",), ()), Steps((), ("target-0",)),
        Steps(("target",), ()),
    ]  # fmt: skip


def test_stale_ones_are_replaced_where_there_is_no_place_for_all_that_are_wanted() -> None:
    """At most one fewer serves than there is room for, and other roles have their turn."""
    world = Rolling(["target"], room=3, target=4, coordinator=1)
    for _ in range(20):
        world.step()
        assert world.serving("target") >= 2
    assert world.serving("target") == 3
    assert not any(one.stale for one in world.fleet)


def test_the_last_that_is_there_does_not_leave_for_one_that_may_never_come() -> None:
    """Unless it is the only one that is wanted."""
    last = view("target", 0, stale=True)
    roles: tuple[Role, ...] = ("target",)
    assert next_steps({"target": 2}, [last], (), roles, roles) == Steps(("target",), ())
    assert next_steps({"target": 1}, [last], (), roles, roles) == Steps((), ("target-0",))


def test_of_too_many_stale_ones_leave_first() -> None:
    fleet = [
        view("target", 0),
        view("target", 1, stale=True),
        view("target", 2),
    ]
    assert next_steps({"target": 2}, fleet) == Steps((), ("target-1",))
    assert next_steps({"target": 1}, fleet) == Steps((), ("target-1", "target-2"))
