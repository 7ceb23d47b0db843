"""Finds the files of a deployment's models, and refuses a pair that cannot work, before any actor
is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from outrider.config import DeploymentConfig

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def resolve_models(config: DeploymentConfig) -> DeploymentConfig:
    """The configuration with the directories of models and tokenizer. Takes minutes where a model
    must be converted or fetched first. Raises `ConfigError` for a model that is not to be had, and
    for a draft whose tokenizer differs from the target's."""
    if config.target.emulated is not None:
        from outrider.engine.emulated import EmulatedSpec

        EmulatedSpec.parse(config.target.emulated)
        return config
    # These import the model library, which takes seconds: only where they are needed.
    from outrider.engine.sources import resolve_model

    trust = config.target.trust_remote_code
    directory = resolve_model(config.target.model, trust_remote_code=trust)
    draft_directory = ""
    if not config.draft.is_ngram:
        draft_directory = str(resolve_model(config.draft.model, trust_remote_code=trust))
        from outrider.engine.loading import check_same_tokenizer

        check_same_tokenizer(config.target.model, config.draft.model, trust_remote_code=trust)
    return replace(
        config,
        target=replace(config.target, directory=str(directory)),
        draft=replace(config.draft, directory=draft_directory),
        coordinator=replace(
            config.coordinator,
            tokenizer_directory=str(directory) if _has_tokenizer(directory) else "",
            served_model_name=config.served_model_name,
        ),
    )


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)
