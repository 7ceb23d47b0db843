"""A gRPC client that takes no data (its window is 0) starts 20 generations of at most 3 s.

Held if none of them runs 15 s later."""

import struct
import time
from typing import Final

from outrider.v1 import coordinator_pb2 as pb
from tests.attacks.http2 import Connection
from tests.attacks.victims import System, judge

NUM_CALLS: Final = 20
DEADLINE_MS: Final = 3000
LATER_S: Final = 15
CALLERS: Final = [{"name": "alice", "tenant": "alice", "concurrency": 64}]


def attack() -> tuple[bool, str]:
    request = pb.GenerateRequest(
        text="hello", max_tokens=2000, deadline_ms=DEADLINE_MS, ignore_eos=True
    ).SerializeToString()
    message = b"\0" + struct.pack(">I", len(request)) + request
    with System(verify_ms=10.0, callers=CALLERS, max_sessions=32) as system:
        client = Connection(system.addresses["grpc"], window=0)
        for _ in range(NUM_CALLS):
            stream = client.call("/outrider.v1.Coordinator/Generate", system.keys["alice"])
            client.data(stream, message, end=True)
        time.sleep(1)
        num_at_first = system.ask()["sessions"]
        time.sleep(LATER_S - 1)
        num_later = system.ask()["sessions"]
        client.close()
    if not num_at_first:
        raise RuntimeError("no session was started")
    return not num_later, (
        f"{num_at_first} sessions run after 1 s, {num_later} after {LATER_S} s, with a deadline of "
        f"{DEADLINE_MS / 1e3:g} s"
    )


if __name__ == "__main__":
    judge(attack)
