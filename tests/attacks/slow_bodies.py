"""Strangers take every connection of a gateway that may open 512 files, with bodies that arrive
byte by byte. They open each lost connection again.

Held if alice, through the gateway, is without an event for at most `GAP_S`."""

import socket
import time
from collections.abc import Sequence
from typing import Final

from tests.attacks.victims import GAP_S, STRANGER, Alice, Doors, judge

SECONDS: Final = 30
PAUSE_S: Final = 6
FILES: Final = 512
BODY_BYTES: Final = 4 * 2**20
HEAD: Final = (
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    f"Content-Length: {BODY_BYTES}\r\n\r\n"
).encode()


def begun(address: str, num_bytes: int) -> socket.socket | None:
    """A request whose body has begun, or None if it was refused."""
    host, port = address.split(":")
    try:
        one = socket.create_connection((host, int(port)), 5, (STRANGER, 0))
        one.sendall(HEAD + b" " * num_bytes)
    except OSError:
        return None
    return one


def hold(address: str, sizes: Sequence[int], seconds: float) -> int:
    """Holds a request for each of these sizes, with so many bytes of its body. Sends one more byte
    of each every `PAUSE_S`. Returns how often a lost request was opened again."""
    ends_at, num_lost = time.monotonic() + seconds, 0
    held = [begun(address, size) for size in sizes]
    while time.monotonic() < ends_at:
        time.sleep(PAUSE_S)
        for index, one in enumerate(held):
            try:
                if one is None:
                    raise OSError
                one.sendall(b" ")
            except OSError:
                num_lost += 1
                if one is not None:
                    one.close()
                held[index] = begun(address, sizes[index])
    for one in held:
        if one is not None:
            one.close()
    return num_lost


def attack() -> tuple[bool, str]:
    with Doors(files=FILES) as doors, Alice(doors, "gateway") as alice:
        alice.wait_for_calm()
        places = doors.ask()["places"]["gateway"]
        num_lost = hold(doors.addresses["gateway"], [0] * places, SECONDS)
        seen = alice.during()
    return seen["longest_gap_s"] <= GAP_S, (
        f"{places} sockets for {places} places, {num_lost} opened again; alice's longest gap "
        f"{seen['longest_gap_s']} s"
    )


if __name__ == "__main__":
    judge(attack)
