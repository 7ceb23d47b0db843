"""Text from tokens as they come: whole characters, and in the end exactly the decoded text."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from outrider.errors import BadRequest, ConfigError
from outrider.models.tokenizer import TokenizerText
from tests.support.models import (
    SPECIAL_TOKENS,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    save_tiny_model,
)


def unknown_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of an unknown kind (its decoder is hidden in a sequence of one)."""
    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    return tokenizer


KINDS = {
    "byte level": byte_level_tokenizer,
    "byte fallback": byte_fallback_tokenizer,
    "unknown": unknown_tokenizer,
}


@cache
def text_of(kind: str) -> TokenizerText:
    return TokenizerText(KINDS[kind](), kind)


def deltas(text: TokenizerText, ids: list[int]) -> list[str]:
    stream = text.stream()
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text(
    st.sampled_from("the fox é東🦊👩‍👩‍👧\u0301 \n\t�"), max_size=40
)


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=UNICODE)
@example(prompt=" leading and  double  spaces ")
@example(prompt="�")
@example(prompt="👩‍👩‍👧�🦊")
@settings(max_examples=250, deadline=None)
def test_deltas_make_up_the_text(kind: str, prompt: str) -> None:
    """For any Unicode text, with a tokenizer that splits characters into bytes, one that drops the
    first space, and any other: the deltas are whole characters and make up the decoded text."""
    text = text_of(kind)
    if kind == "unknown":  # there, U+FFFD in the text cannot be told from a split character
        prompt = prompt.replace("\ufffd", "")
    ids = text.encode(prompt)
    parts = deltas(text, ids)
    assert "".join(parts) == text.decode(ids)
    if "\ufffd" not in prompt:
        assert all("\ufffd" not in part for part in parts)


@given(ids=st.lists(st.integers(0, 319), max_size=60))
@settings(max_examples=300, deadline=None)
def test_deltas_make_up_what_any_tokens_decode_to(ids: list[int]) -> None:
    """Byte level: also for tokens that no text encodes to, invalid UTF-8 included."""
    text = text_of("byte level")
    assert "".join(deltas(text, ids)) == text.decode(ids)


@given(
    words=st.lists(st.sampled_from(["the", "fox", " ", "é", "🦊"]), min_size=1, max_size=8),
    places=st.lists(st.integers(0, 20), max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_special_tokens_are_hidden_and_disturb_nothing(words: list[str], places: list[int]) -> None:
    for kind in KINDS:
        text = text_of(kind)
        ids = text.encode("".join(words))
        expected = text.decode(ids)
        for place in places:
            ids.insert(min(place, len(ids)), 2 if kind == "byte fallback" else 0)
        assert "".join(deltas(text, ids)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_comes_when_its_last_byte_does(kind: str) -> None:
    """U+1F98A is four tokens; a text that ends inside it ends with U+FFFD."""
    text = text_of(kind)
    ids = text.encode("🦊")[-4:]
    assert deltas(text, ids) == ["", "", "", "🦊", ""]
    assert deltas(text, ids[:-1])[-1].startswith("\ufffd")


def test_bytes_that_never_make_a_character_are_not_held_for_ever() -> None:
    """Byte fallback: 200 continuation bytes. At most four tokens wait at any time."""
    text = text_of("byte fallback")
    byte = text._tokenizer.convert_tokens_to_ids("<0x80>")
    stream = text.stream()
    shown = 0
    for pushed in range(1, 201):
        shown += len(stream.push(byte))
        assert pushed - shown <= 4


def test_the_cost_of_a_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text, decoded = text_of("byte fallback"), []
    whole = TokenizerText.decode
    monkeypatch.setattr(
        TokenizerText, "decode", lambda self, ids: decoded.append(len(ids)) or whole(self, ids)
    )
    deltas(text, text.encode("the fox and the 🦊 " * 60))
    assert len(decoded) > 1000
    assert max(decoded) <= 8


def test_chat_uses_the_models_template() -> None:
    text = text_of("byte level")
    ids = text.encode_chat([{"role": "user", "content": "the fox"}])
    user, assistant = SPECIAL_TOKENS.index("<|user|>"), SPECIAL_TOKENS.index("<|assistant|>")
    assert (ids[0], ids[-1]) == (user, assistant)
    assert text.decode(ids) == "the fox"
    assert all(text.is_special(i) for i, token in enumerate(SPECIAL_TOKENS))


@pytest.mark.parametrize(
    ("kind", "role", "content", "said"),
    [
        ("byte fallback", "user", "x", "chat: model byte fallback has no chat template"),
        ("byte level", "tool", "x", "chat: the model's chat template failed: no tools here"),
        ("byte level", "user", "a\ud800", "chat: not Unicode"),
    ],
)
def test_what_is_no_prompt_is_refused(kind: str, role: str, content: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        text_of(kind).encode_chat([{"role": role, "content": content}])
    with pytest.raises(BadRequest, match="text: not Unicode"):
        text_of(kind).encode("a\ud800")


def test_loading(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "with", vocab_size=320, tokenizer=byte_level_tokenizer())
    text = TokenizerText.load(tmp_path / "with", "m")
    assert text.decode(text.encode("naïve 東京")) == "naïve 東京"
    save_tiny_model(tmp_path / "without")
    with pytest.raises(ConfigError, match="no tokenizer"):
        TokenizerText.load(tmp_path / "without", "m")
