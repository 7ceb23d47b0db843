"""Flags for a deployment's settings, made from `outrider.config`, and the deployment they name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from deploy.fleet.local_state import DeploymentRecord
from outrider.config import DeploymentConfig, deployment_settings, load_config
from outrider.errors import ConfigError
from outrider.settings import Value, sources

_PREFIX: Final = "setting_"
SECRETS: Final = tuple(key for key, found in deployment_settings().items() if found.secret)
SEVERAL: Final = ("api_key",)
"""Settings whose flags may be given several times."""
KEY_FLAG: Final = "--api-key"
KEY_VARIABLE: Final = "OUTRIDER_API_KEY"
OF_CALLERS: Final = ("api_key",)
"""Those that say, where a deployment runs already, what its callers show."""


def add_setting_flags(
    parser: argparse.ArgumentParser, title: str, without: Collection[str] = ()
) -> None:
    """A flag for every setting but those in `without`. What a flag says is checked later, with the
    other places that a setting may come from."""
    group = parser.add_argument_group(
        title,
        "a flag wins over the environment (OUTRIDER_NAME), which wins over the file",
    )
    group.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings")
    for setting in deployment_settings().values():
        if setting.key in without:
            continue
        default = "unset" if setting.default is None else setting.default
        text = f"{setting.doc} [{default if default != '' else 'empty'}]".replace("%", "%%")
        name = _PREFIX + setting.key
        if setting.kind is bool:
            group.add_argument(
                setting.flag,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                dest=name,
                help=text,
            )
        else:
            metavar = "|".join(setting.choices) or setting.kind.__name__.upper()
            group.add_argument(
                setting.flag,
                action="append" if setting.key in SEVERAL else "store",
                default=argparse.SUPPRESS,
                dest=name,
                metavar=metavar,
                help=text,
            )


def given_flags(arguments: argparse.Namespace) -> dict[str, object]:
    """The settings that flags were given for, by key."""
    return {
        name.removeprefix(_PREFIX): ",".join(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name.startswith(_PREFIX)
    }


def flags_again(arguments: argparse.Namespace, without: Collection[str]) -> tuple[str, ...]:
    """The words of the flags that were given for settings, but for secrets and those in
    `without`."""
    words = [] if arguments.config is None else ["--config", str(arguments.config)]
    settings = deployment_settings()
    for key, value in given_flags(arguments).items():
        flag = settings[key].flag
        if key in SECRETS or key in without:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return tuple(words)


def with_flags(arguments: argparse.Namespace, **values: object) -> argparse.Namespace:
    """The arguments as if these flags had been given too, by their settings' keys."""
    flags = {_PREFIX + key: value for key, value in values.items()}
    return argparse.Namespace(**(vars(arguments) | flags))


def set_by(arguments: argparse.Namespace) -> dict[str, str]:
    """By key, what sets each setting that is set: file, environment or flag. Raises
    `ConfigError` for an unknown name."""
    file = getattr(arguments, "config", None)
    return sources(deployment_settings(), file, os.environ, given_flags(arguments))


def deployment_config(arguments: argparse.Namespace) -> DeploymentConfig:
    """The deployment that file, environment and flags describe. Raises `ConfigError`."""
    return load_config(given_flags(arguments), os.environ, arguments.config)


def public_settings(config: DeploymentConfig) -> dict[str, Value]:
    """Every setting of a deployment by key, but for those that may hold a password."""
    return {key: value for key, value in config.values().items() if key not in SECRETS}


def refuse_other_settings(arguments: argparse.Namespace, record: DeploymentRecord) -> None:
    """Raises `ConfigError` where a flag asks for another deployment than the one that runs."""
    settings = deployment_settings()
    for key, raw in given_flags(arguments).items():
        if key in OF_CALLERS:
            continue
        asked = settings[key].parse(raw, settings[key].flag)
        if key in SECRETS or record.settings.get(key) != asked:
            runs = "" if key in SECRETS else f" with {record.settings.get(key)!r}"
            raise ConfigError(
                f"{settings[key].flag}: {asked if key not in SECRETS else '***'} was asked for, "
                f"but a deployment runs already{runs} ({record.grpc_address}); stop it first "
                "(outrider stop), or leave the flag out"
            )
