"""Settings: typed values with a name, a unit, bounds, and four places they may come from.

A configuration is a pydantic dataclass (`CHECKED`). Its fields are settings, unless they are
`Internal`. Layers are merged by `merge`: defaults < YAML file < `OUTRIDER_*` environment <
flag. Each layer is checked by itself, so that an error names what set the bad value.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from outrider.errors import ConfigError, SettingError, did_you_mean

Value = str | int | float | bool | None
Config = TypeVar("Config")
T = TypeVar("T")

CHECKED: Final = ConfigDict(
    strict=True, extra="forbid", defer_build=True, use_attribute_docstrings=True,
    validate_by_name=True, validate_by_alias=False, hide_input_in_errors=True,
)  # fmt: skip
"""Of a dataclass of settings. An alias is the setting's key, where that is not the field's name."""
Internal = Annotated[T, Field(exclude=True)]
"""A field that is no setting: whoever starts the service fills it in."""

ENVIRONMENT_PREFIX: Final = "OUTRIDER_"
NOT_SETTINGS: Final = (
    "OUTRIDER_CACHE", "OUTRIDER_STATE_DIR", "OUTRIDER_TEST_DATA", "OUTRIDER_CA_CERT",
    "OUTRIDER_CLIENT_CERT", "OUTRIDER_CLIENT_KEY",
)  # fmt: skip
"""Variables of the same prefix that are no settings of a deployment: where things lie, and what
those who call one have."""
CONFIG_FILE_BYTES_MAX: Final = 2**20

_KIND_NAMES: Final = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}

_BOOLEANS: Final = ("true", "1", "yes", "on", "false", "0", "no", "off")


@dataclass(frozen=True)
class Setting:
    """One setting as the command line, the environment and the documentation see it."""

    key: str
    """Its name in a YAML file; the flag and the variable are made from it."""
    field: FieldInfo
    doc: str
    group: str
    """Name of the class that declares it."""

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENVIRONMENT_PREFIX + self.key.upper()

    @property
    def default(self) -> Value:
        """Its value where nothing sets it."""
        default: Value = self.field.default
        return default

    @property
    def secret(self) -> bool:
        """Whether its value is shown to nobody, in errors neither."""
        return not self.field.repr

    @property
    def optional(self) -> bool:
        """Whether None (in YAML: null) is a value."""
        return isinstance(self.field.annotation, types.UnionType)

    @property
    def kind(self) -> type:
        """`str`, `int`, `float` or `bool`."""
        if self.choices:
            return str
        one: Any = self.field.annotation
        found: type = typing.get_args(one)[0] if self.optional else one
        return found

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values, where there are few."""
        found = self.field.annotation
        return typing.get_args(found) if typing.get_origin(found) is Literal else ()

    @property
    def minimum(self) -> float | None:
        """The least value."""
        return self._bound("ge")

    @property
    def maximum(self) -> float | None:
        """The greatest value."""
        return self._bound("le")

    def _bound(self, name: str) -> float | None:
        found = (getattr(one, name, None) for one in self.field.metadata)
        return next((one for one in found if one is not None), None)

    @property
    def allowed(self) -> str:
        """What its values may be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = _KIND_NAMES[self.kind]
        if self.minimum is not None and self.maximum is not None:
            words += f" from {self.minimum} to {self.maximum}"
        elif self.minimum is not None:
            words += f", at least {self.minimum}"
        return words

    @cached_property
    def adapter(self) -> TypeAdapter[Value]:
        """Checks its values, and describes them as a JSON schema."""
        checked: Any = Annotated[self.field.annotation, Field(), *self.field.metadata]
        return TypeAdapter(checked)

    def parse(self, raw: object, source: str) -> Value:
        """The value that `raw` (text, or what YAML made of it) stands for. Raises `ConfigError`
        naming `source` where it is not one or lies outside the bounds."""
        try:
            if isinstance(raw, str) and not self._reads(raw):
                raise ValueError(raw)
            return self.adapter.validate_python(raw, strict=not isinstance(raw, str))
        except ValueError:  # pydantic's errors, too.
            shown = "what it is set to" if self.secret else repr(raw)
            hint = did_you_mean(str(raw), self.choices) if self.choices else ""
            raise ConfigError(
                f"{source}: {shown} is wrong; it must be {self.allowed}{hint}"
            ) from None

    def _reads(self, text: str) -> bool:
        """Whether the text has the form of its kind: pydantic also takes `y` and `5.0`."""
        if self.kind is bool:
            return text.strip().lower() in _BOOLEANS
        return self.kind is not int or "." not in text


def settings_of(config: Any) -> Mapping[str, Setting]:
    """The settings of a configuration by field name."""
    docs: dict[str, str] = {}
    groups: dict[str, str] = {}
    for kind in reversed(type.mro(config)):
        for name, one in getattr(kind, "__pydantic_fields__", {}).items():
            docs[name] = one.description or docs.get(name, "")
            groups.setdefault(name, kind.__name__)
    fields: Mapping[str, FieldInfo] = config.__pydantic_fields__
    return {
        name: Setting(one.alias or name, one, " ".join(docs[name].split()), groups[name])
        for name, one in fields.items()
        if not one.exclude
    }


@contextmanager
def checking(config: Any) -> Iterator[None]:
    """Turns the error of a value that does not suit this configuration into a `SettingError`."""
    try:
        yield
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_context=False)
        setting = settings_of(type(config))[str(first["loc"][0])]
        shown = "it" if setting.secret else repr(first["input"])
        raise SettingError(setting.key, f"{shown} is wrong; it must be {setting.allowed}") from None


def check_range(key: str, value: float | None, lowest: float, highest: float) -> None:
    """Raises `SettingError` unless an option of a command is in these bounds, or not given."""
    if value is not None and not lowest <= value <= highest:
        raise SettingError(key, f"{value} is wrong; it must be from {lowest} to {highest}")


@contextmanager
def blaming(key: str) -> Iterator[None]:
    """Turns a `ConfigError` that names no setting into a `SettingError` of this one."""
    try:
        yield
    except SettingError:
        raise
    except ConfigError as error:
        raise SettingError(key, error.message) from error


@contextmanager
def by_its_keys(config: type) -> Iterator[None]:
    """Lets a `SettingError` that names a field of this configuration name that field's setting."""
    try:
        yield
    except SettingError as error:
        found = settings_of(config).get(error.key)
        if found is None:
            raise
        raise SettingError(found.key, error.reason) from error


def build(config: type[Config], values: Mapping[str, Value], **internal: Any) -> Config:
    """A configuration from values by key; those that `values` lacks keep their default."""
    named = {
        name: values[found.key]
        for name, found in settings_of(config).items()
        if found.key in values
    }
    return config(**named, **internal)


def merge(
    settings: Mapping[str, Setting],
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, object],
) -> dict[str, Value]:
    """Values by key of all settings that a YAML file, the environment or a flag sets, the last one
    winning. Raises `ConfigError` for an unknown key and for a bad value, also where another layer
    overrides it."""
    given = _given(settings, file, environment, flags)
    return {found.key: found.parse(raw, source) for found, raw, source in given}


def sources(
    settings: Mapping[str, Setting],
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, object],
) -> dict[str, str]:
    """By key, what errors call each setting that is set: its flag, its variable, or file and key,
    whichever wins. Raises `ConfigError` for an unknown key."""
    return {found.key: source for found, _, source in _given(settings, file, environment, flags)}


def _given(
    settings: Mapping[str, Setting],
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, object],
) -> Iterator[tuple[Setting, object, str]]:
    """What each layer sets: the setting, what was written, and what set it. The last one wins."""
    if file is not None:
        for key, raw in _read_yaml(file).items():
            yield _known(settings, key, f"{file}: {key}"), raw, f"{file}: {key}"
    for variable, text in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in NOT_SETTINGS:
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            yield _known(settings, key, variable), text, variable
    for key, raw in flags.items():
        found = _known(settings, key, key)
        yield found, raw, found.flag


def _known(settings: Mapping[str, Setting], key: str, source: str) -> Setting:
    if key not in settings:
        names = {one.key: one for one in settings.values()}
        if source == ENVIRONMENT_PREFIX + key.upper():
            key, names = source, {one.variable: one for one in settings.values()}
        raise ConfigError(f"{source}: there is no such setting{did_you_mean(key, names)}")
    return settings[key]


def _read_yaml(path: Path) -> dict[str, object]:
    """A flat YAML mapping; `-` in a key is read as `_`."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Safe, and refuses a key that is written twice."""

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, object]:
        found: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True)).replace("-", "_")
            if key in found:
                raise ConfigError(f"{path}: {key}: is set twice")
            found[key] = loader.construct_object(value_node, deep=True)
        return found

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_FILE_BYTES_MAX + 1)
        if len(data) > CONFIG_FILE_BYTES_MAX:
            raise ConfigError(f"{path}: is larger than {CONFIG_FILE_BYTES_MAX} bytes")
        loaded = yaml.load(data, Loader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{path}: is not YAML: {line}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must be a mapping of settings to values")
    return loaded
