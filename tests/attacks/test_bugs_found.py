"""Attacks find planted bugs, and nothing without these bugs."""

from typing import Any

import pytest

from tests.attacks import partial_messages, refused_bodies, victims

pytestmark = [pytest.mark.full, pytest.mark.timeout(120), pytest.mark.xdist_group("redis")]


@pytest.mark.parametrize(
    ("attacked", "bug"),
    [
        (partial_messages, "first_message_without_limit"),
        (refused_bodies, "body_validated_before_admission"),
    ],
)
@pytest.mark.parametrize("is_planted", [True, False])
def test_an_attack_finds_a_planted_bug(
    attacked: Any, bug: str, is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(victims, "QUIET_S", 1.0)
    monkeypatch.setattr(partial_messages, "NUM_CALLS", 24)  # enough to exceed `GROWTH_MIB`
    monkeypatch.setattr(partial_messages, "HELD_S", 1)
    monkeypatch.setattr(refused_bodies, "SECONDS", 3)
    if is_planted:
        monkeypatch.setenv("PLANTED_BUG", bug)
        for system in (victims.Doors, victims.System):
            monkeypatch.setattr(system, "MODULE", "planted")
    is_held, figures = attacked.attack()
    assert is_held is not is_planted, figures
