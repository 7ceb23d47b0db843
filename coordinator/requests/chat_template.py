"""Reads the chat template that replaces a model's own."""

import re
from importlib.resources import files
from pathlib import Path

from outrider.config import HERMES
from outrider.errors import SettingError
from outrider.limits import FILE_BYTES_MAX

_TRAINED = re.compile(r"{%-?\s*(end)?generation\s*-?%}")


def read_chat_template(name: str) -> str:
    """Returns the text of a template. `name` is a path, or `HERMES` for the template of this
    package. If `name` is empty, returns an empty text. Raises `SettingError`."""
    if not name:
        return ""
    if name == HERMES:
        return files("coordinator.requests").joinpath("hermes.jinja").read_text("utf-8")
    try:
        with Path(name).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        # A file that is too large is not decoded, because its cut text may be invalid UTF-8.
        text = "" if len(data) > FILE_BYTES_MAX else data.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = f"{name} cannot be read: {error}; allowed: a file, or {HERMES}"
        raise SettingError("chat_template", reason) from error
    if not text.strip():
        reason = f"{name} is empty, or larger than {FILE_BYTES_MAX} bytes"
        raise SettingError("chat_template", reason)
    from jinja2 import Environment, TemplateSyntaxError

    try:  # jinja2 does not know the `generation` blocks of transformers.
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TRAINED.sub("", text))  # noqa: S701
    except TemplateSyntaxError as error:
        reason = f"{name}, line {error.lineno}: {error.message}"
        raise SettingError("chat_template", reason) from error
    return text
