"""The one detached deployment of a user: its process, and where it answers.

`deployment.json` in the state directory is written atomically when it is ready, and removed when it
stops; so is `cli.key` where callers need a key. A lock beside it, which has the process's number in
it and is held as long as the deployment runs, lets only one start.
"""

from __future__ import annotations

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
from outrider.files import write_whole

FILE_NAME = "deployment.json"
KEY_NAME = "cli.key"
"""Holds a key for the commands of this machine, where callers need one."""
LOCK_NAME = "deployment.lock"
LOG_NAME = "serve.log"
ERROR_PREFIX = "outrider: error: "
"""Begins the line in which a command says why it ends."""
_LOCK_ATTEMPTS = 10
_LOCK_PERIOD_S = 0.02
"""Between two of them: who looks at the lock holds it for a moment."""


@dataclass(frozen=True)
class DeploymentRecord:
    """A running deployment, as others on this machine find it."""

    pid: int
    """Of the process that started it and will stop it."""
    started_at: str
    """ISO 8601, UTC."""
    draft_model: str
    served_model_name: str
    grpc_address: str
    """HOST:PORT of the coordinators, with commas between them."""
    target_addresses: list[str]
    draft_addresses: list[str]
    target_directory: str
    """Where the target's files are; empty for an emulated one."""
    tokenizer_directory: str
    """Empty where the model has none."""
    redis: dict[str, Any]
    """The fields of its `RedisAddress`, without passwords: at most the names of their files."""
    http_address: str = ""
    """HOST:PORT where they answer by HTTP, likewise; empty where they do not."""
    deployment: str = ""
    """Its name in Redis."""
    ray_address: str = ""
    """HOST:PORT of the Ray cluster that it runs on ..."""
    ray_token: str = ""
    """... and the file of its token; empty where that is a cluster elsewhere."""
    asks_for_keys: bool = False
    """Whether its callers need a key."""
    wanted: dict[Any, int] = field(default_factory=dict)
    """How many replicas of each role there should be."""
    trial: str = ""
    """How the trial of a drafter goes, or has ended; empty where there was none."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Every setting by key, but for those that hold secrets."""


@dataclass(frozen=True)
class DeploymentLocation:
    """Which deployment, and how its cluster is reached."""

    address: str
    """Of the Ray cluster, HOST:PORT."""
    deployment: str
    token: Path | None = None
    """File of Ray's token; None = as Ray finds it, by RAY_AUTH_TOKEN_PATH and the like."""


def namespace_of(deployment: str) -> str:
    """The Ray namespace of a deployment's actors."""
    return f"outrider-{deployment}"


def state_directory(environment: Mapping[str, str]) -> Path:
    """`$OUTRIDER_STATE_DIR`, by default `~/.local/state/outrider`; made if missing, and readable
    by its owner only. Raises `ConfigError`."""
    place = environment.get("OUTRIDER_STATE_DIR", "")
    path = Path(place).expanduser() if place else Path.home() / ".local" / "state" / "outrider"
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"OUTRIDER_STATE_DIR: cannot use {path}: {error.strerror}") from error
    return path.resolve()


def recorded_deployment(directory: Path) -> DeploymentRecord | None:
    """The deployment that was recorded last and has not withdrawn its record, whether or not its
    process still runs. Raises `ConfigError` for a file that is no record."""
    path = directory / FILE_NAME
    try:
        return DeploymentRecord(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: is not a deployment's record ({error}); stop what runs, then remove the file"
        ) from error


def running_deployment(directory: Path) -> DeploymentRecord | None:
    """The deployment that runs, if it is ready. Raises `ConfigError` for a file that is no
    record."""
    record = recorded_deployment(directory)
    return record if record is not None and record.pid == lock_holder(directory) else None


def logged_error(directory: Path) -> str | None:
    """Why the detached deployment that was started last ended by itself; None where its log has
    no error, or there is no log."""
    try:
        lines = (directory / LOG_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    errors = [line for line in lines if line.startswith(ERROR_PREFIX)]
    return errors[-1].removeprefix(ERROR_PREFIX) if errors else None


def publish(directory: Path, record: DeploymentRecord) -> None:
    """Writes the record, in one step, for its owner only."""
    write_whole(directory / FILE_NAME, json.dumps(asdict(record), indent=2) + "\n", 0o600)


def publish_key(directory: Path, key: str) -> None:
    """Writes the key of this machine's commands, for their owner only, where there is one."""
    if key:
        write_whole(directory / KEY_NAME, key, 0o600)


def local_key(directory: Path) -> str:
    """The key of this machine's commands; empty where there is none."""
    try:
        return (directory / KEY_NAME).read_text("ascii")
    except FileNotFoundError:
        return ""


def withdraw(directory: Path) -> None:
    """Removes the record, and the key. Only the holder of the lock may."""
    (directory / FILE_NAME).unlink(missing_ok=True)
    (directory / KEY_NAME).unlink(missing_ok=True)


def lock_holder(directory: Path) -> int | None:
    """The process that runs, starts or stops the one deployment; None where there is none."""
    path = directory / LOCK_NAME
    for _ in range(_LOCK_ATTEMPTS):
        try:
            with path.open(encoding="ascii") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except FileNotFoundError:
            return None
        except BlockingIOError:
            if text := path.read_text("ascii"):
                return int(text)
        time.sleep(_LOCK_PERIOD_S)  # It has just taken the lock, or is letting go of it.
    raise ConfigError(f"{path} does not say which process holds it")


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Holds the lock of the one deployment, and removes what one that was killed has left. Raises
    `ConfigError` while another process holds it. The kernel frees it when this process ends,
    however it ends."""
    with (directory / LOCK_NAME).open("a", encoding="ascii") as file:
        for _ in range(_LOCK_ATTEMPTS):
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOCK_PERIOD_S)
        else:
            record = running_deployment(directory)
            where = ", and is starting"
            if record is not None:
                where = f" (pid {record.pid}, {record.grpc_address})"
            raise ConfigError(
                f"a deployment runs already{where}; `outrider stop` stops it, "
                "OUTRIDER_STATE_DIR names another place"
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        withdraw(directory)
        try:
            yield
        finally:
            file.truncate(0)
