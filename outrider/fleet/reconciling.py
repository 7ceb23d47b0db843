"""What is to be done so that there are as many replicas as are wanted. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .registry import ROLES, Role


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


@dataclass(frozen=True, slots=True)
class Steps:
    """What to do next."""

    starts: tuple[Role, ...]
    leaves: tuple[str, ...]
    """Names of those that are not wanted any more."""


def next_steps(
    wanted: Mapping[Role, int], fleet: Sequence[Standing], held_back: Collection[Role] = ()
) -> Steps:
    """As many starts as replicas are missing, but none of a role that is `held_back`; of those that
    are too many such as do not serve yet leave first, and then the youngest."""
    starts: list[Role] = []
    leaves: list[str] = []
    for role in ROLES:
        stay = [one for one in fleet if one.role == role and not one.leaves]
        num_missing = wanted.get(role, 0) - len(stay)
        if num_missing > 0 and role not in held_back:
            starts += [role] * num_missing
        if num_missing < 0:
            stay.sort(key=lambda one: (one.serves, -one.age))
            leaves += [one.name for one in stay[:-num_missing]]
    return Steps(tuple(starts), tuple(leaves))
