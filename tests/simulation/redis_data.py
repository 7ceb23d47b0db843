"""The data and the commands of a Redis server in memory, on a clock of the caller's.

Has the commands that the scripts and the stores use, with the answers and errors of Redis 6.2 and
7. `test_redis_data.py` compares it with a real server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Value = bytes | dict[bytes, bytes] | set[bytes] | dict[bytes, float]
"""Of a key: string, hash, set, sorted set."""
Reply = Any
"""int, bytes, None, `Status`, `ReplyError` (inside of a list) or a list of replies."""
Snapshot = tuple[dict[bytes, Any], dict[bytes, float]]
"""Values and expiry times (ms), by key."""


class Status(bytes):
    """A simple string, such as `OK`."""


class ReplyError(Exception):
    """An error as Redis words it, its code first."""


OK = Status(b"OK")
DENY_OOM = frozenset((b"SET", b"SETRANGE", b"HSET", b"SADD"))
"""Commands that a server refuses while its memory is full."""
WRITES = DENY_OOM | {b"DEL", b"EXPIRE", b"PEXPIRE", b"SREM"}
_WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
_NOT_AN_INTEGER = "ERR value is not an integer or out of range"
_SYNTAX = "ERR syntax error"


class RedisData:
    """Keys, their values and when they expire."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        """`now_ms` is the server's wall clock, milliseconds since 1970."""
        self.now_ms = now_ms
        self.num_writes_left: int | None = None
        """How many more commands that need memory are carried out before the memory is full; None
        where it does not fill up."""
        self.is_dirty = False
        """Whether the script that runs has written."""
        self.spares_dirty = True
        """Whether such a script is refused no memory any more, as by Redis itself."""
        self.num_refused = 0
        """Commands refused as the memory was full."""
        self._values: dict[bytes, Any] = {}
        self._expires_ms: dict[bytes, float] = {}
        self._commands: dict[bytes, Callable[..., Reply]] = {
            name.encode(): partial(function, self) for name, function in _COMMANDS.items()
        }

    def run(self, arguments: Sequence[bytes]) -> Reply:
        """The answer to one command. Raises `ReplyError`."""
        name = arguments[0].upper()
        command = self._commands.get(name)
        if command is None:
            raise ReplyError(f"ERR unknown command '{arguments[0].decode(errors='replace')}'")
        if self.num_writes_left is not None and name in DENY_OOM:
            self._take_memory()
        try:
            return command(*arguments[1:])
        except TypeError:
            raise ReplyError(
                f"ERR wrong number of arguments for '{name.decode().lower()}' command"
            ) from None

    def _take_memory(self) -> None:
        if self.num_writes_left:
            self.num_writes_left -= 1
        elif not (self.is_dirty and self.spares_dirty):
            self.num_refused += 1
            raise ReplyError("OOM command not allowed when used memory > 'maxmemory'.")

    def snapshot(self) -> Snapshot:
        """All that is kept now; later commands do not change it."""
        values = {
            key: value if isinstance(value, bytes) else value.copy()
            for key, value in self._values.items()
        }
        return values, dict(self._expires_ms)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes back to a snapshot."""
        values, expires_ms = snapshot
        self._values = {
            key: value if isinstance(value, bytes) else value.copy()
            for key, value in values.items()
        }
        self._expires_ms = dict(expires_ms)

    def sorted_keys(self) -> list[bytes]:
        """Of all values that have not expired, in order."""
        return sorted(key for key in list(self._values) if self.get(key) is not None)

    def get(self, key: bytes) -> Any:
        """The value of a key, or None."""
        until_ms = self._expires_ms.get(key)
        if until_ms is not None and until_ms <= self.now_ms():
            self._drop(key)
        return self._values.get(key)

    def ttl_ms(self, key: bytes) -> int:
        """What PTTL says."""
        if self.get(key) is None:
            return -2
        until_ms = self._expires_ms.get(key)
        return -1 if until_ms is None else max(0, int(until_ms - self.now_ms()))

    def _drop(self, key: bytes) -> bool:
        self._expires_ms.pop(key, None)
        return self._values.pop(key, None) is not None

    def _typed(self, key: bytes, kind: type) -> Any:
        """The value of a key, or None. Raises `ReplyError` for one of another kind."""
        value = self.get(key)
        if value is not None and type(value) is not kind:
            raise ReplyError(_WRONG_TYPE)
        return value

    def _made(self, key: bytes, kind: type) -> Any:
        """The same; where there is none, a new one that is kept."""
        value = self._typed(key, kind)
        if value is None:
            value = self._values[key] = kind()
        return value

    def _expire(self, key: bytes, at_ms: float) -> int:
        if self.get(key) is None:
            return 0
        if at_ms <= self.now_ms():
            self._drop(key)
        else:
            self._expires_ms[key] = at_ms
        return 1


def _integer(text: bytes) -> int:
    try:
        if text.strip() == text and b"_" not in text and not text.startswith(b"+"):
            number = int(text)
            if -(2**63) <= number < 2**63:
                return number
    except ValueError:
        pass
    raise ReplyError(_NOT_AN_INTEGER)


def _type(data: RedisData, key: bytes) -> Reply:
    names = {bytes: b"string", dict: b"hash", set: b"set"}
    return Status(names.get(type(data.get(key)), b"none"))


def _mget(data: RedisData, *keys: bytes) -> Reply:
    values = [data.get(key) for key in keys]
    return [value if isinstance(value, bytes) else None for value in values]


def _set(data: RedisData, key: bytes, value: bytes, *options: bytes) -> Reply:
    until_ms = None
    if options:
        if len(options) != 2 or options[0].upper() != b"PX":
            raise ReplyError(_SYNTAX)
        number = _integer(options[1])
        if number <= 0:
            raise ReplyError("ERR invalid expire time in 'set' command")
        until_ms = data.now_ms() + number
    data._drop(key)
    data._values[key] = value
    if until_ms is not None:
        data._expires_ms[key] = until_ms
    return OK


def _getrange(data: RedisData, key: bytes, first: bytes, last: bytes) -> Reply:
    start, end = _integer(first), _integer(last)
    value = data._typed(key, bytes) or b""
    if start < 0 and end < 0 and start > end:
        return b""
    start = max(start + len(value), 0) if start < 0 else start
    end = max(end + len(value), 0) if end < 0 else end
    return value[start : end + 1]


def _setrange(data: RedisData, key: bytes, at: bytes, more: bytes) -> Reply:
    start = _integer(at)
    if start < 0:
        raise ReplyError("ERR offset is out of range")
    value = data._typed(key, bytes) or b""
    if more:
        value = value.ljust(start, b"\0")
        value = data._values[key] = value[:start] + more + value[start + len(more) :]
    return len(value)


def _hset(data: RedisData, key: bytes, field: bytes, value: bytes, *more: bytes) -> Reply:
    pairs = (field, value, *more)
    if len(pairs) % 2:
        raise TypeError(pairs)
    fields = data._made(key, dict)
    before = len(fields)
    fields.update(zip(pairs[::2], pairs[1::2], strict=True))
    return len(fields) - before


def _hmget(data: RedisData, key: bytes, *names: bytes) -> Reply:
    fields = data._typed(key, dict) or {}
    return [fields.get(name) for name in names]


def _hgetall(data: RedisData, key: bytes) -> Reply:
    return [part for pair in (data._typed(key, dict) or {}).items() for part in pair]


def _sadd(data: RedisData, key: bytes, member: bytes, *more: bytes) -> Reply:
    there = data._made(key, set)
    before = len(there)
    there.update((member, *more))
    return len(there) - before


def _srem(data: RedisData, key: bytes, member: bytes, *more: bytes) -> Reply:
    there = data._typed(key, set) or set()
    before = len(there)
    there.difference_update((member, *more))
    if before and not there:
        data._drop(key)
    return before - len(there)


def _time(data: RedisData) -> Reply:
    now_us = int(data.now_ms() * 1e3)
    return [str(now_us // 10**6).encode(), str(now_us % 10**6).encode()]


def _flushall(data: RedisData) -> Reply:
    data._values.clear()
    data._expires_ms.clear()
    return OK


_COMMANDS: dict[str, Callable[..., Reply]] = {
    "DEL": lambda data, *keys: sum(data.get(k) is not None and data._drop(k) for k in keys),
    "EXISTS": lambda data, *keys: sum(data.get(key) is not None for key in keys),
    "TYPE": _type,
    "EXPIRE": lambda data, key, s: data._expire(key, data.now_ms() + _integer(s) * 1000),
    "PEXPIRE": lambda data, key, ms: data._expire(key, data.now_ms() + _integer(ms)),
    "PTTL": lambda data, key: data.ttl_ms(key),
    "GET": lambda data, key: data._typed(key, bytes),
    "MGET": _mget,
    "SET": _set,
    "STRLEN": lambda data, key: len(data._typed(key, bytes) or b""),
    "GETRANGE": _getrange,
    "SETRANGE": _setrange,
    "HSET": _hset,
    "HGET": lambda data, key, field: (data._typed(key, dict) or {}).get(field),
    "HMGET": _hmget,
    "HGETALL": _hgetall,
    "SADD": _sadd,
    "SREM": _srem,
    "SMEMBERS": lambda data, key: sorted(data._typed(key, set) or ()),
    "TIME": _time,
    "PING": lambda data: Status(b"PONG"),
    "FLUSHALL": _flushall,
    "WAIT": lambda data, replicas, ms: 0,
}
"""Python refuses a wrong number of arguments, as a server does."""
