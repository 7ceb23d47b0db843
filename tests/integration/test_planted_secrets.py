"""Neither Ray's data about a deployment nor a list of processes shows a password or key. Ray
answers no call without its token."""

import json
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
from redis_servers import START_S, Server, free_port

from deploy.cli.serve import ask_registry
from deploy.fleet.launcher import Deployment
from deploy.fleet.ray_cluster import check_asks_for_token
from outrider.config import load_config

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("deployment"),
    pytest.mark.timeout(300),
]
PASSWORD, KEY = secrets.token_hex(16), f"key-{secrets.token_hex(16)}"
MARKER = f"marker-{secrets.token_hex(8)}:"
"""The prefix of Redis' keys. Ray knows it and it is no secret, so a search that cannot find
anything is noticed."""
PART_BYTES = 2**24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a Redis server that asks for a password."""
    port = free_port()
    config = f"port {port}\nbind 127.0.0.1\nsave ''\nrequirepass {PASSWORD}\n"
    running = Server(tmp_path_factory.mktemp("redis") / "server", config, port=port)
    give_up_at = time.monotonic() + START_S
    while not running.info(PASSWORD):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    yield port
    running.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(
    server: int, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Deployment]:
    """A deployment that gets each secret in two ways: as a setting, and as an environment
    variable."""
    settings = {
        "engine": "emulated:vocab_size=100", "draft_model": "emulated", "grpc_port": 0, "port": 0,
        "redis_url": f"redis://:{PASSWORD}@127.0.0.1:{server}/0", "redis_key_prefix": MARKER,
        "api_key": KEY, "target_num_cpus": 0.2, "draft_num_cpus": 0.1, "coordinator_num_cpus": 0.1,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_REDIS_PASSWORD", PASSWORD)
        patch.setenv("OUTRIDER_API_KEY", KEY)
        state = tmp_path_factory.mktemp("planted")
        async with Deployment(load_config(settings, {}), state) as started:
            yield started


@dataclass(frozen=True)
class Process:
    pid: int
    words: bytes
    """The command line of a process."""

    @property
    def parent(self) -> int:
        """The parent of a process."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])

    def memory_has(self, secrets: list[bytes]) -> set[bytes]:
        """The texts that are anywhere in the memory of a process."""
        found = set()
        with Path(f"/proc/{self.pid}/mem").open("rb", buffering=0) as memory:
            for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
                place = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
                if place is None:
                    continue
                at, end = (int(number, 16) for number in place.groups())
                before = b""
                while at < end:
                    try:
                        memory.seek(at)
                        part = memory.read(min(PART_BYTES, end - at))
                    except (OSError, ValueError, OverflowError):
                        break
                    if not part:
                        break
                    found |= {one for one in secrets if one in before + part}
                    before, at = part[-200:], at + len(part)
        return found


def processes() -> list[Process]:
    """All files that this user may read."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            found.append(Process(int(place.name), (place / "cmdline").read_bytes()))
        except OSError:
            continue
    return found


async def test_status_reaches_the_redis_that_the_record_names(deployment: Deployment) -> None:
    record = deployment.record
    assert PASSWORD not in json.dumps(asdict(record))
    known, error = await ask_registry(record, 5.0)
    assert error is None
    addresses = {record.grpc_address, *record.target_addresses, *record.draft_addresses}
    assert set(known) == addresses
    without = replace(record, redis=record.redis | {"password_file": ""})
    assert "OUTRIDER_REDIS_PASSWORD" in str(await ask_registry(without, 5.0))


async def test_no_secret_stands_in_a_list_of_processes(deployment: Deployment) -> None:
    token = deployment.ray.token
    assert token is not None
    planted = [PASSWORD.encode(), KEY.encode(), token.read_bytes()]
    for process in processes():
        assert not [one for one in planted if one in process.words], process.words


async def test_no_secret_stands_in_rays_head(deployment: Deployment) -> None:
    """No secret is in the memory or the environment of the processes that know the arguments of
    actors. Files with a secret are readable by their owner only."""
    head = [one for one in processes() if b"gcs_server" in one.words or b"/raylet/" in one.words]
    token = deployment.ray.token
    assert token is not None
    ours = [one for one in head if one.parent == os.getpid()]
    assert len(ours) == 2
    found = [one.memory_has([PASSWORD.encode(), KEY.encode(), MARKER.encode()]) for one in ours]
    assert {MARKER.encode()} in found, "the search finds nothing"
    assert all(one <= {MARKER.encode()} for one in found)
    [log_dir] = re.findall(rb"--log_dir=([^\0]+)", b"".join(sorted(one.words for one in ours)))[:1]
    session, state = Path(log_dir.decode()).parent, token.parent.parent
    for path in (one for place in (session, state) for one in place.rglob("*") if one.is_file()):
        text = path.read_bytes()
        if PASSWORD.encode() in text or KEY.encode() in text:
            assert path == token.parent / "redis.password"
            assert path.stat().st_mode & 0o777 == 0o600


async def test_ray_answers_nobody_without_its_token(deployment: Deployment) -> None:
    token = deployment.ray.token
    assert token is not None
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700
    check_asks_for_token(deployment.ray.found)
