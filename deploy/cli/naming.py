"""What an error calls the setting, the option or the field that is wrong: what the user wrote."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

from deploy.fleet.local_state import state_directory
from outrider.errors import (
    NO_TOKENIZER,
    BadRequest,
    ConfigError,
    OutriderError,
    SettingError,
    Unauthenticated,
)

from .settings import KEY_FLAG, KEY_VARIABLE, set_by

CHANGING: Final = ("scale", "autoscale", "upgrade")
"""Commands whose settings have the values of the deployment that runs, unless they are given."""
_PROMPT_FIELDS: Final = ("prompt", "text", "chat")
_PART: Final = re.compile(r"(\w+)(?:\[(\d+)\])?")
"""Of a field's path: a name, and the index of what is wrong in it."""


def spoken(error: OutriderError, arguments: argparse.Namespace) -> str:
    """The error's line: flag, variable, or file and key where it is about a setting; the flag or
    PROMPT where it is about a request that the command made of them. Where nothing set it, its name
    is followed by where the value is from: the default, or the deployment that runs."""
    if isinstance(error, SettingError):
        return f"{_setting_name(error.key, arguments)}: {error.reason}"
    if isinstance(error, BadRequest):
        return f"{_field_name(error.field, arguments)}: {_reason(error)}"
    return told(error)


def told(error: OutriderError) -> str:
    """The error's message, with what gives a caller's key on the command line where that is wrong
    or missing."""
    if isinstance(error, Unauthenticated):
        return f"{error.message} ({KEY_VARIABLE}, or {KEY_FLAG})"
    return error.message


def program(name: str = "outrider") -> str:
    """What to type for this program, or for one that is installed beside it: its path where a
    shell does not find it by name. Empty where there is none."""
    if shutil.which(name):
        return name
    beside = Path(sys.argv[0] if Path(sys.argv[0]).name == "outrider" else sys.executable)
    found = shutil.which(name, path=str(beside.parent))
    return found or ("" if name != "outrider" else name)


def _reason(error: BadRequest) -> str:
    """Why a request was refused, with the command's flag in place of the request's field."""
    if error.reason == NO_TOKENIZER:
        return "the model has no tokenizer; give token ids by `outrider generate --token-ids`"
    return error.reason


def typed() -> str:
    """What to type before a command's name, quoted for a shell, so that it finds the deployments
    that this process finds: this program, behind OUTRIDER_STATE_DIR where that is set."""
    ours = shlex.quote(program())
    if not os.environ.get("OUTRIDER_STATE_DIR"):
        return ours
    return f"OUTRIDER_STATE_DIR={shlex.quote(str(state_directory(os.environ)))} {ours}"


def _setting_name(key: str, arguments: argparse.Namespace) -> str:
    if _is_given(key, arguments):
        return _flag(key)
    if key == "model" and "target" in arguments:
        return "TARGET"
    if key in arguments:
        return f"{key} (default)"  # An option of the command's own.
    try:
        found = set_by(arguments).get(key)
    except ConfigError:  # Another setting is wrong, too; this error is told first.
        found = None
    unset = "of the deployment that runs" if arguments.command in CHANGING else "default"
    return found or f"{key} ({unset})"


def _field_name(field: str, arguments: argparse.Namespace) -> str:
    parts = _PART.findall(field)
    if parts and parts[0][0] in _PROMPT_FIELDS:
        return "PROMPT" if "prompt" in arguments else field
    for place, (name, _) in enumerate(parts):
        if name in arguments:
            index = next((index for _, index in parts[place:] if index), None)
            if not _is_given(name, arguments):
                return field
            return _flag(name) if index is None else f"{_flag(name)} (number {int(index) + 1})"
    return field


def _is_given(key: str, arguments: argparse.Namespace) -> bool:
    """Whether the flag of this name is among the words of the command."""
    flags = (_flag(key), f"--no-{_flag(key)[2:]}")
    return any(word.partition("=")[0] in flags for word in arguments.words)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
