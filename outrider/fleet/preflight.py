"""Checks settings before models are loaded, and finds or fetches the models' files."""

import errno
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from coordinator.requests.chat_template import read_chat_template
from outrider.config.deployment import (
    HERMES,
    PATHS,
    PORT_MAX,
    VLLM,
    CoordinatorConfig,
    DeploymentConfig,
    DraftConfig,
    TargetConfig,
    configuration,
    deployment_settings,
    is_loopback,
)
from outrider.config.emulated_spec import SCHEME, EmulatedSpec
from outrider.drafters.names import DEMO, EAGLE3, MTP, check_model_name, eagle3_name
from outrider.errors import ConfigError, SettingError
from outrider.foundation.api_keys import given_keys, key_hash, new_key, read_key_file
from outrider.foundation.settings import Value, blaming, with_setting_keys
from outrider.redis.address import without_password
from outrider.registry.registry import ROLES
from outrider.replica.vllm_release import check_vllm

_log = logging.getLogger(__name__)
_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
"""Errors of `bind` that the port causes. The host causes all other errors."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def check_before_start(config: DeploymentConfig) -> None:
    check_security_files(config.coordinator)
    read_chat_template(config.coordinator.chat_template)
    listeners(config)
    check_names(config)
    for service in (config.target, config.draft):
        if service.emulated is None and service.model_engine == VLLM:
            with with_setting_keys(type(service)):
                check_vllm(service)


def listeners(config: DeploymentConfig) -> list[tuple[str, str, int]]:
    """Setting, host and port of each server of a deployment on this machine; port 0 = any free
    port. Raises `SettingError` if two settings need the same port, or a port exceeds `PORT_MAX`."""
    coordinator = config.coordinator
    taken: dict[int, str] = {}
    servers = []
    for key, server, first, number in (
        ("grpc_port", coordinator, coordinator.grpc_port, config.num_coordinators),
        ("port", coordinator, coordinator.port, config.num_coordinators if coordinator.http else 0),
        ("health_port", coordinator, coordinator.health_port or 0, config.num_coordinators),
        ("target_port", config.target, config.target.port, config.num_targets),
        ("draft_port", config.draft, config.draft.port, config.num_drafts),
    ):
        for port in range(first, first + number) if first else (0,):
            if port > PORT_MAX:
                raise SettingError(key, f"{first} is too high for the ports of {number} replicas")
            if (other := taken.setdefault(port, key)) != key and port:
                raise SettingError(key, f"{port} is also a port of {other}; give another, or 0")
            servers.append((key, server.host, port))
    return servers


def check_ports(config: DeploymentConfig) -> None:
    """Binds each port of `listeners` for a moment. Raises `SettingError`."""
    for key, host, port in listeners(config):
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            reason = f"{host!r} is not an address: {error.strerror or error}"
            raise SettingError("host", reason) from error
        with socket.socket(family, kind) as probe:
            # Like the servers, allow an address in TIME_WAIT.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
                if error.errno not in _PORT_ERRORS:
                    raise SettingError("host", reason) from error
                flag = deployment_settings()[key].flag
                raise SettingError(
                    key, f"{reason}; give another port with {flag} (0 = any free port)"
                ) from error


def check_names(config: DeploymentConfig) -> None:
    """Checks the names of the models, and fetches nothing. Raises `SettingError`."""
    from outrider.models.sources import check_name, local_path

    drafter = config.draft.drafter
    name = "" if drafter.kind == MTP else drafter.name
    if name and not local_path(name).exists():
        if config.target.emulated is None and name.lower() == SCHEME:
            raise SettingError(
                "draft_model",
                f"{name!r} drafts only for an emulated target (--engine {SCHEME}:SPEC)",
            )
        check_model_name(name)
    if config.target.emulated is not None:
        with blaming("engine"):
            EmulatedSpec.parse(config.target.emulated)
        return
    with blaming("model"):
        check_name(config.target.model)
    if name:
        with blaming("draft_model"):
            check_name(name, drafts=True)


def needs_hub(config: DeploymentConfig) -> bool:
    """Whether a model must come from the hub, because it is not on this machine."""
    from outrider.models.sources import local_path

    names = {config.target.model, config.draft.drafter.name} - {"", DEMO, MTP}
    return config.target.emulated is None and not all(local_path(name).exists() for name in names)


def _with_kind(config: DeploymentConfig, name: str, where: Path) -> DeploymentConfig:
    """Adds `eagle3:` to the draft model's name if the directory `where` has an EAGLE-3 head. Raises
    `SettingError` if the drafter cannot be served, or its name states a wrong kind."""
    from outrider.models.published_drafters import SERVED, recognise

    with blaming("draft_model"):
        kind = recognise(where)
        if kind == MTP:
            raise ConfigError(
                f"drafter {name}: it holds MTP layers, which are served only from the target's own "
                f"files (`{MTP}`); {SERVED}"
            )
        is_eagle3, is_named = kind == EAGLE3, config.draft.drafter.kind == EAGLE3
        if is_eagle3 and not is_named:
            named = eagle3_name(config.draft.model, name)
            return replace(config, draft=replace(config.draft, model=named))
        if is_named and not is_eagle3:
            raise ConfigError(
                f"drafter {name}: its files are not those of an EAGLE-3 head; leave `{EAGLE3}:` "
                "out, and the kind is read from the files"
            )
    return config


def resolve_models(config: DeploymentConfig) -> DeploymentConfig:
    """Fills in the directories of models and tokenizer. Takes minutes if a model must be fetched or
    converted. Raises `SettingError` if a model is not found, or does not fit these settings."""
    resolved = _resolved(config)
    if resolved.draft.eagle3_on == "draft" and resolved.draft.drafter.kind != EAGLE3:
        raise SettingError(
            "eagle3_on",
            f"'draft' was given, but {resolved.draft.model} is no EAGLE-3 head; give target, or an "
            "EAGLE-3 head as --draft-model",
        )
    return resolved


def _resolved(config: DeploymentConfig) -> DeploymentConfig:
    check_names(config)
    config = _with_lookup(config)
    coordinator, target, draft = config.coordinator, config.target, config.draft
    drafter = draft.drafter
    if target.emulated is not None:
        return config
    from outrider.models.sources import resolve_model

    name, trust = target.model, target.trust_remote_code
    drafts, where = drafter.name, Path()
    # The draft comes first, because it is smaller: a wrong name is found before a long download.
    if drafts and drafter.kind != MTP:
        with blaming("draft_model"):
            where = resolve_model(drafts, trust_remote_code=trust, drafts=True)
    with blaming("model"):
        directory = resolve_model(name, trust_remote_code=trust)
    _check_size(target, name, directory, trust)
    has_tokenizer = any((directory / filename).is_file() for filename in _TOKENIZER_FILES)
    places: dict[str, Any] = {"tokenizer_directory": str(directory) if has_tokenizer else ""}
    target, draft = replace(target, directory=str(directory), **places), replace(draft, **places)
    coordinator = replace(coordinator, served_model_name=config.served_model_name, **places)
    config = replace(config, target=target, draft=draft, coordinator=coordinator)
    if not drafter.name:
        return config
    # These imports take seconds and memory, so they run only if needed.
    from outrider.models.loading import check_same_tokenizer
    from outrider.models.mtp import check_mtp
    from outrider.models.student import check_target, is_student

    with blaming("draft_model"):
        apart = drafter.runs_on == "draft"
        if drafter.kind == MTP:
            where = directory
            check_mtp(directory, name)
        else:
            named = _with_kind(config, drafts, where)
            if named is not config:
                return _resolved(named)
            if drafter.kind != EAGLE3 and is_student(where):
                check_target(where, name=drafts, target_directory=directory, target_name=name)
                draft = replace(draft, target=name, target_directory=str(directory))
            elif drafter.kind != EAGLE3:
                check_same_tokenizer(name, drafts, trust_remote_code=trust)
        if drafter.kind:
            target = replace(
                target,
                head=drafts,
                head_kind=drafter.kind,
                head_directory=str(where),
                shows_features=apart,
            )
        if apart and drafter.kind:
            draft = replace(draft, target=name, target_directory=str(directory))
        if apart:
            draft = replace(draft, directory=str(where))
            if not drafter.kind:
                _check_size(draft, drafts, where, trust)
    return replace(config, target=target, draft=draft)


def _with_lookup(config: DeploymentConfig) -> DeploymentConfig:
    """Sets where look-ups draft, and how. Raises `SettingError`."""
    draft, drafter = config.draft, config.draft.drafter
    lookup, lookup_on = _lookup_of(draft), config.coordinator.lookup_on
    only_looks_up = drafter.lookup is not None and not drafter.name
    if lookup_on is None:
        lookup_on = "target" if only_looks_up else "coordinator"
    if lookup_on == "coordinator":
        return replace(
            config, coordinator=replace(config.coordinator, lookup=lookup, lookup_on=lookup_on)
        )
    if not only_looks_up:
        raise SettingError(
            "lookup_on",
            f"'target' was given, but the drafter is {draft.model}; give coordinator, or "
            "--draft-model suffix or ngram",
        )
    # Sessions with the seed of another session look up in the coordinator. They must not read
    # answers that the other's may have influenced.
    own = replace(lookup, suffix_tokens_per_tenant=0)
    coordinator = replace(config.coordinator, lookup=own, lookup_on=lookup_on)
    return replace(config, coordinator=coordinator, target=replace(config.target, lookup=lookup))


def _lookup_of(draft: DraftConfig) -> DraftConfig:
    """The settings with which coordinators draft by `suffix` or `ngram`. Leaves out the settings
    of draft replicas, because coordinators are replaced if any setting in the result changes."""
    lookup, model = draft.drafter.lookup, "model"
    prefixes: tuple[str, ...] = ("ngram_",)
    if lookup is not None:
        prefixes = ("ngram_", "suffix_", "hybrid_")
        # Whatever model a hybrid has, its name here is `model`.
        model = f"hybrid:{lookup},model" if draft.drafter.name else lookup.value
    names = [field.name for field in fields(draft) if field.name.startswith(prefixes)]
    return DraftConfig(model=model, **{name: getattr(draft, name) for name in names})


def check_same_tokens(running: TargetConfig, other: TargetConfig) -> None:
    """Raises `SettingError` if the target `other` has another vocabulary or tokenizer than
    `running`, because coordinators keep their tokenizer and sessions when the target changes. If
    the files of `running` are gone, accepts any target."""
    if running.emulated == other.emulated and running.directory == other.directory:
        return
    try:
        before = _tokens(running)
    except ConfigError as error:
        _log.warning("cannot read the tokenizer of the running target: %s", error)
        return
    if before != _tokens(other):
        is_engine = running.emulated is not None or other.emulated is not None
        names = [
            config.model if config.emulated is None else config.engine
            for config in (other, running)
        ]
        raise SettingError(
            "engine" if is_engine else "model",
            f"{names[0]!r} has another vocabulary or tokenizer than the running {names[1]!r}; "
            "start another deployment for it",
        )


def _tokens(target: TargetConfig) -> tuple[int, str]:
    if target.emulated is not None:
        return EmulatedSpec.parse(target.emulated).vocab_size, ""
    from outrider.models.loading import stated_tokens

    return stated_tokens(Path(target.directory), trust_remote_code=target.trust_remote_code)


def _check_size(
    service: TargetConfig | DraftConfig, name: str, directory: Path, trust: bool
) -> None:
    with with_setting_keys(type(service)):
        if service.max_model_len:
            from outrider.models.loading import stated_length

            stated = stated_length(directory, trust_remote_code=trust)
            if stated is not None and service.max_model_len > stated:
                raise SettingError(
                    "max_model_len",
                    f"{service.max_model_len} is wrong; the model takes at most {stated} tokens",
                )
        key, num_ranks = "tensor_parallel_size", service.tensor_parallel_size
        if num_ranks > 1 and service.model_engine != VLLM:
            if isinstance(service, DraftConfig) and service.target_directory:
                raise SettingError(key, "must be 1 for a drafter that was trained for a target")
            from outrider.models.sharding import check_shares

            check_shares(directory, num_ranks, key=key, name=name, trust_remote_code=trust)


def warnings(config: DeploymentConfig) -> Iterator[str]:
    """Warnings about the settings that `resolve_models` returned."""
    coordinator = config.coordinator
    if not coordinator.tokenizer_directory:
        yield (
            "warning: the target has no tokenizer, so text, chats and stop strings are refused; "
            "use token ids (outrider generate --token-ids)"
        )
    if (
        coordinator.asks_for_keys
        and not coordinator.ssl_certfile
        and not is_loopback(coordinator.host)
    ):
        yield (
            "warning: keys and texts cross the network in plain text; give --ssl-certfile and "
            "--ssl-keyfile, unless a proxy in front of the coordinators terminates TLS"
        )


def without_secrets(config: DeploymentConfig) -> tuple[DeploymentConfig, str, dict[str, str]]:
    """Removes the secrets, which Ray must not get, and replaces API keys by their hashes. Returns
    the configuration, a new API key for commands on this machine (empty if callers need no key),
    and the passwords of Redis by field of `RedisAddress`. Raises `SettingError`."""
    config = configuration(whole_paths(config.values()))
    coordinator, key = config.coordinator, ""
    if coordinator.asks_for_keys:
        key = new_key()
        coordinator = replace(
            coordinator, api_key=",".join([*given_keys(coordinator.api_key), key_hash(key)])
        )
    redis, passwords = without_password(coordinator.redis)
    return replace(config, coordinator=coordinator.reaching(redis)), key, passwords


def whole_paths(values: Mapping[str, Value]) -> dict[str, Any]:
    """The settings, with relative paths made absolute."""
    absolute = dict(values)
    for key, value in values.items():
        is_path = key in PATHS or (key == "chat_template" and value != HERMES)
        if is_path and value and isinstance(value, str):
            absolute[key] = str(Path(value).expanduser().absolute())
    return absolute


def check_security_files(config: CoordinatorConfig) -> None:
    """Raises `ConfigError` if a certificate, a key or a file of API keys cannot be used."""
    from outrider.transport.tls import RoleFiles, check_pair, read_certificates

    def check_roles(directory: Path) -> None:
        for role in ROLES:
            RoleFiles.of(directory, role).checked()

    checks: dict[str, Callable[[Path], object]] = {
        "ssl_certfile": lambda path: check_pair(path, Path(config.ssl_keyfile)),
        "ssl_ca_certs": read_certificates,
        "internal_tls_dir": check_roles,
        "api_key_file": read_key_file,
    }
    for key, check in checks.items():
        if name := getattr(config, key):
            with blaming(key):
                check(Path(name))
