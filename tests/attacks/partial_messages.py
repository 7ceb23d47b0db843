"""A stranger sends all but the end of an 8 MiB message on each of 64 calls of gRPC health. If the
server limits the calls of a connection, she uses several connections.

Held if alice, by gRPC, is without an event for at most `GAP_S`, and the process grows by at most
`GROWTH_MIB` meanwhile and `HELD_S` later."""

import struct
import time
from typing import Final

from tests.attacks.http2 import connections
from tests.attacks.victims import GAP_S, Alice, Doors, judge

NUM_CALLS: Final = 64
MESSAGE_BYTES: Final = 8 * 2**20
HELD_S: Final = 10
GROWTH_MIB: Final = 64
LONGEST_S: Final = 60
METHOD: Final = "/grpc.health.v1.Health/Check"


def attack() -> tuple[bool, str]:
    part = b"\0" + struct.pack(">I", MESSAGE_BYTES) + bytes(MESSAGE_BYTES - 4096)
    with Doors() as doors, Alice(doors, "grpc") as alice:
        alice.wait_for_calm()
        before, num_sent, used, start = doors.forget_peak(), 0, set(), time.monotonic()
        for connection in connections(doors.addresses["grpc"], NUM_CALLS):
            used.add(connection)
            num_sent += connection.data(connection.call(METHOD), part)
            if time.monotonic() - start > LONGEST_S:
                break
        took_s = time.monotonic() - start
        peak = doors.memory_mib("VmHWM") - before
        time.sleep(HELD_S)
        kept, seen = doors.memory_mib() - before, alice.during()
        for one in used:
            one.close()
    return max(peak, kept) <= GROWTH_MIB and seen["longest_gap_s"] <= GAP_S, (
        f"{num_sent / 2**20:.0f} MiB sent in {took_s:.1f} s on {len(used)} connections; growth "
        f"{peak} MiB, {kept} MiB after {HELD_S} s; alice's longest gap {seen['longest_gap_s']} s"
    )


if __name__ == "__main__":
    judge(attack)
