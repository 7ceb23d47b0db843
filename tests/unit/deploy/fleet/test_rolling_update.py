"""Other settings for a deployment that runs: what is refused, and what is kept."""

from __future__ import annotations

import pytest

from deploy.fleet.reconciler import Changes, changed
from outrider.config import load_config


def test_a_draft_goes_with_the_target_that_it_was_chosen_for() -> None:
    before = load_config({"model": "demo", "draft_model": "hybrid:suffix,demo-drafter"}, {})
    assert changed(before, {"model": "other"}).draft.model == "suffix"
    assert changed(before, {"model": "demo"}).draft.model == "hybrid:suffix,demo-drafter"
    assert changed(before, {"model": "other", "draft_model": "suffix"}).draft.model == "suffix"
    assert changed(before, {"num_targets": 1}) == before


def test_changes_are_what_they_were_when_they_are_read_again() -> None:
    changes = Changes({"max_num_seqs": 7}, 2.0)
    assert Changes.from_json(changes.to_json()) == changes
    assert Changes.from_json("") == Changes()
    for text in ("[]", '{"values": 3}', "{"):
        with pytest.raises(ValueError):  # noqa: PT011 (of several kinds)
            Changes.from_json(text)
