"""The token that Ray asks for: whoever reaches its ports without it is refused.

Ray reads RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH, and its processes inherit both. The token itself
stands in a file for its owner only, not in any process's words or variables.
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
from pathlib import Path
from typing import Any, Final

from outrider.errors import SettingError

TOKEN_FILE: Final = "ray.token"  # noqa: S105 (a name)
MODE, PATH, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"
_BYTES: Final = 32
_ANSWER_S: Final = 5.0
_before: dict[str, str | None] = {}
"""The user's own variables while `use_token` holds; None = was not set."""


def new_token() -> str:
    """Another token, for a cluster that begins."""
    return secrets.token_hex(_BYTES)


def use_token(path: Path) -> None:
    """From now on this process, and those that it starts, show and ask for the token in a file."""
    if not _before:
        _before.update({name: os.environ.get(name) for name in (MODE, PATH, TOKEN)})
    os.environ |= {MODE: "token", PATH: str(path)}
    os.environ.pop(TOKEN, None)
    _read_again()


def forget_token() -> None:
    """Undoes `use_token`: the variables are as they were before its first call."""
    for name, text in _before.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text
    _before.clear()
    _read_again()


def _read_again() -> None:
    if "ray" in sys.modules:  # It has read the variables already, and perhaps another token.
        raylet = _raylet()
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def check_asks_for_token(address: str) -> None:
    """Calls the head (GCS) of a Ray cluster without a token. Raises `SettingError` where it
    answers: whoever reaches it may run code on every machine; and where neither a refusal nor an
    answer comes. With TLS it speaks to nobody without a certificate, and is not asked."""
    import grpc

    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive", bytes, bytes)
        try:
            ask(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            code = error.code()
            if code == grpc.StatusCode.UNAUTHENTICATED:
                return
            raise SettingError(
                "address",
                f"whether the Ray cluster at {address} asks for a token is not known ({code.name})",
            ) from error
    raise SettingError(
        "address",
        f"the Ray cluster at {address} runs code for whoever reaches it: start it with "
        f"{MODE}=token and {PATH}, which this command then needs, too, or give --insecure on a "
        "trusted network",
    )


def _raylet() -> Any:
    """Ray's own module for this, which has no types."""
    return importlib.import_module("ray._raylet")
