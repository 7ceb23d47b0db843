"""How often an engine's steps wait for a CUDA device, send to it and start a kernel, for 1 and for
16 sessions, on tensors without numbers (`fake_cuda.py`).

These tests do not see streams, events, pinned memory and the order of operations, and run no kernel
of ours. Operators whose result's size depends on numbers, such as `nonzero`, fail in them.
"""

from collections.abc import Callable
from functools import cache
from itertools import count

import pytest

from outrider.engine.paged_engine import PagedEngine
from outrider.interfaces.engine import SequenceStep
from tests.support.fake_cuda import BACKEND, VOCAB, DeviceWatch, fake_engine, to_device
from tests.support.models import tiny_config, tiny_eagle3, tiny_module

_names = map(str, count())


@cache
def engine(kind: str) -> PagedEngine:
    """Of two layers."""
    module = tiny_module(tiny_config("gemma2" if kind == "windows" else "llama", VOCAB))
    if kind == "eagle3":
        layer = tiny_eagle3(module, range(VOCAB))
        to_device(layer.module)
        return fake_engine(to_device(module), BACKEND, draft_layer=layer)
    backend = None if kind == "gathered" else BACKEND
    return fake_engine(to_device(module), backend)


def grown(engine: PagedEngine, num: int) -> list[str]:
    """New sequences, none of which ends with its page."""
    names = [next(_names) for _ in range(num)]
    engine.forward([SequenceStep(name, tuple(range(5)), 1) for name in names])
    return names


Case = Callable[[PagedEngine, list[str]], object]


def steps(num_tokens: int, num_logits: int = 1) -> Case:
    ids = tuple(range(num_tokens))
    return lambda engine, names: engine.forward(
        [SequenceStep(name, ids, num_logits) for name in names]
    )


def ragged(engine: PagedEngine, names: list[str]) -> None:
    """Steps of all lengths, as of sessions with their own K."""
    engine.forward([SequenceStep(each, (1,) * (1 + i % 4), 1) for i, each in enumerate(names)])


def draft(engine: PagedEngine, names: list[str]) -> None:
    features = [rows[-1] for rows in engine.features()]
    engine.forward_draft([SequenceStep(name, (1,), 1) for name in names], features)


def features(engine: PagedEngine, names: list[str]) -> None:
    steps(4, 4)(engine, names)
    assert [tuple(rows.shape) for rows in engine.features()] == [(4, 24)] * len(names)


def forks(engine: PagedEngine, names: list[str]) -> None:
    """Two of each sequence, one of them cut, and a step of all."""
    for name in names:
        engine.fork(name, name + "a")
        engine.fork(name + "a", name + "b")
        engine.keep(name + "b", 4)
    steps(1)(engine, [name + branch for name in names for branch in "ab"])


def kept(engine: PagedEngine, names: list[str]) -> None:
    """Some slots of a step are dropped, and the next step writes them again."""
    steps(4, 4)(engine, names)
    for name in names:
        engine.keep(name, 7)
    steps(1)(engine, names)


CASES: dict[str, tuple[Case, dict[str, tuple[int, int, int]]]] = {
    "plain": (steps(1), {"gathered": (0, 3, 27), "tables": (0, 1, 9), "eagle3": (0, 2, 22)}),
    "prefix": (steps(40), {"tables": (0, 1, 9)}),
    "verify": (
        steps(4, 4),
        {"gathered": (0, 3, 27), "tables": (0, 1, 9), "windows": (0, 1, 9), "eagle3": (0, 2, 22)},
    ),
    "ragged": (ragged, {"tables": (0, 1, 9), "windows": (0, 1, 9)}),
    "draft": (draft, {"eagle3": (0, 3, 31)}),
    "features": (features, {"eagle3": (0, 2, 22)}),
    "forks": (forks, {"tables": (0, 2, 14)}),
    "kept": (kept, {"tables": (0, 2, 18)}),
}
"""Reads, sends and operators of a model of two layers, beside those of the library's modules, for 1
and for 16 sessions; and so for any number. Gathered steps have some four operators fewer for one.
"""


@pytest.mark.parametrize(
    ("case", "kind"), [(case, kind) for case, (_, counts) in CASES.items() for kind in counts]
)
def test_a_step_of_many_sessions_asks_no_more_than_one_of_one(
    watch: DeviceWatch, case: str, kind: str
) -> None:
    work, allowed = CASES[case]
    for num in (1, 16):
        names = grown(engine(kind), num)
        counts = watch.counted(lambda names=names: work(engine(kind), names))
        print(num, counts)
        assert all(map(int.__le__, counts, allowed[kind])), counts
