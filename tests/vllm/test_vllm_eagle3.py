"""vLLM's own engine runs an EAGLE-3 head that `outrider distill` made."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draft_service.training.distilling import distill
from draft_service.training.documents import Template
from draft_service.training.options import DistillOptions
from draft_service.training.teacher import Target
from outrider.config.deployment import TargetConfig
from outrider.engine.paged_engine import PagedEngine
from outrider.interfaces.engine import ModelInfo, SequenceStep
from outrider.models.draft_head import LoadedDraftHead
from outrider.models.eagle3 import load_eagle3
from tests.support.vllm_models import MAX_MODEL_LEN, VOCAB, save

NUM_LAYERS, NUM_DRAFTED, NUM_WRITTEN = 8, 4, 24
Drafts = list[tuple[list[int], list[int]]]
"""Texts, and the draft tokens behind each of them."""


def drafts_of_vllm(target: str, head: str, prompts: list[list[int]]) -> Drafts:
    """The drafts of all rounds in which vLLM continues the prompts greedily. Changes the number of
    threads of its process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    model = LLM(
        target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**24,
        skip_tokenizer_init=True,
        speculative_config={
            "method": "eagle3",
            "model": head,
            "num_speculative_tokens": NUM_DRAFTED,
        },
    )
    executor: Any = model.llm_engine.model_executor
    proposer = executor.driver_worker.worker.model_runner.drafter
    propose, rounds = proposer.propose, []

    def noted(**given: Any) -> Any:
        length = int(given["common_attn_metadata"].seq_lens[0])
        if (rejected := given["num_rejected_tokens_gpu"]) is not None:
            length -= int(rejected[0])
        newest, found = int(given["next_token_ids"][0]), propose(**given)
        rounds.append((length, newest, found[0].tolist()))
        return found

    proposer.propose = noted
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_WRITTEN, ignore_eos=True, detokenize=False
    )
    drafts = []
    for prompt in prompts:
        rounds.clear()
        [output] = model.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        text = [*prompt, *output.outputs[0].token_ids]
        for length, newest, drafted in rounds:
            if length < len(text):  # Otherwise the last round has written more than was requested.
                assert text[length] == newest
                drafts.append((text[: length + 1], drafted))
    return drafts


def drafted_by(engine: PagedEngine, loaded: LoadedDraftHead, text: list[int]) -> list[int]:
    engine.forward([SequenceStep("a", tuple(text[:-1]), 1)])
    feature, drafted = engine.features()[0][-1], text[-1:]
    for _ in range(NUM_DRAFTED):
        [row] = engine.forward_draft([SequenceStep("a", (drafted[-1],), 1)], [feature])
        drafted.append(loaded.token_ids[int(loaded.module.logits(row).argmax())])
        feature = loaded.module.carry(row)
    engine.release("a")
    return drafted[1:]


def test_vllm_drafts_what_we_draft_with_a_head_of_distill(tmp_path: Path) -> None:
    """Drafts are compared in float32, behind 20 prompts and behind the text of each round, whether
    or not the drafts were accepted. Both read the head's files unchanged."""
    save("llama", tmp_path / "target", num_hidden_layers=NUM_LAYERS)
    config = TargetConfig(model="tiny", directory=str(tmp_path / "target"))
    whose = Target(config, Template((0, 5), (3, 6)), None)
    options = DistillOptions(
        out=tmp_path / "head", kind="eagle3", draft_vocab=48, tokens=8000, steps=60
    )
    distill(options, whose, tmp_path / "cache", lambda *_: None)
    generator = torch.manual_seed(4)
    prompts = [
        torch.randint(VOCAB, (num,), generator=generator).tolist() for num in range(1, 81, 4)
    ]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        directories = (str(tmp_path / "target"), str(tmp_path / "head"))
        drafts = pool.submit(drafts_of_vllm, *directories, prompts).result()
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    loaded = load_eagle3(tmp_path / "head", target, name="HEAD", target_name="tiny")
    info = ModelInfo("tiny", VOCAB, MAX_MODEL_LEN, "float32", (), "", "")
    engine = PagedEngine(target, info, draft_layer=loaded)
    rounds = [len(text) for text, _ in drafts]
    assert len(prompts) * 8 < len(drafts) < len(prompts) * NUM_WRITTEN, rounds
    assert [drafted_by(engine, loaded, text) for text, _ in drafts] == [own for _, own in drafts]
