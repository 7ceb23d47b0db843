"""Deployments that draft from what the target computes: by itself, and by a head in a draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from actors_here import actors_here
from models import (
    byte_level_tokenizer,
    save_tiny_eagle,
    save_tiny_exit,
    save_tiny_heads,
    save_tiny_model,
)

from outrider.client import Client, GenerateRequest
from outrider.models.loading import load_model
from outrider.request import RoundReport
from outrider.speculation.sampling_params import SamplingParams

PROMPT = tuple(range(10, 30))
VOCAB_SIZE = 320
NUM_TOKENS = 24


@pytest.mark.parametrize(
    ("kind", "save", "has_draft"),
    [
        ("medusa", save_tiny_heads, False),
        ("early-exit", save_tiny_exit, False),
        ("eagle", save_tiny_eagle, True),
    ],
)
async def test_it_writes_what_its_target_writes(
    tmp_path: Path, kind: str, save: Callable[..., Path], has_draft: bool
) -> None:
    """Greedy, with the heads' proposals in every round but the first. The look-up that goes first
    is never so sure as is asked of it here."""
    target = save_tiny_model(
        tmp_path / "target", vocab_size=VOCAB_SIZE, tokenizer=byte_level_tokenizer(VOCAB_SIZE)
    )
    heads = save(tmp_path / "heads", target, range(0, VOCAB_SIZE, 3))
    settings = {
        "model": str(target), "draft_model": f"hybrid:suffix,{kind}:{heads}", "device": "cpu",
        "dtype": "float32", "length_control": False,
        "num_draft_tokens": 2, "hybrid_min_score": 4.0, "hybrid_model_tokens": 2,
    }  # fmt: skip
    module, _ = load_model(target)
    written = module.generate(  # type: ignore[operator]
        torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False
    )
    request = GenerateRequest(
        PROMPT, sampling=SamplingParams(temperature=0.0), max_tokens=NUM_TOKENS, include_rounds=True
    )
    async with (
        actors_here(tmp_path / "redis", **settings) as addresses,
        Client(addresses["coordinator"]) as client,
    ):
        assert ("draft" in addresses) is has_draft
        ids: list[int] = []
        rounds: list[RoundReport] = []
        async for event in client.generate(request):
            if isinstance(event, RoundReport):
                rounds.append(event)
            ids += getattr(event, "token_ids", ())
    assert ids[:NUM_TOKENS] == written[0, len(PROMPT) :].tolist()
    early = [entry.proposed_token_ids for entry in rounds[1 : NUM_TOKENS // 3]]
    assert {len(token_ids) for token_ids in early} == {2}
    # The heads have logits of these alone, and the fallback drafter copies any.
    assert all(token_id % 3 == 0 for token_ids in early for token_id in token_ids)
