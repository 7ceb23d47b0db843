"""Translates the `--speculative-config` of `vllm serve` into settings of a deployment.

The keys and values are those of vLLM 0.32. An error for an unsupported value names its key."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import WithJsonSchema

from outrider.drafters.names import MTP
from outrider.engine.emulated_spec import SCHEME, EmulatedSpec
from outrider.errors import ConfigError, did_you_mean
from outrider.limits import NUM_DRAFT_TOKENS_MAX
from outrider.settings import Value, checked

SPECULATIVE_CONFIG = "speculative_config"


@checked()
class SpeculativeConfig:
    """Settings of vLLM."""

    speculative_config: Annotated[str, WithJsonSchema({"type": "string", "format": "json"})] = ""
    """JSON as for `vllm serve --speculative-config`. This setting replaces `draft_model`,
    `num_draft_tokens` and other settings, which docs/drafters.md lists."""


_SETTINGS = {
    "num_speculative_tokens": "num_draft_tokens",
    "draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "max_model_len": "draft_max_model_len",
    "prompt_lookup_min": "ngram_min",
    "prompt_lookup_max": "ngram_max",
    "suffix_decoding_max_tree_depth": "suffix_depth",
    "suffix_decoding_min_token_prob": "suffix_min_score",
}
"""The setting for each of these keys of vLLM."""
_METHODS = {
    "ngram": "ngram", "[ngram]": "ngram", "ngram_gpu": "ngram", "suffix": "suffix",
    "draft_model": "{}", "eagle3": "eagle3:{}",
    "mtp": MTP, "deepseek_mtp": MTP, "glm4_moe_mtp": MTP, "qwen3_next_mtp": MTP,
}  # fmt: skip
"""The value of `draft_model` for each `method`. {} stands for the value of the key `model`."""
_NGRAM = ("ngram", "[ngram]")
"""Methods that may also be given as `model`."""
_NGRAM_TOKENS = 5
"""Shortest and longest match, in tokens, if neither is given."""
_RULES = {"standard": "token", "block": "block"}
"""For each `rejection_sample_method` except synthetic, the value of `unseeded_rule`."""
_RATES = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
_BY_FILES = "give a directory with the files that are meant as the model"
_BY_LENGTH_CONTROL = "--length-control chooses how many tokens each round drafts"
_OF_ENGINE = "the draft's engine decides; see --draft-engine"
_ONLY_VLLM = "it configures code of vLLM that does not run here"
_FIXED: dict[str, tuple[Value, str]] = {
    "draft_sample_method": ("probabilistic", "models draw drafts as the request samples"),
    "suffix_decoding_max_cached_requests": (
        0,
        "earlier answers are bounded by --suffix-tokens-per-tenant",
    ),
    "suffix_decoding_max_spec_factor": (None, "--suffix-min-score says where a proposal ends"),
    "use_heterogeneous_vocab": (False, "a draft must have the target's tokenizer"),
    "enforce_eager": (False, "--enforce-eager is for target and draft"),
    "tensor_parallel_size": (None, "the key for drafts is draft_tensor_parallel_size"),
    "quantization": (None, "the model's own config.json says how it is quantized"),
    "revision": (None, _BY_FILES),
    "code_revision": (None, _BY_FILES),
    "draft_load_config": (None, _BY_FILES),
    "num_speculative_tokens_per_batch_size": (None, _BY_LENGTH_CONTROL),
    "enable_adaptive_verification": (False, _BY_LENGTH_CONTROL),
    "attention_backend": (None, _OF_ENGINE),
    "moe_backend": (None, _OF_ENGINE),
    "kv_cache_dtype": (None, _OF_ENGINE),
    "index_share_for_mtp_iteration": (None, _ONLY_VLLM),
    "disable_padded_drafter_batch": (False, _ONLY_VLLM),
    "disable_eagle_block_drop": (False, _ONLY_VLLM),
    "use_local_argmax_reduction": (False, _ONLY_VLLM),
    "dspark_draft_topk": (None, _ONLY_VLLM),
}
"""The only allowed value of each of these keys, and the reason. None = the key must be omitted."""
_UNDERSTOOD = (
    "method", "model", "parallel_drafting", *_SETTINGS, "rejection_sample_method", *_RATES
)  # fmt: skip


def settings_of_vllm(raw: object, source: str) -> Iterator[tuple[str, Value, str]]:
    """Yields the settings that a `speculative_config` stands for: the key of each, its unchecked
    value, and vLLM's key. `raw` is text, or a value from YAML. For synthetic acceptance, also
    yields `speculative_config`, the emulated engine's `acceptance_rates`, and an empty text. A
    `ConfigError` names `source` and the wrong key."""
    if raw == "":
        return
    said = _Said(raw, source)
    said.check_parallel_drafting()
    for key, value in said.values.items():
        if key in _SETTINGS:
            yield _SETTINGS[key], value, key
    if "suffix_decoding_max_cached_requests" in said.values:
        yield "suffix_tokens_per_tenant", 0, "suffix_decoding_max_cached_requests"
    key = "rejection_sample_method"
    rejection = said.one_of(key, (*_RULES, "synthetic"))
    if rejection == "synthetic":
        yield SPECULATIVE_CONFIG, "/".join(map(str, said.acceptance_rates())), ""
    elif given := [one for one in _RATES if one in said.values]:
        raise said.error(given[0], f"needs {key} synthetic")
    elif rejection is not None:
        yield "unseeded_rule", _RULES[rejection], key
    yield "draft_model", *said.draft_model(is_emulated=rejection == "synthetic")


class _Said:
    """A parsed `speculative_config`: its `values` by key, without nulls."""

    def __init__(self, raw: object, source: str) -> None:
        self._source = source
        try:
            found = json.loads(raw) if isinstance(raw, str) else raw
        except ValueError as error:
            raise ConfigError(f"{source}: {raw!r} is not JSON: {error}") from error
        if not isinstance(found, Mapping):
            raise ConfigError(f"{source}: {found!r} is wrong; it must be a JSON object")
        self.values: dict[str, Any] = {}
        for name, value in found.items():
            key = str(name).replace("-", "_")
            if key in _FIXED:
                self._check_fixed(key, value)
            elif key not in _UNDERSTOOD:
                known = (*_UNDERSTOOD, *_FIXED)
                hint = did_you_mean(key, known) or f"; known are {', '.join(known)}"
                raise self.error(key, f"{value!r} given, but there is no such key{hint}")
            if value is not None:
                self.values[key] = value
        bounds = ("prompt_lookup_min", "prompt_lookup_max")
        if _METHODS.get(str(self.values.get("method", self.values.get("model")))) == "ngram":
            # As in vLLM, a missing bound gets the value of the other bound. The given bound stays
            # first in `values`, so that errors name the given bound.
            one = next((self.values[key] for key in bounds if key in self.values), _NGRAM_TOKENS)
            for key in bounds:
                self.values.setdefault(key, one)

    def error(self, key: str, reason: str) -> ConfigError:
        return ConfigError(f"{self._source}: {key}: {reason}")

    def _check_fixed(self, key: str, value: object) -> None:
        only, why = _FIXED[key]
        if value is not None and (value != only or type(value) is not type(only)):
            allowed = "leave it out" if only is None else f"it must be {json.dumps(only)}"
            raise self.error(key, f"{value!r} is wrong; {allowed}: {why}")

    def one_of(self, key: str, allowed: Sequence[str]) -> str | None:
        value: str | None = self.values.get(key)
        if value is not None and value not in allowed:
            hint = did_you_mean(str(value), allowed)
            one = ", ".join(allowed)
            raise self.error(key, f"{value!r} is wrong; it must be one of {one}{hint}")
        return value

    def draft_model(self, *, is_emulated: bool) -> tuple[str, str]:
        """The setting `draft_model`, and vLLM's key that determines it."""
        model, method = self.values.get("model"), self.one_of("method", tuple(_METHODS))
        if not isinstance(model, str | None):
            raise self.error("model", f"{model!r} is wrong; it must be a string")
        if method is None and model in _NGRAM:
            method = model
        form = _METHODS[method or "draft_model"]
        if "{}" not in form:
            if model not in (None, method, *(_NGRAM if form == "ngram" else ())):
                why = "drafts with layers of the target" if form == MTP else "looks drafts up"
                raise self.error("model", f"{model!r} given, but {method} {why}")
            if form != MTP or not is_emulated:
                return form, "method"
        if is_emulated:
            return SCHEME, "rejection_sample_method"
        if not model:
            why = "give it or method" if method is None else f"{method} needs it"
            raise self.error("model", f"is missing; {why}")
        return form.format(model), "model"

    def check_parallel_drafting(self) -> None:
        """Raises `ConfigError` if `parallel_drafting` is true without a draft model. With a draft
        model, the model's files, not this key, decide whether one pass drafts all tokens."""
        value = self.values.get("parallel_drafting", False)
        if not isinstance(value, bool):
            raise self.error("parallel_drafting", f"{value!r} is wrong; it must be true or false")
        method = self.values.get("method", "draft_model")
        if value and (method != "draft_model" or self.values.get("model") in (None, *_NGRAM)):
            raise self.error(
                "parallel_drafting", "true needs a model that drafts: method draft_model, and model"
            )

    def acceptance_rates(self) -> tuple[float, ...]:
        """Probabilities that a round accepts at least 1, 2, ... draft tokens."""
        given = [key for key in _RATES if key in self.values]
        if len(given) != 1:
            reason = "cannot be given with" if given else "is missing; give it or"
            raise self.error(_RATES[0], f"{reason} {_RATES[1]}")
        count = self.values.get("num_speculative_tokens")
        if type(count) is not int or not 1 <= count <= NUM_DRAFT_TOKENS_MAX:
            allowed = f"a whole number from 1 to {NUM_DRAFT_TOKENS_MAX}"
            raise self.error("num_speculative_tokens", f"synthetic needs {allowed}, not {count!r}")
        key, value = given[0], self.values[given[0]]
        if key == "synthetic_acceptance_length":
            if not isinstance(value, int | float) or not 1 <= value <= count + 1:
                raise self.error(
                    key, f"{value!r} is wrong; it must be a number from 1 to {count + 1}"
                )
            # As in vLLM, a round commits floor(length) or floor(length) + 1 tokens.
            return tuple(min(1.0, max(0.0, value - 1 - place)) for place in range(count))
        try:
            rates = EmulatedSpec(acceptance_rates=tuple(value)).acceptance_rates
        except (TypeError, ValueError, ConfigError):
            rates = ()
        if len(rates) != count:
            allowed = f"{count} numbers from 0 to 1 (num_speculative_tokens) that do not increase"
            raise self.error(key, f"{value!r} is wrong; it must be {allowed}")
        return rates
