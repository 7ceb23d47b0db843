"""Logs are bounded: each file, each directory, and Redis' log."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from outrider.fleet.local_state import LOG_NAME, logged_error
from outrider.foundation import logs as log_files
from outrider.limits import EMBEDDED_REDIS_BYTES_MAX, LOG_FILES_KEPT
from outrider.redis.embedded import EmbeddedRedis
from outrider.replica.logs import log_to

SMALL = 2_000  # bytes of a file in these tests


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "LOG_BYTES_MAX", SMALL)


def test_the_log_of_a_replica_is_bounded(tmp_path: Path) -> None:
    log_to(str(tmp_path), "target-0")
    for index in range(400):
        logging.getLogger("outrider").warning("line %d", index)
    files = sorted(path.name for path in tmp_path.iterdir())
    names = ["target-0.log", *(f"target-0.log.{number + 1}" for number in range(LOG_FILES_KEPT))]
    assert files == names
    assert all(path.stat().st_size <= SMALL for path in tmp_path.iterdir())
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert "line 399" in (tmp_path / "target-0.log").read_text().splitlines()[-1]


def test_replicas_that_have_gone_leave_no_more_than_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_bytes(bytes(SMALL))
    for age in range(1, 10):
        path = tmp_path / f"draft-{age}.log{'.1' if age % 2 else ''}"
        path.write_bytes(bytes(SMALL))
        os.utime(path, (age, age))
    monkeypatch.setattr(log_files, "LOG_DIRECTORY_BYTES_MAX", SMALL * (1 + LOG_FILES_KEPT + 3))
    log_files.make_room(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["draft-4.log", "draft-6.log", "draft-8.log", "notes.txt"]


def test_the_log_of_a_running_replica_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import logging, sys; from outrider.replica.logs import log_to\n"
        "log_to(sys.argv[1], 'target-0')\n"
        "logging.getLogger().warning('quiet'); print(flush=True); input()\n"
    )
    quiet = tmp_path / "target-0.log"
    monkeypatch.setattr(log_files, "LOG_DIRECTORY_BYTES_MAX", 1)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as running:
        running.stdout.readline()
        os.utime(quiet, (1, 1))
        log_files.make_room(tmp_path)
        assert list(tmp_path.iterdir()) == [quiet]
        running.communicate()
    log_files.make_room(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_log_of_a_detached_process_is_bounded(tmp_path: Path) -> None:
    """With its last error on standard error, which commands read."""
    code = (
        "import logging, os, sys; from pathlib import Path\n"
        "from outrider.foundation import logs as log_files; from outrider.cli import serve\n"
        f"log_files.LOG_BYTES_MAX = {SMALL}\n"
        "logging.basicConfig(stream=sys.stderr)\n"
        "serve._detach(log_files.LogFile(Path(sys.argv[1], 'serve.log'), (1, 2)))\n"
        "for index in range(200):\n"
        "    logging.getLogger('outrider.fleet').warning('line %d', index)\n"
        "    print('word', index, file=sys.stderr, flush=True)\n"
        "print('outrider: error: the last word', file=sys.stderr)\n"
    )
    with (tmp_path / LOG_NAME).open("ab") as log:
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], stderr=log, check=True)
    files = list(tmp_path.iterdir())
    assert len(files) == 1 + LOG_FILES_KEPT
    assert all(path.stat().st_size <= SMALL + 100 for path in files)
    assert (tmp_path / LOG_NAME).read_text().endswith("outrider: error: the last word\n")
    assert logged_error(tmp_path) == "the last word"


def test_redis_fills_no_disk(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(EMBEDDED_REDIS_BYTES_MAX)}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        client.config_set("loglevel", "debug")
        log = tmp_path / "redis.log"
        for _ in range(2):
            while not log.exists() or log.stat().st_size <= SMALL:
                with redis.Redis.from_url(server.url) as other:
                    other.ping()
            server.rotate_log()
        assert (tmp_path / "redis.log.1").stat().st_size > SMALL
        assert not (tmp_path / "redis.log.2").exists()
