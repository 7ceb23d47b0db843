"""The models and the number of threads that `bench` gives to peers of a deployment."""

from typing import Any

import pytest

from benchmarks.speedup import Subject
from deploy.cli.bench import _subject
from deploy.cli.main import main
from deploy.cli.options import Connection
from deploy.cli.output import progress
from outrider.replica.process_setup import available_cores


def subject(target: str = "x", **settings: Any) -> Subject:
    client: Any = None
    known = {"model": "m"} | settings
    return _subject(Connection("127.0.0.1:1", target, settings=known), client, True)


def test_peers_have_as_many_threads_as_the_services_in_all() -> None:
    """Target and draft of one session take turns, so peers get the larger of their numbers."""
    for target, draft, expected in ((0, 0, available_cores()), (3, 5, 5)):
        found = subject(target_num_threads=target, draft_num_threads=draft).target
        assert found.num_threads == expected


@pytest.fixture(autouse=True)
def _not_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the command that ran in this process before."""
    monkeypatch.setattr(progress, "quiet", False)


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"draft_model": "suffix"}, True),
        ({"draft_model": "hybrid:suffix,a/b"}, True),
        ({"draft_model": "hybrid:ngram,a/b"}, False),
        ({"draft_model": "suffix", "suffix_tokens_per_tenant": 0}, False),
    ],
)
def test_suffix_decoding_keeps_answers(
    capsys: pytest.CaptureFixture[str], settings: dict[str, Any], copies: bool
) -> None:
    subject(**settings)
    shown = capsys.readouterr().err
    assert ("drafts may copy from earlier answers" in shown) == copies
    assert ("Stop it to measure a new deployment" in shown) == copies


@pytest.mark.parametrize("name", ["speedup", "serve"])
def test_of_a_server_elsewhere_nothing_is_known(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """So a note warns that its drafts may copy, but does not propose to stop it."""
    assert main(["bench", name, "--server", "127.0.0.1:1"]) == 1
    shown = capsys.readouterr().err
    assert "drafts may copy from earlier answers" in shown
    assert "Stop it" not in shown
