"""Drafts of several tokens from one pass, compared with the library's own forward on the input that
the paper (arXiv 2504.18583) defines: the whole prefix and K - 1 parallel tokens. Tokens are drawn
from its last K rows."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count as counting
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.model_drafter import ParallelDrafter, parallel_token
from outrider.config.deployment import DraftConfig
from outrider.drafters.drafter import DraftDeadline, DraftRequest
from outrider.errors import ConfigError
from outrider.foundation.tokens import TokenSequence
from outrider.grammar.token_mask import TokenMask
from outrider.interfaces.engine import SequenceStep
from outrider.speculation.logits_processing import masked_logits, target_probabilities
from outrider.speculation.proposal import DraftDistribution, Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams, TokenHistory
from tests.support.draft_items import item
from tests.support.draft_world import draft_over
from tests.support.models import MAX_MODEL_LEN, save_tiny_model, tiny_config, tiny_module, twin
from tests.support.paged_engines import VOCAB, checked_engines, dense, ids
from tests.support.rounds import GREEDY, PENALISED, RULES
from tests.support.toy_engine import ToyEngine, toy_logits
from tests.support.verdict_laws import draft_token

MASK, TOY_MASK, TOY_VOCAB = VOCAB - 1, 7, 8
LENGTHS = (1, 2, 5, 31, 64, 120)
ROUNDS = 4
Rows = Callable[[Sequence[int], int], torch.Tensor]  # the last K rows after a prefix


class Alternating:
    """Even and odd tokens alternate; the completion ends after four."""

    def mask_after(self, drafted: Sequence[int]) -> TokenMask:
        wanted = drafted[-1] % 2 == 0 if drafted else True
        flags = [token % 2 == wanted for token in range(VOCAB)]
        return TokenMask(np.packbits(flags, bitorder="little"), is_over=len(drafted) == 4)


def request(
    name: str, tokens: Sequence[int], count: int, rule: Rule, sampling: SamplingParams, **more: Any
) -> DraftRequest:
    noise = RoundNoise(len(name), rule, len(tokens))
    return DraftRequest(name, "", tokens, 1, count, sampling, rule, noise, **more)


def expected(
    asked: DraftRequest, count: int, rows_behind: Rows
) -> tuple[list[int], list[DraftDistribution | None]]:
    tokens: list[int] = []
    q = []
    for index, row in enumerate(rows_behind(asked.token_ids, count).split(1)):
        if asked.allowed is not None:
            mask = asked.allowed.mask_after(tokens)
            if mask.is_over:
                break
            row = masked_logits(row, [mask])
        history = TokenHistory(asked.token_ids[:1], (*asked.token_ids[1:], *tokens))
        p = target_probabilities(row, asked.sampling, history)[0]
        token_id, distribution = draft_token(p, asked.noise, index)
        tokens.append(token_id)
        q.append(distribution)
    return tokens, q if asked.rule.needs_q else []


def proposals(drafter: ParallelDrafter, asked: Sequence[DraftRequest]) -> list[Proposal]:
    drafts = [*map(drafter.begin, asked)]
    drafter.extend(drafts)
    return [draft.proposal for draft in drafts]


def counts(q: DraftDistribution | None) -> dict[int, int]:
    return {} if q is None else dict(zip(q.token_ids, q.counts, strict=True))


def toy_rows(prefix: Sequence[int], count: int) -> torch.Tensor:
    paths = ([*prefix, *[TOY_MASK] * masks] for masks in range(count))
    return torch.stack([toy_logits(2, path, TOY_VOCAB) for path in paths])


def test_proposals_are_those_of_the_whole_input() -> None:
    """Rounds keep some tokens and add one, for sessions of all rules in one batch. Token ids are
    equal, q is equal up to rounding, and only committed tokens are held."""
    module = tiny_module(tiny_config("qwen3", VOCAB))
    library = twin(module)

    def rows_behind(prefix: Sequence[int], count: int) -> torch.Tensor:
        return dense(library, (*prefix, *[MASK] * (count - 1)))[-count:]

    kinds: list[Any] = [(*kind, None) for kind in RULES]
    kinds += [(Rule.TOKEN, SamplingParams(), Alternating()), (Rule.GREEDY, GREEDY, Alternating())]
    texts = {"s" * (n + 1): list(ids(LENGTHS[n % len(LENGTHS)], n)) for n in range(len(kinds))}
    num_proposed = set()
    with checked_engines() as make_engine:
        drafter = ParallelDrafter(make_engine(module), MASK)
        for round_index in range(ROUNDS):
            asked = [
                request(name, tuple(text), 1 + (3 * round_index + n) % 8, rule, params, allowed=own)
                for n, ((name, text), (rule, params, own)) in enumerate(
                    zip(texts.items(), kinds, strict=True)
                )
            ]
            for one, found in zip(asked, proposals(drafter, asked), strict=True):
                count = min(one.num_draft_tokens, MAX_MODEL_LEN + 1 - len(one.token_ids))
                tokens, q = expected(one, count, rows_behind)
                assert list(found.token_ids) == tokens
                for own, other in zip(map(counts, found.q), map(counts, q), strict=True):
                    assert all(abs(own.get(v, 0) - other.get(v, 0)) <= 2 for v in own | other)
                num_proposed.add(len(tokens))
                text = texts[one.session_id]
                assert drafter.engine.length(one.session_id) == len(text)
                text += [*tokens[: round_index % 3], 5]
    assert num_proposed == set(range(1, 9))


@pytest.mark.parametrize("rule", list(Rule))
async def test_outcomes_are_drafted_in_a_pass(rule: Rule) -> None:
    """What is pushed is what would be proposed. One pass makes the proposal, one reads it, and one
    drafts for all outcomes."""
    asked = item((1, 2, 3), rule=rule)
    async with draft_over(parallel_token=TOY_MASK) as draft:
        answer, *pushed = await draft.send(asked)
        assert len(pushed) == 8
        assert len(draft.engine.batches) == 3
        text, chosen = (1, 2, 3, *pushed[2].assumed), pushed[2]
        held = chosen.proposal.token_ids
        later = await draft.send(item(text, 3, round_index=1, rule=rule, held=held))
        assert len(later) == 8
        assert len(draft.engine.batches) == 5
    replies = [((1, 2, 3), one) for one in (answer, *pushed)] + [(text, one) for one in later]
    for begun, reply in replies:
        prefix = (*begun, *reply.assumed)
        noise = RoundNoise(7, rule, len(prefix), TokenSequence(prefix).digest())
        one = replace(request("s", prefix, 3, rule, asked.head.params()), noise=noise)
        assert (list(reply.proposal.token_ids), list(reply.proposal.decode().q)) == expected(
            one, 3, toy_rows
        )


async def test_a_step_is_no_longer_than_its_budget() -> None:
    items = [item((1, 2, 3), session=n, count=16, look_ahead=0) for n in range(1, 41)]
    async with draft_over(max_num_batched_tokens=512, parallel_token=TOY_MASK) as draft:
        replies = await draft.send(*items)
        assert {len(reply.proposal) for reply in replies} == {16}
        assert max(map(sum, draft.engine.counts)) <= 512


def test_tokens_before_a_row_that_cannot_be_drawn_from_are_proposed() -> None:
    class Broken(ToyEngine):
        def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
            first, *others = super().forward(steps)
            return [first.index_fill(0, torch.tensor(2), float("nan")), *others]

    drafter = ParallelDrafter(Broken(TOY_VOCAB, salt=2), TOY_MASK)
    asked = [request(name, (1, 2, 3), 4, Rule.TOKEN, SamplingParams()) for name in ("a", "bb")]
    for one, found, length in zip(asked, proposals(drafter, asked), (2, 4), strict=True):
        assert list(found.token_ids) == expected(one, 4, toy_rows)[0][:length]
        assert drafter.engine.length(one.session_id) == 3


@pytest.mark.parametrize(
    ("ends_at", "lengths"), [(0.5, [0, 0]), (1.5, [4, 1]), (2.5, [4, 2]), (9.0, [4, 4])]
)
def test_there_is_time_for_all_draws_or_for_each(ends_at: float, lengths: list[int]) -> None:
    """Each call of the clock takes a second."""
    drafter = ParallelDrafter(ToyEngine(TOY_VOCAB, salt=2), TOY_MASK)
    found = []
    for sampling in (SamplingParams(), PENALISED):
        deadline = DraftDeadline(ends_at, counting(1).__next__)
        asked = request("s", (1, 2, 3), 4, Rule.TOKEN, sampling, deadline=deadline)
        found += proposals(drafter, [asked])
        assert drafter.engine.length("s") == 3
        drafter.engine.release("s")
    assert [*map(len, found)] == lengths


def test_its_files_tell_such_a_model(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family="qwen3") / "config.json"
    config = DraftConfig(model="some/model", directory=str(tmp_path))
    assert parallel_token(DraftConfig(model="some/model")) is parallel_token(config) is None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": 5}))
    assert parallel_token(config) == 5
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": None}))
    with pytest.raises(ConfigError, match=f"drafter {tmp_path}: cannot be loaded"):
        parallel_token(config)
    with pytest.raises(ConfigError, match=r"token 8 is not in 0\.\.7"):
        ParallelDrafter(ToyEngine(TOY_VOCAB), TOY_VOCAB)
