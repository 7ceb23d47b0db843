"""Actors that do not answer, and connections to a Ray cluster, with faked calls."""

import asyncio
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray
from ray._common.utils import try_to_create_directory

from outrider.config.deployment import DraftConfig, TargetConfig
from outrider.errors import ConfigError, SettingError, Unavailable
from outrider.fleet import ray_cluster
from outrider.fleet.ray_cluster import MODE, PATH, TOKEN, Actor, RayConnection, check_asks_for_token
from outrider.fleet.replica_set import _all_or_error
from outrider.replica.rank_process import threads_of_a_rank
from outrider.replica.ray_actor import ActorLocation

REFUSED, DOWN = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE


def actor_that(answer: Future[Any]) -> Actor:
    reference = SimpleNamespace(future=lambda: answer)
    return Actor("target", SimpleNamespace(ping=SimpleNamespace(remote=lambda: reference)))


async def test_what_became_of_an_actor_is_told_by_whether_it_says_where_it_runs() -> None:
    answer: Future[Any] = Future()
    answer.set_result(ActorLocation(1, "here"))
    actor = actor_that(answer)
    assert await actor.locate(20.0)
    assert actor.location == ActorLocation(1, "here")
    assert not await actor_that(Future()).locate(0.01)
    died: Future[Any] = Future()
    died.set_exception(ray.exceptions.RayActorError(error_msg="out of\nmemory"))
    with pytest.raises(Unavailable, match="the target actor died: out of memory"):
        await actor_that(died).locate(20.0)


async def test_a_lack_of_place_names_settings_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cluster_resources", "available_resources"):
        monkeypatch.setattr(ray, name, lambda: {"CPU": 1.0})
    cluster = ray_cluster.Cluster("d", local=True)
    demands = [ray_cluster.Demand("coordinator", 1.0, 0.0), ray_cluster.Demand("target", 1.0, 0.5)]
    flags = "--coordinator-num-cpus, --target-num-cpus, --target-num-gpus"
    with pytest.raises(ConfigError, match=rf"; lower {flags}$"):
        await cluster.place(demands, 1.0, 1.0)


async def _after(delay_s: float, outcome: object) -> object:
    await asyncio.sleep(delay_s)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def test_a_rank_that_cannot_start_is_told_of_without_waiting_for_the_others() -> None:
    """A wrong setting is preferred to the error of a rank that ended because of it."""
    with pytest.raises(Unavailable, match="late"):
        await _all_or_error(_after(0, "address"), _after(0.05, Unavailable("late")))
    waits = asyncio.ensure_future(_after(3600, "address"))
    with pytest.raises(ConfigError, match="no such file"):
        await _all_or_error(
            waits, _after(0, Unavailable("ended")), _after(0.05, ConfigError("no such file"))
        )
    await asyncio.sleep(0)
    assert waits.cancelled()


def test_neighbours_share_the_cores() -> None:
    assert threads_of_a_rank(TargetConfig(), 16, 1) == 16
    assert threads_of_a_rank(TargetConfig(), 16, 4) == 4
    assert threads_of_a_rank(DraftConfig(), 2, 4) == 1
    assert threads_of_a_rank(TargetConfig(num_threads=3), 16, 4) == 3


class Head(grpc.GenericRpcHandler):
    """A fake head of Ray. It answers all calls, or ends them with a status."""

    def __init__(self, code: grpc.StatusCode | None) -> None:
        self.code = code

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            assert not [key for key, _ in context.invocation_metadata() if key == "authorization"]
            if self.code is not None:
                context.abort(self.code, "no")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of such a head."""
    server = grpc.server(ThreadPoolExecutor(1), [Head(request.param)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize(
    ("address", "said"),
    [(REFUSED, ""), (None, "requires no token"), (DOWN, r"a token \(UNAVAILABLE")],
    indirect=["address"],
)
def test_only_a_head_that_refuses_strangers_is_taken(
    address: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    with pytest.raises(SettingError, match=f"address: .*{said}") if said else nullcontext():
        check_asks_for_token(address)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    check_asks_for_token(address)


def test_the_users_own_token_is_theirs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {MODE: "token", TOKEN: "own"}
    found: list[dict[str, str]] = []

    def variables() -> dict[str, str]:
        return {name: text for name, text in os.environ.items() if name.startswith("RAY_AUTH")}

    def init(**_: Any) -> None:
        found.append(variables())
        raise ConnectionError

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv(PATH, raising=False)
    for name, text in own.items():
        monkeypatch.setenv(name, text)
    connection = RayConnection("head:1", "outrider-test", token=tmp_path)
    with pytest.raises(SettingError):
        asyncio.run(connection.connect())
    asyncio.run(connection.disconnect())
    assert [*found, variables()] == [{MODE: "token", PATH: str(tmp_path)}, own]


def test_other_users_enter_neither_the_directory_of_a_local_ray_nor_that_of_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray makes its own directory accessible to all users."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    told: list[Path] = []

    def init(_temp_dir: str, **_: Any) -> None:
        try_to_create_directory(_temp_dir)
        told.append(Path(_temp_dir))
        raise ConnectionError

    monkeypatch.setattr(ray, "init", init)
    connection = RayConnection("", "outrider-test", tmp_path / "state" / "secrets")
    with pytest.raises(SettingError):
        asyncio.run(connection.connect())
    [ours] = told[0].relative_to("/tmp").parts[:1]
    token = connection.token
    assert len(token.read_text()) == 64
    modes = [one.stat().st_mode for one in (Path("/tmp", ours), token.parent, token)]
    assert [*map(stat.S_IMODE, modes)] == [0o700, 0o700, 0o600]
    asyncio.run(connection.disconnect())
    assert not Path("/tmp", ours).exists()


@pytest.mark.parametrize("num_late", [0, 1, 2])
async def test_ray_that_starts_late_is_started_once_more(
    num_late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray waits for its own processes for 30 s, whatever the machine is doing."""
    starts: list[str] = []

    def init(**options: Any) -> None:
        starts.append(options["address"])
        if len(starts) <= num_late:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    context = SimpleNamespace(gcs_address="host:1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    connection = RayConnection("host:1", "space")
    if num_late == 2:
        with pytest.raises(SettingError, match="cannot start or reach Ray: The current node timed"):
            await connection.connect()
    else:
        await connection.connect()
    assert starts == ["host:1"] * min(num_late + 1, 2)


def test_only_rays_own_processes_are_in_other_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to this process' group must not end Ray, which starts processes with a
    `preexec_fn`."""

    def session(**options: Any) -> int:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, **options) as child:
            return os.getsid(child.pid)

    sessions: list[int] = []

    def init(**_: object) -> None:
        sessions.append(session(preexec_fn=lambda: None))
        with ThreadPoolExecutor(1) as pool:
            sessions.append(pool.submit(session, preexec_fn=lambda: None).result())

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="h:1"))
    RayConnection("h:1", "outrider-d")._connect()
    sessions.append(session(preexec_fn=lambda: None))
    assert [found == os.getsid(0) for found in sessions] == [False, True, True]
