"""The record of this user's deployment on this machine.

The record is `deployment.json` in the state directory. It is written when the deployment is ready,
and removed when the deployment stops. If callers need an API key, the file `cli.key` has a key for
this machine's commands. This file is removed with the record. The deployment's process locks the
file `deployment.lock`, which contains the process id, and also `stopping` from when the process
begins to end.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.foundation.files import write_whole

FILE_NAME, KEY_NAME = "deployment.json", "cli.key"
LOCK_NAME, LOG_NAME = "deployment.lock", "serve.log"
ERROR_PREFIX = "outrider: error: "
_STOPPING = " stopping"
_LOCK_ATTEMPTS = 10
_LOCK_PERIOD_S = 0.02
"""Pause between attempts to take the lock. Another process's `lock_holder` may hold it briefly."""


@dataclass(frozen=True)
class DeploymentRecord:
    """A running deployment, as `deployment.json` describes it to other commands."""

    pid: int
    started_at: str
    draft_model: str
    served_model_name: str
    grpc_address: str
    """HOST:PORT of the coordinators, separated by commas."""
    target_addresses: list[str]
    draft_addresses: list[str]
    target_directory: str
    """Empty if the target is emulated."""
    tokenizer_directory: str
    """Empty if the model has no tokenizer."""
    redis: dict[str, Any]
    """The fields of the deployment's `RedisAddress`, without passwords."""
    http_address: str = ""
    """HOST:PORT of the coordinators' HTTP servers, separated by commas; empty = no HTTP."""
    name: str = ""
    """The deployment's name, which the other commands take as `--deployment-name`."""
    ray_address: str = ""
    ray_token: str = ""
    """File of the Ray token, if the cluster is local."""
    asks_for_keys: bool = False
    wanted: dict[Any, int] = field(default_factory=dict)
    trial: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """All settings by key, without secrets."""


@dataclass(frozen=True)
class DeploymentLocation:
    """A deployment on a Ray cluster."""

    address: str
    deployment: str
    token: Path | None = None
    """File of Ray's token; None = Ray finds the token, for example by RAY_AUTH_TOKEN_PATH."""


def namespace_of(deployment: str) -> str:
    return f"outrider-{deployment}"


def state_directory(environment: Mapping[str, str]) -> Path:
    """`$OUTRIDER_STATE_DIR`, by default `~/.local/state/outrider`. Creates the directory, which
    only its owner can enter. Raises `ConfigError`."""
    place = environment.get("OUTRIDER_STATE_DIR", "")
    path = Path(place).expanduser() if place else Path.home() / ".local" / "state" / "outrider"
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"OUTRIDER_STATE_DIR: cannot use {path}: {error.strerror}") from error
    return path.resolve()


def recorded_deployment(directory: Path) -> DeploymentRecord | None:
    """The record, even of a dead deployment; None = no record. Raises `ConfigError` if damaged."""
    path = directory / FILE_NAME
    try:
        return DeploymentRecord(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: is damaged ({error}); stop the deployment, then remove the file"
        ) from error


def running_deployment(directory: Path) -> DeploymentRecord | None:
    """The deployment that runs and is ready. Raises `ConfigError` for a damaged record."""
    record = recorded_deployment(directory)
    return record if record and record.pid == lock_holder(directory) else None


def logged_error(directory: Path) -> str | None:
    """The last error in the log of the last detached deployment."""
    try:
        lines = (directory / LOG_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    errors = [line for line in lines if line.startswith(ERROR_PREFIX)]
    return errors[-1].removeprefix(ERROR_PREFIX) if errors else None


def publish(directory: Path, record: DeploymentRecord, key: str = "") -> None:
    """Writes the record and, unless `key` is empty, the API key for this machine's commands. Each
    file is written atomically, and only its owner can read it. Raises `ConfigError`."""
    try:
        if key:
            write_whole(directory / KEY_NAME, key, 0o600)
        write_whole(directory / FILE_NAME, json.dumps(asdict(record), indent=2) + "\n", 0o600)
    except OSError as error:
        where = directory / FILE_NAME
        raise ConfigError(f"{where}: cannot be written: {error.strerror or error}") from error


def local_key(directory: Path) -> str:
    """The API key for this machine's commands; empty if no key is needed."""
    try:
        return (directory / KEY_NAME).read_text("ascii")
    except FileNotFoundError:
        return ""


def withdraw(directory: Path) -> None:
    """Removes the record and the key. The caller must hold the lock."""
    (directory / FILE_NAME).unlink(missing_ok=True)
    (directory / KEY_NAME).unlink(missing_ok=True)


def mark_stopping(directory: Path) -> None:
    """Notes that this process, which must hold the lock, stops the deployment."""
    # A full disk must not prevent the stop. The lock file always has the process id.
    with suppress(OSError), (directory / LOCK_NAME).open("r+", encoding="ascii") as file:
        file.write(f"{os.getpid()}{_STOPPING}")


def is_stopping(directory: Path) -> bool:
    """Whether a process stops the deployment."""
    if lock_holder(directory) is None:
        return False
    return (directory / LOCK_NAME).read_text("ascii").endswith(_STOPPING)


def lock_holder(directory: Path) -> int | None:
    """Id of the process that starts, runs or stops the deployment; None = no such process."""
    path = directory / LOCK_NAME
    for _ in range(_LOCK_ATTEMPTS):
        try:
            with path.open(encoding="ascii") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except FileNotFoundError:
            return None
        except BlockingIOError:
            if text := path.read_text("ascii").removesuffix(_STOPPING):
                return int(text)
        time.sleep(_LOCK_PERIOD_S)  # Another process is taking or releasing the lock.
    raise ConfigError(f"{path}: is locked, but does not contain a process id")


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Holds the lock while the context lasts. Removes the record of a deployment that was killed.
    Raises `ConfigError` if another process holds the lock."""
    with (directory / LOCK_NAME).open("a", encoding="ascii") as file:
        for _ in range(_LOCK_ATTEMPTS):
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOCK_PERIOD_S)
        else:
            if is_stopping(directory):
                raise ConfigError(
                    f"the deployment (pid {lock_holder(directory)}) is being stopped; try again "
                    "when it has ended"
                )
            record = running_deployment(directory)
            where = ", but is not ready"
            if record is not None:
                where = f" (pid {record.pid}, {record.grpc_address})"
            raise ConfigError(
                f"a deployment runs already{where}; stop it with `outrider stop`, or set "
                "OUTRIDER_STATE_DIR to another directory"
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        withdraw(directory)
        try:
            yield
        finally:
            file.truncate(0)
