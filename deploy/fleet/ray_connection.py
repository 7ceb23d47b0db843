"""Ray's processes on this machine, or the cluster elsewhere that this process connects to; and the
token that it asks for.

Ray reads RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH, and its processes inherit both. The token itself
stands in a file for its owner only, not in any process's arguments or variables.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.config import deployment_settings
from outrider.errors import ConfigError, SettingError
from outrider.files import write_whole
from outrider.limits import LOG_BYTES_MAX, LOG_FILES_KEPT

OBJECT_STORE_BYTES = 100 * 2**20
"""Nothing large goes through Ray."""
_TEMPORARY_BYTES_MAX = 16
"""Ray puts sockets some 85 bytes below it, and a socket's path has 107 at most."""
_RAY_FOLDER = "r"
"""Ray's directory in the temporary one. Ray opens its own to all users (mode 0777); the one around
it keeps them out (0700)."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray would else warn about what it will do in a later version.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's workers would else give way to everything on the machine; these serve requests.
    "RAY_worker_niceness": "0",
    # Without these the standard error of Ray's workers is a file without bounds.
    "RAY_ROTATION_MAX_BYTES": str(LOG_BYTES_MAX),
    "RAY_ROTATION_BACKUP_COUNT": str(LOG_FILES_KEPT),
}
TOKEN_FILE = "ray.token"  # noqa: S105 (a name)
MODE, PATH, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"
_VARIABLES = MODE, PATH, TOKEN
_BYTES = 32
_ANSWER_S = 5.0


class SecretFiles:
    """A directory of files for their owner alone, which processes of this machine read: Ray opens
    its own directory to all users, and a list of processes shows their arguments."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def hide(self, name: str, secret: str) -> Path:
        """A file with the secret, of mode 0600 in a directory of mode 0700."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / name
        write_whole(path, secret, 0o600)
        return path

    def forget(self) -> None:
        """Removes them."""
        shutil.rmtree(self._directory, ignore_errors=True)


class RayConnection:
    """A Ray cluster that this process started, or one that runs elsewhere."""

    def __init__(
        self, address: str, namespace: str, secret_files: SecretFiles | None = None,
        token: Path | None = None,
    ) -> None:  # fmt: skip
        """Actors have names in a `namespace`, which is their deployment's alone. `secret_files`
        are a local cluster's, whose token stands among them; `token` is the file of another's."""
        self.local = not address
        self.namespace = namespace
        self._secret_files = secret_files
        self._address = address or "local"
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._connected = False
        self._before = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        """The user's own, as they are in the end again."""
        self.found = ""
        """HOST:PORT of the cluster, once it is connected."""
        self.token = token
        """File of its token; None = as Ray finds it, by RAY_AUTH_TOKEN_PATH and the like."""

    async def connect(self) -> None:
        """Starts a local cluster, or connects to the one at the address. Raises `ConfigError`."""
        await asyncio.to_thread(self._connect)
        if threading.current_thread() is threading.main_thread():
            # Ray has put a handler of its own, which dumps a stack, under Python's.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))

    def _connect(self) -> None:
        os.environ.update(ENVIRONMENT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray

        options: dict[str, Any] = {"address": self._address, "namespace": self.namespace}
        if self.local and self._secret_files is not None:
            self._temporary = _short_directory()
            # Ray's processes listen on all addresses of the machine, whatever they are told.
            self.token = self._secret_files.hide(TOKEN_FILE, secrets.token_hex(_BYTES))
            options |= {
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(Path(self._temporary.name, _RAY_FOLDER)),
            }
        if self.token is not None:
            use_token(self.token)
        try:
            with _without_secrets():
                ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
        except ray.exceptions.AuthenticationError as error:
            reason = str(error).partition("\n")[0]
            raise SettingError(
                "address",
                f"the Ray cluster is not reached without its token ({reason}); give the file that "
                f"holds it by {PATH}",
            ) from error
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            reason = " ".join(str(error).split())
            raise SettingError("address", f"cannot start or reach Ray: {reason}") from error
        self._connected = True
        self.found = str(ray.get_runtime_context().gcs_address)

    async def disconnect(self) -> None:
        """Ends a local cluster with all its processes; leaves another one."""
        try:
            if self._connected:
                import ray

                self._connected = False
                await asyncio.to_thread(ray.shutdown)
        finally:
            _set_variables(self._before)
            if self._temporary is not None:
                await asyncio.to_thread(self._temporary.cleanup)


@contextmanager
def _without_secrets() -> Iterator[None]:
    """Processes that this one starts meanwhile inherit no variables with secrets."""
    names = {one.variable for one in deployment_settings().values() if one.secret}
    hidden = {name: os.environ.pop(name) for name in names & os.environ.keys()}
    try:
        yield
    finally:
        os.environ |= hidden


def _short_directory() -> tempfile.TemporaryDirectory[str]:
    """A new directory around Ray's, with sockets and logs, that no other user may enter: under the
    usual place or, where that has too long a name, under /tmp. Raises `ConfigError`."""
    usual = tempfile.gettempdir()
    short = len(os.fsencode(usual)) <= _TEMPORARY_BYTES_MAX
    try:
        return tempfile.TemporaryDirectory(
            prefix="outrider-ray-",
            dir=usual if short else "/tmp",  # noqa: S108
            ignore_cleanup_errors=True,
        )
    except OSError as error:
        raise ConfigError(
            f"Ray needs a directory with a short name for its sockets: {error}; set TMPDIR"
        ) from error


def use_token(path: Path) -> None:
    """From now on this process, and those that it starts, show and ask for the token in a file."""
    _set_variables({MODE: "token", PATH: str(path)})


def _set_variables(texts: dict[str, str]) -> None:
    for name in _VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(texts)
    if "ray" in sys.modules:  # It has read the variables already, and perhaps another token.
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def check_asks_for_token(address: str) -> None:
    """Calls the head (GCS) of a Ray cluster without a token. Raises `SettingError` where it
    answers, as any process that reaches it may run code on every machine; and where neither a
    refusal nor an answer comes. With TLS it asks for certificates, and is not called."""
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
