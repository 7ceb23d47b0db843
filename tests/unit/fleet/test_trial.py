"""The decision of a trial, computed from the coordinators' sums."""

import math
import re
from random import Random

import pytest

from coordinator.decoding.trial import DrafterSums, TrialMeter, TrialSums
from outrider.fleet.trial import added, judged


def counted(speeds: tuple[float, float], num_sessions: int, num_rounds: int = 30) -> TrialSums:
    """Sums of sessions with these mean speeds, old and new. The speeds have a standard deviation of
    a fifth, and sessions differ in length."""
    random = Random(5)
    meters = [TrialMeter(), TrialMeter()]
    for index in range(2 * num_sessions):
        is_new = bool(index % 2)
        session = meters[index // 2 % 2].begin("draft-7", is_new)
        speed = speeds[is_new] * random.uniform(1 - 0.35, 1 + 0.35)
        for _ in range(random.randint(num_rounds // 2, 3 * num_rounds // 2)):
            session.note(1, 2, 2 / speed)
        session.end()
    return added([one.sums for one in meters] + [None, TrialSums("draft-1")], "draft-7")


@pytest.mark.parametrize(
    ("speeds", "num_sessions", "is_over", "expected", "said"),
    [
        ((10.0, 20.0), 40, False, True, r"\+[89][0-9]|\+1[01][0-9]"),
        ((20.0, 10.0), 40, False, False, "-[45][0-9]"),
        ((20.0, 20.5), 40, False, None, "/s a session and 1.00 accepted draft tokens a round in"),
        ((20.0, 20.5), 40, True, False, "tokens/s"),
        ((10.0, 20.0), 5, False, None, "^5 sessions and [0-9]+ rounds with the old drafter; 10"),
        ((10.0, 20.0), 5, True, False, "10 and 200 are needed"),
    ],
)
def test_a_difference_must_stand_out_of_its_error(
    speeds: tuple[float, float], num_sessions: int, is_over: bool, expected: bool | None, said: str
) -> None:
    found, reason = judged(counted(speeds, num_sessions), is_over)
    assert found is expected, reason
    assert re.search(said, reason), reason


def test_the_error_of_a_speed_is_that_of_its_sessions() -> None:
    """The rounds of a session are not independent. For one session the error is infinite."""
    sums = counted((10.0, 20.0), 400)
    for one, speed in ((sums.old, 10.0), (sums.new, 20.0)):
        assert one.num_sessions == 400
        assert one.tokens_per_second == pytest.approx(speed, rel=0.1)
        assert one.relative_error * math.sqrt(400) == pytest.approx(0.2, rel=0.25)
    assert DrafterSums(1, 9, 9, 18, 1.0).relative_error == math.inf
