"""Settings: typed values with names and bounds, from flags, `OUTRIDER_*` variables, a YAML file and
defaults, in this order of precedence.

A configuration is a pydantic dataclass (`checked`). Its fields are settings, except the `Internal`
fields. Each source is checked on its own, so an error can name the source of a bad value."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import ConfigDict, Field, TypeAdapter

from outrider.errors import ConfigError, SettingError, UnknownSetting, did_you_mean
from outrider.foundation.files import read_file

Value = str | int | float | bool | None
Config = TypeVar("Config")
T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
def checked(prefix: str = "", fields: Collection[str] = ()) -> Any:
    """Makes a class a frozen dataclass that checks the values of its settings. The key of a setting
    is its field's alias. The default alias is the name, with the `prefix` for names in `fields`."""
    names = {name: prefix + name for name in fields}
    config = ConfigDict(
        strict=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_by_name=True,
        validate_by_alias=False,
        hide_input_in_errors=True,
        alias_generator=lambda name: names.get(name, name),
    )
    return pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=config)


def between(least: float, most: float) -> Any:
    """Bounds of a setting's values, for its `Annotated` type."""
    return Field(ge=least, le=most)


Internal = Annotated[T, Field(exclude=True)]
"""A field that is not a setting. The code that builds the configuration sets its value."""

ENVIRONMENT_PREFIX = "OUTRIDER_"
NOT_SETTINGS = (
    "OUTRIDER_CACHE",
    "OUTRIDER_STATE_DIR",
    "OUTRIDER_TEST_DATA",
    "OUTRIDER_CA_CERT",
    "OUTRIDER_CLIENT_CERT",
    "OUTRIDER_CLIENT_KEY",
)
"""Variables that begin with `OUTRIDER_` but hold local paths or credentials of clients."""

_KIND_NAMES = {
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}


@dataclass(frozen=True)
class Setting:
    """One setting as the command line, the environment and the documentation see it."""

    key: str
    doc: str
    group: str
    """Heading of the setting in the help: the docstring of the setting's class."""
    default: Value
    secret: bool
    """Whether the value is hidden everywhere, even in errors."""
    annotation: Any

    @cached_property
    def adapter(self) -> TypeAdapter[Value]:
        return TypeAdapter(self.annotation)

    @cached_property
    def schema(self) -> Any:
        """JSON schema of a value other than None. For a list, the schema of an entry."""
        schema = self.adapter.json_schema()
        schema = schema.get("items", schema)
        return schema.get("anyOf", [schema])[0]

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, tuple)

    @property
    def choices(self) -> Sequence[str]:
        """The allowed values if the type lists them, otherwise empty."""
        return self.schema.get("enum", ())  # type: ignore[no-any-return]

    @property
    def metavar(self) -> str:
        kind = self.schema.get("format", self.schema["type"]).upper()
        return ("|".join(self.choices) or kind) + (",.." if self.is_list else "")

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.key.upper()

    @property
    def allowed(self) -> str:
        if self.choices:
            return "one of " + ", ".join(choice or "(empty)" for choice in self.choices)
        schema = self.schema
        if "pattern" in schema:
            return str(schema["title"])
        words = _KIND_NAMES[schema["type"]]
        if "maximum" in schema:
            return f"{words} from {schema['minimum']} to {schema['maximum']}"
        return f"{words}, at least {schema['minimum']}" if "minimum" in schema else words

    def parse(self, raw: object, source: str) -> Value:
        """Converts `raw`, a text or a value from YAML, to the setting's value. The text of a list
        has commas between the entries. The `ConfigError` for a bad value names `source`."""
        try:
            if not isinstance(raw, str):
                return self.adapter.validate_python(raw, strict=True)
            entries = tuple(map(str.strip, raw.split(",")))
            return self.adapter.validate_python(entries if self.is_list else raw, strict=False)
        except ValueError:  # Includes pydantic's errors.
            quoted = "the value" if self.secret else repr(raw)
            hint = did_you_mean(str(raw), self.choices) if self.choices else ""
            raise ConfigError(
                f"{source}: {quoted} is wrong; it must be {self.allowed}{hint}"
            ) from None


def settings_of(config: type[Any]) -> Mapping[str, Setting]:
    """The settings of a configuration by field name."""
    settings = {}
    for name, field in config.__pydantic_fields__.items():
        if field.exclude:
            continue
        bases: list[Any] = [
            base for base in type.mro(config) if name in getattr(base, "__pydantic_fields__", {})
        ]
        docs = filter(None, (base.__pydantic_fields__[name].description for base in bases))
        settings[name] = Setting(
            key=field.alias or name,
            doc=" ".join(next(docs, "").split()),
            group=(bases[-1].__doc__ or "").rstrip("."),
            default=field.default,
            secret=not field.repr,
            annotation=Annotated[field.annotation, Field(title=field.title), *field.metadata],
        )
    return settings


@contextmanager
def blaming(key: str) -> Iterator[None]:
    """Turns a `ConfigError` that names no setting into a `SettingError` for this key."""
    try:
        yield
    except SettingError:
        raise
    except ConfigError as error:
        raise SettingError(key, error.message) from error


@contextmanager
def with_setting_keys(config: type) -> Iterator[None]:
    """Replaces the field name in a `SettingError` by the key of the setting."""
    try:
        yield
    except SettingError as error:
        if (setting := settings_of(config).get(error.key)) is None:
            raise
        raise SettingError(setting.key, error.reason) from error


def build(config: type[Config], values: Mapping[str, Value], **internal: Any) -> Config:
    """Builds a configuration with these values, by key. Other settings keep their defaults. Raises
    `SettingError` for a contradiction."""
    named = {
        name: values[setting.key]
        for name, setting in settings_of(config).items()
        if setting.key in values
    }
    with with_setting_keys(config):
        return config(**named, **internal)


def layers(
    settings: Mapping[str, Setting],
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, object],
) -> Iterator[dict[str, tuple[Setting, object, str]]]:
    """Yields three layers: the settings of a YAML file, of the environment, and of flags. A layer
    maps the key of each setting to the setting, its raw value, and the source to name in errors.
    Raises `UnknownSetting`."""
    in_file = {} if file is None else _read_yaml(file)
    for given in (
        [(key, raw, f"{file}: {key}") for key, raw in in_file.items()],
        [
            (name.removeprefix(ENVIRONMENT_PREFIX).lower(), raw, name)
            for name, raw in environment.items()
            if name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_SETTINGS
        ],
        [(key, raw, "--" + key.replace("_", "-")) for key, raw in flags.items()],
    ):
        layer = {}
        for key, raw, source in given:
            if key not in settings:
                raise UnknownSetting(source, key, did_you_mean(key, settings))
            layer[key] = settings[key], raw, source
        yield layer


def _read_yaml(path: Path) -> dict[str, object]:
    """Reads a flat mapping. A `-` in a key becomes `_`."""
    import yaml

    with blaming("config"):
        data = read_file(path)
    try:
        loaded = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{path}: is not YAML: {line}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must be a mapping of settings to values")
    return {str(key).replace("-", "_"): value for key, value in loaded.items()}
