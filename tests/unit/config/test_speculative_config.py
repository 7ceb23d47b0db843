"""`--speculative-config` of vLLM: what it sets, and what is refused by key."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.main import main
from outrider.config import load_config, merge
from outrider.errors import ConfigError

ENGINE = {"engine": "emulated:verify_ms=2"}
SYNTHETIC = {"num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}


def _merged(said: object, **flags: object) -> dict[str, Any]:
    return merge(flags | {"speculative_config": json.dumps(said)}, {})


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        (
            {"method": "ngram", "num-speculative-tokens": 5, "prompt_lookup_max": 4,
             "prompt_lookup_min": 2, "quantization": None, "parallel_drafting": False},
            {"draft_model": "ngram", "num_draft_tokens": 5, "ngram_min": 2, "ngram_max": 4},
        ),
        ({"model": "[ngram]", "method": "ngram_gpu"},
         {"draft_model": "ngram", "ngram_min": 5, "ngram_max": 5}),
        ({"model": "[ngram]"}, {"draft_model": "ngram", "ngram_min": 5, "ngram_max": 5}),
        (
            {"method": "ngram_gpu", "prompt_lookup_max": 3},
            {"draft_model": "ngram", "ngram_min": 3, "ngram_max": 3},
        ),
        ({"model": "a/pard", "parallel_drafting": True}, {"draft_model": "a/pard"}),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 24,
             "suffix_decoding_min_token_prob": 0.2, "suffix_decoding_max_cached_requests": 0},
            {"draft_model": "suffix", "suffix_depth": 24, "suffix_min_score": 0.2,
             "suffix_tokens_per_tenant": 0},
        ),
        (
            {"method": "draft_model", "model": "a/b", "draft_tensor_parallel_size": 2,
             "max_model_len": 99, "draft_sample_method": "probabilistic",
             "rejection_sample_method": "standard"},
            {"draft_model": "a/b", "draft_tensor_parallel_size": 2, "draft_max_model_len": 99,
             "unseeded_rule": "token"},
        ),
        ({"method": "eagle3", "model": "a/b"}, {"draft_model": "eagle3:a/b"}),
        ({"method": "glm4_moe_mtp"}, {"draft_model": "mtp"}),
        (
            {"model": "a/b", "rejection_sample_method": "block"},
            {"draft_model": "a/b", "unseeded_rule": "block"},
        ),
    ],
)  # fmt: skip
def test_it_sets_what_it_stands_for(said: object, settings: dict[str, object]) -> None:
    assert _merged(said) == settings


@pytest.mark.parametrize(
    ("said", "rates"),
    [
        ({"synthetic_acceptance_rates": [0.9, 0.5, 0.5]}, "0.9/0.5/0.5"),
        ({"synthetic_acceptance_length": 2.25, "method": "eagle3", "model": "a/b"}, "1.0/0.25/0.0"),
    ],
)
def test_synthetic_acceptance_is_of_an_emulated_pair(said: dict[str, object], rates: str) -> None:
    """Wherever its engine is set; a draft model is emulated, too, but a look-up is not."""
    text = json.dumps(SYNTHETIC | said)
    config = load_config({"speculative_config": text}, {"OUTRIDER_ENGINE": "emulated:verify_ms=2"})
    assert config.target.engine == f"emulated:verify_ms=2,acceptance_rates={rates}"
    assert (config.draft.engine, config.draft.model) == (config.target.engine, "emulated")
    assert _merged(SYNTHETIC | said | {"method": "suffix", "model": None}, **ENGINE) == {
        "draft_model": "suffix", "num_draft_tokens": 3, "engine": config.target.engine,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"methode": 1}, "methode: 1 given, but there is no such key; did you mean method?"),
        ({"zzz": None}, "zzz: None given, but there is no such key; known are method, model, "),
        ({"method": "ernie_mtp"}, "method: 'ernie_mtp' is wrong; it must be one of ngram, "),
        ({"method": "medusa", "model": "a/b"}, "method: 'medusa' is wrong; it must be one of ng"),
        ({"method": "mtp", "model": "a/b"}, "model: 'a/b' given, but mtp drafts with layers of"),
        ({"method": "mtp", "model": "ngram"}, "model: 'ngram' given, but mtp drafts with layers"),
        ({"method": "suffix", "model": "[ngram]"}, "model: '[ngram]' given, but suffix looks dra"),
        ({"method": "eagle3"}, "model: is missing; eagle3 needs it"),
        ({"num_speculative_tokens": 3}, "model: is missing; give it or method"),
        ({"method": "ngram", "model": "a/b"}, "model: 'a/b' given, but ngram looks drafts up"),
        (
            {"method": "suffix", "num_speculative_tokens": 32},
            "num_speculative_tokens: 32 is wrong; it must be a whole number from 0 to 16",
        ),
        ({"method": "suffix", "prompt_lookup_min": False}, "prompt_lookup_min: False is wrong; "),
        (
            {"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 4},
            "prompt_lookup_min: 6 is more than ngram_",
        ),
        ({"method": "ngram", "prompt_lookup_max": 999}, "prompt_lookup_max: 999 is wrong; "),
        ({"method": "ngram", "parallel_drafting": True}, "parallel_drafting: true needs a model"),
        ({"model": "a/b", "parallel_drafting": 1}, "parallel_drafting: 1 is wrong; it must be tr"),
        ({"draft_sample_method": "greedy"}, 'it must be "probabilistic": '),
        ({"suffix_decoding_max_cached_requests": 9}, "it must be 0: earlier answers are bounded"),
        ({"revision": "main"}, "revision: 'main' is wrong; leave it out: give a directory"),
        ({"rejection_sample_method": "typical"}, "it must be one of standard, block, synthetic"),
        ({"synthetic_acceptance_length": 2}, "needs rejection_sample_method synthetic"),
        (SYNTHETIC, "synthetic_acceptance_rates: is missing; give it or"),
        (SYNTHETIC | {"synthetic_acceptance_length": 4.1}, "must be a number from 1 to 4"),
        (SYNTHETIC | {"num_speculative_tokens": -3, "synthetic_acceptance_length": 1},
         "num_speculative_tokens: synthetic needs a whole number from 1 to 16, not -3"),
        (SYNTHETIC | {"num_speculative_tokens": True, "synthetic_acceptance_length": 1},
         "num_speculative_tokens: synthetic needs a whole number from 1 to 16, not True"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "that do not increase"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [0.5]}, "it must be 3 numbers from 0 to 1"),
        (SYNTHETIC | {"synthetic_acceptance_length": 2},
         "rejection_sample_method: 'synthetic' is wrong; it needs --engine emulated:SPEC"),
        ([1], "[1] is wrong; it must be a JSON object"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_its_key(
    said: object, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "demo", "--speculative-config", json.dumps(said)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("outrider: error: --speculative-config: ")
    assert error in shown


def test_a_stronger_layer_wins_and_one_layer_says_a_thing_once(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("speculative_config: {method: suffix, num_speculative_tokens: 4}\n")
    assert merge({"num_draft_tokens": "2"}, {}, file) == {
        "draft_model": "suffix", "num_draft_tokens": 2,
    }  # fmt: skip
    variables = {"OUTRIDER_SPECULATIVE_CONFIG": '{"method": "ngram"}'}
    assert merge({}, variables, file) == {"draft_model": "ngram", "ngram_min": 5, "ngram_max": 5}
    with pytest.raises(ConfigError, match=r"_CONFIG: method: is the same as OUTRIDER_DRAFT_MODEL"):
        merge({}, variables | {"OUTRIDER_DRAFT_MODEL": "suffix"})
