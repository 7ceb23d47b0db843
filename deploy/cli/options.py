"""Options of settings and of requests, what they give, and what errors call them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from deploy.fleet.local_state import DeploymentRecord
from outrider import limits
from outrider.config import DeploymentConfig, deployment_settings, load_config
from outrider.errors import (
    NO_TOKENIZER,
    BadRequest,
    ConfigError,
    OutriderError,
    SettingError,
    Unauthenticated,
)
from outrider.settings import Setting, Value, merge, sources
from outrider.speculation.sampling_params import Rule, SamplingParams

from .command import Arguments, Option, grouped, option

SECRETS: Final = tuple(key for key, found in deployment_settings().items() if found.secret)
KEY_FLAG: Final = "--api-key"
KEY_VARIABLE: Final = "OUTRIDER_API_KEY"
OF_CALLERS: Final = ("api_key",)
"""Settings that say, where a deployment runs already, what its callers show."""
PLACE_KEYS: Final = ("address", "deployment_name")
"""Settings that say which deployment of which cluster is meant."""
REQUEST_KEYS: Final = ("seed", "num_draft_tokens", "deadline_ms")
"""Settings of a deployment that are options of the request instead."""
COMMON: Final = (
    "draft_model", "device", "dtype", "max_model_len", "max_num_seqs", "num_draft_tokens",
    "num_targets", "num_drafts", "grpc_port", "port", "host", "api_key_file", "redis_url",
    "telemetry",
)  # fmt: skip
"""Settings that `serve` shows first."""
TITLES: Final = {
    "ServerConfig": "Settings of every service",
    "ModelServerConfig": "Settings of targets and drafts",
    "TargetConfig": "Settings of targets",
    "DraftConfig": "Settings of drafts",
    "FrontConfig": "Settings of coordinators: keys and TLS",
    "CoordinatorConfig": "Settings of coordinators",
    "DeploymentConfig": "Settings of the deployment",
    "AutoscaleConfig": "Settings of autoscaling",
}
CHANGING: Final = ("scale", "autoscale", "upgrade")
"""Commands whose settings have the values of the deployment that runs, unless they are given."""
_PROMPT_FIELDS: Final = ("prompt", "text", "chat")
_PART: Final = re.compile(r"(\w+)(?:\[(\d+)\])?")
"""Of a field's path: a name, and the index of what is wrong in it."""


def setting_options(
    without: Collection[str] = (), common: Collection[str] = ("draft_model",)
) -> Iterator[Option]:
    """One for every setting but those in `without`; the help shows those in `common` first. What
    they say is checked later, with the other places that a setting may come from."""
    yield option(
        "--config", type=Path, metavar="FILE", group="Settings",
        help="YAML file of settings; a flag wins over the environment (OUTRIDER_NAME), which wins "
        "over the file",
    )  # fmt: skip
    for setting in deployment_settings().values():
        if setting.key not in without:
            yield _setting_option(setting, rare=setting.key not in common)


def _setting_option(setting: Setting, rare: bool, doc: str = "") -> Option:
    flags = setting.flag
    kind: dict[str, Any] = {"metavar": "|".join(setting.choices) or setting.kind.__name__.upper()}
    if setting.kind is bool:
        flags, kind = f"{setting.flag}/--no-{setting.flag[2:]}", {}
    return Option(
        [flags, f"setting_{setting.key}"],
        setting=setting, group=TITLES[setting.group], rare=rare, help=doc or setting.doc,
        default=None, multiple=setting.key == "api_key", **kind,
    )  # fmt: skip


def place_options() -> list[Option]:
    """Where a deployment is that runs on another cluster; see `find_deployment`."""
    others = [key for key in deployment_settings() if key not in PLACE_KEYS]
    return grouped("A deployment on a Ray cluster elsewhere", setting_options(others, PLACE_KEYS))


def key_option() -> Option:
    """What a command shows that starts no deployment, and so has no settings of one."""
    setting = deployment_settings()["api_key"]
    return _setting_option(setting, rare=False, doc=f"shown to coordinators [${KEY_VARIABLE}]")


def request_options(max_tokens: int) -> list[Option]:
    """One for every field of a request but the prompt. `max_tokens` is the default."""
    return grouped("Request", [
        option("--max-tokens", type=int, default=max_tokens, help="tokens at most"),
        option("--temperature", type=float, default=0.0, help="0..2; 0 is greedy"),
        option("--top-p", type=float, default=1.0, help="(0, 1]"),
        option("--top-k", type=int, default=0, help="0 or -1 = off"),
        option("--min-p", type=float, default=0.0, rare=True, help="0..1"),
        option("--presence-penalty", type=float, default=0.0, rare=True, help="-2..2"),
        option("--frequency-penalty", type=float, default=0.0, rare=True, help="-2..2"),
        option("--repetition-penalty", type=float, default=1.0, rare=True, help="(0, 10]"),
        option(
            "--stop", multiple=True, metavar="TEXT",
            help=f"end before this text; up to {limits.STOP_STRINGS_MAX} times",
        ),
        option("--ignore-eos", is_flag=True, rare=True, help="go on past the model's own end"),
        option("--seed", type=int, help="repeat this request's randomness"),
        option(
            "--rule", choices=[rule.value for rule in Rule], help="acceptance rule; by default "
            "greedy at temperature 0, coupled with a seed, else token",
        ),
        option(
            "--num-draft-tokens", type=int, metavar="K",
            help="draft tokens a round; 0 = plain decoding",
        ),
        option("--deadline-ms", type=int, help="end after this time, ms"),
        option(
            "--draft-deadline-ms", type=int, rare=True, help="time that a round gives its draft, "
            "ms; by default --draft-timeout-ms of the deployment",
        ),
    ])  # fmt: skip


def request_fields(arguments: Arguments) -> dict[str, Any]:
    """What the options say, as fields of a `GenerateRequest`. Raises `BadRequest` for a number
    that is none; all other limits are the coordinator's."""
    for name in ("temperature", "top_p", "min_p"):
        if not math.isfinite(getattr(arguments, name)):
            raise BadRequest(name, "must be a finite number")
    given = vars(arguments)
    sampling = {name: given[name] for name in SamplingParams.__dataclass_fields__ if name in given}
    names = ("max_tokens", "stop", "ignore_eos", "seed", "num_draft_tokens", "deadline_ms",
             "draft_deadline_ms")  # fmt: skip
    return {
        "sampling": SamplingParams(**sampling),
        "rule": None if arguments.rule is None else Rule(arguments.rule),
        **{name: given[name] for name in names},
    }


def given_settings(arguments: Arguments) -> dict[str, Value]:
    """By key, the settings that file, environment or an option sets. Raises `ConfigError`."""
    return merge(deployment_settings(), arguments.config, os.environ, arguments.settings)


def deployment_config(arguments: Arguments) -> DeploymentConfig:
    """The deployment that file, environment and options describe. Raises `ConfigError`."""
    return load_config(arguments.settings, os.environ, arguments.config)


def set_by(arguments: Arguments) -> dict[str, str]:
    """By key, what sets each setting that is set: file, environment or flag. Raises
    `ConfigError` for an unknown name."""
    return sources(deployment_settings(), arguments.config, os.environ, arguments.settings)


def with_settings(arguments: Arguments, **values: object) -> Arguments:
    """The arguments as if these settings had been given too, by key."""
    return Arguments(**vars(arguments) | {"settings": arguments.settings | values})


def flags_again(arguments: Arguments, without: Collection[str]) -> tuple[str, ...]:
    """The words of the options that were given for settings, but for secrets and those in
    `without`."""
    words = [] if arguments.config is None else ["--config", str(arguments.config)]
    settings = deployment_settings()
    for key, value in arguments.settings.items():
        flag = settings[key].flag
        if key in SECRETS or key in without:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return tuple(words)


def public_settings(config: DeploymentConfig) -> dict[str, Value]:
    """Every setting of a deployment by key, but for those that may hold a password."""
    return {key: value for key, value in config.values().items() if key not in SECRETS}


def refuse_other_settings(arguments: Arguments, record: DeploymentRecord) -> None:
    """Raises `ConfigError` where a flag asks for another deployment than the one that runs."""
    settings = deployment_settings()
    for key, raw in arguments.settings.items():
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


def error_line(error: OutriderError, arguments: Arguments) -> str:
    """The error's line: flag, variable, or file and key where it is about a setting; the flag or
    PROMPT where it is about a request that the command made of them. Where nothing set it, its name
    is followed by where the value is from: the default, or the deployment that runs."""
    if isinstance(error, SettingError):
        return f"{_setting_name(error.key, arguments)}: {error.reason}"
    if isinstance(error, BadRequest):
        reason = error.reason
        if reason == NO_TOKENIZER:
            reason = "the model has no tokenizer; give token ids by `outrider generate --token-ids`"
        return f"{_field_name(error.field, arguments)}: {reason}"
    return error_message(error)


def error_message(error: OutriderError) -> str:
    """The error's message, with what gives a caller's key on the command line where that is wrong
    or missing."""
    if isinstance(error, Unauthenticated):
        return f"{error.message} ({KEY_VARIABLE}, or {KEY_FLAG})"
    return error.message


def _setting_name(key: str, arguments: Arguments) -> str:
    if key in arguments.given:
        return _flag(key)
    if key == "model" and getattr(arguments, "target", None):
        return "TARGET"
    if hasattr(arguments, key):
        return f"{key} (default)"  # An option of the command's own.
    try:
        found = set_by(arguments).get(key)
    except ConfigError:  # Another setting is wrong, too; this error comes first.
        found = None
    unset = "of the deployment that runs" if arguments.command in CHANGING else "default"
    return found or f"{key} ({unset})"


def _field_name(field: str, arguments: Arguments) -> str:
    parts = _PART.findall(field)
    if parts and parts[0][0] in _PROMPT_FIELDS:
        return "PROMPT" if hasattr(arguments, "prompt") else field
    for place, (name, _) in enumerate(parts):
        if hasattr(arguments, name):
            index = next((index for _, index in parts[place:] if index), None)
            if name not in arguments.given:
                return field
            return _flag(name) if index is None else f"{_flag(name)} (number {int(index) + 1})"
    return field


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
