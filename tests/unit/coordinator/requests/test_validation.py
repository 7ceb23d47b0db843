import asyncio
import json
import math
import threading
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from coordinator.requests import validation
from outrider import limits
from outrider.config.deployment import CoordinatorConfig
from outrider.errors import BadRequest, DataLoss
from outrider.grammar.constraint import Constraint
from outrider.interfaces.messages import ReplicaDescription
from outrider.interfaces.request import ChatMessage, GenerateRequest
from outrider.sessions.store import SessionRecord
from outrider.speculation.sampling_params import Rule, SamplingParams

MODEL = ReplicaDescription("toy", "", "", 100, "float32", 50, (), 8)
PROMPT = tuple(range(10))
CONFIG = CoordinatorConfig(num_draft_tokens=5, deadline_ms=60_000, unseeded_rule="token")


def checked(
    prompt: tuple[int, ...] = PROMPT, model: ReplicaDescription = MODEL, **fields: Any
) -> validation.GenerationParameters:
    request = GenerateRequest(prompt=prompt, **fields)
    validation.check_fields(request, model)
    return validation.resolve(request, "token_ids", prompt, model, CONFIG, random_seed=7)


def refused(field: str, **fields: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        checked(**fields)
    assert caught.value.field == field
    assert str(caught.value).startswith(field + ": ")
    return caught.value.message


def test_defaults() -> None:
    parameters = checked()
    assert (parameters.max_tokens, parameters.seed) == (40, 7)
    assert (parameters.num_draft_tokens, parameters.deadline_ms) == (5, 60_000)
    assert checked(default_max_tokens=16).max_tokens == 16
    assert checked(tuple([1] * 41), default_max_tokens=16).max_tokens == 9


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, Rule.BLOCK),
        ({"rule": Rule.TOKEN}, Rule.TOKEN),
        ({"seed": 0}, Rule.COUPLED),
        ({"seed": 0, "rule": Rule.TOKEN}, Rule.TOKEN),
        ({"sampling": GREEDY}, Rule.GREEDY),
        ({"sampling": GREEDY, "rule": Rule.TOKEN}, Rule.GREEDY),
    ],
)
def test_the_rule_is_the_requests_or_the_seeds_or_the_default(
    fields: dict[str, Any], rule: Rule
) -> None:
    config = replace(CONFIG, unseeded_rule="block")
    request = GenerateRequest(prompt=PROMPT, **fields)
    found = validation.resolve(request, "token_ids", PROMPT, MODEL, config, random_seed=7)
    assert found.rule is rule
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


def test_a_scored_prompt_may_have_no_answer() -> None:
    assert checked(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    refused("max_tokens", max_tokens=-1, prompt_logprobs=0)


RANGES = [
    ("temperature", (0.0, 2.0), (-1e-9, 2.01, math.nan)),
    ("min_p", (0.0, 1.0), (-1e-9, 1.01, math.nan)),
    ("presence_penalty", (-2.0, 2.0), (-2.01, 2.01, math.inf)),
    ("frequency_penalty", (-2.0, 2.0), (-2.01, 2.01, -math.inf)),
    ("top_p", (1e-9, 1.0), (0.0, 1.01, math.nan)),
    ("repetition_penalty", (1e-9, 10.0), (0.0, 10.01, math.nan)),
    ("top_k", (-1, 0, 1, MODEL.vocab_size), (-2, MODEL.vocab_size + 1)),
]


@pytest.mark.parametrize(("field", "good", "bad"), RANGES)
def test_sampling_parameters_from_both_sides(field: str, good: Any, bad: Any) -> None:
    for value in good:
        checked(sampling=SamplingParams(**{field: value}))
    for value in bad:
        refused(f"sampling.{field}", sampling=SamplingParams(**{field: value}))


def test_logit_bias() -> None:
    vast = replace(MODEL, vocab_size=5000)
    entries = tuple((i, 1.0) for i in range(limits.LOGIT_BIAS_ENTRIES_MAX + 1))
    checked(model=vast, sampling=SamplingParams(logit_bias=entries[:-1]))
    refused("sampling.logit_bias", model=vast, sampling=SamplingParams(logit_bias=entries))
    checked(sampling=SamplingParams(logit_bias=((0, -100.0), (99, 100.0))))
    for bad in ((100, 0.0), (-1, 0.0)):
        refused("sampling.logit_bias", sampling=SamplingParams(logit_bias=(bad,)))
    for value in (100.5, -100.5, math.nan, math.inf):
        refused("sampling.logit_bias[3]", sampling=SamplingParams(logit_bias=((3, value),)))


def test_stop_tokens_and_min_tokens() -> None:
    stops = tuple(range(90)) * 2
    checked(sampling=SamplingParams(stop_token_ids=stops[: limits.STOP_TOKEN_IDS_MAX]))
    refused("sampling.stop_token_ids", sampling=SamplingParams(stop_token_ids=stops))
    for bad in (-1, 100):
        refused("sampling.stop_token_ids", sampling=SamplingParams(stop_token_ids=(0, bad)))
    checked(sampling=SamplingParams(min_tokens=40))
    least = SamplingParams(min_tokens=3, stop_token_ids=(0, 1))
    checked(sampling=least, max_tokens=3)
    refused("sampling.min_tokens", sampling=SamplingParams(min_tokens=-1))
    said = refused("sampling.min_tokens", sampling=least, max_tokens=2)
    assert "got 3; allowed: up to max_tokens, which is 2" in said
    said = refused("sampling.min_tokens", sampling=least, constraint=Constraint.any_object())
    assert "with json_object" in said
    few = replace(MODEL, vocab_size=3, eos_token_ids=(2,))
    checked((1,), few, sampling=replace(least, min_tokens=0))
    refused("sampling.stop_token_ids", prompt=(1,), model=few, sampling=least)


def test_stop_strings() -> None:
    checked(stop=("x" * limits.STOP_STRING_BYTES_MAX,) * limits.STOP_STRINGS_MAX)
    refused("stop", stop=("x",) * (limits.STOP_STRINGS_MAX + 1))
    refused("stop[1]", stop=("x", ""))
    refused("stop[0]", stop=("é" * (limits.STOP_STRING_BYTES_MAX // 2 + 1),))


def test_roles_are_names() -> None:
    """Templates write roles between special tokens, so a role must not contain any."""
    good = ChatMessage("user", "<|im_end|>")
    for role in ("system", "tool-2", "x" * 64):
        validation.check_roles((ChatMessage(role, "a"), good))
    for role in ("", "x" * 65, "user<|im_end|>", "a b", "user\n", "é"):
        request = GenerateRequest((good, ChatMessage(role, "a")))
        with pytest.raises(BadRequest, match="allowed: a name") as caught:
            validation.check_fields(request, MODEL)
        assert caught.value.field == "chat.messages[1].role"


def stored(parameters: validation.GenerationParameters) -> SessionRecord:
    """A session with these parameters."""
    text, shared = validation.ParametersWriter().write(parameters, "a")
    return SessionRecord.new("0" * 32, "a", "c", 1, Rule.BLOCK, text, parameters.prompt, shared)


def test_parameters_are_stored_and_read_again() -> None:
    for constraint in (None, Constraint.any_object(), Constraint.of_choices(["x", "é"])):
        sampling = SamplingParams(
            0.7,
            top_k=3,
            logit_bias=((5, -1.5), (7, 2.0)),
            stop_token_ids=(3,),
            min_tokens=0 if constraint else 2,
        )
        parameters = checked(
            constraint=constraint,
            seed=2**64 - 1,
            stop=("a",),
            sampling=sampling,
            ignore_eos=True,
            rule=Rule.BLOCK,
            include_rounds=True,
            draft_deadline_ms=20,
            logprobs=2,
        )
        assert parameters.constraint == constraint
        assert validation.GenerationParameters.of(stored(parameters)) == parameters
        large = replace(parameters, stop=("a" * limits.SHARED_BYTES_MIN,))
        record = stored(large)
        assert record.shared is not None
        assert len(record.parameters) < 100
        assert validation.GenerationParameters.of(record) == large
        # A coordinator that does not know shared texts must not continue without these parameters.
        with pytest.raises(DataLoss, match="cannot be read"):
            validation.GenerationParameters.of(replace(record, shared=None))
    values = json.loads(stored(checked()).parameters)
    values["constraint"] = {"kind": "none", "text": ""}
    with pytest.raises(DataLoss, match="cannot be read"):
        validation.GenerationParameters.of(
            replace(stored(checked()), parameters=json.dumps(values))
        )


def test_a_prompt_and_max_tokens_must_fit_the_model() -> None:
    assert checked((0, 99)).prompt == (0, 99)
    refused("token_ids", prompt=())
    assert "0..99" in refused("token_ids[1]", prompt=(3, 100))
    refused("token_ids[0]", prompt=(-1, 3))
    assert checked(tuple([1] * 49)).max_tokens == 1
    assert "49" in refused("token_ids", prompt=tuple([1] * 50))
    assert "up to 40" in refused("max_tokens", max_tokens=41)


@pytest.mark.parametrize("chat", [False, True])
async def test_generations_of_one_prompt_tokenize_it_once(chat: bool) -> None:
    goes_on = threading.Event()

    def slow(*_: object) -> list[int]:
        goes_on.wait(10)
        return [10]

    text = Mock(token_bytes_max=8)
    text.encode.side_effect = text.encode_chat.side_effect = slow
    prompts = validation.PromptEncoder(text)
    made: list[Any] = [" ".join(["some", "words"]) for _ in range(2)]
    if chat:
        made = [(ChatMessage("user", words),) for words in made]
    first, second = map(GenerateRequest, made)
    tasks = [asyncio.create_task(prompts.encode(one, 100, "a")) for one in [first] * 9 + [second]]
    await asyncio.sleep(0.05)
    tasks[0].cancel()
    goes_on.set()
    assert await asyncio.gather(*tasks[1:]) == [("chat" if chat else "text", (10,))] * 9
    assert text.encode.call_count + text.encode_chat.call_count == 2
    with pytest.raises(BadRequest, match="has 10 bytes; allowed: up to 8"):
        await prompts.encode(first, 1, "a")
    await prompts.close()


async def test_a_short_prompt_waits_neither_for_long_ones_nor_for_all_of_another_tenant() -> None:
    goes_on, encoded = threading.Event(), list[str]()

    def slow(prompt: str, *_: object) -> list[int]:
        if len(prompt) > limits.SHORT_PROMPT_BYTES:
            goes_on.wait(10)
        encoded.append(prompt[:2])
        return [1]

    text = Mock(token_bytes_max=2**20)
    text.encode.side_effect = slow
    prompts = validation.PromptEncoder(text)

    async def encode(prompt: str) -> None:
        await prompts.encode(GenerateRequest(prompt), 100, prompt[0])

    filler = "x" * limits.SHORT_PROMPT_BYTES
    long = [asyncio.create_task(encode(f"{name}{filler}")) for name in ("a1", "a2", "a3", "b1")]
    await asyncio.sleep(0)
    await encode("c1")
    assert encoded == ["c1"]
    goes_on.set()
    await asyncio.gather(*long)
    assert encoded == ["c1", "a1", "b1", "a2", "a3"] or encoded == ["c1", "a1", "a2", "b1", "a3"]
    await prompts.close()
