from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from coordinator.routing.replica_pool import affinity, choose, ranked

NAMES = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=8, unique=True)


@given(st.binary(min_size=1, max_size=32), NAMES)
def test_who_leaves_changes_nothing_for_the_others(key: bytes, names: list[str]) -> None:
    order = ranked(key, names)
    assert sorted(order) == sorted(names)
    for gone in names:
        assert ranked(key, [name for name in reversed(names) if name != gone]) == [
            name for name in order if name != gone
        ]


def test_keys_prefer_all_alike() -> None:
    names = ["a", "b", "c", "d"]
    firsts = Counter(ranked(n.to_bytes(2, "little"), names)[0] for n in range(4000))
    assert all(abs(firsts[name] - 1000) < 120 for name in names)  # 4.4 standard deviations


@given(st.binary(min_size=1, max_size=32), st.dictionaries(st.text(max_size=3), st.integers(0, 99)))
def test_nobody_is_given_more_than_a_quarter_above_the_mean(
    key: bytes, loads: dict[str, int]
) -> None:
    found = choose(key, loads, 1000)
    if not loads:
        assert found is None
        return
    assert found is not None
    mean = (sum(loads.values()) + 1) / len(loads)
    assert loads[found] + 1 <= max(1.25 * mean, mean + 1)
    if len(set(loads.values())) == 1:
        assert found == ranked(key, list(loads))[0] or loads[found] == 0


def test_beyond_the_seats_of_a_step_all_have_the_same() -> None:
    """Whoever had more would keep its sessions waiting."""
    for num_seats, most in ((2, 8), (9, 9), (64, 10)):
        loads = dict.fromkeys("ab", 0)
        for _ in range(16):
            name = choose(b"the same", loads, num_seats)
            assert name is not None
            loads[name] += 1
        assert max(loads.values()) == most


def test_what_begins_alike_has_one_key_within_a_tenant() -> None:
    prompt = tuple(range(40))
    assert affinity("", prompt) == affinity("", (*prompt[:32], 7, 7))
    assert affinity("", prompt) != affinity("", (*prompt[:31], 7))
    assert affinity("", prompt) != affinity("b", prompt)
    assert affinity("", prompt[:5]) != affinity("", prompt[:6])
