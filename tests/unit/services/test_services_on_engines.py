"""Both services over the engines that ship: a model on pages and an emulated pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import tiny_config, tiny_module
from paged_engines import WatchedEngine
from rounds import GREEDY, Listener, Player

from draft_service.service import DraftService
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.engine.interface import Engine, ModelInfo
from outrider.replica.scheduler import ThreadExecutor
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.link import MemoryLink
from target_service.service import TargetService

VOCAB = 16
SPEC = EmulatedSpec(
    vocab_size=500, support=8, verify_ms=0.01, draft_ms=0.01, max_model_len=64, deviation=0.4
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def paged_engine(seed: int) -> Callable[[], Engine]:
    def make() -> Engine:
        module = tiny_module(tiny_config("llama", VOCAB), seed, torch.float64)
        info = ModelInfo("tiny", VOCAB, 64, "float64", (), str(seed), "")
        return WatchedEngine(module, info, max_num_seqs=4)

    return make


PAIRS: dict[str, tuple[Callable[[], Engine], Callable[[], Engine]]] = {
    "paged": (paged_engine(1), paged_engine(2)),
    "emulated": (lambda: EmulatedEngine(SPEC, "target"), lambda: EmulatedEngine(SPEC, "draft")),
}


async def write(
    pair: str, rule: Rule, sampling: SamplingParams, counts: list[int]
) -> tuple[list[int], int]:
    """24 tokens of one session with K from `counts` in turn, and how many were accepted."""
    make_target, make_draft = PAIRS[pair]
    target_engine, draft_engine = make_target(), make_draft()
    target = TargetService(
        target_engine, ThreadExecutor("target", target_engine.take_step_seconds), max_num_seqs=4
    )
    draft = DraftService.with_model(
        draft_engine, ThreadExecutor("draft", draft_engine.take_step_seconds), max_num_seqs=4
    )
    to_target: MemoryLink[Any, Any] = MemoryLink(target)
    to_draft: MemoryLink[Any, Any] = MemoryLink(draft)
    player = Player(
        (1, 2, 3),
        rule,
        sampling,
        (to_target, Listener(to_target)),
        (to_draft, Listener(to_draft)),
    )
    while len(player.tokens) < 27:
        await player.play(counts[player.round_index % len(counts)])
    for service in (target, draft):
        service.check_integrity()
        await service.close()
    return player.tokens[:27], player.num_accepted


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.COUPLED])
async def test_the_text_is_the_targets_own(pair: str, rule: Rule) -> None:
    """Greedy and coupled, penalised, exact logits: the same text for K = 0, 3 and varying."""
    penalties = {"presence_penalty": 0.4, "repetition_penalty": 1.2}
    temperature = GREEDY.temperature if rule is Rule.GREEDY else 1.0
    sampling = SamplingParams(temperature=temperature, top_p=0.95, **penalties)
    plain, _ = await write(pair, rule, sampling, [0])
    for counts in ([3], [0, 2, 5, 1]):
        text, _ = await write(pair, rule, sampling, counts)
        assert text == plain


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
async def test_rounds_repeat_exactly_and_drafts_help(pair: str, rule: Rule) -> None:
    """Token and block: the same seed gives the same text and acceptances again, some accepted."""
    sampling = SamplingParams(temperature=0.9, top_k=12)
    first = await write(pair, rule, sampling, [4, 2])
    assert first == await write(pair, rule, sampling, [4, 2])
    assert first[1] > 0
