"""What an error calls the setting, the option or the field that is wrong: what the user wrote."""

from __future__ import annotations

import argparse
import os
import re
from typing import Final

from outrider.config import deployment_settings
from outrider.errors import BadRequest, OutriderError, SettingError
from outrider.settings import sources

from .settings import given_flags

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
    given = given_flags(arguments)
    own = getattr(arguments, key, None) is not None
    if not own and key not in given:
        file = getattr(arguments, "config", None)
        set_by = sources(deployment_settings(), file, os.environ, given)
        if key in set_by:
            return set_by[key]
    return _flag(key)


def _field_name(field: str, arguments: argparse.Namespace) -> str:
    parts = _PART.findall(field)
    if parts and parts[0][0] in _PROMPT_FIELDS:
        return "PROMPT" if "prompt" in arguments else field
    for name, index in parts:
        if name in arguments:
            return f"{_flag(name)} (number {int(index) + 1})" if index else _flag(name)
    return field


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
