"""Heads and MTP layers, compared with those of `speculators` (`make test-drafters`)."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from draft_service.training.distilling import distill
from draft_service.training.documents import Template
from draft_service.training.options import DistillOptions
from draft_service.training.teacher import Target
from outrider.config.deployment import TargetConfig
from outrider.models.draft_head import LoadedDraftHead, Pairs
from outrider.models.eagle3 import Eagle3Config, Eagle3Head, load_eagle3, save_speculators
from outrider.models.mtp import load_mtp
from outrider.models.sources import resolve_model
from tests.support.models import tiny_config, tiny_module
from tests.support.mtp_models import MtpReference, mtp_target

PYTHON = os.environ.get("SPECULATORS_PYTHON", "")
SCRIPT = Path(__file__).with_name("speculators_reference.py")
NUM_DEPTHS = 3
NUM_PAIRS = 300

pytestmark = pytest.mark.skipif(not PYTHON, reason="no speculators here: make test-drafters")


def reference(*words: Any) -> None:
    """Runs the library's code."""
    environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    subprocess.run(
        [PYTHON, str(SCRIPT), *map(str, words)], check=True, env=environment, timeout=280
    )


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    tiny_module(tiny_config("llama", num_hidden_layers=8)).save_pretrained(directory)
    return directory


def random_head(target: Any, token_ids: list[int], **changes: Any) -> Eagle3Head:
    """A random head of the target's width, the only width that the library supports."""
    sizes = target.config
    layer = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 3 * sizes.hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 64,
    } | changes.pop("layer", {})
    num_layers = sizes.num_hidden_layers
    config = Eagle3Config(
        layer=LlamaConfig(**layer),
        draft_vocab_size=len(token_ids),
        layer_ids=(2, num_layers // 2, num_layers - 3),
        target_width=sizes.hidden_size,
        **changes,
    )
    torch.manual_seed(1)
    head = Eagle3Head(config).requires_grad_(False).eval()
    for parameter in head.parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 16
        parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, fan_in**-0.5)
    return head


def save(directory: Path, head: Eagle3Head, token_ids: list[int], target: Path) -> None:
    save_speculators(
        directory,
        head,
        token_ids,
        target_name=str(target),
        num_draft_tokens=NUM_DEPTHS,
        architectures=["LlamaForCausalLM"],
    )


def greedy_draft(
    loaded: LoadedDraftHead, features: Tensor, token_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The chain [NUM_DEPTHS] after the last of these pairs, from keys and values of the earlier
    pairs, and the feature after each of its pairs [NUM_DEPTHS, D]."""
    module, length = loaded.module, len(token_ids)
    places = torch.arange(length + NUM_DEPTHS)
    pairs = module.keys_and_values(Pairs(features, token_ids, places[:length]))
    keys, values = (heads[:-1] for heads in pairs)

    def attend(queries: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
        nonlocal keys, values
        keys, values = torch.cat([keys, new_keys]), torch.cat([values, new_values])
        return torch.nn.functional.scaled_dot_product_attention(
            *(heads.transpose(0, 1) for heads in (queries, keys, values)), enable_gqa=True
        ).transpose(0, 1)

    feature, token, drafted = features[-1:], token_ids[-1:], []
    carried: list[Tensor] = []
    for depth in range(NUM_DEPTHS):
        place = places[length - 1 + depth, None]
        hidden = module.step(Pairs(feature, token, place), attend)
        token = torch.tensor(loaded.token_ids)[module.logits(hidden).argmax(-1)]
        drafted.append(token)
        feature = module.carry(hidden)
        carried.append(feature)
    return torch.cat(drafted), torch.cat(carried)


def read(target: Any, texts: Tensor, layer_ids: Iterable[int]) -> dict[str, Tensor]:
    """Pairs of the texts [N, T + 1], and the inputs of the target's last norm at their tokens."""
    last: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    with torch.no_grad():
        states = target(texts, output_hidden_states=True).hidden_states
    hook.remove()
    taps = torch.cat([states[index][:, :-1] for index in layer_ids], -1)
    return {"taps": taps, "token_ids": texts[:, 1:].contiguous(), "last": last[0][:, 1:].clone()}


def check_equal(directory: Path, target: Any, texts: Tensor, prefixes: list[int]) -> None:
    """Compares the library and Outrider on the checkpoint in `directory`: hidden states and logits
    of chains after each pair of the texts, and greedy drafts after prefixes of these lengths."""
    loaded = load_eagle3(directory, target, name="HEAD", target_name="TARGET")
    module = loaded.module
    given = read(target, texts, module.layer_ids)
    counts = {"prefixes": torch.tensor(prefixes), "num_depths": torch.tensor(NUM_DEPTHS)}
    save_file(given | counts, str(directory / "inputs"))
    reference("run", directory, directory / "inputs", directory / "outputs")
    expected = load_file(str(directory / "outputs"))

    features, tokens = module.fuse(given["taps"]), given["token_ids"]
    behind = torch.nn.functional.pad(tokens, (0, NUM_DEPTHS - 1))
    for depth, hidden in enumerate(module.unroll(features, behind, NUM_DEPTHS)):
        rows = slice(0, features.shape[1] - depth)
        for found, wanted in ((hidden, "hidden"), (module.logits(hidden), "logits")):
            torch.testing.assert_close(
                found[:, rows], expected[wanted][depth][:, rows], rtol=2e-4, atol=2e-4
            )
    drafts = [
        greedy_draft(loaded, own[:length], ids[:length])[0]
        for own, ids in zip(features, tokens, strict=True)
        for length in prefixes
    ]
    assert torch.equal(torch.stack(drafts), expected["drafts"])


def random_texts(target: Any, num_texts: int, num_pairs: int) -> Tensor:
    torch.manual_seed(2)
    return torch.randint(0, target.config.vocab_size, (num_texts, num_pairs + 1))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "norm_output": True},
        {"fc_norm": True, "layer": {"attention_bias": True, "hidden_act": "gelu"}},
        {"norm_before_fc": True, "qk_norm": True},
        {
            "layer": {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            }
        },
        {"layer": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}},
    ],
    ids=["plain", "normed", "fc-norm", "before-fc", "llama3", "yarn"],
)
def test_heads_of_ours_do_the_same_there(
    changes: dict[str, Any], tiny_target: Path, tmp_path: Path
) -> None:
    target = AutoModelForCausalLM.from_pretrained(tiny_target)
    token_ids = [0, 3, 4, 9, 15, 16, 17, 22, 30]
    save(tmp_path, random_head(target, token_ids, **changes), token_ids, tiny_target)
    texts = random_texts(target, 1, NUM_PAIRS)
    check_equal(tmp_path, target, texts, [*range(1, 10), 64, 65, NUM_PAIRS])


def test_a_head_that_the_library_trained_does_the_same_here(
    tiny_target: Path, tmp_path: Path
) -> None:
    target = AutoModelForCausalLM.from_pretrained(tiny_target)
    texts = random_texts(target, 1, NUM_PAIRS)
    save_file(read(target, texts, (1, 2, 4)), str(tmp_path / "inputs"))
    reference("train", tmp_path, tiny_target, tmp_path / "inputs")
    check_equal(tmp_path, target, texts, [*range(1, 33), 64, 127, 128, 129, NUM_PAIRS])


def test_a_head_that_distill_made_does_the_same_there(tiny_target: Path, tmp_path: Path) -> None:
    """Drafts after 20 prompts are compared. The library reads the head's files."""
    config = TargetConfig(model="tiny", directory=str(tiny_target))
    whose = Target(config, Template((0, 5), (3, 6)), None)
    options = DistillOptions(
        out=tmp_path / "head", kind="eagle3", draft_vocab=24, tokens=4000, steps=12
    )
    distill(options, whose, tmp_path / "cache", lambda *_: None)
    target = AutoModelForCausalLM.from_pretrained(tiny_target)
    check_equal(tmp_path / "head", target, random_texts(target, 20, 40), [3, 17, 40])


def test_an_mtp_layer_does_the_same_there(tmp_path: Path) -> None:
    """The layer is of Qwen3-Next, the only one of these families that the library has."""
    made = MtpReference(mtp_target("qwen3_next", max_model_len=NUM_PAIRS + NUM_DEPTHS))
    loaded = load_mtp(made.save(tmp_path), made.target, target_name="TARGET")
    [text] = random_texts(made.target, 1, NUM_PAIRS)
    features, prefixes = made.features(text[:-1]), [*range(2, 10), 64, 65, NUM_PAIRS]
    given = {
        "features": features,
        "token_ids": text[1:].contiguous(),
        "prefixes": torch.tensor(prefixes),
        "num_depths": torch.tensor(NUM_DEPTHS),
    }
    save_file(given, str(tmp_path / "inputs"))
    reference("mtp", tmp_path, tmp_path / "inputs", tmp_path / "outputs")
    expected = load_file(str(tmp_path / "outputs"))
    found = [greedy_draft(loaded, features[:n], text[1 : n + 1]) for n in prefixes]
    drafts, hidden = (torch.stack(each) for each in zip(*found, strict=True))
    assert torch.equal(drafts, expected["drafts"])
    torch.testing.assert_close(hidden, expected["hidden"], rtol=2e-4, atol=2e-4)


@pytest.mark.real_model
def test_heads_of_the_demo_do_the_same_there(tmp_path: Path) -> None:
    directory = resolve_model("demo")
    target = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    vocab_size = target.config.vocab_size
    token_ids = torch.arange(0, vocab_size, 24).tolist()
    save(tmp_path, random_head(target, token_ids), token_ids, directory)
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    text = torch.tensor(AutoTokenizer.from_pretrained(directory)(readme)["input_ids"])
    check_equal(tmp_path, target, text[None, : NUM_PAIRS + 1], [1, 2, 3, 7, 64, 150, NUM_PAIRS])
