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
from outrider.config import DeploymentConfig, configuration, deployment_settings, merge
from outrider.errors import (
    NO_TOKENIZER,
    BadRequest,
    ConfigError,
    OutriderError,
    SettingError,
    Unauthenticated,
)
from outrider.settings import Setting, Value, layers
from outrider.speculation.sampling_params import Rule, SamplingParams

from .command import Arguments, Option, grouped, option

SECRETS: Final = tuple(key for key, found in deployment_settings().items() if found.secret)
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
_PROMPT_FIELDS: Final = ("prompt", "text", "chat")


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
    shown = "" if setting.default in (None, "") else f" [{str(setting.default).lower()}]"
    flags = setting.flag
    kind: dict[str, Any] = {"metavar": "|".join(setting.choices) or setting.kind.__name__.upper()}
    if setting.kind is bool:
        flags, kind = f"{setting.flag}/--no-{setting.flag[2:]}", {}
    return Option(
        [flags, setting.key],
        setting=setting, group=setting.group, rare=rare, help=(doc or setting.doc) + shown,
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
    numbers: tuple[tuple[str, type, float | None, bool, str], ...] = (
        ("--max-tokens", int, max_tokens, False, "tokens at most"),
        ("--temperature", float, 0.0, False, "0..2; 0 is greedy"),
        ("--top-p", float, 1.0, False, "(0, 1]"),
        ("--top-k", int, 0, False, "0 or -1 = off"),
        ("--min-p", float, 0.0, True, "0..1"),
        ("--presence-penalty", float, 0.0, True, "-2..2"),
        ("--frequency-penalty", float, 0.0, True, "-2..2"),
        ("--repetition-penalty", float, 1.0, True, "(0, 10]"),
        ("--seed", int, None, False, "repeat this request's randomness"),
        ("--num-draft-tokens", int, None, False, "draft tokens a round; 0 = plain decoding"),
        ("--deadline-ms", int, None, False, "end after this time, ms"),
        (
            "--draft-deadline-ms", int, None, True, "time that a round gives its draft, ms; by "
            "default --draft-timeout-ms of the deployment",
        ),
    )  # fmt: skip
    return grouped("Request", [
        *(
            option(flag, type=kind, default=default, rare=rare, help=words)
            for flag, kind, default, rare, words in numbers
        ),
        option(
            "--stop", multiple=True, metavar="TEXT",
            help=f"end before this text; up to {limits.STOP_STRINGS_MAX} times",
        ),
        option("--ignore-eos", is_flag=True, rare=True, help="go on past the model's own end"),
        option(
            "--rule", choices=[rule.value for rule in Rule], help="acceptance rule; by default "
            "greedy at temperature 0, coupled with a seed, else token",
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
    return merge(arguments.settings, os.environ, arguments.config)


def deployment_config(arguments: Arguments) -> DeploymentConfig:
    """The deployment that file, environment and options describe. Raises `ConfigError`."""
    return configuration(given_settings(arguments))


def with_settings(arguments: Arguments, **values: object) -> Arguments:
    """The arguments as if these settings had been given too, by key."""
    return Arguments(**vars(arguments) | {"settings": arguments.settings | values})


def flags_again(arguments: Arguments, without: Collection[str]) -> tuple[str, ...]:
    """The words of the options that were given for settings, but for secrets and those in
    `without`."""
    words = [] if arguments.config is None else ["--config", str(arguments.config)]
    for key, value in arguments.settings.items():
        if key in SECRETS or key in without:
            continue
        if isinstance(value, bool):
            words.append(_flag(key if value else f"no_{key}"))
        else:
            words += [_flag(key), str(value)]
    return tuple(words)


def refuse_other_settings(arguments: Arguments, record: DeploymentRecord) -> None:
    """Raises `ConfigError` where a flag asks for another deployment than the one that runs."""
    for key, raw in arguments.settings.items():
        asked = deployment_settings()[key].parse(raw, _flag(key))
        if key in OF_CALLERS or (key not in SECRETS and record.settings.get(key) == asked):
            continue
        runs = "" if key in SECRETS else f" with {record.settings.get(key)!r}"
        raise ConfigError(
            f"{_flag(key)}: {asked if key not in SECRETS else '***'} was asked for, but a "
            f"deployment runs already{runs} ({record.grpc_address}); stop it first (outrider stop),"
            " or leave the flag out"
        )


def error_line(error: OutriderError, arguments: Arguments) -> str:
    """The error's line. It begins with the flag, the variable, or the file and key that set a wrong
    setting, or with the flag or PROMPT that a wrong field of a request comes from."""
    if isinstance(error, SettingError):
        return f"{_setting_name(error.key, arguments)}: {error.reason}"
    if isinstance(error, BadRequest):
        reason = error.reason
        if reason == NO_TOKENIZER:
            reason = "the model has no tokenizer; give token ids by `outrider generate --token-ids`"
        return f"{_field_name(error.field, arguments)}: {reason}"
    return error_message(error)


def error_message(error: OutriderError) -> str:
    """The error's message, with what gives another key to a caller without the right one."""
    if isinstance(error, Unauthenticated):
        return f"{error.message} ({KEY_VARIABLE}, or --api-key)"
    return error.message


def _setting_name(key: str, arguments: Arguments) -> str:
    if key in arguments.given:
        return _flag(key)
    if key == "model" and getattr(arguments, "target", None):
        return "TARGET"
    given = layers(deployment_settings(), arguments.config, os.environ, arguments.settings)
    try:
        return {found.key: source for found, _, source in given}.get(key, key)
    except ConfigError:  # Another setting is wrong, too; this error comes first.
        return key


def _field_name(field: str, arguments: Arguments) -> str:
    """`sampling.top_p` is `--top-p`, and `stop[1]` is `--stop (number 2)`."""
    names = re.findall(r"[a-z]\w*", field)
    if names and names[0] in _PROMPT_FIELDS and hasattr(arguments, "prompt"):
        return "PROMPT"
    index = re.search(r"\[(\d+)\]", field)
    number = f" (number {int(index[1]) + 1})" if index else ""
    return next((_flag(name) + number for name in names if name in arguments.given), field)


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")
