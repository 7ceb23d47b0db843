"""Translates the `--speculative-config` of `vllm serve` into settings of a deployment.

The keys and values are those of vLLM 0.32. For an unsupported value, the error names the key."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import WithJsonSchema

from outrider.config.emulated_spec import SCHEME, EmulatedSpec
from outrider.drafters.names import MTP
from outrider.errors import ConfigError, did_you_mean
from outrider.foundation.settings import Value, checked
from outrider.limits import NUM_DRAFT_TOKENS_MAX

SPECULATIVE_CONFIG = "speculative_config"


@checked()
class SpeculativeConfig:
    """The setting that takes vLLM's configuration of speculation."""

    speculative_config: Annotated[str, WithJsonSchema({"type": "string", "format": "json"})] = ""
    """JSON as for `vllm serve --speculative-config`. This setting replaces `draft_model`,
    `num_draft_tokens` and the other settings that docs/drafters.md lists."""


_RULE = "rejection_sample_method"
_RULES = {"standard": "token", "block": "block"}
"""`rejection_sample_method` of vLLM -> `unseeded_rule` of Outrider."""
_SYNTHETIC = "synthetic"
_RATES = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
_SETTINGS = {
    "num_speculative_tokens": "num_draft_tokens",
    "draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "max_model_len": "draft_max_model_len",
    "quantization": "draft_quantization",
    "prompt_lookup_min": "ngram_min",
    "prompt_lookup_max": "ngram_max",
    "suffix_decoding_max_tree_depth": "suffix_depth",
    "suffix_decoding_min_token_prob": "suffix_min_score",
    "suffix_decoding_max_cached_requests": "suffix_tokens_per_tenant",
    _RULE: "unseeded_rule",
}
"""Key of vLLM -> setting of Outrider."""
_METHODS = {
    "ngram": "ngram",
    "[ngram]": "ngram",
    "ngram_gpu": "ngram",
    "suffix": "suffix",
    "draft_model": "{}",
    "eagle3": "eagle3:{}",
    "mtp": MTP,
    "deepseek_mtp": MTP,
    "glm4_moe_mtp": MTP,
    "qwen3_next_mtp": MTP,
}
"""`method` of vLLM -> `draft_model` of Outrider. {} stands for vLLM's `model`."""
_LOOK_UPS = ("ngram", "suffix")
_ALLOWED: dict[str, tuple[Value, ...]] = {
    "method": tuple(_METHODS),
    "parallel_drafting": (True,),
    "draft_sample_method": ("probabilistic",),
    _RULE: (*_RULES, _SYNTHETIC),
    "suffix_decoding_max_cached_requests": (0,),
}
"""Key of vLLM -> allowed values. All known keys also allow null and false."""
_KEYS = tuple(dict.fromkeys(("method", "model", *_SETTINGS, *_ALLOWED, *_RATES)))
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 5}'
_NGRAM_BOUNDS = ("prompt_lookup_min", "prompt_lookup_max")
_NGRAM_TOKENS = 5
"""Length of the shortest and of the longest match, in tokens, if neither bound is given."""


def settings_of_vllm(raw: object, source: str) -> Iterator[tuple[str, Value, str]]:
    """Yields the name, the unchecked value and the origin of each setting that follows from a
    `speculative_config`. `raw` is JSON, or a value from YAML. The origin is `source` and vLLM's
    key. With synthetic acceptance, also yields a new value of `speculative_config`, the
    `acceptance_rates` for the emulated engine, with the origin `source`. The `ConfigError` for a
    wrong key names `source` and the key."""
    if raw == "":
        return
    values = _values(raw, source)
    method, model = values.get("method"), values.get("model")
    if method is None and _METHODS.get(str(model)) == "ngram":
        method, model = model, None
    method = method or "draft_model"
    form = _METHODS[method]
    if "{}" not in form and model is not None:
        raise ConfigError(f"{source}: model: {model!r} given, but {method} takes no model")
    is_synthetic = values.get(_RULE) == _SYNTHETIC
    if "{}" in form and not is_synthetic and not (model and isinstance(model, str)):
        wrong = "is missing" if model is None else f"{model!r} is wrong"
        raise ConfigError(f"{source}: model: {wrong}; the method {method} needs a model's name")
    drafter = form.format(model)
    if is_synthetic:
        del values[_RULE]
        yield SPECULATIVE_CONFIG, "/".join(map(str, _acceptance_rates(values, source))), source
        drafter = form if form in _LOOK_UPS else SCHEME
    elif given := [key for key in _RATES if key in values]:
        raise ConfigError(f"{source}: {given[0]}: needs {_RULE} {_SYNTHETIC}")
    yield "draft_model", drafter, f"{source}: {'model' if model else 'method'}"
    if form == "ngram":
        # As in vLLM, a missing bound gets the value of the other bound. The given bound is yielded
        # first, so the first error for a wrong value names the given bound.
        bound = next((values[key] for key in _NGRAM_BOUNDS if key in values), _NGRAM_TOKENS)
        for key in _NGRAM_BOUNDS:
            values.setdefault(key, bound)
    if _RULE in values:
        values[_RULE] = _RULES[values[_RULE]]
    for key, value in values.items():
        if key in _SETTINGS:
            yield _SETTINGS[key], value, f"{source}: {key}"


def _acceptance_rates(values: Mapping[str, Any], source: str) -> Sequence[float]:
    """Returns the probabilities that at least 1, 2, ... draft tokens are accepted."""
    keys = (*_RATES, "num_speculative_tokens")
    given: list[Any] = [values.get(key) for key in keys]
    rates, length, count = given
    try:
        if rates is None and 1 <= length <= count + 1 <= NUM_DRAFT_TOKENS_MAX + 1:
            # As in vLLM, a round commits floor(length) or floor(length) + 1 tokens.
            rates, length = [min(1, max(0, length - 1 - place)) for place in range(count)], None
        if length is None and len(rates) == count:
            return EmulatedSpec(acceptance_rates=tuple(rates)).acceptance_rates
    except (TypeError, ValueError, ConfigError):
        pass  # The error below names all keys.
    raise ConfigError(
        f"{source}: {_RULE}: {_SYNTHETIC} needs num_speculative_tokens N and either {_RATES[0]} (N "
        f"numbers from 0 to 1 that do not increase) or {_RATES[1]} (a number from 1 to N + 1)"
    )


def _values(raw: object, source: str) -> dict[str, Any]:
    """Returns the values of a `speculative_config` by key. Omits null and false."""
    needed = f"it must be a JSON object such as {_EXAMPLE}, with keys from {', '.join(_KEYS)}"
    try:
        config = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError as error:
        raise ConfigError(f"{source}: {raw} is not JSON ({error}); {needed}") from error
    if not isinstance(config, Mapping):
        kind = "an array" if isinstance(config, list) else "a single value"
        raise ConfigError(f"{source}: {raw} is {kind}; {needed}")
    values = {}
    for name, value in config.items():
        key = str(name).replace("-", "_")
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS) or f"; known keys are {', '.join(_KEYS)}"
            raise ConfigError(f"{source}: {key}: {value!r} given, but this key is unknown{hint}")
        if value is None or value is False:
            continue
        allowed = _ALLOWED.get(key, (value,))
        if value not in allowed:
            hint = did_you_mean(str(value), map(str, allowed))
            choices = ", ".join(map(json.dumps, allowed))
            raise ConfigError(
                f"{source}: {key}: {value!r} is wrong; it must be one of {choices}{hint}"
            )
        values[key] = value
    return values
