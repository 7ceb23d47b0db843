"""A drafter whose engine draws all tokens in one replay, against one whose engine is asked for
each: on a CUDA device, and on a CPU with what stands in for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from models import tiny_config, tiny_drafter, tiny_module, twin
from paged_engines import VOCAB, EngineMaker, checked_engines, gap, ids, run
from recorded_work import backend_on, draw_without_kernels

from draft_service.model_drafter import ModelDrafter
from outrider.drafters.drafter import DraftDeadline, DraftRequest
from outrider.engine.paged_engine import PagedEngine
from outrider.speculation.proposal import SealedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.tokens import TokenSequence

ENTRIES = 8
SOME_TOKENS = tuple(token_id for token_id in range(VOCAB) if token_id % 3)


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_without_kernels(monkeypatch)


@pytest.fixture
def make_engine() -> Iterator[EngineMaker]:
    with checked_engines() as maker:
        yield maker


@dataclass
class Pair:
    """Two drafters of the same model; `calls` counts what the first one's engine was asked for."""

    at_once: PagedEngine
    by_step: PagedEngine
    calls: list[str]

    def propose(self, requests: list[DraftRequest]) -> list[Any]:
        """What both propose, which must be the same."""
        found, expected = (
            ModelDrafter(engine, ENTRIES).propose(requests)
            for engine in (self.at_once, self.by_step)
        )
        for own, other in zip(found, expected, strict=True):
            self.compare(own, other)
        for request in requests:
            lengths = [e.length(request.session_id) for e in (self.at_once, self.by_step)]
            assert lengths[0] == lengths[1]
        return found

    def compare(self, found: Any, expected: Any) -> None:
        """Proposals must be sealed to the same bytes; in float32 counts may be rounded otherwise,
        as rows are computed beside others."""
        assert found.token_ids == expected.token_ids
        if self.at_once._dtype == torch.float64:
            assert SealedProposal.of(found) == SealedProposal.of(expected)
        for own, other in zip(found.q, expected.q, strict=True):
            assert (own is None) == (other is None)
            if own is not None and other is not None:
                assert own.token_ids == other.token_ids
                pairs = zip(own.counts, other.counts, strict=True)
                assert all(abs(count - known) <= 3 for count, known in pairs)


@pytest.fixture(params=[(), SOME_TOKENS], ids=["whole", "reduced"])
def pair(
    request: pytest.FixtureRequest,
    device: str,
    make_engine: EngineMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> Pair:
    """Of a model with a head over all tokens, and of one with a head over some. On a CPU both
    drafters compute in float64, so that sums in another order change no count of a q; the kernel of
    CUDA takes float32 at most."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    module, token_ids = tiny_module(tiny_config("llama", VOCAB), dtype=dtype), request.param
    if token_ids:
        module = tiny_drafter(module, token_ids)
    module = module.to(device, dtype)
    # The stand-in for a CPU takes any dtype.
    at_once, by_step = (
        make_engine(each, backend=backend_on(device, torch.float32), logit_token_ids=token_ids)
        for each in (module, twin(module))
    )
    calls: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> None:
        def made(*arguments: Any) -> Any:
            answer = call(*arguments)
            calls.append(name if answer is not None else "refused")
            return answer

        monkeypatch.setattr(at_once, name, made)

    counted("run_multi_step", at_once.run_multi_step)
    counted("forward", at_once.forward)
    monkeypatch.setattr(by_step, "run_multi_step", lambda *_: None)
    return Pair(at_once, by_step, calls)


def request(
    name: str, tokens: tuple[int, ...], count: int, rule: Rule, sampling: SamplingParams
) -> DraftRequest:
    digests = TokenSequence()
    digests.extend(tokens[:-1])
    return DraftRequest(
        session_id=name,
        tenant="",
        token_ids=tokens,
        prompt_length=3,
        num_draft_tokens=count,
        sampling=sampling,
        rule=rule,
        noise=RoundNoise(ord(name[-1]), rule, len(tokens)),
        digests=digests,
    )


def requests() -> list[DraftRequest]:
    """Every rule, prefixes across a page's end, and other parameters and lengths for each."""
    return [
        request("a", ids(14, 1), 5, Rule.TOKEN, SamplingParams(temperature=0.9)),
        request("b", ids(5, 2), 3, Rule.BLOCK, SamplingParams(top_p=0.8)),
        request("c", ids(30, 3), 5, Rule.COUPLED, SamplingParams(top_k=9, min_p=0.01)),
        request("d", ids(3, 4), 1, Rule.GREEDY, SamplingParams(temperature=0.0)),
        request("e", ids(9, 5), 4, Rule.TOKEN, SamplingParams(temperature=1.3, top_k=3)),
    ]


def test_the_same_proposals_in_one_call(pair: Pair) -> None:
    """Token ids, q to the count and slots, over rounds that accept some of what was proposed; what
    is held goes on, and is shared, as if each token had been run by itself."""
    asked = requests()
    for accepted in (2, 0, 9):
        proposals = pair.propose(asked)
        assert pair.calls == ["run_multi_step"]
        pair.calls.clear()
        following = []
        for each, proposal in zip(asked, proposals, strict=True):
            kept = proposal.token_ids[:accepted]
            tokens = (*each.token_ids, *kept, (each.token_ids[0] + 1) % VOCAB)
            for engine in (pair.at_once, pair.by_step):
                held = min(engine.length(each.session_id), len(tokens) - 1)
                engine.keep(each.session_id, held)
            noise = replace(each.noise, committed_length=len(tokens))
            following.append(replace(each, token_ids=tokens, noise=noise))
        asked = following
    pair.propose(asked)
    for each in asked:
        pools = [engine._pool for engine in (pair.at_once, pair.by_step)]
        held = [pool.token_ids(each.session_id) for pool in pools]
        assert held[0] == held[1]
        rows = [run(engine, each.session_id, (1, 2), 2) for engine in (pair.at_once, pair.by_step)]
        assert gap(*rows) <= 1e-3
    longest = max(held, key=len)
    for engine in (pair.at_once, pair.by_step):
        engine.release(asked[-1].session_id)
    shared = [e.attach("new", (*longest, 1)) for e in (pair.at_once, pair.by_step)]
    assert shared[0] == shared[1]


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": SamplingParams(repetition_penalty=1.2)},
        {"sampling": SamplingParams(logit_bias=((3, 1.0),))},
        {"num_draft_tokens": 0},
    ],
)
def test_what_needs_a_look_in_between_is_drawn_by_step(pair: Pair, change: dict[str, Any]) -> None:
    """By itself: the others of its step are drawn at once."""
    asked = requests()
    asked[2] = replace(asked[2], **change)
    pair.propose(asked)
    assert pair.calls == ["run_multi_step", *["forward"] * max(1, asked[2].num_draft_tokens)]
    pair.calls.clear()
    for engine in (pair.at_once, pair.by_step):
        engine.release("c")
    pair.propose([asked[2]])
    assert set(pair.calls) == {"forward"}


def test_draws_of_one_call_are_as_many_as_there_is_time_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By how long earlier ones took; at least one, where one is allowed, and none else."""
    drafter = ModelDrafter(pair.at_once, 8)
    asked = request("a", (3, 1, 4), 5, Rule.TOKEN, SamplingParams())
    [whole] = ModelDrafter(pair.by_step, 8).propose([asked])
    monkeypatch.setattr(drafter, "_draw_s", 1.0)
    for name, left_s, num_expected in (("b", 3.5, 3), ("c", 0.5, 1), ("d", -1.0, 0)):
        deadline = DraftDeadline(left_s, lambda: 0.0)
        one = replace(asked, session_id=name, deadline=deadline)
        pair.calls.clear()
        [found] = drafter.propose([one])
        assert found.token_ids == whole.token_ids[:num_expected]
        assert pair.calls[0] == ("run_multi_step" if num_expected else "forward")
        assert deadline.has_cut
        monkeypatch.setattr(drafter, "_draw_s", 1.0)
