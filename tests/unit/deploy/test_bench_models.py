"""Which models, and how many threads, the peers of a deployment are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import save_tiny_model

from deploy.cli.bench import _drafting_reference
from deploy.cli.connection import Connection
from outrider.config import DeploymentConfig
from outrider.hosting import available_cores


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
    [(0, 0, available_cores()), (3, 0, 3), (3, 5, 5), (3, 2, 3)],
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


@pytest.mark.parametrize("draft_model", ["ngram", "suffix", "quantized:8"])
def test_a_drafter_without_a_model_of_its_own_assists_nobody(draft_model: str) -> None:
    found = _drafting_reference(connection("x", draft_model=draft_model))
    assert found is not None
    assert found.drafter is None


@pytest.mark.parametrize("form", ["{}", "hybrid:suffix,{}"])
def test_a_model_that_drafts_assists(tmp_path: Path, form: str) -> None:
    directory = save_tiny_model(tmp_path / "draft")
    found = _drafting_reference(connection("x", draft_model=form.format(directory)))
    assert found is not None
    assert found.drafter is not None
    assert (found.drafter.directory, found.drafter.dtype) == (str(directory), "float32")


def test_a_target_whose_files_are_elsewhere_has_no_peers() -> None:
    assert _drafting_reference(connection("")) is None
