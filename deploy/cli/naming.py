"""What an error calls the setting, the option or the field that is wrong: what the user wrote."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import Final

from outrider.errors import BadRequest, ConfigError, OutriderError, SettingError

from .settings import set_by

_PROMPT_FIELDS: Final = ("prompt", "text", "chat")
_PART: Final = re.compile(r"(\w+)(?:\[(\d+)\])?")
"""Of a field's path: a name, and the index of what is wrong in it."""


def spoken(error: OutriderError, arguments: argparse.Namespace) -> str:
    """The error's line: flag, variable, or file and key where it is about a setting; the flag or
    PROMPT where it is about a request that the command made of them. A flag that was not given is
    not named: then it is the name of the setting or the field."""
    if isinstance(error, SettingError):
        return f"{_setting_name(error.key, arguments)}: {error.reason}"
    if isinstance(error, BadRequest):
        return f"{_field_name(error.field, arguments)}: {error.reason}"
    return error.message


def program(name: str = "outrider") -> str:
    """What to type for this program, or for one that is installed beside it: its path where a
    shell does not find it by name. Empty where there is none."""
    if shutil.which(name):
        return name
    beside = Path(sys.argv[0] if Path(sys.argv[0]).name == "outrider" else sys.executable)
    found = shutil.which(name, path=str(beside.parent))
    return found or ("" if name != "outrider" else name)


def _setting_name(key: str, arguments: argparse.Namespace) -> str:
    if _is_given(key, arguments):
        return _flag(key)
    if key == "model" and "target" in arguments:
        return "TARGET"
    if key in arguments:
        return f"{key} (not given)"  # An option of the command's own.
    try:
        found = set_by(arguments).get(key)
    except ConfigError:  # Another setting is wrong, too; this error is told first.
        found = None
    return found or f"setting {key} (not given)"


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
