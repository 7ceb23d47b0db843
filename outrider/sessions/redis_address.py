"""Which Redis server, and who we are to it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """What it takes to connect. Its text has no secret."""

    url: str = field(repr=False)
    """May hold a user and a password, which win over those below. For the form with Sentinels
    see `redis_sentinel`."""
    username: str = ""
    password: str = field(default="", repr=False)
    ca_file: str = ""
    """Certificate authority of servers reached by TLS; empty = the system's."""
    sentinel_password: str = field(default="", repr=False)
    """What Sentinels ask for, where the URL names them."""
    key_prefix: str
    """Begins every key."""
    password_file: str = ""
    """Holds the password on the machine of whoever connects; empty = there is no such file."""
    sentinel_password_file: str = ""
    """Likewise, of the Sentinels."""
    asks_for_password: bool = False
    """Whether there is one, though it is not here; see `redis_password.py`."""
    asks_for_sentinel_password: bool = False
    """Likewise, of the Sentinels."""
