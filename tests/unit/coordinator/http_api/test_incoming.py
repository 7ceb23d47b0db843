"""What a server's process keeps of the bodies that it has read."""

import subprocess
import sys

_PROGRAM = """
from pathlib import Path
from coordinator.http_api.incoming import IncomingBodies

MIB = 2**20

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // MIB

IncomingBodies()
bytes(8 * MIB)  # Freed at once. By default, glibc takes such blocks from its heap from now on.
before = resident_mib()
bodies = []
for _ in range(32):
    bodies.append(b"x" * (4 * MIB))
    bodies.append(bytes(64 * 1024))  # Lies behind the larger block.
del bodies[::2]
print(resident_mib() - before)
"""


def test_memory_of_bodies_goes_back_to_the_system() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) < 16
