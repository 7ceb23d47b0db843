import json
import math
from dataclasses import replace
from typing import Any

import pytest

from coordinator.requests.validation import (
    GenerationParameters,
    RequestDefaults,
    ServedModel,
    check_fields,
    check_roles,
    resolve,
)
from outrider import limits
from outrider.errors import BadRequest, DataLoss
from outrider.grammar.constraint import Constraint
from outrider.request import ChatMessage, GenerateRequest
from outrider.speculation.sampling_params import Rule, SamplingParams

MODEL = ServedModel("toy", vocab_size=100, max_model_len=50, eos_token_ids=())
PROMPT = tuple(range(10))


DEFAULTS = RequestDefaults(num_draft_tokens=5, deadline_ms=60_000)


def checked(
    prompt: tuple[int, ...] = PROMPT, model: ServedModel = MODEL, **fields: Any
) -> GenerationParameters:
    request = GenerateRequest(prompt=prompt, **fields)
    check_fields(request, model)
    return resolve(request, "token_ids", prompt, model, DEFAULTS, random_seed=7)


def sampled(**fields: Any) -> GenerationParameters:
    return checked(sampling=SamplingParams(**fields))


def refused(field: str, **fields: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        checked(**fields)
    assert caught.value.field == field
    assert str(caught.value).startswith(field + ": ")
    return caught.value.message


def test_defaults() -> None:
    parameters = checked()
    assert parameters.max_tokens == 40
    assert parameters.seed == 7
    assert parameters.num_draft_tokens == 5
    assert parameters.deadline_ms == 60_000
    assert parameters.rule is Rule.TOKEN


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, Rule.BLOCK),
        ({"rule": Rule.TOKEN}, Rule.TOKEN),
        ({"seed": 1}, Rule.COUPLED),
        ({"sampling": SamplingParams(temperature=0.0)}, Rule.GREEDY),
    ],
)
def test_the_rule_of_requests_that_name_none(fields: dict[str, Any], rule: Rule) -> None:
    defaults = replace(DEFAULTS, unseeded_rule=Rule.BLOCK)
    request = GenerateRequest(prompt=PROMPT, **fields)
    assert resolve(request, "token_ids", PROMPT, MODEL, defaults, random_seed=7).rule is rule


def test_a_seed_without_a_rule_means_coupled_and_temperature_0_always_greedy() -> None:
    assert checked(seed=0).rule is Rule.COUPLED
    assert checked(seed=0, rule=Rule.BLOCK).rule is Rule.BLOCK
    assert checked(sampling=SamplingParams(temperature=0.0), rule=Rule.TOKEN).rule is Rule.GREEDY
    assert "temperature 0" in refused("rule", rule=Rule.GREEDY)


INTEGERS = [
    ("max_tokens", 1, 40),
    ("num_draft_tokens", 0, limits.NUM_DRAFT_TOKENS_MAX),
    ("deadline_ms", 1, limits.DEADLINE_MS_MAX),
    ("draft_deadline_ms", 1, limits.DRAFT_DEADLINE_MS_MAX),
    ("logprobs", 0, limits.LOGPROBS_MAX),
    ("seed", 0, limits.SEED_MAX),
]


@pytest.mark.parametrize(("field", "low", "high"), INTEGERS)
def test_integers_from_both_sides(field: str, low: int, high: int) -> None:
    for good in (low, high):
        assert getattr(checked(**{field: good}), field) == good
    for bad in (low - 1, high + 1):
        assert str(bad) in refused(field, **{field: bad})


FLOATS = [
    ("temperature", 0.0, 2.0, True),
    ("min_p", 0.0, 1.0, True),
    ("presence_penalty", -2.0, 2.0, True),
    ("frequency_penalty", -2.0, 2.0, True),
    ("top_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 10.0, False),
]


@pytest.mark.parametrize(("field", "low", "high", "low_allowed"), FLOATS)
def test_sampling_parameters_from_both_sides(
    field: str, low: float, high: float, low_allowed: bool
) -> None:
    sampled(**{field: high})
    sampled(**{field: low if low_allowed else low + 1e-9})
    too_low = low - 1e-9 if low_allowed else low
    for bad in (too_low, high + 1e-9, math.nan, math.inf, -math.inf):
        refused(f"sampling.{field}", sampling=SamplingParams(**{field: bad}))


def test_top_k_from_both_sides() -> None:
    for good in (-1, 0, 1, MODEL.vocab_size):
        sampled(top_k=good)
    for bad in (-2, MODEL.vocab_size + 1):
        refused("sampling.top_k", sampling=SamplingParams(top_k=bad))


def test_logit_bias() -> None:
    vast = replace(MODEL, vocab_size=5000)
    entries = tuple((i, 1.0) for i in range(limits.LOGIT_BIAS_ENTRIES_MAX + 1))
    checked(model=vast, sampling=SamplingParams(logit_bias=entries[:-1]))
    refused("sampling.logit_bias", model=vast, sampling=SamplingParams(logit_bias=entries))
    sampled(logit_bias=((0, -100.0), (99, 100.0)))
    for bad in ((100, 0.0), (-1, 0.0)):
        refused("sampling.logit_bias", sampling=SamplingParams(logit_bias=(bad,)))
    for value in (100.5, -100.5, math.nan, math.inf):
        refused("sampling.logit_bias[3]", sampling=SamplingParams(logit_bias=((3, value),)))


def test_stop_strings() -> None:
    checked(stop=("x" * limits.STOP_STRING_BYTES_MAX,) * limits.STOP_STRINGS_MAX)
    refused("stop", stop=("x",) * (limits.STOP_STRINGS_MAX + 1))
    refused("stop[1]", stop=("x", ""))
    refused("stop[0]", stop=("é" * (limits.STOP_STRING_BYTES_MAX // 2 + 1),))


def test_roles_are_names() -> None:
    """A template writes them between the marks of a turn: no mark may come in with one."""
    good = ChatMessage("user", "<|im_end|>")
    for role in ("system", "tool-2", "x" * 64):
        check_roles((ChatMessage(role, "a"), good))
    for role in ("", "x" * 65, "user<|im_end|>", "a b", "user\n", "é"):
        request = GenerateRequest((good, ChatMessage(role, "a")))
        with pytest.raises(BadRequest, match="allowed: a name") as caught:
            check_fields(request, MODEL)
        assert caught.value.field == "chat.messages[1].role"


def test_a_constraint_is_stored_and_read_again() -> None:
    for constraint in (
        None,
        Constraint.of_schema({"type": "object", "title": "é"}),
        Constraint.any_object(),
        Constraint.of_regex("a+"),
        Constraint.of_choices(["x", "y"]),
    ):
        parameters = checked(constraint=constraint)
        assert parameters.constraint == constraint
        assert GenerationParameters.from_json(parameters.to_json(), PROMPT) == parameters
        assert parameters.constraint == constraint
    values = json.loads(checked().to_json())
    del values["constraint"]  # as it was stored before there were any
    assert GenerationParameters.from_json(json.dumps(values), PROMPT) == checked()
    values["constraint"] = {"kind": "none", "text": ""}
    with pytest.raises(DataLoss, match="cannot be read"):
        GenerationParameters.from_json(json.dumps(values), PROMPT)


def test_prompts() -> None:
    assert checked((0, 99)).prompt == (0, 99)
    refused("token_ids", prompt=())
    assert "0..99" in refused("token_ids[1]", prompt=(3, 100))
    refused("token_ids[0]", prompt=(-1, 3))
    assert checked(tuple([1] * 49)).max_tokens == 1
    assert "49" in refused("token_ids", prompt=tuple([1] * 50))


def test_a_silent_max_tokens_is_what_there_is_room_for() -> None:
    """At most the default of who asks, which never refuses a request."""
    assert checked(default_max_tokens=16).max_tokens == 16
    assert checked(tuple([1] * 41), default_max_tokens=16).max_tokens == 9


def test_prompt_and_max_tokens_must_fit_the_model() -> None:
    message = refused("max_tokens", max_tokens=41)
    assert "at most 40" in message
