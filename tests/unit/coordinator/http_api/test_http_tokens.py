"""`POST /tokenize` and `/detokenize` with a whole coordinator."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.models.tokenizer import TokenizerText
from tests.support.coordinator_bench import bench, target_service
from tests.support.http_front import Front
from tests.support.models import byte_fallback_tokenizer, byte_level_tokenizer
from tests.support.toy_engine import ToyEngine

VOCAB = 320
TEXT = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
CHAT = [{"role": "user", "content": "the fox"}]


class Caller(Front):
    async def call(self, path: str, **body: Any) -> Any:
        """The answer, or the field of its error."""
        found = await self.send("POST", path, json=body)
        return found.json() if found.status_code == 200 else found.json()["error"]["param"]


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    async with bench(text=TEXT, target=target_service(ToyEngine(VOCAB))) as made:
        yield Caller(made.service)


async def test_tokens_are_those_that_a_generation_reads(caller: Caller) -> None:
    """Those of a text and of a conversation. Special tokens are written by name."""
    ids = TEXT.encode("the <|end|>")
    assert await caller.call("/tokenize", prompt="the <|end|>", return_token_strs=True) == {
        "count": len(ids),
        "max_model_len": 64,
        "tokens": ids,
        "token_strs": [TEXT.spell(one).decode() for one in ids],
    }
    told = await caller.call("/tokenize", messages=CHAT, model="toy", add_special_tokens=False)
    assert (told["tokens"], told["token_strs"]) == (TEXT.encode_chat(CHAT), None)
    assert await caller.call("/detokenize", tokens=ids) == {"prompt": "the <|end|>"}
    assert await caller.call("/detokenize", tokens=[]) == {"prompt": ""}
    whole = await caller.call("/tokenize", prompt="the fox " * 100)
    assert whole["count"] > whole["max_model_len"]  # More than a generation accepts.


async def test_special_tokens_before_a_text_may_be_left_out() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_fallback_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    async with bench(text=TokenizerText(tokenizer, "toy")) as made:
        caller = Caller(made.service)
        whole, bare = [
            (await caller.call("/tokenize", prompt="the", add_special_tokens=given))["tokens"]
            for given in (None, False)
        ]
    assert whole == [1, *bare]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": "a" * 64 * 400}, "prompt"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "a b", "content": ""}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [1, VOCAB]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.0]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ],
)
async def test_what_is_wrong_is_named(
    caller: Caller, path: str, body: dict[str, Any], field: str
) -> None:
    assert await caller.call(path, **body) == field


async def test_without_a_tokenizer_there_is_no_text() -> None:
    async with bench() as made:
        caller = Caller(made.service)
        assert await caller.call("/tokenize", prompt="a") == "prompt"
        assert await caller.call("/detokenize", tokens=[1]) == "tokens"
