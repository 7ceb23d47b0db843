"""Data, commands and Lua scripts of a Redis server in memory, on a clock of the caller's.

It has the commands that the scripts and the stores use, with the answers of Redis 6.2 and 7;
`test_redis_data.py` compares it with a real server. Scripts run in Lua 5.1, as in Redis."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cache, partial
from typing import Any

import msgpack
from lupa.lua51 import LuaError, LuaRuntime, lua_type
from redis._parsers import Encoder

Reply = Any
"""int, bytes, None, `Status`, `ReplyError` (inside a list) or a list of replies."""
Snapshot = tuple[dict[bytes, Any], dict[bytes, float]]
"""Values and expiry times (ms), by key."""
Command = tuple[bytes, ...]


class Status(bytes):
    """A simple string, such as `OK`."""


class ReplyError(Exception):
    """An error in Redis' words, its code first."""


OK = Status(b"OK")
DENY_OOM = frozenset((b"SET", b"SETRANGE", b"HSET", b"SADD", b"ZADD"))
"""Commands that a server refuses while its memory is full."""
WRITES = DENY_OOM | {b"DEL", b"EXPIRE", b"PEXPIRE", b"SREM", b"ZREM", b"ZREMRANGEBYSCORE"}
_PRELUDE = b"""
local call, pcall_, unpacked = ...
redis = {call = call, pcall = pcall_}
cmsgpack = {unpack = unpacked}
function redis.error_reply(text) return {err = text} end
function redis.status_reply(text) return {ok = text} end
KEYS, ARGV = {}, {}
for _, name in ipairs({'python', 'os', 'io', 'require', 'package', 'module', 'dofile', 'loadfile',
    'print', 'getfenv', 'setfenv'}) do
  _G[name] = nil
end
debug = false  -- which lupa looks for
math.random, math.randomseed = nil, nil
setmetatable(_G, {__newindex = function()
  error('Attempt to modify a readonly table')
end, __index = function(_, name)
  error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'")
end})
"""
"""As in Redis, scripts have no globals of their own, no clock and no randomness."""


class SortedSet(dict[bytes, float]):
    """Member -> score. No command needs their order."""


class RedisData:
    """Keys with values (bytes, dict, set or `SortedSet`) and expiry times; and known scripts, by
    SHA-1."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        """`now_ms` is the server's wall clock, milliseconds since 1970."""
        self.now_ms = now_ms
        self.num_writes_left: int | None = None
        """Commands that need memory and still succeed before the memory is full; None = it does not
        fill up."""
        self.is_dirty = False
        """Whether the running script has written."""
        self.spares_dirty = True
        """Whether such a script is never refused memory, as in Redis itself."""
        self.num_refused = 0
        """Commands refused for lack of memory."""
        self._values: dict[bytes, Any] = {}
        self._expires_ms: dict[bytes, float] = {}
        self._scripts: dict[bytes, bytes] = {}
        self._commands: dict[bytes, Callable[..., Reply]] = {
            name.encode(): partial(function, self) for name, function in _COMMANDS.items()
        }

    def run(self, arguments: Sequence[bytes]) -> Reply:
        """The answer to one command. Raises `ReplyError`; earlier changes of a script stay."""
        name = arguments[0].upper()
        command = self._commands.get(name)
        if command is None:
            raise ReplyError(f"ERR unknown command '{arguments[0].decode(errors='replace')}'")
        if self.num_writes_left is not None and name in DENY_OOM:
            self._take_memory()
        if name == b"EVALSHA":  # A Python error in a script ends the simulation; it is no reply.
            return command(*arguments[1:])
        try:
            return command(*arguments[1:])
        except (TypeError, ValueError) as error:
            raise ReplyError(f"ERR {name.decode()}: {error}") from None

    def _take_memory(self) -> None:
        if self.num_writes_left:
            self.num_writes_left -= 1
        elif not (self.is_dirty and self.spares_dirty):
            self.num_refused += 1
            raise ReplyError("OOM command not allowed when used memory > 'maxmemory'.")

    def snapshot(self) -> Snapshot:
        """A copy of all data and expiry times."""
        return {key: copy(value) for key, value in self._values.items()}, dict(self._expires_ms)

    def restore(self, snapshot: Snapshot) -> None:
        self._values = {key: copy(value) for key, value in snapshot[0].items()}
        self._expires_ms = dict(snapshot[1])

    def sorted_keys(self) -> list[bytes]:
        """Keys of unexpired values, sorted."""
        return sorted(key for key in list(self._values) if self.get(key) is not None)

    def get(self, key: bytes) -> Any:
        until_ms = self._expires_ms.get(key)
        if until_ms is not None and until_ms <= self.now_ms():
            self.drop(key)
        return self._values.get(key)

    def put(self, key: bytes, value: Any) -> Any:
        self._values[key] = value
        return value

    def drop(self, key: bytes) -> bool:
        self._expires_ms.pop(key, None)
        return self._values.pop(key, None) is not None

    def typed(self, key: bytes, kind: Callable[[], Any]) -> Any:
        """The value of a key, or an empty one. Raises `ReplyError` for one of another kind."""
        value = self.get(key)
        if value is not None and type(value) is not kind:
            raise ReplyError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return kind() if value is None else value

    def ttl_ms(self, key: bytes) -> int:
        if self.get(key) is None:
            return -2
        until_ms = self._expires_ms.get(key)
        return -1 if until_ms is None else max(0, int(until_ms - self.now_ms()))

    def expire(self, key: bytes, after_ms: int) -> int:
        if self.get(key) is None:
            return 0
        if after_ms <= 0:
            self.drop(key)
        else:
            self._expires_ms[key] = self.now_ms() + after_ms
        return 1

    def load_script(self, source: bytes) -> bytes:
        """Registers a script. Returns its SHA-1, as text."""
        sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        self._scripts[sha] = source
        return sha

    def run_script(self, sha: bytes, keys: Sequence[bytes], arguments: Sequence[bytes]) -> Reply:
        source = self._scripts.get(sha)
        if source is None:
            raise ReplyError("NOSCRIPT No matching script. Please use EVAL.")
        return _lua().run(source, self, keys, arguments)


def packed(command: Iterable[Any]) -> Command:
    name, *arguments = command
    words = name.encode().split() if isinstance(name, str) else (name,)
    return (*words, *map(Encoder("utf-8", "strict", False).encode, arguments))


def _set(data: RedisData, key: bytes, value: bytes, *options: bytes) -> Reply:
    if options and (len(options) != 2 or options[0].upper() != b"PX" or int(options[1]) <= 0):
        raise ValueError(options)
    data.drop(key)
    data.put(key, value)
    if options:
        data.expire(key, int(options[1]))
    return OK


def _getrange(data: RedisData, key: bytes, first: bytes, last: bytes) -> Reply:
    start, end = int(first), int(last)
    value = data.typed(key, bytes)
    if start < 0 and end < 0 and start > end:
        return b""
    start = max(start + len(value), 0) if start < 0 else start
    end = max(end + len(value), 0) if end < 0 else end
    return value[start : end + 1]


def _setrange(data: RedisData, key: bytes, at: bytes, more: bytes) -> Reply:
    start = int(at)
    if start < 0:
        raise ValueError("offset is out of range")
    value = data.typed(key, bytes)
    if more:
        value = value.ljust(start, b"\0")
        value = data.put(key, value[:start] + more + value[start + len(more) :])
    return len(value)


def _hset(data: RedisData, key: bytes, field: bytes, value: bytes, *more: bytes) -> Reply:
    pairs = (field, value, *more)
    new = dict(zip(pairs[::2], pairs[1::2], strict=True))
    fields = data.put(key, data.typed(key, dict))
    before = len(fields)
    fields.update(new)
    return len(fields) - before


def _sadd(data: RedisData, key: bytes, member: bytes, *more: bytes) -> Reply:
    there = data.put(key, data.typed(key, set))
    before = len(there)
    there.update((member, *more))
    return len(there) - before


def _srem(data: RedisData, key: bytes, member: bytes, *more: bytes) -> Reply:
    there = data.typed(key, set)
    before = len(there)
    there.difference_update((member, *more))
    if before and not there:
        data.drop(key)
    return before - len(there)


def _zadd(data: RedisData, key: bytes, score: bytes, member: bytes, *more: bytes) -> Reply:
    scores = (float(score), *map(float, more[::2]))
    new = dict(zip((member, *more[1::2]), scores, strict=True))
    there = data.put(key, data.typed(key, SortedSet))
    before = len(there)
    there.update(new)
    return len(there) - before


def _zrem(data: RedisData, key: bytes, *members: bytes) -> Reply:
    there = data.typed(key, SortedSet)
    num_removed = sum(there.pop(member, None) is not None for member in members)
    if num_removed and not there:
        data.drop(key)
    return num_removed


def _zremrangebyscore(data: RedisData, key: bytes, least: bytes, most: bytes) -> Reply:
    low, high = float(least), float(most)
    found = [one for one, score in data.typed(key, SortedSet).items() if low <= score <= high]
    return _zrem(data, key, *found)


def _zscore(data: RedisData, key: bytes, member: bytes) -> Reply:
    score = data.typed(key, SortedSet).get(member)
    return None if score is None else f"{score:.17g}".encode()


def _time(data: RedisData) -> Reply:
    seconds, microseconds = divmod(int(data.now_ms() * 1e3), 10**6)
    return [str(seconds).encode(), str(microseconds).encode()]


_COMMANDS: dict[str, Callable[..., Reply]] = {
    "DEL": lambda data, *keys: sum(data.get(k) is not None and data.drop(k) for k in keys),
    "EXISTS": lambda data, *keys: sum(data.get(key) is not None for key in keys),
    "EXPIRE": lambda data, key, s: data.expire(key, int(s) * 1000),
    "PEXPIRE": lambda data, key, ms: data.expire(key, int(ms)),
    "PTTL": lambda data, key: data.ttl_ms(key),
    "GET": lambda data, key: data.typed(key, bytes) if data.get(key) is not None else None,
    "MGET": lambda data, *keys: [v if isinstance(v := data.get(k), bytes) else None for k in keys],
    "STRLEN": lambda data, key: len(data.typed(key, bytes)),
    "HGET": lambda data, key, field: data.typed(key, dict).get(field),
    "HMGET": lambda data, key, *names: [*map(data.typed(key, dict).get, names)],
    "HGETALL": lambda data, key: [part for pair in data.typed(key, dict).items() for part in pair],
    "SMEMBERS": lambda data, key: sorted(data.typed(key, set)),
    "INFO": lambda data, section: b"used_memory:0\r\nmaxmemory:0\r\n",
    "FLUSHALL": lambda data: data.restore(({}, {})) or OK,
    "WAIT": lambda data, replicas, ms: 0,
    "EVAL": lambda data, source, *words: data.run((b"EVALSHA", data.load_script(source), *words)),
    "EVALSHA": lambda data, sha, n, *words: data.run_script(sha, words[: int(n)], words[int(n) :]),
    "SCRIPT": lambda data, load, source: data.load_script(source),
    "SET": _set,
    "GETRANGE": _getrange,
    "SETRANGE": _setrange,
    "HSET": _hset,
    "SADD": _sadd,
    "SREM": _srem,
    "TIME": _time,
    "ZADD": _zadd,
    "ZREM": _zrem,
    "ZSCORE": _zscore,
    "ZREMRANGEBYSCORE": _zremrangebyscore,
    "ZCARD": lambda data, key: len(data.typed(key, SortedSet)),
}
"""Python refuses a wrong number of arguments, as a server does."""


class _Lua:
    """Runs the scripts of all servers of this process, one after the other."""

    def __init__(self) -> None:
        self._lua = LuaRuntime(  # type: ignore[call-arg]
            encoding=None,
            unpack_returned_tuples=False,
            register_eval=False,
            register_builtins=False,
        )
        self._globals = self._lua.globals()
        self._compiled: dict[bytes, Callable[[], Any]] = {}
        self._data: Any = None
        self._keys: Sequence[bytes] = ()
        self._lua.compile(_PRELUDE)(self._call, self._pcall, self._unpacked)

    def run(
        self, source: bytes, data: RedisData, keys: Sequence[bytes], arguments: Sequence[bytes]
    ) -> Reply:
        script = self._compiled.get(source)
        if script is None:
            script = self._compiled[source] = self._lua.compile(source)
        self._data, self._keys = data, keys
        self._globals[b"KEYS"] = self._lua.table_from(keys)
        self._globals[b"ARGV"] = self._lua.table_from(arguments)
        try:
            reply = _to_reply(script())
            if isinstance(reply, ReplyError):
                raise reply
            return reply
        except LuaError as error:
            text = str(error).splitlines()[0]
            raise ReplyError(f"ERR Error running script: {text}") from None
        finally:
            self._data, data.is_dirty = None, False

    def _call(self, *arguments: Any) -> Any:
        # Redis converts Lua's numbers like this.
        command = [one if isinstance(one, bytes) else f"{one:.17g}".encode() for one in arguments]
        data = self._data
        if len(command) > 1 and command[1] not in self._keys:  # As in a cluster.
            raise ReplyError("ERR Script attempted to access a key that it was not given")
        reply = data.run(command)
        data.is_dirty = data.is_dirty or command[0].upper() in WRITES
        return self._to_lua(reply)

    def _pcall(self, *arguments: Any) -> Any:
        try:
            return self._call(*arguments)
        except ReplyError as error:
            return self._lua.table_from({b"err": str(error).encode()})

    def _unpacked(self, data: bytes) -> Any:
        return self._to_lua(msgpack.unpackb(data, raw=True))

    def _to_lua(self, reply: Reply) -> Any:
        """See "Redis to Lua type conversion" in Redis' "Lua API reference"."""
        if reply is None:
            return False
        if isinstance(reply, Status):
            return self._lua.table_from({b"ok": bytes(reply)})
        if isinstance(reply, list):
            return self._lua.table_from([self._to_lua(one) for one in reply])
        return reply


_lua = cache(_Lua)


def _to_reply(value: Any) -> Reply:
    """See "Lua to Redis type conversion" in the same place."""
    if isinstance(value, bool):
        return 1 if value else None
    if isinstance(value, int | float):
        return int(value)
    if value is None or isinstance(value, bytes):
        return value
    if lua_type(value) != "table":
        return None
    if (error := value[b"err"]) is not None:
        return ReplyError(error.decode())
    if (status := value[b"ok"]) is not None:
        return Status(status)
    replies = []
    while (one := value[len(replies) + 1]) is not None:
        replies.append(_to_reply(one))
    return replies
