"""Connects to Redis, checks that the server can keep sessions, converts Redis' errors, and runs Lua
scripts. A `ConfigError` names the server by its URL, with the password masked."""

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any
from urllib.parse import unquote, urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, NoScriptError, RedisError, ResponseError

from outrider import errors, limits
from outrider.redis.address import RedisAddress

MINIMUM_VERSION = (6, 2)
_LOADING_POLL_S = 0.1
_PASSING = re.compile(
    r"\b(BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOAUTH|NOPERM|NOREPLICAS|OOM|READONLY|UNBLOCKED"
    r"|ClusterDownError|MasterDownError|NoPermissionError|OutOfMemoryError|ReadOnlyError)\b"
    # Inside a script, Redis 6.2 reports this text in place of NOPERM.
    r"|The user executing the script can't run this command"
)
"""Errors of a server that runs but cannot serve now: the server is busy or failing over, its disk
or memory is full, or a user's rights are changing. The pattern has Redis' codes, and the classes to
which the client library converts some codes. The library does not convert errors in scripts."""
_REPLACED = re.compile(
    r"\b(LOADING|MASTERDOWN|NOREPLICAS|READONLY|UNBLOCKED"
    r"|BusyLoadingError|MasterDownError|ReadOnlyError)\b"
)
"""Errors of a server that may no longer be the primary. The server was demoted or restarted, or is
cut off from its replicas while Sentinel promotes one of them."""


class NotReplicated(RedisError):
    """Too few replicas of Redis have received a write."""


def masked_url(url: str) -> str:
    """Replaces every password in the URL by `***`, even if the URL cannot be parsed."""
    return re.sub(r"(://[^:@/]*):.*@", r"\1:***@", url)


@asynccontextmanager
async def calling(client: redis.asyncio.Redis) -> AsyncIterator[None]:
    """The context of a call. Ends the call after `REDIS_TIMEOUT_MS`, and converts an error of the
    call into an `OutriderError`. If the server fails, or may no longer be the primary, closes idle
    connections. The next call then connects anew, and finds the primary by DNS or by Sentinel. A
    failed call must close its own connection.

    The time is counted in slices. A slice starts when the event loop has handled the end of the
    previous slice. So a pause of this process, such as a garbage collection, uses up only one
    slice. With a single timer, as of redis-py's `socket_timeout`, a pause could end a call whose
    answer arrived during the pause. `socket_timeout` also limits each answer, not the call."""
    loop = asyncio.get_running_loop()
    slice_s = limits.REDIS_TIMEOUT_MS / limits.REDIS_TIMEOUT_SLICES / 1000
    timer: asyncio.TimerHandle

    def tick(left: int) -> None:
        nonlocal timer
        if left == 0:
            scope.reschedule(loop.time())
        else:
            timer = loop.call_later(slice_s, tick, left - 1)

    try:
        async with asyncio.timeout(None) as scope:
            tick(limits.REDIS_TIMEOUT_SLICES)
            try:
                yield
            finally:
                timer.cancel()
    except (RedisError, OSError, TimeoutError) as error:
        if not isinstance(error, ResponseError) or may_be_replaced(error):
            await client.connection_pool.disconnect(inuse_connections=False)
        raise to_our_error(error) from error


def may_be_replaced(error: Exception) -> bool:
    """Whether an error shows that the server may no longer be the primary."""
    return _REPLACED.search(_named(error)) is not None


def to_our_error(error: Exception) -> errors.OutriderError:
    """Returns `StoreUnavailable` for a temporary error, `DataLoss` if a key's value has a type that
    Outrider does not write, and `InvariantError` for a wrong command."""
    if isinstance(error, NotReplicated):
        return errors.StoreUnavailable(f"Redis: {error}; try again")
    if isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError | TimeoutError):
        return errors.StoreUnavailable(f"Redis does not answer ({_first_line(error)}); try again")
    if _PASSING.search(_named(error)):
        return errors.StoreUnavailable(f"Redis cannot serve now ({_first_line(error)}); try again")
    if "WRONGTYPE" in str(error):
        return errors.DataLoss(f"the session in Redis is damaged ({_first_line(error)})")
    return errors.InvariantError(f"Redis refused a command: {_first_line(error)}")


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _first_line(error: BaseException | None) -> str:
    if isinstance(error, MasterNotFoundError):
        # The text also describes each Sentinel's client. Only the errors' names are kept.
        reasons = sorted(set(re.findall(r"\b\w+Error\b", str(error))))
        return ", ".join(["no Sentinel knows a running primary of this service", *reasons])
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def new_client(address: RedisAddress) -> redis.asyncio.Redis:
    """Returns a client that connects at its first call. `without_password` must have removed user
    and password from the URL. The client never retries and has no timeouts, so each call must use
    `calling`."""
    url = address.url
    options: dict[str, Any] = dict.fromkeys(("timeout", "socket_connect_timeout", "socket_timeout"))
    options |= {
        "max_connections": limits.REDIS_CONNECTIONS_MAX,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if address.ca_file and not url.startswith(("rediss://", "rediss+sentinel://")):
        raise errors.SettingError(
            "redis_ca_file", "needs a Redis URL that begins with rediss:// or rediss+sentinel://"
        )
    given = {
        "username": address.username,
        "password": address.password,
        "ssl_ca_certs": address.ca_file,
    }
    options |= {name: text for name, text in given.items() if text}
    try:
        if url.startswith(SCHEMES):
            return _sentinel_client(url, address.sentinel_password or None, options)
        pool = Pool.from_url(url, **options)
    except (TypeError, ValueError):
        # The cause is left out (`from None`), because it may quote the password.
        raise errors.ConfigError(
            f"Redis URL {masked_url(url)} is not one of redis://HOST:PORT/DB, "
            f"rediss://HOST:PORT/DB, unix:///PATH?db=DB, "
            f"redis+sentinel://HOST:PORT[,HOST:PORT...]/SERVICE[/DB], "
            f"rediss+sentinel://HOST:PORT[,HOST:PORT...]/SERVICE[/DB]"
        ) from None
    return redis.asyncio.Redis.from_pool(pool)


async def check_server(client: redis.asyncio.Redis, url: str) -> None:
    """Raises `ConfigError` if the server does not answer, or if `check_info` refuses the server.
    Waits while the server loads its data, and while Sentinels elect a primary."""
    name = f"Redis at {masked_url(url)}"
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    while True:
        try:
            async with calling(client):
                info = await client.info()
            break
        except errors.OutriderError as failure:
            error, wait_ms = failure.__cause__, 0
            line = _first_line(error)
            match error:
                case redis.BusyLoadingError():
                    wait_ms = limits.REDIS_LOADING_MS_MAX
                    reason = (
                        f"is still loading its data after {wait_ms} ms; start again when it is "
                        "ready"
                    )
                case NoPermissionError() | redis.AuthenticationError():
                    reason = f"refuses this user: {line}"
                case ResponseError():
                    reason = f"does not answer INFO: {line}"
                case _:
                    if isinstance(error, MasterNotFoundError):
                        wait_ms = limits.REDIS_ELECTION_MS_MAX
                    reason = f"cannot be reached ({line}); start it, or change --redis-url"
            if loop.time() >= began_at + wait_ms / 1000:
                raise errors.ConfigError(f"{name} {reason}") from error
            await asyncio.sleep(_LOADING_POLL_S)
    check_info(name, info)


def check_info(name: str, info: dict[str, Any]) -> None:
    """Raises `ConfigError` if a server cannot keep sessions. `info` is its answer to INFO."""
    version, policy = str(info.get("redis_version", "0")), info.get("maxmemory_policy", "unknown")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    reason = ""
    if info.get("redis_mode") == "sentinel":
        reason = "is a Sentinel; give redis+sentinel://HOST:PORT[,HOST:PORT...]/SERVICE[/DB]"
    elif numbers < MINIMUM_VERSION:
        reason = f"has version {version}; 6.2 or newer is needed"
    elif policy != "noeviction":
        reason = (
            f"has maxmemory-policy {policy}, so it may drop sessions; "
            "set maxmemory-policy noeviction"
        )
    elif info.get("role") == "slave":
        reason = "is a read-only replica; give the URL of its primary"
    elif info.get("cluster_enabled"):
        reason = "runs in cluster mode, which is not supported; use one server"
    if reason:
        raise errors.ConfigError(f"{name} {reason}")


class Pool(redis.asyncio.BlockingConnectionPool):
    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Closes all connections, or only idle ones. Unlike the library's method, closes idle ones
        without suspending. During suspension, another task could take a half-closed connection."""
        if inuse_connections:
            await super().disconnect()
            return
        for connection in self._available_connections:
            await connection.disconnect(nowait=True)


SCHEMES = ("redis+sentinel://", "rediss+sentinel://")
_PORT = 26_379


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.netloc != text:
        raise ValueError("a Sentinel is not HOST or HOST:PORT")
    return parts.hostname, parts.port or _PORT


class _Pool(SentinelConnectionPool, Pool): ...


class _Client(redis.asyncio.Redis):
    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        pool: Any = self.connection_pool
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def _sentinel_client(
    url: str, sentinel_password: str | None, options: dict[str, Any]
) -> redis.asyncio.Redis:
    """Returns a client that asks the URL's Sentinels for the primary, and connects to the primary.
    With `rediss+sentinel://`, connections to Sentinels and to servers use TLS. The client asks one
    Sentinel after another, and waits `REDIS_SENTINEL_TIMEOUT_MS` for each answer. Raises
    `ValueError` if the URL is malformed."""
    scheme, _, rest = url.partition("://")
    hosts, _, path = rest.partition("/")
    service, _, db = path.partition("/")
    if not service or any(sign in path for sign in "?#@") or not (db or "0").isdecimal():
        raise ValueError("the path is not /SERVICE[/DB]")
    options["ssl"] = scheme == "rediss+sentinel"
    timeout_s = limits.REDIS_SENTINEL_TIMEOUT_MS / 1000
    shared = ("ssl", "ssl_ca_certs", "retry", "protocol")
    of_sentinels = {name: options[name] for name in shared if name in options} | {
        "password": sentinel_password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
    }
    addresses = [_host_and_port(host) for host in hosts.split(",")]
    sentinel: Any = Sentinel(addresses, sentinel_kwargs=of_sentinels)  # type: ignore[no-untyped-call]
    client: redis.asyncio.Redis = sentinel.master_for(
        unquote(service),
        redis_class=_Client,
        connection_pool_class=_Pool,
        db=int(db or 0),
        **options,
    )
    return client


class Script:
    """A Lua script, joined from files of `lua/`, and the hash that names the script in Redis."""

    def __init__(self, *names: str, replicated: bool = False) -> None:
        self.replicated = replicated
        folder = resources.files("outrider.sessions") / "lua"
        self.source = "\n".join((folder / f"{name}.lua").read_text() for name in names)
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


_WRITE = """
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('SET', KEYS[1], 1, 'PX', ARGV[1])
"""
"""Writes a key for some milliseconds, even if Redis' memory is full: Redis refuses a SET then, but
not in a script that has written before."""
Call = tuple[Sequence[str], Sequence[str | int | bytes]]  # the keys and arguments of a script's run


class ScriptRunner:
    """Runs scripts on one server."""

    def __init__(
        self, client: redis.asyncio.Redis, wait_replicas: int = 0, replicated_key: str = ""
    ) -> None:
        """A replicated script succeeds only once `wait_replicas` replicas of Redis have its writes
        and all earlier writes. But Redis' WAIT covers writes only up to the last write on its own
        connection, and a script may write nothing. So `replicated_key` is written before WAIT."""
        self._client = client
        self._wait_replicas = wait_replicas
        self._replicated_key = replicated_key
        self._waiting: dict[Script, deque[tuple[Call, asyncio.Future[Any]]]] = {}
        """For each script whose round trip runs, the calls that wait for the next round trip."""
        self._senders: set[asyncio.Task[None]] = set()

    async def run(self, script: Script, call: Call) -> Any:
        """Runs a script. All calls during a round trip share the next round trip."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if script not in self._waiting:
            self._waiting[script] = deque()
            sender = asyncio.create_task(self._send_waiting(script))
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        self._waiting[script].append((call, future))
        answer = await future
        if isinstance(answer, errors.OutriderError):
            raise answer
        return answer

    async def run_all(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Runs a script once per call, all in one round trip. Returns, in order, each run's answer
        or its `OutriderError`. An answer that is a list may have an `OutriderError` in place of an
        element. Raises `StoreUnavailable` if any run, or a part of it, could not be served. If the
        server does not know the script yet, a second round trip sends the script."""
        if not calls:
            return []
        answers = await self._send(script, calls)
        if unknown := [i for i, a in enumerate(answers) if isinstance(a, NoScriptError)]:
            again = await self._send(script, [calls[i] for i in unknown], load=True)
            for index, answer in zip(unknown, again, strict=True):
                answers[index] = answer
        return _with_our_errors(answers)

    async def close(self) -> None:
        """Waits for running round trips."""
        await asyncio.gather(*self._senders, return_exceptions=True)

    async def _send_waiting(self, script: Script) -> None:
        """Makes round trips until no run waits. If a round trip fails, all waiting runs fail, so
        that no caller waits for longer than one timeout."""
        waiting = self._waiting[script]
        while waiting:
            size = min(len(waiting), limits.CALLS_PER_PIPELINE_MAX)
            batch = [waiting.popleft() for _ in range(size)]
            try:
                answers = await self.run_all(script, [call for call, _ in batch])
            except Exception as error:  # noqa: BLE001 (passed to all callers)
                if not isinstance(error, errors.OutriderError):
                    error = errors.InvariantError(f"a script was not run: {error!r}")
                batch.extend(waiting)
                waiting.clear()
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
        del self._waiting[script]

    async def _send(self, script: Script, calls: Sequence[Call], load: bool = False) -> list[Any]:
        """Returns each run's answer or error."""
        pipeline = self._client.pipeline(transaction=False)
        if load:
            pipeline.script_load(script.source)
        for keys, arguments in calls:
            pipeline.evalsha(script.sha, len(keys), *keys, *arguments)
        num_replicas = self._wait_replicas if script.replicated else 0
        if num_replicas:
            pipeline.eval(_WRITE, 1, self._replicated_key, limits.REDIS_WAIT_MS)
            pipeline.wait(num_replicas, limits.REDIS_WAIT_MS)
        async with calling(self._client):
            answers = await pipeline.execute(raise_on_error=False)
            for error in _errors(answers):
                if may_be_replaced(error):
                    raise error
            if num_replicas:
                *answers, written, num_synced = answers
                for answer in (written, num_synced):
                    if isinstance(answer, Exception):
                        raise answer
                if num_synced < num_replicas:
                    reason = f"{num_synced} of {num_replicas} replicas have received a write"
                    raise NotReplicated(f"{reason} after {limits.REDIS_WAIT_MS} ms")
        return answers[1:] if load else answers


def _errors(answers: Sequence[Any]) -> Iterator[Exception]:
    """Yields the errors among answers, and among the elements of answers that are lists."""
    for answer in answers:
        if isinstance(answer, list):
            yield from _errors(answer)
        elif isinstance(answer, Exception):
            yield answer


def _with_our_errors(answers: Sequence[Any]) -> list[Any]:
    """Converts the errors that `_errors` yields. Raises a `StoreUnavailable`."""
    ours: list[Any] = []
    for answer in answers:
        if isinstance(answer, list):
            answer = _with_our_errors(answer)
        elif isinstance(answer, Exception):
            answer = to_our_error(answer)
            if isinstance(answer, errors.StoreUnavailable):
                raise answer
        ours.append(answer)
    return ours
