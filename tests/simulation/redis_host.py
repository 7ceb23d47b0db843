"""Redis in the simulation: servers in processes, and the connections of the real stores.

The real `RedisStore` and `RedisRegistry` run on the real client and its pool. Only the connection
is replaced: it carries commands through the simulated network to a server in memory, which runs the
real scripts."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError

from coordinator.auth import access_control
from outrider.errors import InvariantError
from outrider.redis.address import DEFAULT_KEY_PREFIX, RedisAddress
from outrider.registry.redis_registry import RedisRegistry
from outrider.sessions.redis_store import TOKEN_BYTES, RedisStore, encode_tokens
from outrider.sessions.store import FinishReason
from tests.simulation import redis_data
from tests.simulation.network import Network
from tests.simulation.processes import Process, current, wall_clock_s
from tests.support.script_store import ScriptStore

ADDRESS = RedisAddress(url="redis://redis", key_prefix=DEFAULT_KEY_PREFIX)
DEPLOYMENT = "d"
_TAKE, _KEEP = (one.sha.encode() for one in (access_control._TAKE, access_control._KEEP))
_SESSION = f"{DEFAULT_KEY_PREFIX}session:".encode()


class RedisServer:
    """One server: a process and its data."""

    def __init__(self, history: History, snapshot: redis_data.Snapshot | None = None) -> None:
        self.process = Process("redis")
        self.data = redis_data.RedisData(lambda: wall_clock_s(self.process) * 1e3)
        self.connections: list[SimulatedConnection] = []
        self._history = history
        if snapshot is not None:
            self.data.restore(snapshot)

    def execute(self, command: redis_data.Command) -> redis_data.Reply:
        """The answer to one command. Raises `ReplyError`."""
        try:
            return self.data.run(command)
        finally:
            if command[0] == b"EVALSHA":
                self._history.look(self.data, command[3 : 3 + int(command[2])])

    def execute_for(
        self, client: Process, commands: Sequence[redis_data.Command]
    ) -> list[redis_data.Reply]:
        """The answers to a process's commands, errors included."""
        replies: list[redis_data.Reply] = []
        queued: list[redis_data.Reply] | None = None
        for command in commands:
            if command[0] == b"MULTI":
                queued = []
                replies.append(redis_data.Status(b"OK"))
            elif command[0] == b"EXEC":
                replies.append(queued)
                queued = None
            elif queued is None:
                replies.append(self._answer(command))
            else:
                queued.append(self._answer(command))
                replies.append(redis_data.Status(b"QUEUED"))
        self._history.note_slots(client, commands, replies)
        return replies

    def _answer(self, command: redis_data.Command) -> redis_data.Reply:
        try:
            return self.execute(command)
        except redis_data.ReplyError as error:
            return error

    def die(self) -> None:
        self.process.die()
        for connection in list(self.connections):
            connection.break_off()


class SimulatedConnection(AbstractConnection):
    """A client's connection to the server that its process is directed to."""

    def __init__(self, *, redis: Redis, network: Network, may_fail: bool, **options: Any) -> None:
        super().__init__(**options)
        self._redis = redis
        self._network = network
        self._may_fail = may_fail
        self._server: RedisServer | None = None
        self._process: Process | None = None
        self._replies: deque[redis_data.Reply] = deque()
        self._number = 0
        """Number of the connection; increased with each close."""
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def repr_pieces(self) -> list[tuple[str, str]]:
        return [("host", "redis")]

    @property
    def is_connected(self) -> bool:
        return self._server is not None

    async def connect(self) -> None:
        if self._server is not None:
            return
        process = current()
        server = self._redis.server_of(process)
        if server.process.is_dead:
            raise RedisConnectionError("connection refused")
        await self._network.call(server.process, lambda: None)
        self._server, self._process, self._error = server, process, None
        self._replies.clear()
        server.connections.append(self)

    async def disconnect(self, *args: Any, **options: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self._server is not None:
            self._server.connections.remove(self)
            self._server = None
            self._number += 1

    def break_off(self) -> None:
        """The server has gone, or its client is directed to another."""
        process = self._process
        if process is None or process.is_dead or self._server is None:
            return

        def hear(number: int) -> None:
            if number == self._number:
                self._error = RedisConnectionError("connection reset by peer")
                self._close()
                self._wake()

        loop = asyncio.get_running_loop()
        loop.call_soon(hear, self._number, context=process.context)

    async def can_read(self) -> bool:
        return bool(self._replies)

    def pack_command(self, *args: Any) -> list[Any]:
        return self.pack_commands([args])

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[Any]:
        return [redis_data.packed(command) for command in commands]

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        await self.connect()
        server, process, number = self._server, self._process, self._number
        if server is None or process is None:
            raise RedisConnectionError("connection reset by peer")
        if self._may_fail and self._network.adversary.call_fails():
            self._close()
            raise RedisConnectionError("the request was lost")

        def arrive() -> None:
            replies = server.execute_for(process, command)
            self._network.carry(process, lambda: self._receive(number, replies), payload=replies)

        self._network.carry(server.process, arrive, payload=command)

    def _receive(self, number: int, replies: list[redis_data.Reply]) -> None:
        if number != self._number:
            return
        if self._may_fail and self._network.adversary.call_fails():
            self._error = RedisConnectionError("the answer was lost")
            self._close()
        else:
            self._replies.extend(replies)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        while not self._replies:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._server is None:
                raise RedisConnectionError("connection closed")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except BaseException:
                self._close()  # A late answer must not be read as that of the next command.
                raise
        reply = self._unpacked(self._replies.popleft())
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _unpacked(self, reply: redis_data.Reply) -> Any:
        if isinstance(reply, redis_data.ReplyError):
            return self._parser.parse_error(str(reply))
        if isinstance(reply, redis_data.Status):
            return bytes(reply)
        if isinstance(reply, list):
            return [self._unpacked(one) for one in reply]
        return reply


class History:
    """What servers ever held of sessions: lost tokens may have been shown."""

    def __init__(self) -> None:
        self._ever: dict[bytes, list[bytes]] = {}
        """By key: tokens, none a prefix of another."""
        self._finished: dict[bytes, int] = {}
        """By key of the session: number of losses before it was finished."""
        self.num_losses = 0
        self.broken: InvariantError | None = None
        """The first invalid stored state, if any."""
        self.slots_renewed: dict[tuple[str, str], float] = {}
        """Coordinator, slot -> time at which it last took or renewed the slot."""
        self.slots_freed: set[tuple[str, str]] = set()
        """Coordinator, slot."""
        self.on_last_token: Callable[[str], object] | None = None
        """If set, called with the owner when a session's last token is stored."""

    def look(self, data: redis_data.RedisData, keys: Iterable[bytes]) -> None:
        for key in keys:
            if _is_session(key):
                fields = data.get(key)
                if isinstance(fields, dict) and b"state" in fields:
                    ends = int(fields[b"tokens_start"]), int(fields[b"tokens_end"])
                    tokens = (data.get(key + b":tokens") or b"")[slice(*ends)]
                    self._look_at_session(key, fields, tokens)

    def _look_at_session(self, key: bytes, fields: dict[bytes, bytes], tokens: bytes) -> None:
        ever = self._ever.setdefault(key, [b""])
        if ever[-1] != tokens:
            if tokens.startswith(ever[-1]):
                ever.pop()
            ever.append(tokens)
        is_finished = fields[b"state"] == b"finished"
        if is_finished:
            self._finished[key] = self.num_losses
        is_complete = fields[b"finish_reason"] == FinishReason.LENGTH.value.encode()
        if not (is_complete or (self.on_last_token and not is_finished)):
            return
        *_, parameters, prompt_length = json.loads(fields[b"opened"])
        length = len(tokens) // TOKEN_BYTES
        wanted = prompt_length + json.loads(parameters)["max_tokens"]
        if is_complete and length != wanted and self.broken is None:
            found = f"{key.decode()} is recorded as complete with {length} of {wanted} tokens"
            self.broken = InvariantError(found)
        if length == wanted and not is_finished and self.on_last_token:
            self.on_last_token(fields[b"owner"].decode())

    def note_slots(
        self,
        client: Process,
        commands: Iterable[redis_data.Command],
        replies: Iterable[redis_data.Reply],
    ) -> None:
        if any(isinstance(reply, redis_data.ReplyError) for reply in replies):
            return
        for command in commands:
            if command[0] != b"EVALSHA" or command[1] not in (_TAKE, _KEEP):
                continue
            arguments, num_freed = command[3 + int(command[2]) :], 0
            first = 4
            if command[1] == _KEEP:
                first, num_freed = 2, int(arguments[1])
            slots = [(client.name, slot.decode()) for slot in arguments[first:]]
            self.slots_freed.update(slots[:num_freed])
            now = asyncio.get_running_loop().time()
            self.slots_renewed.update(dict.fromkeys(slots[num_freed:], now))

    def held(self, session_id: str, token_ids: Sequence[int]) -> bool:
        beginning = encode_tokens(token_ids)
        known = self._ever.get(session_key(session_id), ())
        return any(tokens.startswith(beginning) for tokens in known)

    def was_finished(self, session_id: str) -> bool:
        return session_key(session_id) in self._finished

    def is_kept(self, session_id: str) -> bool:
        """Whether a session was finished, and nothing was lost since."""
        return self._finished.get(session_key(session_id)) == self.num_losses


def _is_session(key: bytes) -> bool:
    return key.startswith(_SESSION) and key.endswith(b"}")


def session_key(session_id: str) -> bytes:
    return f"{DEFAULT_KEY_PREFIX}session:{{{session_id}}}".encode()


class Redis:
    """Redis' host name, and the servers behind it."""

    def __init__(self, network: Network) -> None:
        self.history = History()
        self.primary = RedisServer(self.history)
        self._network = network
        self._former: RedisServer | None = None
        """A former primary that still believes to be it ..."""
        self._misled: frozenset[str] = frozenset()
        """... and the names of processes that believe so, too."""

    @property
    def process(self) -> Process:
        return self.primary.process

    @property
    def is_split(self) -> bool:
        return self._former is not None

    def has_lost(self, num_losses: int) -> bool:
        """Whether data may have been lost since the history had `num_losses`."""
        return self.history.num_losses > num_losses or self.is_split

    @property
    def processes(self) -> list[Process]:
        return [one.process for one in (self.primary, self._former) if one is not None]

    def server_of(self, process: Process | None) -> RedisServer:
        if self._former is not None and process is not None and process.name in self._misled:
            return self._former
        return self.primary

    def flush(self) -> None:
        self.history.num_losses += 1
        self.primary.data.run((b"FLUSHALL",))

    def start_again(self, snapshot: redis_data.Snapshot) -> None:
        """Starts a server from a snapshot, after the former one died."""
        self.history.num_losses += 1
        self.primary = RedisServer(self.history, snapshot)

    def split(self, snapshot: redis_data.Snapshot, misled: Iterable[str]) -> None:
        """Another server becomes the primary, with its copy; processes with these names stay with
        the former one, which continues."""
        self.history.num_losses += 1
        self._former, self._misled = self.primary, frozenset(misled)
        self.primary = RedisServer(self.history, snapshot)
        for connection in list(self._former.connections):
            if connection._process is None or connection._process.name not in self._misled:
                connection.break_off()

    def unite(self) -> None:
        if self._former is not None:
            self.history.num_losses += 1
            former, self._former, self._misled = self._former, None, frozenset()
            former.die()

    def owned(self) -> dict[str, tuple[int, str]]:
        data, found = self.primary.data, {}
        for key in data.sorted_keys():
            if _is_session(key):
                fields = data.get(key)
                if isinstance(fields, dict) and b"owner" in fields:
                    session_id = key[len(_SESSION) + 1 : -1].decode()
                    found[session_id] = int(fields[b"epoch"]), fields[b"owner"].decode()
        return found

    def at_once(self) -> ScriptStore:
        """The primary's sessions, without a network."""
        return ScriptStore(lambda: 0.0, lambda _: self.primary.data, DEFAULT_KEY_PREFIX)

    def store(self) -> RedisStore:
        client = RedisRegistry(ADDRESS, DEPLOYMENT)._client
        return RedisStore(self._connected(client, may_fail=True), DEFAULT_KEY_PREFIX)

    def slots(self) -> access_control.RedisSlots:
        slots = access_control.RedisSlots(ADDRESS)
        self._connected(slots._client, may_fail=True)
        return slots

    def registry(self) -> RedisRegistry:
        registry = RedisRegistry(ADDRESS, DEPLOYMENT)
        self._connected(registry._client, may_fail=False)
        return registry

    def _connected(self, client: Any, may_fail: bool) -> Any:
        """Connects a client to these servers. `may_fail`: single calls fail at random."""
        pool = client.connection_pool
        pool.connection_class = SimulatedConnection
        kept = pool.connection_kwargs
        for name in ("host", "port", "path", "db"):
            kept.pop(name, None)
        kept.update(redis=self, network=self._network, may_fail=may_fail, driver_info=None)
        return client
