"""A deployment on local Ray of two models of two ranks, whose secrets no other user finds."""

import asyncio
import json
import os
import re
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from outrider.cli.serve import InRegistry, ask_registry
from outrider.client import Client, GenerateRequest
from outrider.config.deployment import load_config
from outrider.fleet.launcher import Deployment
from outrider.fleet.ray_cluster import check_asks_for_token
from outrider.models.loading import load_model
from outrider.speculation.sampling_params import SamplingParams
from tests.support.models import byte_level_tokenizer, save_tiny_model
from tests.support.redis_servers import START_S, Server, free_port
from tests.support.stack import until

PROMPT = tuple(range(10, 30))
VOCAB_SIZE = 320
NUM_TOKENS = 24
END_S = 150.0
"""Ray looks again for a place that it has not found, after longer and longer delays."""
PASSWORD, KEY = secrets.token_hex(16), f"key-{secrets.token_hex(16)}"
MARKER = f"marker-{secrets.token_hex(8)}:"
"""The prefix of Redis' keys. Ray knows it, so a search that cannot find anything is noticed."""
PART_BYTES = 2**24

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("shared"),
    pytest.mark.timeout(3 * END_S),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    tokenizer = byte_level_tokenizer(VOCAB_SIZE)
    for seed, name in enumerate(("target", "draft")):
        save_tiny_model(directory / name, seed=seed, vocab_size=VOCAB_SIZE, tokenizer=tokenizer)
    return directory


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
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
async def shared(
    models: Path, redis_port: int, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Deployment]:
    """Two ranks of each model. Each secret comes as a setting and as an environment variable."""
    settings = {
        "model": str(models / "target"),
        "draft_model": str(models / "draft"),
        "device": "cpu",
        "dtype": "float32",
        "grpc_port": 0,
        "port": 0,
        "stop_timeout_s": 0,
        "length_control": False,
        "tensor_parallel_size": 2,
        "draft_tensor_parallel_size": 2,
        "api_key": KEY,
        "redis_url": f"redis://:{PASSWORD}@127.0.0.1:{redis_port}/0",
        "redis_key_prefix": MARKER,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_REDIS_PASSWORD", PASSWORD)
        patch.setenv("OUTRIDER_API_KEY", KEY)
        state = tmp_path_factory.mktemp("shared")
        async with Deployment(load_config(settings, {}), state) as started:
            yield started


async def _greedy(deployment: Deployment, num_draft_tokens: int) -> tuple[int, ...]:
    request = GenerateRequest(
        PROMPT,
        sampling=SamplingParams(temperature=0.0),
        max_tokens=NUM_TOKENS,
        num_draft_tokens=num_draft_tokens,
    )
    async with Client(deployment.address, api_key=KEY) as client:
        completion = await client.complete(request)
    if num_draft_tokens:
        assert completion.metrics.num_draft_tokens > 0
    return tuple(completion.token_ids)


async def test_shared_models_write_what_the_whole_target_writes(
    shared: Deployment, models: Path
) -> None:
    module, _ = load_model(models / "target")
    written = module.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False)
    expected = tuple(written[0, len(PROMPT) :].tolist())
    for num_draft_tokens in (0, 4):
        assert await _greedy(shared, num_draft_tokens) == expected


@dataclass(frozen=True)
class Process:
    pid: int
    words: bytes

    @property
    def parent(self) -> int:
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])

    def memory_has(self, secrets: list[bytes]) -> set[bytes]:
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
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.append(Process(int(place.name), (place / "cmdline").read_bytes()))
    return found


async def test_status_reaches_the_redis_that_the_record_names(shared: Deployment) -> None:
    def addresses() -> set[str]:
        record = shared.record
        return {record.grpc_address, *record.target_addresses, *record.draft_addresses}

    record, found = shared.record, InRegistry()
    assert PASSWORD not in json.dumps(asdict(record))
    async with asyncio.timeout(END_S):  # A replica that has just died is listed for a while.
        while set(found.replicas) != addresses() or found.starts:
            found = await ask_registry(record)
            assert found.error is None
            await asyncio.sleep(0.1)
    without = replace(record, redis=record.redis | {"password_file": ""})
    assert "OUTRIDER_REDIS_PASSWORD" in str((await ask_registry(without)).error)


async def test_no_secret_stands_in_a_list_of_processes(shared: Deployment) -> None:
    planted = [PASSWORD.encode(), KEY.encode(), shared.ray.token.read_bytes()]
    for process in processes():
        assert not [one for one in planted if one in process.words], process.words


async def test_no_secret_stands_in_rays_head(shared: Deployment) -> None:
    """No secret is in the memory or the environment of the processes that know the arguments of
    actors. Files with a secret are readable by their owner only."""
    head = [one for one in processes() if b"gcs_server" in one.words or b"/raylet/" in one.words]
    token = shared.ray.token
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


async def test_ray_answers_no_call_without_its_token(shared: Deployment) -> None:
    check_asks_for_token(shared.ray.gcs_address)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_replica_that_any_rank_leaves_or_in_which_it_hangs_is_replaced(
    shared: Deployment, fault: signal.Signals
) -> None:
    before = shared.overview.of("target")[0]
    serving, other = before.locations
    os.kill(other.pid, fault)
    assert len(await _greedy(shared, 4)) == NUM_TOKENS
    ranks = [Path(f"/proc/{one.pid}") for one in (serving, other)]
    await until(
        lambda: not any(one.exists() for one in ranks) and shared.overview.addresses("target"),
        END_S,
    )
    assert shared.overview.of("target")[0].name != before.name
    assert shared.overview.failed_role is None
