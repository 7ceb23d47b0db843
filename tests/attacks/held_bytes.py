"""Strangers hold all 256 MiB that a gateway has for bodies, with 65 sockets. 64 of them have sent
4 MiB less 200 bytes, and the last one the rest.

Held if alice, through the gateway, is without an event for at most `GAP_S`, and the process grows
by at most `GROWTH_MIB`."""

from typing import Final

from tests.attacks.slow_bodies import BODY_BYTES, hold
from tests.attacks.victims import GAP_S, Alice, Doors, judge

SECONDS: Final = 20
GROWTH_MIB: Final = 64
SIZES: Final = [BODY_BYTES - 200] * 64 + [64 * 200 - 8]


def attack() -> tuple[bool, str]:
    with Doors() as doors, Alice(doors, "gateway") as alice:
        alice.wait_for_calm()
        before = doors.forget_peak()
        num_lost = hold(doors.addresses["gateway"], SIZES, SECONDS)
        growth, seen = doors.memory_mib("VmHWM") - before, alice.during()
    return seen["longest_gap_s"] <= GAP_S and growth <= GROWTH_MIB, (
        f"{len(SIZES)} sockets, {num_lost} opened again; growth {growth} MiB; alice's longest gap "
        f"{seen['longest_gap_s']} s"
    )


if __name__ == "__main__":
    judge(attack)
