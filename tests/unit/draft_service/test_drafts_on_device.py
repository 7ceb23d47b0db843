"""Drafts drawn on the device of their logits, compared with drafts drawn on the CPU. Without a CUDA
device, its kernels have substitutes."""

import pytest
import torch
from cuda_substitutes import backend_on, draw_without_kernels
from models import tiny_config, tiny_drafter, tiny_module, twin
from paged_engines import VOCAB, checked_engines, ids

from draft_service.model_drafter import ModelDrafter
from outrider.drafters.drafter import DraftRequest
from outrider.speculation import draft_sampling
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

SOME_TOKENS = tuple(token_id for token_id in range(VOCAB) if token_id % 3)
BIASED = SamplingParams(logit_bias=((3, 1.0),))
PENALISED = SamplingParams(repetition_penalty=1.2)


def request(
    name: str, tokens: tuple[int, ...], count: int, rule: Rule, sampling: SamplingParams
) -> DraftRequest:
    noise = RoundNoise(ord(name), rule, len(tokens))
    return DraftRequest(name, "", tokens, 3, count, sampling, rule, noise)


def requests() -> list[DraftRequest]:
    """Every rule, with different parameters and lengths; the last two are not drawn on the
    device."""
    return [
        request("a", ids(14, 1), 5, Rule.TOKEN, SamplingParams(temperature=0.9)),
        request("b", ids(5, 2), 3, Rule.BLOCK, SamplingParams(top_p=0.8)),
        request("c", ids(30, 3), 5, Rule.COUPLED, SamplingParams(top_k=9, min_p=0.01)),
        request("d", ids(3, 4), 1, Rule.GREEDY, SamplingParams(temperature=0.0)),
        request("e", ids(9, 5), 4, Rule.TOKEN, SamplingParams(temperature=1.3, top_k=3)),
        request("f", ids(8, 6), 4, Rule.COUPLED, PENALISED),
        request("g", ids(7, 7), 4, Rule.TOKEN, BIASED),
    ]


@pytest.mark.parametrize("token_ids", [(), SOME_TOKENS], ids=["whole", "reduced"])
def test_the_same_proposals(
    token_ids: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_without_kernels(monkeypatch)
    module = tiny_module(tiny_config("llama", VOCAB))
    module = (tiny_drafter(module, token_ids) if token_ids else module).to(device)
    with checked_engines() as make_engine:
        on_device, on_cpu = (
            ModelDrafter(
                make_engine(
                    each, backend=backend_on(device, torch.float32), logit_token_ids=token_ids
                )
            )
            for each in (module, twin(module))
        )
        found = on_device.propose(requests())
        monkeypatch.setattr(draft_sampling, "has_kernels", lambda _: False)
        expected = on_cpu.propose(requests())
    for own, other in zip(found, expected, strict=True):
        assert own.token_ids == other.token_ids
        for q, known in zip(own.q, other.q, strict=True):
            assert (q is None) == (known is None)
            if q is not None and known is not None:
                assert q.token_ids == known.token_ids
                pairs = zip(q.counts, known.counts, strict=True)
                assert all(abs(count - other_count) <= 3 for count, other_count in pairs)
