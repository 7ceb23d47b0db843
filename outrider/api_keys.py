"""API keys, their stored hashes, and the callers that they identify.

    or-<salt>-<secret>          a key made by `outrider keys new`. The salt has 16 hexadecimal
                                digits. The secret has 43 characters, for 256 random bits.
    sha256:<salt>:<digest>      the hash of such a key: HMAC-SHA256 of the whole key under its salt
    sha256:<digest>             the hash of a key that was made elsewhere: SHA-256 of the key

The salt in a made key selects the one stored hash that the server compares with the key. Each line
of a key file has the hash of one key. `#` begins a comment:

    NAME HASH [tenant=TENANT] [requests_per_minute=N] [concurrency=N] [admin]
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from outrider.errors import ConfigError
from outrider.files import locked, read_file, without_links, write_whole
from outrider.limits import (
    API_KEY_CHARS_MAX,
    API_KEY_CHARS_MIN,
    API_KEYS_MAX,
    KEY_CONCURRENCY_MAX,
    REQUESTS_PER_MINUTE_MAX,
)


@dataclass(frozen=True)
class Caller:
    """The caller that an API key identifies. Contains no secret."""

    name: str = ""
    """Name of the key, by which rate limits count requests. Empty if the server needs no key."""
    tenant: str = ""
    """Tenant that owns the caller's sessions and cached prefixes. A request cannot change it."""
    requests_per_minute: int = 0
    """0 = unlimited."""
    concurrency: int = 0
    """Largest number of generations at a time; 0 = unlimited."""
    admin: bool = False
    """Whether the caller may read and cancel sessions of all tenants."""

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.concurrency)

    @property
    def reach(self) -> str | None:
        """The tenant whose sessions the caller may read and cancel; None = all tenants."""
        return None if self.admin else self.tenant


ANYBODY = Caller()
"""The caller of all requests if the server needs no key. Has no limits."""


SCHEME = "sha256"
_MADE = re.compile(r"or-([0-9a-f]{16})-[A-Za-z0-9_-]{43}")
_KEPT = re.compile(r"sha256:(?:([0-9a-f]{16}):)?([0-9a-f]{64})")
_GIVEN = re.compile(r"[!-+\--~]+")
"""Visible ASCII. Commas are excluded because they separate keys."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


@dataclass(frozen=True)
class KeyHash:
    """The stored hash of a key. A caller that sends the hash instead of the key is refused."""

    salt: str
    """Empty for a key that was made elsewhere."""
    digest: bytes

    @classmethod
    def of(cls, key: str) -> Self:
        """The hash of a text, which need not be a valid key."""
        data = key.encode(errors="surrogatepass")
        made = _MADE.fullmatch(key)
        if made is None:
            return cls("", hashlib.sha256(data).digest())
        return cls(made[1], hmac.digest(made[1].encode(), data, SCHEME))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a hash. A `ValueError` does not quote the text, because the text may be a key."""
        found = _KEPT.fullmatch(text)
        if found is None:
            raise ValueError("must be sha256:DIGEST or sha256:SALT:DIGEST, in lower-case hex")
        return cls(found[1] or "", bytes.fromhex(found[2]))

    def __str__(self) -> str:
        salt = f"{self.salt}:" if self.salt else ""
        return f"{SCHEME}:{salt}{self.digest.hex()}"


@dataclass(frozen=True)
class KeyEntry:
    """The hash of an accepted key, and the key's caller."""

    hash: KeyHash
    caller: Caller


class Keyring:
    """The accepted keys."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self.entries = tuple(entries)
        if len(self.entries) > API_KEYS_MAX:
            raise ConfigError(f"{len(self.entries)} keys; at most {API_KEYS_MAX} are allowed")
        seen: set[str | KeyHash] = set()
        for entry in self.entries:
            name = entry.caller.name
            if name in seen or entry.hash in seen:
                what = "is given twice" if name in seen else "is given under two names"
                raise ConfigError(f"the key {name!r} {what}")
            seen |= {name, entry.hash}
        self._salted = {one.hash.salt: one for one in self.entries if one.hash.salt}
        self._plain = tuple(one for one in self.entries if not one.hash.salt)

    def find(self, key: str) -> Caller | None:
        """The caller of a key; None for a wrong key. Compares digests in constant time."""
        shown = KeyHash.of(key)
        if shown.salt and (entry := self._salted.get(shown.salt)) is not None:
            return entry.caller if hmac.compare_digest(entry.hash.digest, shown.digest) else None
        plain = shown if not shown.salt else KeyHash("", hashlib.sha256(key.encode()).digest())
        found = None
        for entry in self._plain:
            if hmac.compare_digest(entry.hash.digest, plain.digest):
                found = entry.caller
        return found


def new_key() -> str:
    """A new random key."""
    return f"or-{secrets.token_hex(8)}-{secrets.token_urlsafe(32)}"


def check_key_name(name: str) -> str:
    """Returns the name. Raises `ValueError` if the name is invalid."""
    if not _NAME.fullmatch(name):
        words = "up to 64 letters and digits, and after the first also _ . @ -"
        raise ValueError(f"{name[:64]!r} is wrong; it must be {words}")
    return name


def given_keys(text: str) -> tuple[KeyEntry, ...]:
    """Parses the setting `api_key`: keys or hashes, separated by commas. These keys have no limits.
    Each key has its own tenant, so its caller cannot see sessions of other keys. A `ConfigError`
    has the number of the wrong key, but not the key's text."""
    entries = []
    for number, word in enumerate(text.split(",") if text else (), start=1):
        word = word.strip()
        if word.startswith(f"{SCHEME}:"):
            try:
                found = KeyHash.parse(word)
            except ValueError as error:
                raise ConfigError(f"key {number} {error}") from None
        elif not API_KEY_CHARS_MIN <= len(word) <= API_KEY_CHARS_MAX or not _GIVEN.fullmatch(word):
            raise ConfigError(
                f"key {number} is wrong; it must be {API_KEY_CHARS_MIN} to {API_KEY_CHARS_MAX} "
                "visible ASCII characters (`outrider keys new NAME` makes one)"
            )
        else:
            found = KeyHash.of(word)
        # Names are shown and must not reveal the key's hash, so the name is a hash of this hash.
        name = "key-" + hashlib.sha256(b"name of a key" + found.digest).hexdigest()[:12]
        entries.append(KeyEntry(found, Caller(name, name)))
    return tuple(entries)


def hashed_keys(text: str) -> str:
    """The setting `api_key` with each key replaced by its hash. Raises as `given_keys` does."""
    return ",".join(str(entry.hash) for entry in given_keys(text))


def read_entries(text: str) -> list[KeyEntry]:
    """Parses the text of a key file. A `ConfigError` names the line, but quotes no hash."""
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            entries.append(_entry(words))
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"line {number}: {error}") from None
    return entries


_OPTION = re.compile(r"(tenant|requests_per_minute|concurrency)=(.*)|(admin)")
_MOST = {
    "requests_per_minute": REQUESTS_PER_MINUTE_MAX, "concurrency": KEY_CONCURRENCY_MAX
}  # fmt: skip


def _entry(words: Sequence[str]) -> KeyEntry:
    if len(words) < 2:
        raise ValueError("a line needs at least NAME and HASH")
    name, option = check_key_name(words[0]), "HASH"
    given: dict[str, Any] = {}
    try:
        found = KeyHash.parse(words[1])
        for word in words[2:]:
            match = _OPTION.fullmatch(word)
            if match is None:
                raise ConfigError(
                    f"{word[:32]!r} is wrong; it must be tenant=TENANT, requests_per_minute=N, "
                    "concurrency=N or admin"
                )
            option = match[1] or match[3]
            if option in given:
                raise ConfigError(f"{option!r} is given twice")
            given[option] = _value(option, match[2])
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    return KeyEntry(found, Caller(name, **{"tenant": name} | given))


def _value(option: str, text: str) -> str | int | bool:
    if option == "tenant":
        return check_key_name(text)
    if option == "admin":
        return True
    number, most = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0, _MOST[option]
    if not 1 <= number <= most:
        raise ValueError(f"{text[:32]!r} is wrong; it must be from 1 to {most}")
    return number


def entry_line(hash_: KeyHash, caller: Caller) -> str:
    words = [caller.name, str(hash_)]
    if caller.tenant != caller.name:
        words.append(f"tenant={caller.tenant}")
    words += [f"{option}={n}" for option in _MOST if (n := getattr(caller, option))]
    return " ".join([*words, *(["admin"] if caller.admin else [])])


def read_key_file(path: Path) -> list[KeyEntry]:
    """Reads a key file. Raises `ConfigError`, which names the file and the line."""
    data = read_file(path)
    try:
        entries = read_entries(data.decode())
        Keyring(entries)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text in UTF-8") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None
    return entries


def _locked(path: Path) -> AbstractContextManager[IO[str]]:
    """Locks a key file. All symbolic links to the file have the same lock."""
    file = without_links(path)
    return locked(file.with_name(f"{file.name}.lock"))


def add_key(path: Path, caller: Caller) -> str:
    """Makes a key, adds its hash to the file, and returns the key. Only the owner of a new file can
    read the file. Raises `ConfigError` if the file is invalid or already has the name."""
    with _locked(path):
        entries = read_key_file(path) if path.exists() else []
        if any(entry.caller.name == caller.name for entry in entries):
            raise ConfigError(f"{path}: there is a key {caller.name!r} already")
        key = new_key()
        found = KeyHash.of(key)
        Keyring([*entries, KeyEntry(found, caller)])
        text = path.read_text("utf-8") if path.exists() else ""
        if text and not text.endswith("\n"):
            text += "\n"
        write_whole(path, f"{text}{entry_line(found, caller)}\n")
    return key


def remove_key(path: Path, name: str) -> None:
    """Removes a key's line. Raises `ConfigError` if the file is invalid or has no such key."""
    with _locked(path):
        names = [entry.caller.name for entry in read_key_file(path)]
        if name not in names:
            raise ConfigError(f"{path}: there is no key {name!r}")
        lines = path.read_text("utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.partition("#")[0].split()[:1] != [name]]
        write_whole(path, "".join(kept))
