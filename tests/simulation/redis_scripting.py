"""Lua scripts on Redis in memory: what EVALSHA does, in Lua 5.1, as in Redis."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from lupa.lua51 import LuaError, LuaRuntime, lua_type

from tests.simulation.redis_data import WRITES, RedisData, Reply, ReplyError, Status

_PRELUDE = b"""
local call, pcall_ = ...
redis = {call = call, pcall = pcall_}
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
"""Scripts have no globals of their own, no clock and no chance: as in Redis."""


class Scripts:
    """The scripts that one server knows, by their SHA-1."""

    def __init__(self, data: RedisData) -> None:
        self._data = data
        self._sources: dict[bytes, bytes] = {}

    def load(self, source: bytes) -> bytes:
        """Knows a script from now on. Returns its SHA-1, as text. Raises `ReplyError` for one that
        is no Lua."""
        _engine().compiled(source)
        sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        self._sources[sha] = source
        return sha

    def run(self, sha: bytes, keys: Sequence[bytes], arguments: Sequence[bytes]) -> Reply:
        """What a script answers. Raises `ReplyError`; what it had changed until then stays."""
        source = self._sources.get(sha)
        if source is None:
            raise ReplyError("NOSCRIPT No matching script. Please use EVAL.")
        return run_script(source, self._data, keys, arguments)


def run_script(
    source: bytes, data: RedisData, keys: Sequence[bytes], arguments: Sequence[bytes]
) -> Reply:
    """What a script answers. Raises `ReplyError`; what it had changed until then stays."""
    return _engine().run(source, data, keys, arguments)


class _Engine:
    """Runs the scripts of all servers of this process, one after the other."""

    def __init__(self) -> None:
        self._lua = LuaRuntime(  # type: ignore[call-arg]
            encoding=None, unpack_returned_tuples=False, register_eval=False,
            register_builtins=False,
        )  # fmt: skip
        self._globals = self._lua.globals()
        self._compiled: dict[bytes, Callable[[], Any]] = {}
        self._data: RedisData | None = None
        self._keys: Sequence[bytes] = ()
        self._error: ReplyError | None = None
        self._lua.compile(_PRELUDE)(self._call, self._pcall)

    def compiled(self, source: bytes) -> Callable[[], Any]:
        found = self._compiled.get(source)
        if found is None:
            try:
                found = self._compiled[source] = self._lua.compile(source)
            except LuaError as error:
                raise ReplyError(f"ERR Error compiling script {error}") from None
        return found

    def run(
        self, source: bytes, data: RedisData, keys: Sequence[bytes], arguments: Sequence[bytes]
    ) -> Reply:
        script = self.compiled(source)
        self._data, self._keys, self._error = data, keys, None
        self._globals[b"KEYS"] = self._lua.table_from(keys)
        self._globals[b"ARGV"] = self._lua.table_from(arguments)
        try:
            return _to_reply(script())
        except LuaError as error:
            text = str(error).splitlines()[0]
            raise ReplyError(f"ERR Error running script: {text}") from None
        finally:
            self._data, data.is_dirty = None, False

    def _call(self, *arguments: Any) -> Any:
        """`redis.call`: an error ends the script."""
        return self._to_lua(self._answer(arguments))

    def _pcall(self, *arguments: Any) -> Any:
        """`redis.pcall`: an error is an answer."""
        try:
            return self._to_lua(self._answer(arguments))
        except ReplyError as error:
            return self._lua.table_from({b"err": str(error).encode()})

    def _answer(self, arguments: Sequence[Any]) -> Reply:
        data = self._data
        if data is None:
            raise ReplyError("ERR redis.call outside of a script")
        command = [_to_argument(argument) for argument in arguments]
        if len(command) > 1 and command[1] not in self._keys:
            # Also a single server is asked for no more than one of a cluster would grant.
            raise ReplyError("ERR Script attempted to access a key that it was not given")
        reply = data.run(command)
        data.is_dirty = data.is_dirty or command[0].upper() in WRITES
        return reply

    def _to_lua(self, reply: Reply) -> Any:
        """See "Redis to Lua type conversion" in Redis' "Lua API reference"."""
        if reply is None:
            return False
        if isinstance(reply, Status):
            return self._lua.table_from({b"ok": bytes(reply)})
        if isinstance(reply, list):
            return self._lua.table_from([self._to_lua(one) for one in reply])
        return reply


@cache
def _engine() -> _Engine:
    return _Engine()


def _to_argument(argument: Any) -> bytes:
    """Lua's strings and numbers, as Redis passes them to a command."""
    if isinstance(argument, bytes):
        return argument
    if isinstance(argument, int | float) and not isinstance(argument, bool):
        return f"{argument:.17g}".encode()
    raise ReplyError("ERR Lua redis lib command arguments must be strings or integers")


def _to_reply(value: Any) -> Reply:
    """See "Lua to Redis type conversion" in the same place."""
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if isinstance(value, int | float):
        return int(value)
    if isinstance(value, bytes):
        return value
    if lua_type(value) != "table":
        return None
    error = value[b"err"]
    if error is not None:
        raise ReplyError(error.decode())
    status = value[b"ok"]
    if status is not None:
        return Status(status)
    replies = []
    while (one := value[len(replies) + 1]) is not None:
        replies.append(_to_reply(one))
    return replies
