"""`--speculative-config` of vLLM: what it sets, and what is refused by key."""

import json
from pathlib import Path

import pytest

from outrider.cli.main import main
from outrider.config.deployment import load_config, merge
from outrider.errors import ConfigError

SYNTHETIC = {"num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        (
            {
                "method": "ngram",
                "num-speculative-tokens": 5,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
                "max_model_len": None,
                "parallel_drafting": False,
            },
            {"draft_model": "ngram", "num_draft_tokens": 5, "ngram_min": 2, "ngram_max": 4},
        ),
        ({"model": "[ngram]"}, {"draft_model": "ngram", "ngram_min": 5, "ngram_max": 5}),
        (
            {"method": "ngram_gpu", "prompt_lookup_max": 3},
            {"draft_model": "ngram", "ngram_min": 3, "ngram_max": 3},
        ),
        ({"model": "a/pard", "parallel_drafting": True}, {"draft_model": "a/pard"}),
        (
            {
                "method": "suffix",
                "suffix_decoding_max_tree_depth": 24,
                "suffix_decoding_min_token_prob": 0.2,
                "suffix_decoding_max_cached_requests": 0,
            },
            {
                "draft_model": "suffix",
                "suffix_depth": 24,
                "suffix_min_score": 0.2,
                "suffix_tokens_per_tenant": 0,
            },
        ),
        (
            {
                "method": "draft_model",
                "model": "a/b",
                "draft_tensor_parallel_size": 2,
                "max_model_len": 99,
                "quantization": "int8",
                "draft_sample_method": "probabilistic",
                "rejection_sample_method": "standard",
            },
            {
                "draft_model": "a/b",
                "draft_tensor_parallel_size": 2,
                "draft_max_model_len": 99,
                "draft_quantization": "int8",
                "unseeded_rule": "token",
            },
        ),
        ({"method": "eagle3", "model": "a/b"}, {"draft_model": "eagle3:a/b"}),
        ({"method": "glm4_moe_mtp"}, {"draft_model": "mtp"}),
        (
            {"model": "a/b", "rejection_sample_method": "block"},
            {"draft_model": "a/b", "unseeded_rule": "block"},
        ),
    ],
)
def test_it_sets_what_it_stands_for(said: object, settings: dict[str, object]) -> None:
    assert merge({"speculative_config": json.dumps(said)}, {}) == settings


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
    look_up = json.dumps(SYNTHETIC | said | {"method": "suffix", "model": None})
    assert merge({"speculative_config": look_up, "engine": "emulated:verify_ms=2"}, {}) == {
        "draft_model": "suffix",
        "num_draft_tokens": 3,
        "engine": config.target.engine,
    }


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"methode": 1}, "methode: 1 given, but this key is unknown; did you mean method?"),
        (
            {"revision": "main"},
            "revision: 'main' given, but this key is unknown; known keys are method",
        ),
        ({"method": "suffix", "revision": None}, "revision: None given, but this key is unknown"),
        ({"method": "medusa", "model": "a/b"}, "method: 'medusa' is wrong; it must be one of \""),
        ({"method": "mtp", "model": "ngram"}, "model: 'ngram' given, but mtp takes no model"),
        ({"method": "eagle3"}, "model: is missing; the method eagle3 needs a model's name"),
        ({"num_speculative_tokens": 3}, "model: is missing; the method draft_model needs a model"),
        ({"model": 3}, "model: 3 is wrong; the method draft_model needs a model's name"),
        (
            {"method": "suffix", "num_speculative_tokens": 32},
            "num_speculative_tokens: 32 is wrong; it must be a whole number from 0 to 16",
        ),
        (
            {"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 4},
            "prompt_lookup_min: 6 is more than ngram_",
        ),
        ({"method": "ngram", "prompt_lookup_max": 999}, "prompt_lookup_max: 999 is wrong; "),
        (
            {"model": "a/b", "quantization": "fp8"},
            "quantization: 'fp8' is wrong; it must be one of none, int8, int4",
        ),
        ({"draft_sample_method": "greedy"}, 'it must be one of "probabilistic"'),
        ({"suffix_decoding_max_cached_requests": 9}, "cached_requests: 9 is wrong; it must be one"),
        ({"rejection_sample_method": ["block"]}, 'one of "standard", "block", "synthetic"'),
        (SYNTHETIC, "synthetic needs num_speculative_tokens N and either synthetic_acceptance"),
        (SYNTHETIC | {"synthetic_acceptance_length": 4.1}, "a number from 1 to N + 1"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "that do not increase"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [0.5]}, "N numbers from 0 to 1"),
        ({"method": "suffix", "synthetic_acceptance_length": 2}, "needs rejection_sample_method"),
        (SYNTHETIC | {"synthetic_acceptance_length": 2}, "synthetic needs --engine emulated:SPEC"),
        (["ngram"], '["ngram"] is an array; it must be a JSON object such as {"method": "ngram", '),
        ("ngram", '"ngram" is a single value; it must be a JSON object such as {"method": '),
        (3, "with keys from method, model, num_speculative_tokens, "),
    ],
)
def test_what_is_not_understood_is_refused_by_its_key(
    said: object, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "demo", "--speculative-config", json.dumps(said)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("outrider: error: --speculative-config: ")
    assert error in shown


def test_a_method_without_json_gets_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", "--speculative-config", "ngram"]) == 2
    shown = capsys.readouterr().err
    assert "--speculative-config: ngram is not JSON (Expecting value: line 1 column 1" in shown
    assert 'it must be a JSON object such as {"method": "ngram", "num_speculative' in shown


def test_a_list_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("speculative_config: [ngram]\n")
    with pytest.raises(ConfigError, match=r"\['ngram'\] is an array; it must be a JSON object"):
        merge({}, {}, file)


def test_a_stronger_layer_wins_and_one_layer_says_a_thing_once(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("speculative_config: {method: suffix, num_speculative_tokens: 4}\n")
    assert merge({"num_draft_tokens": "2"}, {}, file) == {
        "draft_model": "suffix",
        "num_draft_tokens": 2,
    }
    variables = {"OUTRIDER_SPECULATIVE_CONFIG": '{"method": "ngram"}'}
    assert merge({}, variables, file) == {
        "draft_model": "ngram",
        "num_draft_tokens": 4,
        "ngram_min": 5,
        "ngram_max": 5,
    }
    synthetic = json.dumps(SYNTHETIC | {"synthetic_acceptance_length": 2})
    flags = {"speculative_config": '{"method": "suffix"}'}
    assert merge(flags, {"OUTRIDER_SPECULATIVE_CONFIG": synthetic})["draft_model"] == "suffix"
    with pytest.raises(ConfigError, match=r"_CONFIG: method: is the same as OUTRIDER_DRAFT_MODEL"):
        merge({}, variables | {"OUTRIDER_DRAFT_MODEL": "suffix"})
