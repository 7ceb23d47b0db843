"""JSON by a schema, through real gRPC and Redis, at temperature 1: every completion that ends by
itself parses and is valid, and under coupled it is that of plain decoding, token for token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from constrained import SCHEMA, eos, grammars, hf_tokenizer
from models import tiny_config, tiny_module
from stack import Stack, running_stack

from outrider.drafters.lookup import NgramDrafter
from outrider.engine.interface import ModelInfo
from outrider.engine.paged_engine import PagedEngine
from outrider.grammar.constraint import Constraint
from outrider.request import GenerateRequest
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.tokenizer import TokenizerText

VOCAB, LENGTH = 320, 256
PROMPT = tuple(range(60, 68))
NUM_SEEDS = 6
SCHEMAS = (
    SCHEMA,
    {
        "type": "object",
        "properties": {
            "kind": {"const": "point"},
            "at": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
            "label": {"type": ["string", "null"], "maxLength": 6},
        },
        "required": ["kind", "at"],
        "additionalProperties": False,
    },
    {
        "$defs": {"leaf": {"type": "object", "properties": {"x": {"type": "boolean"}},
                           "required": ["x"], "additionalProperties": False}},
        "anyOf": [{"$ref": "#/$defs/leaf"}, {"enum": ["none", 3]}],
        "type": ["object", "string", "integer"],
    },
    {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}[0-9]?$"},
     "minItems": 1, "maxItems": 3},
)  # fmt: skip


def engine(seed: int) -> PagedEngine:
    torch.set_num_threads(1)
    config = tiny_config("llama", VOCAB, LENGTH)
    config.num_hidden_layers = 1
    info = ModelInfo(f"tiny-{seed}", VOCAB, LENGTH, "float32", (eos(),), f"w{seed}", "small")
    return PagedEngine(tiny_module(config, seed), info, max_num_seqs=64)


async def completed(stack: Stack, rule: Rule, k: int) -> dict[tuple[int, int], Any]:

    async def one(index: int, seed: int) -> Any:
        request = GenerateRequest(
            PROMPT,
            sampling=SamplingParams(),
            max_tokens=LENGTH - len(PROMPT) - 8,
            seed=seed,
            rule=rule,
            num_draft_tokens=k,
            constraint=Constraint.of_schema(SCHEMAS[index]),
        )
        return await stack.client.complete(request)

    places = [(index, seed) for index in range(len(SCHEMAS)) for seed in range(NUM_SEEDS)]
    found = await asyncio.gather(*(one(*place) for place in places))
    return dict(zip(places, found, strict=True))


@pytest.mark.parametrize("drafter", ["masked", "unmasked", "siblings", "lookup"])
async def test_every_completion_that_ends_is_valid(drafter: str, tmp_path: Path) -> None:
    text = TokenizerText(hf_tokenizer(), "small")
    async with running_stack(
        engine(3),
        None if drafter == "lookup" else engine(4),
        tmp_path,
        lookup=NgramDrafter() if drafter == "lookup" else None,
        text=text,
        grammars=grammars,
        draft_masks=drafter != "unmasked",
        draft_siblings=2 if drafter == "siblings" else 0,
    ) as stack:
        for rule in (Rule.TOKEN, Rule.COUPLED):
            found = {k: await completed(stack, rule, k) for k in (0, 4)}
            for by_place in found.values():
                for (index, _), done in by_place.items():
                    if done.finish_reason is FinishReason.STOP:
                        jsonschema.validate(json.loads(done.text), SCHEMAS[index])
                ended = [d for d in by_place.values() if d.finish_reason is FinishReason.STOP]
                assert len(ended) > len(by_place) / 2
            if rule is Rule.COUPLED:
                tokens = [{p: d.token_ids for p, d in one.items()} for one in found.values()]
                assert tokens[0] == tokens[1]
            assert sum(d.metrics.num_draft_tokens for d in found[4].values()) > 0
            assert sum(d.metrics.num_accepted_draft_tokens for d in found[4].values()) > 0
