"""Runs Lua scripts in Redis. Runs of several callers share round trips."""

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from importlib import resources
from typing import Any

import redis.asyncio
from redis.exceptions import NoScriptError, ResponseError

from outrider.errors import InvariantError, OutriderError, StoreUnavailable
from outrider.limits import CALLS_PER_PIPELINE_MAX, REDIS_WAIT_MS
from outrider.sessions.redis_connection import NotReplicated, calling, may_be_replaced, to_our_error


class Script:
    """A script of concatenated files of `lua/`, and the hash by which Redis knows the script."""

    def __init__(self, *names: str, replicated: bool = False) -> None:
        self.replicated = replicated
        folder = resources.files("outrider.sessions") / "lua"
        self.source = "\n".join((folder / f"{name}.lua").read_text() for name in names)
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


Call = tuple[Sequence[str], Sequence[str | int | bytes]]


class ScriptRunner:
    """Runs scripts on one server."""

    def __init__(
        self, client: redis.asyncio.Redis, wait_replicas: int = 0, replicated_key: str = ""
    ) -> None:
        """A replicated script succeeds only once `wait_replicas` replicas have its writes and all
        earlier writes. The command WAIT waits only for earlier writes of the same connection. A
        script may write nothing, so `replicated_key` is set on the connection before each WAIT."""
        self._client = client
        self._wait_replicas = wait_replicas
        self._replicated_key = replicated_key
        self._waiting: dict[Script, deque[tuple[Call, asyncio.Future[Any]]]] = {}
        """The runs that wait for the next round trip of a script. A script has an entry while a
        task sends its runs."""
        self._senders: set[asyncio.Task[None]] = set()

    async def run(self, script: Script, call: Call) -> Any:
        """Returns the answer to one run. Runs that begin during a round trip of the script share
        the next round trip. Raises the run's error."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if script not in self._waiting:
            self._waiting[script] = deque()
            sender = asyncio.create_task(self._send_waiting(script))
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        self._waiting[script].append((call, future))
        answer = await future
        if isinstance(answer, OutriderError):
            raise answer
        return answer

    async def run_all(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Runs a script once per call, all in one round trip. Returns, in order, each run's answer
        or its `OutriderError`. Raises `StoreUnavailable` if any run could not be served. The first
        run on a server that does not know the script costs a second round trip."""
        if not calls:
            return []
        answers = await self._send(script, calls)
        if unknown := [i for i, a in enumerate(answers) if isinstance(a, NoScriptError)]:
            again = await self._send(script, [calls[i] for i in unknown], load=True)
            for index, answer in zip(unknown, again, strict=True):
                answers[index] = answer
        answers = [to_our_error(a) if isinstance(a, Exception) else a for a in answers]
        for answer in answers:
            if isinstance(answer, StoreUnavailable):
                raise answer
        return answers

    async def close(self) -> None:
        """Waits for running round trips."""
        await asyncio.gather(*self._senders, return_exceptions=True)

    async def _send_waiting(self, script: Script) -> None:
        """Makes round trips until no run waits. If a round trip fails, all waiting runs fail, so
        that no caller waits for longer than one timeout."""
        waiting = self._waiting[script]
        while waiting:
            batch = [waiting.popleft() for _ in range(min(len(waiting), CALLS_PER_PIPELINE_MAX))]
            try:
                answers = await self.run_all(script, [call for call, _ in batch])
            except Exception as error:  # noqa: BLE001 (passed to all callers)
                if not isinstance(error, OutriderError):
                    error = InvariantError(f"a script was not run: {error!r}")
                batch.extend(waiting)
                waiting.clear()
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
        del self._waiting[script]

    async def _send(self, script: Script, calls: Sequence[Call], load: bool = False) -> list[Any]:
        """Returns the answer or error of each run. The client's pipelines would take twice as
        long."""
        commands: list[tuple[Any, ...]] = [("SCRIPT", "LOAD", script.source)] if load else []
        for keys, arguments in calls:
            commands.append(("EVALSHA", script.sha, len(keys), *keys, *arguments))
        num_replicas = self._wait_replicas if script.replicated else 0
        if num_replicas:
            commands.append(("SET", self._replicated_key, 1, "PX", REDIS_WAIT_MS))
            commands.append(("WAIT", num_replicas, REDIS_WAIT_MS))
        pool: Any = self._client.connection_pool
        async with calling(self._client):
            connection = await pool.get_connection()
            try:
                await connection.send_packed_command(b"".join(map(_packed, commands)))
                answers = [await _answer(connection) for _ in commands]
            except BaseException:
                # The next command would otherwise read the answers of this one.
                await connection.disconnect(nowait=True)
                raise
            finally:
                await pool.release(connection)
            for answer in answers:
                if isinstance(answer, Exception) and may_be_replaced(answer):
                    raise answer
            if num_replicas:
                *answers, written, found = answers
                for answer in (written, found):
                    if isinstance(answer, Exception):
                        raise answer
                if found < num_replicas:
                    raise NotReplicated(
                        f"{found} of {num_replicas} replicas have a write after {REDIS_WAIT_MS} ms"
                    )
        return answers[1:] if load else answers


def _packed(command: Sequence[str | int | bytes]) -> bytes:
    """Encodes a command in Redis' protocol. The client's own function takes 8 us, three times as
    long."""
    parts = [b"*%d\r\n" % len(command)]
    for word in command:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


async def _answer(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
