"""What may be shown of settings and variables: all but what may be a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from outrider.config import deployment_settings
from outrider.settings import ENVIRONMENT_PREFIX, NOT_SETTINGS

from .settings import SECRETS

MASK: Final = "***"
VARIABLES: Final = re.compile(
    r"(OUTRIDER|CUDA|NVIDIA|NCCL|OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|PYTORCH|RAY|HF|TRANSFORMERS"
    r"|TOKENIZERS|GRPC|OTEL|MALLOC|PYTHON)_?.*"
)
_SECRET_NAME: Final = re.compile(r"PASS|SECRET|TOKEN|KEY|CREDENTIAL|AUTH|HEADER|COOKIE", re.I)
_URL: Final = re.compile(r"[a-zA-Z][\w+.-]*://\S*")
_KEY: Final = re.compile(r"\bor-[0-9a-f]{16}-[A-Za-z0-9_-]{43}|(?i:\bbearer)\s+[!-~]+")
"""An API key that stands where none should."""


def masked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by key without secrets, and without those in the texts of others."""
    return {
        key: _without_secrets(value) if isinstance(value, str) else value
        for key, value in settings.items()
        if key not in SECRETS
    }


def _without_secrets(text: str) -> str:
    return _KEY.sub(MASK, _URL.sub(lambda url: masked_url(url[0]), text))


def masked_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what Outrider and its libraries do, without secrets."""
    settings = {setting.variable: key for key, setting in deployment_settings().items()}
    found = {}
    for name in sorted(environment):
        if not VARIABLES.fullmatch(name):
            continue
        key = settings.get(name)
        if key is None and name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_SETTINGS:
            secret = True  # A misspelt name, of whatever was meant.
        else:
            secret = key in SECRETS if key else _SECRET_NAME.search(name) is not None
        value = environment[name]
        if secret:
            # Of a URL the place matters; of anything else, nothing.
            found[name] = masked_url(value) if "://" in value else MASK
        else:
            found[name] = _without_secrets(value)
    return found


def masked_url(url: str) -> str:
    """A URL without its user, password and query. One that is not well formed is masked whole:
    what looks like a host may then be a piece of a password."""
    if not set("@?#") & set(url):
        return url
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return MASK
    if "@" in url.replace(parts.netloc, "", 1) or any(c.isspace() for c in url):
        return f"{parts.scheme}://{MASK}"
    user = f"{MASK}@" if "@" in parts.netloc else ""
    host = f"[{host}]" if ":" in host else host
    query = MASK if parts.query or parts.fragment else ""
    return urlunsplit((parts.scheme, f"{user}{host}{port}", parts.path, query, ""))
