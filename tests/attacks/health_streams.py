"""A stranger opens 8,300 calls of gRPC health and sends no message. If the server limits the calls
of a connection, she uses up to 128 connections.

Held if alice, by gRPC, is without an event for at most `GAP_S`, a health probe gets its answer
within `GAP_S`, and the process grows by at most `GROWTH_MIB`."""

import math
import time
from typing import Final

import grpc

from tests.attacks.http2 import connections
from tests.attacks.victims import GAP_S, Alice, Doors, judge

NUM_CALLS: Final = 8300
HELD_S: Final = 10
GROWTH_MIB: Final = 128
METHOD: Final = "/grpc.health.v1.Health/Check"


def probe_s(address: str) -> float:
    """The time of a health probe; infinite if it is refused."""
    start = time.monotonic()
    options = [("grpc.use_local_subchannel_pool", 1)]
    try:
        with grpc.insecure_channel(address, options=options) as channel:
            channel.unary_unary(METHOD)(b"", timeout=5)
    except grpc.RpcError as error:
        print(f"probe: {error.code().name} {error.details()}", flush=True)
        return math.inf
    return time.monotonic() - start


def attack() -> tuple[bool, str]:
    with Doors() as doors, Alice(doors, "grpc") as alice:
        alice.wait_for_calm()
        address = doors.addresses["grpc"]
        print(f"probe before: {probe_s(address):.3f} s")
        before = doors.forget_peak()
        calls = [(one, one.call(METHOD)) for one in connections(address, NUM_CALLS)]
        ends_at, slowest_s = time.monotonic() + HELD_S, 0.0
        while time.monotonic() < ends_at:
            slowest_s = max(slowest_s, probe_s(address))
            time.sleep(1)
        num_open = sum(not one.closed and stream not in one.ended for one, stream in calls)
        used = {one for one, _ in calls}
        growth, seen = doors.memory_mib("VmHWM") - before, alice.during()
        for one in used:
            one.close()
    is_held = max(seen["longest_gap_s"], slowest_s) <= GAP_S and growth <= GROWTH_MIB
    return is_held, (
        f"{num_open} of {NUM_CALLS} calls open on {len(used)} connections; alice's longest gap "
        f"{seen['longest_gap_s']} s; slowest probe {slowest_s:.2f} s; growth {growth} MiB"
    )


if __name__ == "__main__":
    judge(attack)
