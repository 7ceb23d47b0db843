"""Makes the compiler of a replica's constraints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.config.deployment import ReplicaConfig
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.grammar.compiler import Grammars


def build_grammars(config: ReplicaConfig, eos_token_ids: tuple[int, ...] = ()) -> Grammars | None:
    """Returns the compiler of constraints for the target's tokenizer; None without a tokenizer. The
    first compilation loads the tokenizer. Without `eos_token_ids`, reads them from the model."""
    if not config.tokenizer_directory:
        return None
    from outrider.grammar.compiler import Grammars, GrammarTokenizer

    path = Path(config.tokenizer_directory)

    def load() -> GrammarTokenizer:
        from outrider.models.loading import load_tokenizer, stated_eos_token_ids

        tokenizer = load_tokenizer(path, trust_remote_code=config.trust_remote_code)
        if tokenizer is None:
            raise ConfigError("the model has no tokenizer")
        ends = eos_token_ids or stated_eos_token_ids(path, tokenizer)
        return GrammarTokenizer(tokenizer, ends)

    return Grammars(load)
