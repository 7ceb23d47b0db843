"""The deployments of `bench peers`, and the models and the number of threads that peers get."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outrider.bench.speedup import Subject
from outrider.cli import bench
from outrider.cli.bench import _subject
from outrider.cli.main import main, parse
from outrider.cli.options import Connection
from outrider.cli.output import progress
from outrider.replica.threads import available_cores


def subject(target: str = "x", **settings: Any) -> Subject:
    known = {"model": "m"} | settings
    return _subject(Connection("127.0.0.1:1", target, settings=known), None, True)


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


@pytest.mark.parametrize(
    ("numerics", "error", "expected"),
    [
        (("a", "a"), None, True),
        (("a", "b"), None, False),
        (("", ""), None, False),
        (("a",), "no answer", None),
        ((), None, None),
    ],
)
async def test_targets_are_asked_whether_their_rows_are_bit_equal(
    numerics: tuple[str, ...],
    error: str | None,
    expected: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All targets must compute equal logits. If one cannot be asked, nothing is known."""

    async def ask(role: str, address: str, key: str, trust: object, tls: str) -> dict[str, Any]:
        assert (role, key, trust, tls) == ("target", "", None, "/tls")
        return {"numerics": numerics[int(address)], "dtype": "float32", "error": error}

    monkeypatch.setattr(bench, "ask_replica", ask)
    addresses = tuple(str(index) for index in range(len(numerics)))
    settings = {"model": "m", "internal_tls_dir": "/tls"}
    connection = Connection("127.0.0.1:1", "x", settings=settings, target_addresses=addresses)
    found = await bench._described(connection, subject())
    assert found.bit_equal_rows is expected
    assert found.dtype == ("auto" if expected is None else "float32")


async def test_both_sides_are_different_tenants_in_each_temporary_deployment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A deployment has the key of one side, and a key for this machine's commands."""
    keys: list[Any] = []

    @asynccontextmanager
    async def started(arguments: Any) -> AsyncIterator[Connection]:
        keys.append(arguments.settings["api_key"])
        yield Connection("127.0.0.1:1", settings={"model": "m"}, is_own=True, api_key="local")

    monkeypatch.setattr(bench, "connected", started)
    monkeypatch.setattr(bench, "running_deployment", lambda directory: None)
    arguments = parse(["bench", "peers"])
    for number in (1, 2):
        async with bench._two_tenants(arguments, True) as (plain, speculative):
            assert plain.client is not speculative.client
            assert len({*keys}) == number
