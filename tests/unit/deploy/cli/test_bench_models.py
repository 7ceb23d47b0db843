"""Which models, and how many threads, the peers of a deployment are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import save_tiny_model
from recorded import record

from deploy.cli.bench import _drafting_reference, _keeps_answers, _subject
from deploy.cli.connection import Connection, connected
from deploy.cli.main import parse
from deploy.fleet import launcher
from outrider.config import DeploymentConfig
from outrider.replica.process_setup import available_cores


def connection(target: str, **settings: object) -> Connection:
    config = DeploymentConfig()
    known = {
        "dtype": config.target.dtype, "device": "cpu", "target_num_threads": 0,
        "draft_num_threads": 0, "trust_remote_code": False, "draft_model": "ngram",
        "draft_dtype": "float32",
    }  # fmt: skip
    return Connection("127.0.0.1:1", target_directory=target, settings=known | settings)


@pytest.mark.parametrize(
    ("target_threads", "draft_threads", "expected"),
    [(0, 0, available_cores()), (3, 0, 3), (3, 5, 5)],
)
def test_peers_have_as_many_threads_as_the_services_in_all(
    target_threads: int, draft_threads: int, expected: int
) -> None:
    """Target and draft of one session take turns, so that is the larger number."""
    found = _drafting_reference(
        connection("x", target_num_threads=target_threads, draft_num_threads=draft_threads)
    )
    assert found is not None
    assert found.num_threads == expected


@pytest.mark.parametrize(
    ("draft_model", "assists"),
    [("suffix", False), ("quantized:8", False), ("{}", True), ("hybrid:suffix,{}", True)],
)
def test_a_drafter_with_a_model_of_its_own_assists(
    tmp_path: Path, draft_model: str, assists: bool
) -> None:
    """A target whose files are elsewhere has no peers."""
    directory = str(save_tiny_model(tmp_path / "draft"))
    found = _drafting_reference(connection("x", draft_model=draft_model.format(directory)))
    assert found is not None
    assert found.drafter == (directory if assists else "")
    assert _drafting_reference(connection("")) is None


def test_suffix_decoding_keeps_answers() -> None:
    """And what is known by its address alone may."""
    for settings, expected in (
        ({"draft_model": "suffix"}, True),
        ({"draft_model": "hybrid:suffix,quantized:8"}, True),
        ({"draft_model": "hybrid:ngram,quantized:8"}, False),
        ({"draft_model": "suffix", "suffix_tokens_total": 0}, False),
    ):
        known: Any = DeploymentConfig().values(secrets=False) | settings
        assert _keeps_answers(Connection("127.0.0.1:1", settings=known)) == expected
    assert _keeps_answers(Connection("127.0.0.1:1"))


@pytest.mark.parametrize("is_own", [True, False])
async def test_a_deployment_that_the_command_starts_has_been_asked_nothing(
    monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """Of one that is named that is not known."""

    class Started:
        def __init__(self, config: DeploymentConfig, *_: Any, **__: Any) -> None:
            self.address = "127.0.0.1:1"
            self.record = record(settings=config.values(secrets=False))
            self.api_key = ""

        async def __aenter__(self) -> Started:
            return self

        async def __aexit__(self, *_: object) -> None:
            return None

    monkeypatch.setattr(launcher, "Deployment", Started)
    words = ["--draft-model", "suffix"] if is_own else ["--server", "127.0.0.1:1"]
    arguments = parse(["bench", "speedup", *words])
    async with connected(arguments) as connection, connection.client() as client:
        subject = _subject(connection, client, True, None)
        assert (subject.asked is not None) == is_own
        assert subject.keeps_answers
