"""Ray's processes on this machine, or the cluster elsewhere that this process connects to."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from outrider.config import deployment_settings
from outrider.errors import ConfigError, InvariantError, SettingError
from outrider.limits import LOG_BYTES_MAX, LOG_FILES_KEPT

from .ray_token import PATH, TOKEN_FILE, forget_token, new_token, use_token
from .secret_files import Secrets

OBJECT_STORE_BYTES: Final = 100 * 2**20
"""Nothing large goes through Ray."""
_TEMPORARY_BYTES_MAX: Final = 40
"""Ray puts sockets some 60 bytes below its directory, and a socket's path has 107 at most."""
_RAY_FOLDER: Final = "r"
"""Ray's directory in the temporary one. Ray opens its own to all users (mode 0777); the one around
it keeps them out (0700)."""
ENVIRONMENT: Final = {
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


class RayConnection:
    """A Ray cluster that this process started, or one that runs elsewhere."""

    def __init__(self, address: str, namespace: str, secrets: Secrets | None = None) -> None:
        """Actors have names in a `namespace`, which is their deployment's alone. The token of a
        local cluster stands among its `secrets`."""
        self.local = not address
        self._secrets = secrets
        self.namespace = namespace
        self._address = address or "local"
        self._temporary: str | None = None
        self._connected = False
        self.found = ""
        """HOST:PORT of the cluster, once it is connected."""
        self.token: Path | None = None
        """File of a local cluster's token, once it is connected."""

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

        options: dict[str, Any] = {"namespace": self.namespace}
        if self.local:
            self._temporary = _short_directory()
            # Ray's processes listen on all addresses of the machine, whatever they are told.
            if self._secrets is None:
                raise InvariantError("a local cluster has no place for its token")
            self.token = self._secrets.hide(TOKEN_FILE, new_token())
            use_token(self.token)
            options |= {
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(Path(self._temporary, _RAY_FOLDER)),
            }
        try:
            with _without_secrets():
                ray.init(
                    address=self._address,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                    **options,
                )
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
        if self._connected:
            import ray

            self._connected = False
            try:
                await asyncio.to_thread(ray.shutdown)
            finally:
                await self._clean_up()
        else:
            await self._clean_up()

    async def _clean_up(self) -> None:
        if self.token is not None:
            forget_token()
            self.token = None
        if self._temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)
            self._temporary = None


@contextmanager
def _without_secrets() -> Iterator[None]:
    """What this process starts meanwhile has no variables with secrets."""
    names = {one.variable for one in deployment_settings().values() if one.secret}
    hidden = {name: os.environ.pop(name) for name in names & os.environ.keys()}
    try:
        yield
    finally:
        os.environ |= hidden


def _short_directory() -> str:
    """A new directory around Ray's, with sockets and logs, that no other user may enter: under the
    usual place or, where that has too long a name, under /tmp. Raises `ConfigError`."""
    usual = tempfile.gettempdir()
    longest = len(os.fsencode(usual)) + len(f"/outrider-ray-12345678/{_RAY_FOLDER}")
    short = longest <= _TEMPORARY_BYTES_MAX
    try:
        return tempfile.mkdtemp(prefix="outrider-ray-", dir=usual if short else "/tmp")  # noqa: S108
    except OSError as error:
        raise ConfigError(
            f"Ray needs a directory with a short name for its sockets: {error}; set TMPDIR"
        ) from error
