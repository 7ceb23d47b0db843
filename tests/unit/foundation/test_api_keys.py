"""API keys: their hashes, and the key file."""

import errno
import hashlib
import json
import os
import re
import stat
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.auth.access_control import watch_keys
from outrider import limits
from outrider.errors import ConfigError
from outrider.foundation.api_keys import (
    Caller,
    add_key,
    given_keys,
    key_hash,
    new_key,
    read_key_file,
    remove_key,
)

GOOD = "0123456789abcdef"
HASH = "sha256:" + "0" * 64
HASHED = f'"hash": "{HASH}"'
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", fullmatch=True)
CALLERS = st.builds(
    Caller,
    name=NAMES,
    tenant=NAMES,
    requests_per_minute=st.integers(0, limits.REQUESTS_PER_MINUTE_MAX),
    concurrency=st.integers(0, limits.KEY_CONCURRENCY_MAX),
    admin=st.booleans(),
)


@given(CALLERS)
def test_a_file_says_all_of_a_key(caller: Caller) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "keys"
        key = add_key(path, caller)
        assert key not in path.read_text()
        assert read_key_file(path) == {key_hash(key): caller}


@given(st.text(max_size=80))
def test_nothing_else_finds_a_caller(text: str) -> None:
    key = new_key()
    other = key[:20] + ("y" if key[20] == "x" else "x") + key[21:]
    nears = (text, key[:-1], key + "x", key.upper(), other, f" {key}", "", "\ud800" * 20)
    assert key_hash(key) not in map(key_hash, nears)


def test_a_key_of_another_program_is_added_by_its_sum_alone(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"made-elsewhere-1234").hexdigest()
    path = tmp_path / "keys"
    for more, tenant in (({"tenant": "t"}, "t"), ({}, "bob")):
        path.write_text(json.dumps({"bob": {"hash": f"sha256:{digest}"} | more}))
        assert read_key_file(path) == {key_hash("made-elsewhere-1234"): Caller("bob", tenant)}


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"alice": {}}, "alice: hash: Field required"),
        ({"alice": {"hash": "secret-in-clear"}}, "alice: hash: String should match .*sha256:"),
        ({"a": {"hash": HASH, "concurrency": 0}}, "concurrency: .* greater than or equal to 1"),
        ({"a": {"hash": HASH, "concurrency": "4"}}, "a: concurrency: .* valid integer"),
        ({"a": {"hash": HASH, "colour": "red"}}, "a: colour: Extra inputs are not permitted"),
        ({"a": {"hash": HASH, "tenant": ""}}, "a: tenant: '' is not a valid name; it must begin"),
        ({"a/b": {"hash": HASH}}, "a/b: 'a/b' is not a valid name; .* up to 64"),
        ({"a": {"hash": HASH}, "b": {"hash": HASH}}, "'b' has the same hash as 'a'"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, stored: object, words: str) -> None:
    """The error says what is allowed, but has no hash and nothing that may be a key."""
    path = tmp_path / "keys"
    path.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: .*{words}") as caught:
        read_key_file(path)
    assert "secret" not in caught.value.message
    assert "0" * 20 not in caught.value.message


def test_given_keys_have_tenants_of_their_own() -> None:
    """The same in any order, and for a key as for its hash; an error quotes no key."""
    found = given_keys(f"{GOOD}, another-key-12345")
    assert [*found] == [key_hash(GOOD), key_hash("another-key-12345")]
    assert len({caller.tenant for caller in found.values()}) == 2
    assert given_keys(f"another-key-12345,{GOOD}") == found == given_keys(",".join(found))
    assert given_keys("") == {}
    for bad in ("short", "a" * 513, "sixteen chars or so", "schlüssel-mit-umlaut", "sha256:1234"):
        with pytest.raises(ConfigError, match=r"^key 2 ") as caught:
            given_keys(f"{GOOD},{bad}")
        assert bad not in caught.value.message


def test_a_file_is_changed_by_commands(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key = add_key(path, Caller("alice", "team", 60, 4))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    other = add_key(path, Caller("bob", "bob", admin=True))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    bob = {key_hash(other): Caller("bob", "bob", admin=True)}
    assert read_key_file(path) == {key_hash(key): Caller("alice", "team", 60, 4)} | bob
    with pytest.raises(ConfigError, match="there is a key 'alice' already"):
        add_key(path, Caller("alice", "x"))
    with pytest.raises(ConfigError, match="there is no key 'carol'"):
        remove_key(path, "carol")
    remove_key(path, "alice")
    assert read_key_file(path) == bob


def test_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a second. An invalid, missing or unreadable file changes nothing."""
    path, now = tmp_path / "keys", [0.0]
    key = add_key(path, Caller("alice", "alice"))
    monkeypatch.setattr("outrider.foundation.files.monotonic", lambda: now[0])
    keys = watch_keys(path, given_keys(GOOD))

    def is_found() -> bool:
        now[0] += 1.0
        assert key_hash(GOOD) in keys.current()  # Keys of settings stay.
        return key_hash(key) in keys.current()

    assert is_found()
    text = path.read_text()
    remove_key(path, "alice")
    assert key_hash(key) in keys.current()  # The file has not been checked again yet.
    assert not is_found()
    path.write_text(text)
    os.utime(path, ns=(0, 0))
    assert is_found()
    path.write_text("nonsense")
    assert is_found()
    path.unlink()
    assert is_found()
    path.write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert is_found()
    assert not is_found()  # Though it has not changed since.


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "^cannot read .*keys: No such file"),
        (b"\xff\xfe", "keys: Invalid JSON: "),
        (b"#" * (limits.FILE_BYTES_MAX + 1), "keys: is larger than 1048576 bytes"),
        (b'{"a": {}}', "keys: a: hash: Field required"),
        (f'{{"a": {{{HASHED}}}, "a": {{{HASHED}}}}}'.encode(), "'a' is given 2 times"),
        (f'{{"a": {{{HASHED}, {HASHED}}}}}'.encode(), "'hash' is given 2 times"),
    ],
    ids=["none", "no text", "large", "wrong", "a name twice", "a field twice"],
)
def test_an_unusable_file_is_refused_first(tmp_path: Path, data: bytes | None, words: str) -> None:
    path = tmp_path / "keys"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        watch_keys(path)
