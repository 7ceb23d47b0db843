"""Removes secrets from output and from this process's command line. Other users see the command
line in the process list, and `ray.init` stores the command line in Ray's head."""

import re
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from outrider.config import deployment_settings

MASK = "***"
_SECRETS = re.compile(r"\bor-[A-Za-z0-9_-]{43}|(?i:\bbearer)\s+[!-~]+|(?<=://)\S*(?=@)|(?<=\?)\S+")
"""Matches API keys, bearer tokens, and the user, password and query of URLs."""


def hide_words(given: frozenset[str]) -> None:
    """If a secret is among the `given` options, hides all options in the process list."""
    if any(one.secret and one.key in given for one in deployment_settings().values()):
        from setproctitle import setproctitle

        words = sys.argv[1:]
        setproctitle(shlex.join([*sys.orig_argv[: -len(words)], words[0]]))


def masked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Masks secrets inside settings that are not secret as a whole, such as a password in a URL."""
    return {
        key: _SECRETS.sub(MASK, value) if isinstance(value, str) else value
        for key, value in settings.items()
    }
