"""Keeps secrets out of output, and out of this process's command line.

Other users can read command lines in the process list, and `ray.init` stores its own in Ray's head.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.config import deployment_settings
from outrider.settings import ENVIRONMENT_PREFIX, NOT_SETTINGS

MASK = "***"
SHOWN_VARIABLES = re.compile(
    r"(OUTRIDER|CUDA|NVIDIA|NCCL|OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|PYTORCH|RAY|HF|TRANSFORMERS"
    r"|TOKENIZERS|GRPC|OTEL|MALLOC|PYTHON)_?.*"
)
_SECRET_NAME = re.compile(r"PASS|SECRET|TOKEN|KEY|CREDENTIAL|AUTH|HEADER|COOKIE", re.I)
_URL = re.compile(r"[a-zA-Z][\w+.-]*://\S*")
_PLAIN_URL = re.compile(
    r"([a-zA-Z][\w+.-]*://)([^\s@/?#]*@)?((?:\[[\da-fA-F:]+\]|[\w.,:-])+(?:/[^\s@?#]*)?)([?#][^\s@]*)?"
)
"""Groups: scheme, user and password, host and path, query or fragment."""
_KEY = re.compile(r"\bor-[0-9a-f]{16}-[A-Za-z0-9_-]{43}|(?i:\bbearer)\s+[!-~]+")
"""An API key in some other text."""
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
    """Removes secrets from this process's command line, if it has any."""
    words = sys.argv[1:]
    others = without_secrets(words)
    if others != words:
        from setproctitle import setproctitle

        setproctitle(shlex.join([*sys.orig_argv[: -len(words)], *others]))


def masked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by key without secret ones, and with secrets in other texts masked."""
    secrets = {one.key for one in deployment_settings().values() if one.secret}
    return {
        key: _without_secrets(value) if isinstance(value, str) else value
        for key, value in settings.items()
        if key not in secrets
    }


def _without_secrets(text: str) -> str:
    return _KEY.sub(MASK, _URL.sub(lambda url: masked_url(url[0]), text))


def masked_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that affect Outrider and its libraries, with secrets masked."""
    settings = {one.variable: one for one in deployment_settings().values()}
    found = {}
    for name in sorted(filter(SHOWN_VARIABLES.fullmatch, environment)):
        value = environment[name]
        if name in settings:
            secret = settings[name].secret
        else:  # A misspelt name may belong to a secret.
            misspelt = name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_SETTINGS
            secret = misspelt or _SECRET_NAME.search(name) is not None
        # The host of a URL is useful in a report; nothing of another secret is.
        if secret:
            found[name] = masked_url(value) if "://" in value else MASK
        else:
            found[name] = _without_secrets(value)
    return found


def masked_url(url: str) -> str:
    """A URL without user, password and query. A malformed one is masked entirely: what looks like
    its host may be part of a password."""
    if not set("@?#") & set(url):
        return url
    if (found := _PLAIN_URL.fullmatch(url)) is None:
        return MASK
    scheme, user, place, query = found.groups()
    return f"{scheme}{f'{MASK}@' if user else ''}{place}{f'?{MASK}' if query else ''}"
