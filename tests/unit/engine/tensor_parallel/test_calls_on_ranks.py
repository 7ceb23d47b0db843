"""Followers repeat the calls of their leader until the leader or the follower ends."""

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.tensor_parallel import parallel_engine
from outrider.engine.tensor_parallel.group import LEADER, Links
from outrider.errors import BadRequest, EngineLost, InvariantError, OutOfPages, StepUndone
from outrider.interfaces.engine import ModelInfo, SequenceStep

WAIT_S = 10.0
INFO = ModelInfo("toy", 100, 64, "float32", (), "weights", "")


class RecordingEngine:
    """Holds only lengths, and records the calls that change something."""

    info = INFO
    failure: Exception | None = None
    room = True

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.lengths: dict[str, int] = {}
        self.length = lambda sequence_id: self.lengths.get(sequence_id, 0)
        self.can_hold = lambda steps: self.room
        self.tokens = self.page_counts = None

    def __getattr__(self, name: str) -> Any:
        """Records the call."""
        if name not in ("attach", "fork", "keep", "release"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            if name == "keep":
                self.lengths[arguments[0]] = arguments[1]
            return 0

        return call

    def forward_draft(
        self, steps: Sequence[SequenceStep], features: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        self.take_slots(steps)
        return torch.stack([*features])

    def take_slots(self, steps: Sequence[SequenceStep]) -> None:
        self.calls.append(("take_slots", list(steps)))

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        if self.failure is not None:
            raise self.failure
        self.calls.append(("forward", list(steps)))
        for step in steps:
            self.lengths[step.sequence_id] = self.length(step.sequence_id) + len(step.token_ids)
        return [torch.zeros(step.num_logits, INFO.vocab_size) for step in steps]

    def launch(self, steps: Sequence[SequenceStep]) -> Callable[[], list[torch.Tensor]]:
        return lambda: self.forward(steps)


def _step(sequence_id: str, *token_ids: int, num_logits: int = 1) -> SequenceStep:
    return SequenceStep(sequence_id, token_ids, num_logits)


@contextmanager
def _team(num_followers: int = 1) -> Iterator[Any]:
    """A leader's engine, the recorders of all ranks, and the results of the followers' loops."""
    pairs = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_followers)]
    theirs = [socket.create_connection(pair.getsockname()) for pair in pairs]
    ours = Links(LEADER, {rank: pair.accept()[0] for rank, pair in enumerate(pairs, 1)}, WAIT_S)
    for pair in pairs:
        pair.close()
    recorders = [RecordingEngine() for _ in range(num_followers + 1)]
    links = [Links(rank, {LEADER: link}, WAIT_S) for rank, link in enumerate(theirs, 1)]
    leader = parallel_engine.ParallelEngine(
        recorders[0], ours.send_frame, ours.close, max_num_seqs=4
    )

    def run(rank: int) -> None:
        try:
            parallel_engine.follow(links[rank - 1].receive_frame, recorders[rank])
        finally:
            links[rank - 1].close()

    with ThreadPoolExecutor(num_followers) as pool:
        loops: list[Future[None]] = [pool.submit(run, rank + 1) for rank in range(num_followers)]
        try:
            yield leader, recorders, loops
        finally:
            leader.close()


_names = st.text(max_size=20)
_numbers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9).map(tuple)
_steps = st.builds(SequenceStep, _names, _numbers, st.integers(0, 9))
_calls = st.one_of(
    st.tuples(st.sampled_from(["forward", "take_slots"]), st.lists(_steps, max_size=3)),
    st.tuples(st.just("attach"), _names, _numbers, _names),
    st.tuples(st.just("keep"), _names, st.integers(0, 2**40)),
    st.tuples(st.just("fork"), _names, _names),
    st.tuples(st.just("release"), _names),
)


@given(st.lists(_calls, max_size=8))
def test_calls_travel_unchanged(calls: list[tuple[Any, ...]]) -> None:
    heard = RecordingEngine()
    parallel_engine.replay(b"".join(map(_packed, calls)), heard)
    assert heard.calls == calls


def _packed(call: tuple[Any, ...]) -> bytes:
    name, *arguments = call
    given = arguments[0] if name in parallel_engine._STEPS else arguments
    return parallel_engine.pack_call(name, *given)


@pytest.mark.parametrize("name", ["close", "info", "_engine"])
def test_an_unknown_call_is_refused(name: str) -> None:
    with pytest.raises(InvariantError, match=f"{name} is no call"):
        parallel_engine.replay(parallel_engine.pack_call(name), RecordingEngine())


def test_followers_make_the_leaders_calls_in_its_order() -> None:
    with _team(num_followers=2) as (leader, recorders, loops):
        leader.attach("a", (1, 2, 3), "tenant")
        leader.forward([_step("a", 1, 2, 3)])
        feature = torch.zeros(3)
        assert torch.equal(leader.forward_draft([_step("a", 7)], [feature]), feature[None])
        leader.keep("a", 1)
        leader.fork("a", "a/1")
        leader.release("b")
        leader.forward([_step("a", 4), _step("c", 5, 6, num_logits=0)])
        leader.close()
        assert [loop.result(WAIT_S) for loop in loops] == [None, None]
        assert len(recorders[0].calls) == 7
        assert recorders[0].calls == recorders[1].calls == recorders[2].calls


def test_what_is_refused_is_refused_before_the_followers_hear_of_it() -> None:
    """So followers do not wait for a step that the leader does not run, and the group goes on."""
    with _team() as (leader, recorders, loops):
        with pytest.raises(BadRequest, match="100 is not in"):
            leader.forward([_step("a", 100)])
        with pytest.raises(BadRequest, match="takes at most 64"):
            leader.forward([_step("a", *range(65))])
        recorders[0].room = False
        with pytest.raises(OutOfPages):
            leader.forward([_step("a", 1)])
        recorders[0].room = True
        leader.forward([_step("a", 1)])
        leader.close()
        loops[0].result(WAIT_S)
        assert recorders[1].calls == [("forward", [_step("a", 1)])]


def test_many_calls_without_a_step_go_out_by_themselves() -> None:
    with _team() as (leader, recorders, loops):
        for _ in range(30):
            leader.attach("a", range(4000), "")
        assert len(leader._unsent) < 2**18
        leader.close()
        loops[0].result(WAIT_S)
        assert 0 < len(recorders[1].calls) <= len(recorders[0].calls)


def test_a_follower_that_fails_ends_the_steps() -> None:
    with _team(num_followers=2) as (leader, recorders, loops):
        recorders[2].failure = RuntimeError("no memory")
        leader.forward([_step("a", 1)])
        with pytest.raises(RuntimeError, match="no memory"):
            loops[1].result(WAIT_S)
        for _ in range(2):
            with pytest.raises(EngineLost, match="rank 2"):
                leader.forward([_step("a", 2)])
        loops[0].result(WAIT_S)  # the other rank ends with the leader


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (("forward", [_step("a", 4)]), EngineLost),
        (("attach", "b", (1, 2)), MemoryError),
        (("fork", "a", "b"), MemoryError),
        (("keep", "a", 1), MemoryError),
        (("forward_draft", [_step("a", 4)], []), MemoryError),
    ],
    ids=str,
)
def test_a_leader_that_fails_ends_its_followers(
    call: tuple[Any, ...], error: type[Exception]
) -> None:
    name, *arguments = call
    with _team() as (leader, recorders, loops):
        leader.forward([_step("a", 1, 2, 3)])
        setattr(recorders[0], name, _fail)
        with pytest.raises(error):
            getattr(leader, name)(*arguments)
        loops[0].result(WAIT_S)
        with pytest.raises(EngineLost):
            leader.forward([_step("a", 4)])


def test_a_draft_step_that_the_leader_undoes_is_undone_on_all_ranks() -> None:
    with _team() as (leader, recorders, loops):
        leader.forward([_step("a", 1, 2, 3), _step("b", 4)])
        steps = [_step("a", 7), _step("b", 8)]

        def undo(*_: object) -> None:
            raise StepUndone("no memory")

        recorders[0].forward_draft = undo
        with pytest.raises(StepUndone):
            leader.forward_draft(steps, [torch.zeros(3)] * 2)
        leader.forward([_step("a", 5)])
        leader.close()
        loops[0].result(WAIT_S)
        undone = [("take_slots", steps), ("keep", "a", 3), ("keep", "b", 1)]
        assert recorders[1].calls[1:-1] == undone


def _fail(*_: object) -> None:
    raise MemoryError("no room for a copy")
