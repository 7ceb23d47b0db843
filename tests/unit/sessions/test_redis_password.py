"""Where a process finds the password of Redis, and what is left of an address without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError, SettingError
from outrider.limits import PASSWORD_BYTES_MAX
from outrider.sessions.redis_address import (
    SENTINEL_VARIABLE,
    VARIABLE,
    RedisAddress,
    with_password,
    without_password,
)

SECRET = "p@ss/w:rd"  # noqa: S105 (of no server)


def address(url: str = "redis://h:1/2", **others: Any) -> RedisAddress:
    return RedisAddress(url=url, key_prefix="p:", **others)


@pytest.mark.parametrize(
    ("url", "left", "username", "password"),
    [
        ("redis://h:1/2", "redis://h:1/2", "", ""),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=2", "", ""),
        ("redis://:p%40ss%2Fw%3Ard@h:1/2", "redis://h:1/2", "", SECRET),
        ("rediss://me:p%40ss%2Fw%3Ard@h:1/2?a=b", "rediss://h:1/2?a=b", "me", SECRET),
        ("redis://me@h:1", "redis://h:1", "me", ""),
        ("redis://h:1/2?password=p%40ss%2Fw%3Ard&db=3", "redis://h:1/2?db=3", "", SECRET),
        ("unix://me:x@/run/redis.sock", "unix:///run/redis.sock", "me", "x"),
        ("redis://u:x@h:1,i:2/0", "redis://h:1,i:2/0", "u", "x"),
    ],
)
def test_no_password_is_left_in_a_url(url: str, left: str, username: str, password: str) -> None:
    found, secret = without_password(address(url))
    assert (found.url, found.username, found.password, secret.redis) == (
        left,
        username,
        "",
        password,
    )
    assert found.asks_for_password == bool(password)


def test_what_the_url_says_wins() -> None:
    found, secret = without_password(
        address("redis://me:one@h:1", username="you", password="two")  # noqa: S106
    )
    assert (found.username, secret.redis) == ("me", "one")
    found, secret = without_password(
        address("redis://h:1", username="you", password="two")  # noqa: S106
    )
    assert (found.username, found.password, secret.redis) == ("you", "", "two")


def test_passwords_in_other_places_are_refused(tmp_path: Path) -> None:
    """Rather than told to Ray."""
    with pytest.raises(SettingError, match=r"redis_url: has a password among its options"):
        without_password(address("redis://h:1?sentinel_password=x"))
    with pytest.raises(SettingError, match="redis_password_file: cannot go with"):
        without_password(address("redis://:x@h:1", password_file=str(tmp_path)))
    with pytest.raises(ConfigError, match="is no URL"):
        without_password(address("redis://[h:1"))


@pytest.mark.parametrize("text", [SECRET, SECRET + "\n", SECRET + "\r\n"])
def test_the_password_is_read_from_its_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "password"
    path.write_bytes(text.encode())
    found = with_password(address(password_file=str(path)), {VARIABLE: "another"})
    assert found.password == SECRET


@pytest.mark.parametrize("text", [b"", b"\n", b"\xff\xfe", b"x" * (PASSWORD_BYTES_MAX + 1)])
def test_a_file_without_a_password_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "password"
    path.write_bytes(text)
    with pytest.raises(SettingError, match=f"redis_password_file: .*{path}"):
        with_password(address(password_file=str(path)))
    with pytest.raises(SettingError, match="No such file"):
        with_password(address(password_file=str(tmp_path / "nowhere")))


def test_elsewhere_it_is_a_variable_of_the_process() -> None:
    """And no variable is looked for where there is no password."""
    sealed, _ = without_password(address("redis://:x@h:1"))
    assert with_password(sealed, {VARIABLE: SECRET}).password == SECRET
    with pytest.raises(SettingError, match=f"passwords do not travel through Ray.*{VARIABLE}"):
        with_password(sealed, {})
    open_one, _ = without_password(address())
    assert with_password(open_one, {VARIABLE: SECRET}) == open_one


def test_sentinels_have_a_password_of_their_own(tmp_path: Path) -> None:
    sealed, secrets = without_password(
        address("redis+sentinel://me:x@h:1,i:2/sessions", sentinel_password=SECRET)
    )
    assert (sealed.url, sealed.sentinel_password) == ("redis+sentinel://h:1,i:2/sessions", "")
    assert (secrets.redis, secrets.sentinel) == ("x", SECRET)
    assert SECRET not in repr(secrets)
    found = with_password(sealed, {VARIABLE: "x", SENTINEL_VARIABLE: SECRET})
    assert (found.password, found.sentinel_password) == ("x", SECRET)
    with pytest.raises(SettingError, match=f"redis_sentinel_password: .*{SENTINEL_VARIABLE}"):
        with_password(sealed, {VARIABLE: "x"})
    path = tmp_path / "sentinel"
    path.write_text(SECRET)
    found = with_password(
        address(sentinel_password_file=str(path), asks_for_sentinel_password=True), {}
    )
    assert found.sentinel_password == SECRET
    path.unlink()
    with pytest.raises(SettingError, match=f"^redis_sentinel_password: cannot read {path}: No"):
        with_password(address(sentinel_password_file=str(path)), {})
