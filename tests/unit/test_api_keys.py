"""Keys: what is kept of them, the file that has it, and who is found by them."""

from __future__ import annotations

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
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", fullmatch=True)
CALLERS = st.builds(
    Caller,
    name=NAMES,
    tenant=NAMES,
    requests_per_minute=st.integers(0, limits.REQUESTS_PER_MINUTE_MAX),
    concurrency=st.integers(0, limits.KEY_CONCURRENCY_MAX),
    admin=st.booleans(),
)


class Clock:
    """Seconds, as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(CALLERS, st.booleans())
def test_a_line_says_all_of_a_key(caller: Caller, made: bool) -> None:
    """What is written is read again; and the key, with none of it written, finds its caller."""
    key = new_key() if made else "a-key-of-somebody"
    line = entry_line(KeyHash.of(key), caller)
    assert key not in line
    (entry,) = read_entries(line)
    assert entry == KeyEntry(KeyHash.of(key), caller)
    assert Keyring([entry]).find(key) == caller


@given(st.text(max_size=80))
def test_nothing_else_finds_a_caller(text: str) -> None:
    """No text but the key, also not one that is nearly it."""
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
        ("alice", "line 1: a key has a NAME and a HASH"),
        ("\n# x\nalice secret-in-clear", "line 3: HASH: must be sha256:"),
        ("a/b sha256:" + "0" * 64, "line 1: 'a/b' is wrong; it must be up to 64"),
        ("a sha256:" + "0" * 64 + " concurrency=0", "concurrency: '0' is wrong; .* from 1 to 4096"),
        ("a sha256:" + "0" * 64 + " concurrency=" + "9" * 5000, "concurrency: '9{32}' is wrong"),
        ("a sha256:" + "0" * 64 + " colour=red", "'colour=red' is wrong; it must be tenant=TENANT"),
        ("a sha256:" + "0" * 64 + " tenant=x tenant=y", "'tenant' is there twice"),
        ("a sha256:" + "0" * 64 + " tenant=", "tenant: '' is wrong"),
    ],
)
def test_a_wrong_line_is_named(text: str, words: str) -> None:
    """By its number, with what is allowed, and without a hash or what may be a key."""
    with pytest.raises(ConfigError, match=words) as caught:
        read_entries(text)
    assert "secret" not in caught.value.message
    assert "0" * 20 not in caught.value.message


def test_names_and_keys_are_there_once() -> None:
    """Two entries of one name, or one key under two names, are refused; so are too many."""
    one, two = KeyHash.of(new_key()), KeyHash.of(new_key())
    with pytest.raises(ConfigError, match="'a' is there twice"):
        Keyring([KeyEntry(one, Caller("a")), KeyEntry(two, Caller("a"))])
    with pytest.raises(ConfigError, match="'b' has another name"):
        Keyring([KeyEntry(one, Caller("a")), KeyEntry(one, Caller("b"))])
    many = [
        KeyEntry(KeyHash("", i.to_bytes(32, "big")), Caller(f"k{i}"))
        for i in range(limits.API_KEYS_MAX + 1)
    ]
    assert Keyring(many[:-1]).entries
    with pytest.raises(ConfigError, match="4097 keys; at most 4096"):
        Keyring(many)


def test_given_keys_have_tenants_of_their_own() -> None:
    """The same in whichever order and whether the key or its hash is given; an error repeats no
    key."""
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
    """For its owner only where it is new; what somebody else wrote into it stays."""
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
    assert key not in path.read_text()
    before = path.read_text()
    with pytest.raises(ConfigError, match="there is a key 'alice' already"):
        add_key(path, Caller("alice", "x"))
    with pytest.raises(ConfigError, match="there is no key 'carol'"):
        remove_key(path, "carol")
    assert path.read_text() == before
    remove_key(path, "alice")
    assert path.read_text().startswith("# ours\nbob ")
    assert [entry.caller.name for entry in read_key_file(path)] == ["bob"]


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """Within a second, by whatever changed it; one that is wrong or gone changes nothing."""
    path, clock = tmp_path / "keys", Clock()
    key = add_key(path, Caller("alice", "alice"))
    keys = watch_keys(path, given_keys(GOOD), clock)
    assert keys.current().find(key) == Caller("alice", "alice")
    text = path.read_text()
    remove_key(path, "alice")
    assert keys.current().find(key) is not None  # It has not been looked at again yet.
    clock.now += 1.0
    assert keys.current().find(key) is None
    assert keys.current().find(GOOD) is not None  # Those that are given do not come from it.
    path.write_text(text)
    os.utime(path, ns=(0, 0))
    clock.now += 1.0
    assert keys.current().find(key) is not None
    path.write_text("nonsense\n")
    clock.now += 1.0
    assert keys.current().find(key) is not None
    path.unlink()
    clock.now += 1.0
    assert keys.current().find(key) is not None
    path.write_text("# nobody\n")
    clock.now += 1.0
    assert keys.current().find(key) is None


def test_a_key_that_was_revoked_while_nobody_could_read_ends_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first look at which the file can be read, though it has not changed any more; the log
    has said once why not before."""
    path, clock = tmp_path / "keys", Clock()
    key = add_key(path, Caller("alice", "alice"))
    keys = watch_keys(path, (), clock)
    remove_key(path, "alice")

    def exhausted(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", exhausted)
        for _ in range(3):
            clock.now += 1.0
            assert keys.current().find(key) is not None
    assert caplog.text.count("Too many open files") == 1
    clock.now += 1.0
    assert keys.current().find(key) is None


def test_a_file_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    """In one line that names it."""
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match=r"^cannot read .*keys: No such file"):
        watch_keys(path, (), Clock())
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="keys: is not text"):
        watch_keys(path, (), Clock())
    path.write_bytes(b"#" * (limits.KEY_FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="keys: is larger than 1048576 bytes"):
        watch_keys(path, (), Clock())
    path.write_text("alice\n")
    with pytest.raises(ConfigError, match=r"keys: line 1: "):
        watch_keys(path, (), Clock())
