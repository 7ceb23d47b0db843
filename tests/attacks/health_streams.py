"""A stranger opens 8,300 calls of gRPC health and sends no message. If the server limits the calls
of a connection, she uses up to 128 connections.

Held if alice, by gRPC, is without an event for at most `GAP_S`, each health probe at the port for
probes gets its answer within `GAP_S`, a probe at the attacked port does if it is repeated, and the
process grows by at most `GROWTH_MIB`."""

import math
import time
from typing import Any, Final

import grpc

from tests.attacks.http2 import connections
from tests.attacks.victims import GAP_S, Alice, Doors, judge

NUM_CALLS: Final = 8300
HELD_S: Final = 10
GROWTH_MIB: Final = 128
PROBE_S: Final = 5
METHOD: Final = "/grpc.health.v1.Health/Check"


def probe_s(address: str, *, repeats: bool) -> float:
    """The time of a health probe; infinite if it is refused. With `repeats`, a probe that gRPC
    cancels, because too many calls wait, is made again."""
    start = time.monotonic()
    options = [("grpc.use_local_subchannel_pool", 1)]
    while time.monotonic() < start + PROBE_S:
        try:
            channel: Any
            with grpc.insecure_channel(address, options=options) as channel:
                channel.unary_unary(METHOD)(b"", timeout=PROBE_S)
            return time.monotonic() - start
        except grpc.RpcError as error:
            print(f"probe: {error.code().name} {error.details()}", flush=True)
            if not (repeats and error.code() == grpc.StatusCode.CANCELLED):
                break
    return math.inf


def attack() -> tuple[bool, str]:
    with Doors() as doors, Alice(doors, "grpc") as alice:
        alice.wait_for_calm()
        address, probed = doors.addresses["grpc"], doors.addresses["health"]
        print(f"probe before: {probe_s(address, repeats=False):.3f} s")
        before = doors.forget_peak()
        calls = [(one, one.call(METHOD)) for one in connections(address, NUM_CALLS)]
        ends_at, slowest_s, slowest_apart_s = time.monotonic() + HELD_S, 0.0, 0.0
        while time.monotonic() < ends_at:
            slowest_apart_s = max(slowest_apart_s, probe_s(probed, repeats=False))
            slowest_s = max(slowest_s, probe_s(address, repeats=True))
            time.sleep(1)
        num_open = sum(not one.closed and stream not in one.ended for one, stream in calls)
        used = {one for one, _ in calls}
        growth, seen = doors.memory_mib("VmHWM") - before, alice.during()
        for one in used:
            one.close()
    slowest = max(seen["longest_gap_s"], slowest_s, slowest_apart_s)
    return slowest <= GAP_S and growth <= GROWTH_MIB, (
        f"{num_open} of {NUM_CALLS} calls open on {len(used)} connections; alice's longest gap "
        f"{seen['longest_gap_s']} s; slowest probe {slowest_s:.2f} s, at the port for probes "
        f"{slowest_apart_s:.2f} s; growth {growth} MiB"
    )


if __name__ == "__main__":
    judge(attack)
