"""Keeps secrets out of what is shown, and out of the command line that others see.

Other users read command lines in a list of processes, and `ray.init` stores the one of its process
in Ray's head. So a command whose words have secrets takes them out of its own.
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
"""Its scheme, user and password, place, and query or fragment."""
_KEY = re.compile(r"\bor-[0-9a-f]{16}-[A-Za-z0-9_-]{43}|(?i:\bbearer)\s+[!-~]+")
"""An API key that stands where none should."""
_END_OF_FLAGS = "--"


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command's words without secret flags and their values."""
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
    """Takes secrets out of this process's command line, where it has any."""
    words = sys.argv[1:]
    others = without_secrets(words)
    if others != words:
        from setproctitle import setproctitle

        setproctitle(shlex.join([*sys.orig_argv[: -len(words)], *others]))


def masked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by key without secrets, and without those in the texts of others."""
    secrets = {one.key for one in deployment_settings().values() if one.secret}
    return {
        key: _without_secrets(value) if isinstance(value, str) else value
        for key, value in settings.items()
        if key not in secrets
    }


def _without_secrets(text: str) -> str:
    return _KEY.sub(MASK, _URL.sub(lambda url: masked_url(url[0]), text))


def masked_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what Outrider and its libraries do, without secrets."""
    settings = {one.variable: one for one in deployment_settings().values()}
    found = {}
    for name in sorted(filter(SHOWN_VARIABLES.fullmatch, environment)):
        value = environment[name]
        if name in settings:
            secret = settings[name].secret
        else:  # A misspelt name may be that of a secret.
            misspelt = name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_SETTINGS
            secret = misspelt or _SECRET_NAME.search(name) is not None
        # Of a URL the place matters; of any other secret, nothing.
        if secret:
            found[name] = masked_url(value) if "://" in value else MASK
        else:
            found[name] = _without_secrets(value)
    return found


def masked_url(url: str) -> str:
    """A URL without its user, password and query. One that is not well formed is masked whole:
    what looks like a host may then be a piece of a password."""
    if not set("@?#") & set(url):
        return url
    if (found := _PLAIN_URL.fullmatch(url)) is None:
        return MASK
    scheme, user, place, query = found.groups()
    return f"{scheme}{f'{MASK}@' if user else ''}{place}{f'?{MASK}' if query else ''}"
