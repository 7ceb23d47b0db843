"""The one detached deployment of a user: who runs it, and where it answers.

`deployment.json` in the state directory is written atomically when it is ready, and removed when it
stops. A lock beside it, held as long as the deployment runs, lets only one start.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from outrider.errors import ConfigError
from outrider.settings import Value

FILE_NAME: Final = "deployment.json"
LOCK_NAME: Final = "deployment.lock"
LOG_NAME: Final = "serve.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRecord:
    """A running deployment, as others on this machine find it."""

    pid: int
    """Of the process that started it and will stop it."""
    process_start: int
    """When that process started, in the kernel's ticks: a later process with its pid differs."""
    started_at: str
    """ISO 8601, UTC."""
    model: str
    draft_model: str
    served_model_name: str
    grpc_address: str
    """HOST:PORT of the coordinator."""
    target_address: str
    draft_address: str
    target_directory: str
    """Where the target's files are; empty for an emulated one."""
    tokenizer_directory: str
    """Empty where the model has none."""
    settings: dict[str, Value] = field(default_factory=dict)
    """Every setting by key, but for those that hold secrets."""


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


def process_start(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None where there is no such process, or it
    has ended and waits to be collected. 0 for a living one where the kernel does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return 0 if not Path("/proc/self").exists() and _signalable(pid) else None
    except ProcessLookupError:
        return None
    # The name in parentheses may hold spaces: count from behind it. Field 3 is the state.
    after_name = stat.rpartition(")")[2].split()
    return None if after_name[0] in ("Z", "X") else int(after_name[19])


def _signalable(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def alive(record: DeploymentRecord) -> bool:
    """Whether the process that started the deployment still runs."""
    return process_start(record.pid) == record.process_start


def running_deployment(directory: Path) -> DeploymentRecord | None:
    """The deployment that runs; a record whose process is gone is removed."""
    path = directory / FILE_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        record = DeploymentRecord(**values)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: is not a deployment's record ({error}); stop what runs, then remove the file"
        ) from error
    if alive(record):
        return record
    path.unlink(missing_ok=True)
    return None


def publish(directory: Path, record: DeploymentRecord) -> None:
    """Writes the record, in one step, for its owner only."""
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=FILE_NAME)  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(record), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(directory / FILE_NAME)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def withdraw(directory: Path) -> None:
    """Removes the record. Only the holder of the lock may."""
    (directory / FILE_NAME).unlink(missing_ok=True)


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Holds the lock of the one deployment. Raises `ConfigError` while another holds it. The
    kernel frees it when this process ends, however it ends."""
    with (directory / LOCK_NAME).open("w", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            record = running_deployment(directory)
            where = f" (pid {record.pid}, {record.grpc_address})" if record else ", and is starting"
            raise ConfigError(
                f"a deployment runs already{where}; `outrider stop` stops it, "
                "OUTRIDER_STATE_DIR names another place"
            ) from None
        yield
