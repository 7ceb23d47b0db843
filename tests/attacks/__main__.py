"""`python -m tests.attacks [NAME ...]`: runs attacks one after the other, all by default. A
*stranger* has no key and the address `STRANGER`, *mallory* has a key, and *alice* is the victim.

Prints a line for each attack. The exit code is 1 if an attack succeeded or could not be run."""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ATTACKS: Final = (
    "partial_messages",
    "health_streams",
    "blocking_bodies",
    "refused_bodies",
    "slow_bodies",
    "held_bytes",
    "redis_fill",
    "tokenizing",
    "constraints",
    "kept_bodies",
    "unread_streams",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=(*ATTACKS, []), metavar="NAME")
    names = parser.parse_args().names or ATTACKS
    is_held = [_is_held(name) for name in names]
    print(f"attacks={len(is_held)} failed={len(is_held) - sum(is_held)}")
    return 0 if all(is_held) else 1


def _is_held(name: str) -> bool:
    """Runs an attack in a process of its own, because attacks leave threads and sockets behind."""
    start = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-m", f"tests.attacks.{name}"],
        cwd=Path(__file__).parents[2],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    seconds = time.monotonic() - start
    if found.returncode:
        print(found.stdout, end="")
    told = found.stdout.splitlines()[-1:]
    print(f"{name} ({seconds:.0f} s): {'held' if not found.returncode else 'FAILED'}", *told)
    sys.stdout.flush()
    return not found.returncode


if __name__ == "__main__":
    sys.exit(main())
