"""What is to be done so that there are as many replicas as are wanted. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.registry.registry import ROLES, Role


@dataclass(frozen=True, slots=True)
class Standing:
    """A replica as far as has been done."""

    name: str
    role: Role
    age: int
    """Its place in the order in which replicas were started: the youngest has the largest."""
    serves: bool
    """Whether it has started."""
    leaves: bool
    """Whether it is to be left, and will end."""
    stale: bool = False
    """Whether it was started by another plan than the one that holds."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What to do next."""

    starts: tuple[Role, ...]
    leaves: tuple[str, ...]
    """Names of those that are not wanted any more."""


ROLLING: Final[tuple[Role, ...]] = ("draft", "target", "coordinator")
"""Whose stale replicas are replaced first, and then."""


def next_steps(
    wanted: Mapping[Role, int],
    fleet: Sequence[Standing],
    held_back: Collection[Role] = (),
    in_place: Collection[Role] = (),
    crowded: Collection[Role] = (),
) -> Steps:
    """As many starts as replicas are missing, but none of a role that is `held_back`; of those that
    are too many such as do not serve yet leave first, then stale ones, then the youngest.

    Where none is missing, one that is stale is replaced, of one role after the other: another one
    is started, and the stale one leaves once that serves; or, of a role whose replicas are replaced
    `in_place`, it leaves first, and another one is started once it has gone. So it does of a
    `crowded` role even where some are missing, as there is no place for them: but never the last
    that is there, for nobody knows when another one will be."""
    starts: list[Role] = []
    leaves: list[str] = []
    stale = {one.role for one in fleet if one.stale and not one.leaves}
    rolled = next((role for role in ROLLING if role in stale), None)
    for role in ROLES:
        stay = [one for one in fleet if one.role == role and not one.leaves]
        stay.sort(key=lambda one: (one.serves, not one.stale, -one.age))
        num_more = wanted.get(role, 0) - len(stay)
        if role == rolled and all(one.serves for one in stay):
            if num_more == 0:
                num_more = -1 if role in in_place else 1
            elif num_more > 0 and role in crowded and len(stay) > 1:
                num_more = -1
        elif role == rolled and num_more < 0:
            num_more += 1  # The one that comes in the place of another.
        is_held = role in held_back or (role in in_place and _is_making_room(role, fleet))
        if num_more > 0 and not is_held:
            starts += [role] * num_more
        if num_more < 0:
            leaves += [one.name for one in stay[:-num_more]]
    return Steps(tuple(starts), tuple(leaves))


def _is_making_room(role: Role, fleet: Sequence[Standing]) -> bool:
    return any(one.role == role and one.stale and one.leaves for one in fleet)
