"""What is checked and found before anything starts, so that a slip does not cost a model's loading:
files of keys, ports, and the models' files."""

from __future__ import annotations

import errno
import logging
import socket
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from outrider.config import (
    PORT_MAX,
    DeploymentConfig,
    DraftConfig,
    TargetConfig,
    deployment_settings,
)
from outrider.drafters.names import DraftModel, check_model_name
from outrider.engine.emulated_spec import SCHEME, EmulatedSpec
from outrider.errors import ConfigError, SettingError
from outrider.settings import blaming

from .security_setup import check_security_files

_log = logging.getLogger(__name__)

_PORT_ERRORS: Final = (errno.EADDRINUSE, errno.EACCES)
"""Errors that another port on the same host may not have."""
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def check_before_start(config: DeploymentConfig) -> None:
    """For a deployment on this machine. Raises `SettingError` for wrong files of keys or
    certificates, for ports that are not apart, for a model that is certainly not there, and for
    what is no emulated one."""
    check_security_files(config.coordinator)
    check_ports_apart(config)
    check_names(config)


def check_ports_apart(config: DeploymentConfig) -> None:
    """For a deployment on this machine. Raises `SettingError` where two roles count up to one port,
    or one beyond the last."""
    _ports(config)


def check_ports(config: DeploymentConfig) -> None:
    """For a deployment on this machine. Binds each port for a moment. Raises `SettingError` for a
    host or a port that cannot be listened on."""
    for key, host, port in _ports(config):
        _check_listening(key, host, port)


def _ports(config: DeploymentConfig) -> list[tuple[str, str, int]]:
    """The setting, the host and the port of each listener; port 0 once for each role that takes any
    free one. Raises `SettingError` where there are none left or two roles share one."""
    num_http = config.num_coordinators if config.coordinator.http else 0
    listeners = (
        ("grpc_port", config.coordinator, config.coordinator.grpc_port, config.num_coordinators),
        ("port", config.coordinator, config.coordinator.port, num_http),
        ("target_port", config.target, config.target.port, config.num_targets),
        ("draft_port", config.draft, config.draft.port, config.num_drafts),
    )
    taken: dict[int, str] = {}
    found = []
    for key, server, first, number in listeners:
        for port in range(first, first + number) if first else (0,):
            if port > PORT_MAX:
                raise SettingError(key, f"{first} leaves no ports for {number} replicas")
            if (other := taken.setdefault(port, key)) != key and port:
                raise SettingError(key, f"{port} is a port of {other}, too; give another one, or 0")
            found.append((key, server.host, port))
    return found


def _check_listening(key: str, host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SettingError("host", f"{host!r} is no address: {error.strerror or error}") from error
    with socket.socket(family, kind) as probe:
        # As the server will: an address that is only waiting to be forgotten is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
            if error.errno not in _PORT_ERRORS:
                raise SettingError("host", reason) from error
            flag = deployment_settings()[key].flag
            raise SettingError(
                key, f"{reason}; give another port with {flag}, where 0 means any free one"
            ) from error


def check_names(config: DeploymentConfig) -> None:
    """What can be told of the models without fetching or reading much. Raises `SettingError` where
    `resolve_models` certainly would, and for a draft model that is probably a slip."""
    drafter = config.draft.drafter
    name = drafter.on_target if drafter.model is None else drafter.model.name
    is_head = drafter.reads_target
    if name is not None and not is_head and not Path(name).expanduser().exists():
        if config.target.emulated is None and name.lower() == SCHEME:
            raise SettingError(
                "draft_model",
                f"{name!r} drafts for an emulated target alone (--engine {SCHEME}:SPEC)",
            )
        check_model_name(name)
    if config.target.emulated is not None:
        emulated_spec(config.target.emulated)
        return
    from outrider.models.sources import check_name

    with blaming("model"):
        check_name(config.target.model)
    if name is not None:
        with blaming("draft_model"):
            check_name(name, heads=is_head)


def resolve_models(config: DeploymentConfig) -> DeploymentConfig:
    """The configuration with the directories of models and tokenizer. Takes minutes where a model
    must be converted or fetched first. Raises `SettingError` for a model that is not to be had,
    for a length that one does not take, for ranks that one cannot be shared out among, and for a
    draft whose tokenizer differs from the target's."""
    check_names(config)
    if config.target.emulated is not None:
        coordinator = replace(config.coordinator, lookup=_lookup_of(config.draft))
        return replace(config, coordinator=coordinator)
    # Imports the model library, which takes seconds: only where it is needed.
    from outrider.models.sources import resolve_model

    trust = config.target.trust_remote_code
    with blaming("model"):
        directory = resolve_model(config.target.model, trust_remote_code=trust)
    _check_length("max_model_len", config.target.max_model_len, directory, trust)
    num_ranks, name = config.target.tensor_parallel_size, config.target.model
    _check_ranks("tensor_parallel_size", num_ranks, name, directory, trust)
    has_tokenizer = any((directory / name).is_file() for name in _TOKENIZER_FILES)
    tokenizer = str(directory) if has_tokenizer else ""
    config = replace(config, draft=replace(config.draft, tokenizer_directory=tokenizer))
    draft, draft_model = config.draft, config.draft.drafter.model
    if draft_model is not None:
        draft = _resolve_draft(config, draft_model, directory, trust)
    reads = draft_model is not None and draft_model.reads_features
    target = replace(
        config.target,
        directory=str(directory),
        shows_features=reads,
        tokenizer_directory=tokenizer,
    )
    if draft.drafter.on_target is not None:
        target = _with_heads(target, draft, draft.drafter.on_target)
    return replace(
        config,
        target=target,
        draft=draft,
        coordinator=replace(
            config.coordinator,
            tokenizer_directory=tokenizer,
            served_model_name=config.served_model_name,
            lookup=_lookup_of(draft),
        ),
    )


def _lookup_of(draft: DraftConfig) -> DraftConfig | None:
    """What coordinators look drafts up by, if anything, and nothing of the draft replicas: an
    upgrade of those alone replaces no coordinator. A head that reads features looks up itself."""
    drafter = draft.drafter
    if drafter.lookup is None or (drafter.model is not None and drafter.model.reads_features):
        return None
    prefixes = ("model", "ngram_", "suffix_", "hybrid_")
    names = [one.name for one in fields(draft) if one.name.startswith(prefixes)]
    return DraftConfig(**{name: getattr(draft, name) for name in names})


def emulated_spec(text: str) -> EmulatedSpec:
    """What an engine's specification says. Raises `SettingError`."""
    with blaming("engine"):
        return EmulatedSpec.parse(text)


def check_same_tokens(running: TargetConfig, other: TargetConfig) -> None:
    """Raises `SettingError` for a target whose ids mean something else than those of the one that
    is `running`, both with the directories of their models: coordinators, which have the tokenizer
    and the sessions of that, would not take it in beside it. Where the files of the one that runs
    are gone nothing is refused."""
    if running.emulated == other.emulated and running.directory == other.directory:
        return
    try:
        before = _tokens(running)
    except ConfigError as error:  # It runs all the same.
        _log.warning("what the tokens of the target that runs mean is not known: %s", error)
        return
    if before != _tokens(other):
        is_engine = running.emulated is not None or other.emulated is not None
        names = [one.model if one.emulated is None else one.engine for one in (other, running)]
        raise SettingError(
            "engine" if is_engine else "model",
            f"{names[0]!r} has another vocabulary or tokenizer than {names[1]!r}, which runs; "
            "start another deployment for it",
        )


def _tokens(target: TargetConfig) -> tuple[int, str]:
    if target.emulated is not None:
        return emulated_spec(target.emulated).vocab_size, ""
    from outrider.models.loading import stated_tokens

    return stated_tokens(Path(target.directory), trust_remote_code=target.trust_remote_code)


def _resolve_draft(
    config: DeploymentConfig, draft_model: DraftModel, target: Path, trust: bool
) -> DraftConfig:
    """With where its files are: those of `target` where it drafts with the target's weights, and
    those as well where it was made for it."""
    from outrider.models.drafter_checkpoint import TrainedKind, check_target, is_trained_drafter
    from outrider.models.loading import check_same_tokenizer
    from outrider.models.sources import resolve_model

    draft, directory, name = config.draft, target, config.target.model
    if draft_model.name is not None:
        name = draft_model.name
        with blaming("draft_model"):
            reads = draft_model.reads_features
            directory = resolve_model(name, trust_remote_code=trust, heads=reads)
            if reads or is_trained_drafter(directory):
                kind = TrainedKind.EAGLE if reads else TrainedKind.STUDENT
                check_target(directory, name, kind, target, config.target.model)
                draft = replace(draft, target=config.target.model, target_directory=str(target))
            else:
                check_same_tokenizer(config.target.model, name, trust_remote_code=trust)
    if draft_model.reads_features:
        return replace(draft, directory=str(directory))
    _check_length("draft_max_model_len", draft.max_model_len, directory, trust)
    size_key = "draft_tensor_parallel_size"
    if not draft.target_directory:
        _check_ranks(size_key, draft.tensor_parallel_size, name, directory, trust)
    elif draft.tensor_parallel_size > 1:
        raise SettingError(size_key, "a drafter that was made for a target runs on one rank")
    return replace(draft, directory=str(directory))


def _with_heads(target: TargetConfig, draft: DraftConfig, name: str) -> TargetConfig:
    """A target that drafts for itself, with heads or with its first layers and one behind them."""
    from outrider.models.drafter_checkpoint import TrainedKind, check_target
    from outrider.models.sources import resolve_model

    with blaming("draft_model"):
        directory = resolve_model(name, trust_remote_code=target.trust_remote_code, heads=True)
        kind = TrainedKind.MEDUSA if draft.drafter.heads is not None else TrainedKind.EARLY_EXIT
        check_target(directory, name, kind, Path(target.directory), target.model)
    return replace(
        target,
        heads=name,
        heads_kind=kind,
        heads_directory=str(directory),
        heads_support_entries=draft.support_entries,
    )


def _check_length(key: str, asked: int, directory: Path, trust: bool) -> None:
    if asked == 0:
        return
    from outrider.models.loading import stated_length

    stated = stated_length(directory, trust_remote_code=trust)
    if stated is not None and asked > stated:
        raise SettingError(key, f"{asked} is wrong; the model takes at most {stated} tokens")


def _check_ranks(key: str, size: int, name: str, directory: Path, trust: bool) -> None:
    if size > 1:
        from outrider.engine.tensor_parallel.sharding import check_shares

        check_shares(directory, size, key=key, name=name, trust_remote_code=trust)


def tokenizer_warning(tokenizer_directory: str) -> str | None:
    """A warning where the target has no tokenizer."""
    if tokenizer_directory:
        return None
    return (
        "warning: the target has no tokenizer: text, chat and stop strings will be refused; token "
        "ids work (outrider generate --token-ids)"
    )
