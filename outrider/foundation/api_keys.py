"""API keys, their hashes, and the callers that they identify.

    or-<secret>        a key made by `outrider keys new`. The secret consists of 256 random bits,
                       written as 43 characters.
    sha256:<digest>    the hash of a key: its SHA-256, in hexadecimal digits. The hash has no salt,
                       because keys are random.

A key file is a JSON object with a field for each key. The field's name is the key's name:

    {"alice": {"hash": "sha256:9f2b...", "tenant": "team", "concurrency": 4}}
"""

import hashlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from outrider import limits
from outrider.errors import ConfigError
from outrider.foundation.files import locked, read_file, without_links, write_whole


@dataclass(frozen=True)
class Caller:
    """The caller that an API key identifies."""

    name: str = ""
    """Name of the API key; empty if the server needs no key. Rate limits count by this name."""
    tenant: str = ""
    """Tenant that owns the caller's sessions and cached prefixes. Requests cannot change it."""
    requests_per_minute: int = 0
    """0 = unlimited."""
    concurrency: int = 0
    """Largest number of simultaneous generations; 0 = unlimited."""
    admin: bool = False
    """Whether the caller may read and cancel sessions of all tenants."""

    @property
    def reach(self) -> str | None:
        """The tenant whose sessions the caller may read and cancel; None = all tenants."""
        return None if self.admin else self.tenant


ANYBODY = Caller()
"""The caller of every request to a server that needs no key. This caller has no limits."""

_HASH = "sha256:[0-9a-f]{64}"
_GIVEN = re.compile(r"[!-+\--~]+")
"""Visible ASCII. Commas are excluded because they separate keys."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


def key_hash(key: str) -> str:
    """Returns the hash of any text, in the format of key files."""
    return f"sha256:{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()}"


def new_key() -> str:
    """Makes a random key."""
    return f"or-{secrets.token_urlsafe(32)}"


def check_key_name(name: str) -> str:
    """Returns the name. Raises `ValueError` if the name is invalid."""
    if not _NAME.fullmatch(name):
        rule = "begin with a letter or digit, and have up to 64 characters of A-Z a-z 0-9 _ . @ -"
        raise ValueError(f"{name[:64]!r} is not a valid name; it must {rule}")
    return name


def given_keys(text: str) -> dict[str, Caller]:
    """Parses the setting `api_key`: keys or hashes, separated by commas. Maps the hash of each key
    to a caller without limits, with a tenant of its own. If a key is wrong, raises a `ConfigError`
    with the key's number, but not its text."""
    callers = {}
    for number, word in enumerate(text.split(",") if text else (), start=1):
        word = word.strip()
        if not re.fullmatch(_HASH, word):
            least, most = limits.API_KEY_CHARS_MIN, limits.API_KEY_CHARS_MAX
            is_wrong = not (least <= len(word) <= most and _GIVEN.fullmatch(word))
            if word.startswith("sha256:") or is_wrong:
                raise ConfigError(
                    f"key {number} is wrong; it must be {least} to {most} "
                    "visible ASCII characters (`outrider keys new NAME` makes one), or sha256: and "
                    "64 hexadecimal digits in lower case"
                )
            word = key_hash(word)
        # Names are shown, and must not reveal `word`. So a name has a hash of `word`.
        name = f"key-{hashlib.sha256(word.encode()).hexdigest()[:12]}"
        callers[word] = Caller(name, name)
    return callers


_KeyName = Annotated[str, AfterValidator(check_key_name)]


class _StoredKey(BaseModel):
    """A key in a key file. `Caller` describes the fields that both classes have."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    hash: Annotated[str, Field(pattern=f"^{_HASH}$")]
    tenant: _KeyName | None = None
    """None = the name of the key."""
    requests_per_minute: Annotated[int, Field(ge=1, le=limits.REQUESTS_PER_MINUTE_MAX)] = 0
    concurrency: Annotated[int, Field(ge=1, le=limits.KEY_CONCURRENCY_MAX)] = 0
    admin: bool = False


_FILE = TypeAdapter(dict[_KeyName, _StoredKey])


def read_key_file(path: Path) -> dict[str, Caller]:
    """Reads a key file. Maps the hash of each key to its caller. The `ConfigError` for an invalid
    file names the file and the wrong field, but quotes no hash."""
    stored = _read(path)
    callers: dict[str, Caller] = {}
    for name, key in stored.items():
        if key.hash in callers:
            raise ConfigError(f"{path}: {name!r} has the same hash as {callers[key.hash].name!r}")
        own = key.model_dump(exclude={"hash"})
        callers[key.hash] = Caller(name, **own | {"tenant": key.tenant or name})
    return callers


def _read(path: Path) -> dict[str, _StoredKey]:
    def check_names(pairs: Sequence[tuple[str, Any]]) -> None:
        for name, number in Counter(name for name, _ in pairs).items():
            if number > 1:
                raise ConfigError(f"{path}: the name {name!r} is given {number} times")

    try:
        data = read_file(path)
        stored = _FILE.validate_json(data)  # pydantic accepts repeated names.
        json.loads(data, object_pairs_hook=check_names)
        return stored
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = "".join(f"{part}: " for part in first["loc"] if part != "[key]")
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {place}{reason}") from None


@contextmanager
def _changing(path: Path, creates: bool = False) -> Iterator[dict[str, _StoredKey]]:
    """Locks a key file, yields its keys, and writes the changed keys back. The lock also excludes
    writers that use a symbolic link to the file. If `creates` is true, the file may be missing."""
    file = without_links(path)
    with locked(file.with_name(f"{file.name}.lock")):
        stored = {} if creates and not path.exists() else _read(path)
        yield stored
        text = _FILE.dump_json(stored, indent=2, exclude_defaults=True).decode()
        write_whole(path, text + "\n")


def add_key(path: Path, caller: Caller) -> str:
    """Makes a key for the caller, adds the key's hash to the file, and returns the key. A new file
    gets mode 0600. Raises `ConfigError` if the file is invalid or already has the key's name."""
    key = new_key()
    own = {key: value for key, value in asdict(caller).items() if value and key != "name"}
    with _changing(path, creates=True) as stored:
        if caller.name in stored:
            raise ConfigError(f"{path}: there is a key {caller.name!r} already")
        stored[caller.name] = _StoredKey(hash=key_hash(key), **own)
    return key


def remove_key(path: Path, name: str) -> None:
    """Removes a key. Raises `ConfigError` if the file is invalid or has no key of this name."""
    with _changing(path) as stored:
        if stored.pop(name, None) is None:
            raise ConfigError(f"{path}: there is no key {name!r}")
