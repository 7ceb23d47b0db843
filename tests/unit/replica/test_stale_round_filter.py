"""The fence that holds back late rounds."""

from __future__ import annotations

from rounds import make_head, session_name

from outrider.limits import SEQUENCES_PER_REPLICA_MAX
from outrider.replica.service import StaleRoundFilter


def test_the_fence_lets_rounds_and_epochs_only_grow() -> None:
    """Equal ones are repetitions and pass; a release by an older epoch does not lift the fence, and
    after one nothing of the epoch passes, known or not."""
    fence = StaleRoundFilter()
    assert fence.admit(make_head((1,), epoch=1, round_index=5)) is None
    assert fence.admit(make_head((1,), epoch=1, round_index=5)) is None
    behind = fence.admit(make_head((1,), epoch=1, round_index=4))
    assert behind is not None
    assert behind.code == 1
    assert fence.admit(make_head((1,), epoch=2, round_index=0)) is None
    over = fence.admit(make_head((1,), epoch=1, round_index=9))
    assert over is not None
    assert over.code == 10
    assert not fence.release(session_name(1), 1)
    assert fence.admit(make_head((1,), epoch=1, round_index=9)) is not None
    assert fence.release(session_name(1), 2)
    late = fence.admit(make_head((1,), epoch=2, round_index=2**40))
    assert late is not None
    assert late.code == 1
    assert fence.admit(make_head((1,), epoch=1)) is not None
    assert fence.admit(make_head((1,), epoch=3)) is None
    assert fence.release(session_name(2), 1)
    assert fence.admit(make_head((1,), session=2)) is not None
    for session in range(3, SEQUENCES_PER_REPLICA_MAX + 3):
        fence.release(session_name(session), 1)
    assert fence.admit(make_head((1,), session=2)) is None
