"""Which goals of the chaos run count as missed."""

from typing import Any

import pytest

from outrider.registry.registry import ROLES
from tests.chaos.faults import GONE_S_MAX, HANG_GAP_S_MAX, REPLACED_S_MAX, missed_in_hangs


def good() -> dict[str, Any]:
    """A report whose times are just within their limits."""
    return {
        role: {
            "num_hangs": 1,
            "gone_s_max": GONE_S_MAX[role],
            "replaced_s_max": REPLACED_S_MAX,
            "gap_s_max": HANG_GAP_S_MAX,
        }
        for role in ROLES
    }


@pytest.mark.parametrize("figure", ["gone_s_max", "replaced_s_max", "gap_s_max"])
@pytest.mark.parametrize("role", ROLES)
def test_each_limit_of_a_hang_counts(role: str, figure: str) -> None:
    hangs = good()
    assert missed_in_hangs({"hangs": hangs}, ROLES) == []
    hangs[role][figure] += 0.1
    assert missed_in_hangs({"hangs": hangs}, ()) == [f"hang {role}"]


def test_a_role_of_which_no_replica_hung_has_missed_its_goal() -> None:
    hangs = good()
    del hangs["draft"]
    assert missed_in_hangs({"hangs": hangs}, ROLES) == ["hang draft"]
    assert missed_in_hangs({"hangs": hangs}, ["target"]) == []
