"""What is told again of a session whose stream broke, from its record."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.decoding.detokenizer import Completion
from coordinator.decoding.loop import read_logprobs, write_logprobs
from coordinator.decoding.recovery import (
    ENTRIES_PER_EVENT,
    TOKENS_PER_EVENT,
    Replays,
    check_known,
    replay,
    told_again,
)
from coordinator.requests.validation import GenerationParameters
from outrider.errors import DataLoss
from outrider.messages import PositionLogprobs
from outrider.request import Finished, ResumeRequest, Started, Tokens
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState, Counters, FinishReason, SessionRecord
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.tokens import EMPTY_DIGEST, TokenSequence

PARAMETERS = GenerationParameters(
    prompt=(1, 2),
    sampling=SamplingParams(temperature=0.7, top_k=3, logit_bias=((5, -1.5), (7, 2.0))),
    max_tokens=6,
    stop=("cd",),
    ignore_eos=True,
    seed=2**64 - 1,
    rule=Rule.BLOCK,
    num_draft_tokens=3,
    deadline_ms=1000,
    logprobs=2,
    include_rounds=True,
    draft_deadline_ms=20,
)
RECORD = SessionRecord(
    session_id="0" * 32,
    tenant="",
    epoch=2,
    owner="c",
    seed=PARAMETERS.seed,
    rule=Rule.BLOCK,
    parameters=PARAMETERS.to_json(),
    prompt_length=2,
    token_ids=(1, 2, 10, 11, 12),
    prefix_digest=0,
    draft=CacheState(),
    target=CacheState(),
    counters=Counters(2, 4, 1),
    logprobs="[-1.0,[]]\n[-2.0,[[3,-0.5]]]\n[-Infinity,[]]\n",
    finish_reason=None,
)


class Letters:
    """Token 10 is "a", 11 is "b" ..."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id - 10)

    def finish(self) -> str:
        return ""


def completion(stop: tuple[str, ...] = ("cd",), eos: Sequence[int] = ()) -> Completion:
    return Completion(max_tokens=6, stop=stop, eos_token_ids=eos, text_stream=Letters())


def test_parameters_survive_the_store() -> None:
    assert check_known(RECORD, asked(3)) == PARAMETERS


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sampling":{"logit_bias":[]}}'])
def test_parameters_that_cannot_be_read_are_lost_data(text: str) -> None:
    with pytest.raises(DataLoss, match="parameters"):
        check_known(replace(RECORD, parameters=text), asked(0))


def asked(known: int, characters: int | None = None) -> ResumeRequest:
    return ResumeRequest(RECORD.session_id, known, characters)


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_what_the_client_lacks_is_told_with_the_text_that_follows_its_own(known: int) -> None:
    """ "c" may begin the stop string, and is held back, by whoever tells it."""
    found = replay(RECORD, PARAMETERS, completion(), asked(known))
    assert found.completion.num_tokens == 3
    assert found.finish_reason is None
    if known == 3:
        assert not found.events
        return
    [tokens] = found.events
    assert tokens.first_index == known
    assert tokens.token_ids == (10, 11, 12)[known:]
    assert tokens.text_delta == "ab"[known:]
    assert tokens.origins == (Origin.STORED,) * (3 - known)
    assert [entry.logprob for entry in tokens.logprobs] == [-1.0, -2.0, -math.inf][known:]
    assert found.completion.push((13,)).finish_reason is FinishReason.STOP


def test_text_follows_what_the_client_says_that_it_has() -> None:
    [tokens] = replay(RECORD, PARAMETERS, completion(), asked(2, 1)).events
    assert (tokens.token_ids, tokens.text_delta) == ((12,), "b")
    [tokens] = replay(RECORD, PARAMETERS, completion(), asked(1, 2)).events
    assert (tokens.token_ids, tokens.text_delta) == ((11, 12), "")


def test_a_long_answer_is_told_in_parts() -> None:
    num = 2 * TOKENS_PER_EVENT + 7
    quiet = replace(PARAMETERS, logprobs=None, max_tokens=9999, stop=())
    long = Completion(max_tokens=9999, stop=(), eos_token_ids=(), text_stream=Letters())
    record = replace(RECORD, token_ids=(1, 2, *[10] * num), logprobs="")
    events = replay(record, quiet, long, asked(3)).events
    assert [len(event.token_ids) for event in events] == [TOKENS_PER_EVENT] * 2 + [4]
    assert [event.first_index for event in events] == [3, 3 + TOKENS_PER_EVENT, num - 4]
    assert "".join(event.text_delta for event in events) == "a" * (num - 3)


def test_a_completion_that_was_whole_ends_without_another_round() -> None:
    for known in (1, 3):
        found = replay(RECORD, PARAMETERS, completion(eos=(12,)), asked(known))
        assert found.finish_reason is FinishReason.STOP


def test_more_than_is_stored_cannot_be_known() -> None:
    check_known(RECORD, asked(3))
    with pytest.raises(DataLoss, match="the client has 4 tokens, the store 3"):
        check_known(RECORD, asked(4))


def test_other_tokens_than_are_stored_cannot_be_known() -> None:
    """Nor any behind the end; without a digest their number is all that counts."""
    known = TokenSequence(RECORD.token_ids[RECORD.prompt_length :][:2])
    check_known(RECORD, replace(asked(2), tokens_digest=known.digest()))
    check_known(RECORD, replace(asked(0), tokens_digest=EMPTY_DIGEST))
    with pytest.raises(DataLoss, match="the client's 2 tokens are others than those"):
        check_known(RECORD, replace(asked(2), tokens_digest=known.digest() ^ 1))
    with pytest.raises(DataLoss, match="the client's 1 tokens are others than those"):
        check_known(RECORD, replace(asked(1), tokens_digest=known.digest()))


ENDED = replace(RECORD, finish_reason=FinishReason.DEADLINE, logprobs="")
QUIET = replace(PARAMETERS, logprobs=None)


def test_a_finished_session_is_told_again() -> None:
    """What was held back is told where it is not known to have come."""
    events = told_again(ENDED, "toy", replay(ENDED, QUIET, completion(), asked(1)))
    started, tokens, tail, finished = events
    assert isinstance(started, Started)
    assert isinstance(tokens, Tokens)
    assert (tokens.token_ids, tokens.text_delta) == ((11, 12), "b")
    assert isinstance(tail, Tokens)
    assert (tail.first_index, tail.token_ids, tail.text_delta) == (3, (), "c")
    assert isinstance(finished, Finished)
    assert finished.finish_reason is FinishReason.DEADLINE
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 3)
    assert finished.metrics.mean_acceptance_length == 1.5
    assert list(told_again(RECORD, "toy", replay(RECORD, QUIET, completion(), asked(1)))) == []


@pytest.mark.parametrize(("characters", "told"), [(2, ["c"]), (3, []), (None, ["c"])])
def test_held_back_text_is_told_once(characters: int | None, told: list[str]) -> None:
    events = replay(ENDED, QUIET, completion(), asked(3, characters)).events
    assert [event.text_delta for event in events] == told


def test_log_probabilities_survive_the_store() -> None:
    told = PositionLogprobs(-0.25, ((3, -0.25), (4, -math.inf)))
    assert read_logprobs(write_logprobs(told)) == told
    for line in ("", "[]", "[1]", "[1,[[]]]", "nonsense"):
        with pytest.raises(DataLoss, match="log-probabilities"):
            read_logprobs(line)


async def longest_stall(work: asyncio.Future[None]) -> tuple[float, float]:
    """Seconds that `work` took, and the longest time that the event loop did nothing else."""
    began = last = time.perf_counter()
    longest = 0.0
    while not work.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await work
    return time.perf_counter() - began, longest


async def test_a_long_replay_leaves_the_event_loop() -> None:
    """The loop serves others while a hundred thousand tokens are pushed and hashed."""
    num_tokens = 100_000
    parameters = replace(PARAMETERS, max_tokens=num_tokens + 1, logprobs=None, stop=())
    token_ids = (1, 2, *(10 + index % 26 for index in range(num_tokens)))
    record = replace(RECORD, parameters=parameters.to_json(), token_ids=token_ids, logprobs="")
    request = ResumeRequest(record.session_id, num_tokens - 3)
    replays = Replays()

    def long() -> Completion:
        return Completion(
            max_tokens=num_tokens + 1, stop=(), eos_token_ids=(), text_stream=Letters()
        )

    async def resume() -> None:
        session, replayed = await replays.run(
            record, lambda: (Session(record), replay(record, parameters, long(), request))
        )
        assert session.length == len(token_ids)
        assert "".join(event.text_delta for event in replayed.events) == "".join(
            chr(ord("a") + token_id - 10) for token_id in token_ids[-3:]
        )

    try:
        taken, stalled = await longest_stall(asyncio.ensure_future(resume()))
    finally:
        replays.close()
    assert stalled < taken / 4, f"the event loop stood still for {stalled} of {taken} s"


def test_events_with_many_log_probabilities_are_short() -> None:
    """Encoding one must not hold up the event loop."""
    num_tokens = 3 * ENTRIES_PER_EVENT
    parameters = replace(PARAMETERS, max_tokens=num_tokens, logprobs=20, stop=())
    line = write_logprobs(PositionLogprobs(-1.0, tuple((index, -2.0) for index in range(20))))
    record = replace(
        RECORD, token_ids=(1, 2, *[10] * (num_tokens - 1)), logprobs=f"{line}\n" * (num_tokens - 1)
    )
    whole = Completion(max_tokens=num_tokens, stop=(), eos_token_ids=(), text_stream=Letters())
    replayed = replay(record, parameters, whole, ResumeRequest(record.session_id))
    sizes = [len(event.token_ids) * 21 for event in replayed.events]
    assert sum(sizes) == 21 * (num_tokens - 1)
    assert max(sizes) <= ENTRIES_PER_EVENT
