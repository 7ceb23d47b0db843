"""A file of keys: read when it changes, and changed by commands."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from outrider.errors import ConfigError
from outrider.files import FileWatch, locked
from outrider.limits import KEY_FILE_BYTES_MAX, KEY_FILE_LOOK_MS
from outrider.security.callers import Caller
from outrider.security.keys import KeyEntry, KeyHash, Keyring, entry_line, new_key, read_entries

_log = logging.getLogger(__name__)

_OTHERS_MAY_WRITE: Final = 0o022


class KeyFile:
    """The keys of a file and those that are given, as they are now."""

    def __init__(
        self, path: Path | None, given: tuple[KeyEntry, ...], clock: Callable[[], float]
    ) -> None:
        """`clock` counts seconds. Raises `ConfigError` for a file that cannot be read, or is
        wrong."""
        self._path = path
        self._given = given
        self._watch = None if path is None else FileWatch([path], clock, KEY_FILE_LOOK_MS / 1e3)
        self._keys = self._read()
        if path is not None and path.stat().st_mode & _OTHERS_MAY_WRITE:
            _log.warning("%s: others may write it, and so add keys", path)

    @property
    def keys(self) -> Keyring:
        """Those that hold now: the file is read again within a second of a change. One that
        cannot be read, or is wrong, changes nothing, which the log says."""
        found = None if self._watch is None else self._watch.news(self._read)
        if found is not None:
            self._keys = found
            _log.info("%s: %d keys", self._path, len(found.entries))
        return self._keys

    def _read(self) -> Keyring:
        entries = [] if self._path is None else read_key_file(self._path)
        return Keyring([*entries, *self._given])


def read_key_file(path: Path) -> list[KeyEntry]:
    """Its keys. Raises `ConfigError` that names the file, and the line that is wrong."""
    try:
        with path.open("rb") as file:
            data = file.read(KEY_FILE_BYTES_MAX + 1)
        if len(data) > KEY_FILE_BYTES_MAX:
            raise ConfigError(f"{path}: is larger than {KEY_FILE_BYTES_MAX} bytes")
        entries = read_entries(data.decode())
        Keyring(entries)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text in UTF-8") from None
    except ConfigError as error:
        if error.message.startswith(str(path)):
            raise
        raise ConfigError(f"{path}: {error.message}") from None
    return entries


def add_key(path: Path, caller: Caller) -> str:
    """Makes a key, adds its hash to the file, which is made for its owner only where there is
    none, and returns the key. Raises `ConfigError`, also for a name that is there."""
    with _changing(path):
        entries = read_key_file(path) if path.exists() else []
        if any(entry.caller.name == caller.name for entry in entries):
            raise ConfigError(f"{path}: there is a key {caller.name!r} already")
        key = new_key()
        found = KeyHash.of(key)
        Keyring([*entries, KeyEntry(found, caller)])
        text = path.read_text("utf-8") if path.exists() else ""
        if text and not text.endswith("\n"):
            text += "\n"
        _write(path, f"{text}{entry_line(found, caller)}\n")
    return key


def remove_key(path: Path, name: str) -> None:
    """Takes a key out of the file; its other lines stay. Raises `ConfigError`, also where there is
    no such key."""
    with _changing(path):
        names = [entry.caller.name for entry in read_key_file(path)]
        if name not in names:
            raise ConfigError(f"{path}: there is no key {name!r}")
        lines = path.read_text("utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.partition("#")[0].split()[:1] != [name]]
        _write(path, "".join(kept))


def _changing(path: Path) -> AbstractContextManager[None]:
    """Within, no other command changes the file."""
    return locked(path.with_name(f"{path.name}.lock"))


def _write(path: Path, text: str) -> None:
    """In one step; a new file is for its owner only, another one keeps its mode."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
