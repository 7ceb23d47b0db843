"""Which models, and how many threads, the peers of a deployment are given."""

from __future__ import annotations

from typing import Any

import pytest
from recorded import record

from benchmarks.speedup import Subject
from deploy.cli.bench import _subject
from deploy.cli.main import parse
from deploy.cli.options import Connection, connected
from deploy.fleet import launcher
from outrider.config import DeploymentConfig
from outrider.replica.process_setup import available_cores


def subject(target: str = "x", **settings: Any) -> Subject:
    client: Any = None
    known = {"model": "m"} | settings
    return _subject(Connection("127.0.0.1:1", target, settings=known), client, True)


@pytest.mark.parametrize(
    ("target_threads", "draft_threads", "expected"),
    [(0, 0, available_cores()), (3, 0, 3), (3, 5, 5)],
)
def test_peers_have_as_many_threads_as_the_services_in_all(
    target_threads: int, draft_threads: int, expected: int
) -> None:
    """Target and draft of one session take turns, so that is the larger number."""
    found = subject(target_num_threads=target_threads, draft_num_threads=draft_threads).target
    assert found is not None
    assert found.num_threads == expected
    assert subject("").target is None


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"draft_model": "suffix"}, True),
        ({"draft_model": "hybrid:suffix,quantized:8"}, True),
        ({"draft_model": "hybrid:ngram,quantized:8"}, False),
        ({"draft_model": "suffix", "suffix_tokens_total": 0}, False),
    ],
)
def test_suffix_decoding_keeps_answers(
    capsys: pytest.CaptureFixture[str], settings: dict[str, Any], copies: bool
) -> None:
    subject(**settings)
    assert ("drafts may copy from earlier answers" in capsys.readouterr().err) == copies


@pytest.mark.parametrize("is_own", [True, False])
async def test_what_may_be_copied_from_earlier_answers_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_own: bool
) -> None:
    """A deployment that the command starts has been asked nothing; of one that is known by its
    address alone, nothing is known."""

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
        _subject(connection, client, True)
    assert ("drafts may copy from earlier answers" in capsys.readouterr().err) != is_own
