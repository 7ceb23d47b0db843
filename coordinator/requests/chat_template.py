"""Reads the chat template that replaces the model's own template."""

import re
from importlib.resources import files
from pathlib import Path

from outrider.config.deployment import HERMES
from outrider.errors import ConfigError, SettingError
from outrider.foundation.files import read_file

_TRAINED = re.compile(r"{%-?\s*(end)?generation\s*-?%}")


def read_chat_template(name: str) -> str:
    """Returns the text of a chat template. `name` is a path, or `HERMES` for the template in this
    package. An empty name gives an empty text. Raises `SettingError`."""
    if not name:
        return ""
    if name == HERMES:
        return files("coordinator.requests").joinpath("hermes.jinja").read_text("utf-8")
    from jinja2 import Environment, TemplateSyntaxError

    try:
        text = read_file(Path(name)).decode()
        # jinja2 cannot parse the `generation` blocks of transformers.
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TRAINED.sub("", text))  # noqa: S701
        if not text.strip():
            raise ConfigError(f"{name} is empty")
    except ConfigError as error:
        reason = f"{error.message}; allowed: a file, or {HERMES}"
    except UnicodeDecodeError as error:
        reason = f"{name} is not UTF-8: {error}"
    except TemplateSyntaxError as error:
        reason = f"{name}, line {error.lineno}: {error.message}"
    else:
        return text
    raise SettingError("chat_template", reason)
