"""What an error calls the setting, the option or the field that is wrong: what the user wrote."""

from __future__ import annotations

import argparse
import re
from typing import Final

from outrider.errors import BadRequest, ConfigError, OutriderError, SettingError

from .settings import set_by

_PROMPT_FIELDS: Final = ("prompt", "text", "chat")
_PART: Final = re.compile(r"(\w+)(?:\[(\d+)\])?")
"""Of a field's path: a name, and the index of what is wrong in it."""


def spoken(error: OutriderError, arguments: argparse.Namespace) -> str:
    """The error's line: flag, variable, or file and key where it is about a setting; the flag or
    PROMPT where it is about a request that the command made of them."""
    if isinstance(error, SettingError):
        return f"{_setting_name(error.key, arguments)}: {error.reason}"
    if isinstance(error, BadRequest):
        return f"{_field_name(error.field, arguments)}: {error.reason}"
    return error.message


def _setting_name(key: str, arguments: argparse.Namespace) -> str:
    if getattr(arguments, key, None) is not None:
        return _flag(key)  # An option of the command's own.
    try:
        return set_by(arguments).get(key) or _flag(key)
    except ConfigError:  # Another setting is wrong, too; this error is told first.
        return _flag(key)


def _field_name(field: str, arguments: argparse.Namespace) -> str:
    parts = _PART.findall(field)
    if parts and parts[0][0] in _PROMPT_FIELDS:
        return "PROMPT" if "prompt" in arguments else field
    for place, (name, _) in enumerate(parts):
        if name in arguments:
            index = next((index for _, index in parts[place:] if index), None)
            return _flag(name) if index is None else f"{_flag(name)} (number {int(index) + 1})"
    return field


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
