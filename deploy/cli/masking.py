"""Removes secrets from output and from this process's command line.

The process list shows command lines to other users, and `ray.init` stores one in Ray's head.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.config import deployment_settings

MASK = "***"
_SECRETS = re.compile(
    r"\bor-[0-9a-f]{16}-[A-Za-z0-9_-]{43}|(?i:\bbearer)\s+[!-~]+|(?<=://)\S*(?=@)|(?<=\?)\S+"
)
"""Secrets inside a text: an API key, a bearer token, and the user, password and query of a URL."""
_END_OF_FLAGS = "--"


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words without secret options and their values."""
    flags = {one.flag for one in deployment_settings().values() if one.secret}
    others: list[str] = []
    left = iter(words)
    for word in left:
        flag, has_value, _ = word.partition("=")
        if word == _END_OF_FLAGS:
            others += [word, *left]
        elif flag not in flags:
            others.append(word)
        elif not has_value:
            next(left, None)
    return others


def hide_words() -> None:
    """Removes secret options from this process's command line."""
    words = sys.argv[1:]
    others = without_secrets(words)
    if others != words:
        from setproctitle import setproctitle

        setproctitle(shlex.join([*sys.orig_argv[: -len(words)], *others]))


def masked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without secret ones. Secrets inside the other values are masked."""
    secrets = {one.key for one in deployment_settings().values() if one.secret}
    return {
        key: _SECRETS.sub(MASK, value) if isinstance(value, str) else value
        for key, value in settings.items()
        if key not in secrets
    }
