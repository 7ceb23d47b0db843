"""API keys: their stored hashes, the key file, and finding a caller by key."""

import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.auth.access_control import watch_keys
from outrider import limits
from outrider.api_keys import (
    Caller,
    KeyEntry,
    KeyHash,
    Keyring,
    add_key,
    entry_line,
    given_keys,
    hashed_keys,
    new_key,
    read_entries,
    read_key_file,
    remove_key,
)
from outrider.errors import ConfigError

GOOD = "0123456789abcdef"
SUM = "a sha256:" + "0" * 64
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", fullmatch=True)
CALLERS = st.builds(
    Caller,
    name=NAMES,
    tenant=NAMES,
    requests_per_minute=st.integers(0, limits.REQUESTS_PER_MINUTE_MAX),
    concurrency=st.integers(0, limits.KEY_CONCURRENCY_MAX),
    admin=st.booleans(),
)


@given(CALLERS, st.booleans())
def test_a_line_says_all_of_a_key(caller: Caller, made: bool) -> None:
    """A written line is read again; and the key, which it does not contain, finds its caller."""
    key = new_key() if made else "a-key-of-somebody"
    line = entry_line(KeyHash.of(key), caller)
    assert key not in line
    (entry,) = read_entries(line)
    assert entry == KeyEntry(KeyHash.of(key), caller)
    assert Keyring([entry]).find(key) == caller


@given(st.text(max_size=80))
def test_nothing_else_finds_a_caller(text: str) -> None:
    """Only the exact key does."""
    key = new_key()
    ring = Keyring([KeyEntry(KeyHash.of(key), Caller("a")), *given_keys(GOOD)])
    if text != GOOD:
        assert ring.find(text) is None
    other = key[:20] + ("y" if key[20] == "x" else "x") + key[21:]
    for near in (key[:-1], key + "x", key.upper(), other, f" {key}", "", "\ud800" * 20):
        assert ring.find(near) is None
    assert ring.find(key) == Caller("a")


def test_a_key_may_be_kept_by_its_sum_alone() -> None:
    """`sha256sum` makes an entry; also of a key that looks like one of ours."""
    for key in ("made-elsewhere-1234", new_key()):
        line = f"bob sha256:{hashlib.sha256(key.encode()).hexdigest()} tenant=t"
        assert Keyring(read_entries(line)).find(key) == Caller("bob", "t")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alice", "line 1: a line needs at least NAME and HASH"),
        ("\n# x\nalice secret-in-clear", "line 3: HASH: must be sha256:"),
        (f"{SUM} concurrency=0", "concurrency: '0' is wrong; .* from 1 to 4096"),
        (f"{SUM} colour=red", "'colour=red' is wrong; it must be tenant=TENANT"),
        (f"{SUM} tenant=x tenant=y", "'tenant' is given twice"),
        (f"{SUM} tenant=", "tenant: '' is wrong"),
    ],
)
def test_a_wrong_line_is_named(text: str, words: str) -> None:
    """The error has its number and what is allowed, but no hash and nothing that may be a key."""
    with pytest.raises(ConfigError, match=words) as caught:
        read_entries(text)
    assert "secret" not in caught.value.message
    assert "0" * 20 not in caught.value.message


def test_names_and_keys_are_there_once() -> None:
    one, two = KeyHash.of(new_key()), KeyHash.of(new_key())
    with pytest.raises(ConfigError, match="'a' is given twice"):
        Keyring([KeyEntry(one, Caller("a")), KeyEntry(two, Caller("a"))])
    with pytest.raises(ConfigError, match="'b' is given under two names"):
        Keyring([KeyEntry(one, Caller("a")), KeyEntry(one, Caller("b"))])


def test_given_keys_have_tenants_of_their_own() -> None:
    """The same in any order, and for a key as for its hash; an error quotes no key."""
    first, second = given_keys(f"{GOOD}, another-key-12345")
    assert first.caller.tenant != second.caller.tenant
    assert given_keys(f"another-key-12345,{GOOD}") == (second, first)
    hashes = hashed_keys(f"{GOOD},another-key-12345")
    assert GOOD not in hashes
    assert given_keys(hashes) == (first, second)
    assert given_keys("") == ()
    for bad in ("short", "a" * 513, "sixteen chars or so", "schlüssel-mit-umlaut", "sha256:1234"):
        with pytest.raises(ConfigError, match=r"^key 2 ") as caught:
            given_keys(f"{GOOD},{bad}")
        assert bad not in caught.value.message


def test_a_file_is_changed_by_commands_line_by_line(tmp_path: Path) -> None:
    """A new one is for its owner only; lines written by hand stay."""
    path = tmp_path / "keys"
    key = add_key(path, Caller("alice", "team", 60, 4))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("# ours\n" + path.read_text().rstrip("\n"))
    path.chmod(0o640)
    other = add_key(path, Caller("bob", "bob", admin=True))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    ring = Keyring(read_key_file(path))
    assert ring.find(key) == Caller("alice", "team", 60, 4)
    assert ring.find(other) == Caller("bob", "bob", admin=True)
    with pytest.raises(ConfigError, match="there is a key 'alice' already"):
        add_key(path, Caller("alice", "x"))
    with pytest.raises(ConfigError, match="there is no key 'carol'"):
        remove_key(path, "carol")
    remove_key(path, "alice")
    assert path.read_text().startswith("# ours\nbob ")
    assert [entry.caller.name for entry in read_key_file(path)] == ["bob"]


def test_a_file_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a second. An invalid, missing or unreadable file changes nothing."""
    path, now = tmp_path / "keys", [0.0]
    key = add_key(path, Caller("alice", "alice"))
    keys = watch_keys(path, given_keys(GOOD), lambda: now[0])

    def is_found() -> bool:
        now[0] += 1.0
        assert keys.current().find(GOOD) is not None  # Keys of settings stay.
        return keys.current().find(key) is not None

    assert is_found()
    text = path.read_text()
    remove_key(path, "alice")
    assert keys.current().find(key) is not None  # The file has not been checked again yet.
    assert not is_found()
    path.write_text(text)
    os.utime(path, ns=(0, 0))
    assert is_found()
    path.write_text("nonsense\n")
    assert is_found()
    path.unlink()
    assert is_found()
    path.write_text("# none\n")

    def exhausted(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", exhausted)
        assert is_found()
    assert not is_found()  # Though it has not changed since.


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "^cannot read .*keys: No such file"),
        (b"\xff\xfe", "keys: is not text"),
        (b"#" * (limits.FILE_BYTES_MAX + 1), "keys: is larger than 1048576 bytes"),
        (b"alice\n", "keys: line 1: "),
    ],
    ids=["none", "no text", "large", "wrong"],
)
def test_a_file_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, data: bytes | None, words: str
) -> None:
    path = tmp_path / "keys"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        watch_keys(path)
