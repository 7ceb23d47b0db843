"""A coordinator compiles a request's constraint before it opens a session."""

from __future__ import annotations

import pytest
from models import byte_level_tokenizer

from coordinator.prompts import PromptEncoder
from outrider.constraints.constraint import Constraint
from outrider.constraints.grammars import Grammar, GrammarTokenizer
from outrider.errors import BadRequest
from outrider.text import TokenizerText

EOS = (0,)


async def test_what_can_be_compiled_passes_and_what_cannot_is_told_by_its_field() -> None:
    prompts = PromptEncoder(TokenizerText(byte_level_tokenizer(), "small"))
    try:
        await prompts.check_constraint(Constraint.of_schema({"type": "object"}), EOS, "a")
        await prompts.check_constraint(Constraint.of_choices(["a", "b"]), EOS, "a")
        with pytest.raises(BadRequest, match=r"json_schema: cannot be compiled: .*nonsense"):
            await prompts.check_constraint(Constraint.of_schema({"type": "nonsense"}), EOS, "a")
        with pytest.raises(BadRequest, match="regex: cannot be compiled"):
            await prompts.check_constraint(Constraint.of_regex("(a"), EOS, "a")
    finally:
        prompts.close()


async def test_tenants_do_not_share_what_is_compiled() -> None:
    compiled: list[Constraint] = []

    class Noting(GrammarTokenizer):
        def compile(self, constraint: Constraint) -> Grammar:
            compiled.append(constraint)
            return super().compile(constraint)

    class Noted(TokenizerText):
        def grammar_tokenizer(self, eos_token_ids: tuple[int, ...]) -> GrammarTokenizer:
            return Noting(byte_level_tokenizer(), eos_token_ids)

    prompts = PromptEncoder(Noted(byte_level_tokenizer(), "small"))
    for tenant in ("a", "b", "a"):
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, tenant)
    assert len(compiled) == 2
    prompts.close()


async def test_a_model_without_a_tokenizer_has_no_constraints() -> None:
    prompts = PromptEncoder(None)
    with pytest.raises(BadRequest, match=r"^regex: the model has no tokenizer"):
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
    prompts.close()


async def test_a_model_without_an_end_of_text_has_none_either() -> None:
    prompts = PromptEncoder(TokenizerText(byte_level_tokenizer(), "small"))
    with pytest.raises(BadRequest, match=r"^json_object: the model has no token that ends a text"):
        await prompts.check_constraint(Constraint.any_object(), (), "a")
    prompts.close()
