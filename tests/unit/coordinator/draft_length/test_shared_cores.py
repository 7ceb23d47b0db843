"""Lengths where the target's steps wait while the draft works."""

from __future__ import annotations

import pytest
from length_world import World


@pytest.mark.parametrize(("delays", "num_sessions"), [(True, 1), (True, 16), (False, 16)])
def test_a_draft_that_delays_many_others_is_not_asked(delays: bool, num_sessions: int) -> None:
    """Drafting is half as quick again as plain decoding for one that drafts alone. Where the
    target's steps wait for it, it costs fifteen others more than that brings."""
    world = World(acceptance=0.7, draft_s=0.15 * 0.016, row_s=0.0, delays=delays)
    world.controls.load.num_sessions = num_sessions - 1
    run = world.play(world.open(), 1000)
    if delays and num_sessions > 1:
        assert run.plain_share > 0.9
    else:
        assert run.plain_share < 0.2


@pytest.mark.parametrize(("prompt_length", "begins"), [(3000, True), (60_000, False)])
def test_a_prompt_is_read_for_what_drafting_will_bring(prompt_length: int, begins: bool) -> None:
    """Where the target waits meanwhile; what it brings is known from other sessions."""
    world = World(acceptance=0.7, draft_s=0.1 * 0.016, delays=True, prompt_length=3000)
    for seed in range(1, 4):
        control = world.open(seed)
        world.play(control, 100)
        control.close()
    world.prompt_length = prompt_length
    control = world.open(9)
    assert control.begins_plain is not begins
