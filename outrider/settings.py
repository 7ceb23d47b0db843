"""Settings: typed values with a name, a unit, bounds, and four places they may come from.

A configuration is a frozen dataclass whose fields are made by `setting`; a field made otherwise is
not for users. Layers are merged by `merge`: defaults < YAML file < `OUTRIDER_*` environment < flag.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from outrider.errors import ConfigError, InvariantError, SettingError, check, did_you_mean

Value = str | int | float | bool | None
Config = TypeVar("Config")

ENVIRONMENT_PREFIX: Final = "OUTRIDER_"
NOT_SETTINGS: Final = (
    "OUTRIDER_CACHE", "OUTRIDER_STATE_DIR", "OUTRIDER_TEST_DATA", "OUTRIDER_CA_CERT",
    "OUTRIDER_CLIENT_CERT", "OUTRIDER_CLIENT_KEY",
)  # fmt: skip
"""Variables of the same prefix that are no settings of a deployment: where things lie, and what
those who call one have."""
CONFIG_FILE_BYTES_MAX: Final = 2**20

_METADATA: Final = "setting"
_KIND_NAMES: Final = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
_TRUE: Final = ("true", "1", "yes", "on")
_FALSE: Final = ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class _Bounds:
    doc: str
    key: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]
    secret: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as the command line, the environment and the documentation see it."""

    key: str
    """Its name in a YAML file; the flag and the variable are made from it."""
    kind: type
    """`str`, `int`, `float` or `bool`."""
    optional: bool
    """Whether None (in YAML: null) is a value."""
    default: Value
    doc: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]
    secret: bool = False
    """Whether its value is shown to nobody, in errors neither."""

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENVIRONMENT_PREFIX + self.key.upper()

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

    def parse(self, raw: object, source: str) -> Value:
        """The value that `raw` (text, or what YAML made of it) stands for. Raises `ConfigError`
        naming `source` where it is not one or lies outside the bounds."""
        value = self._convert(raw, isinstance(raw, str))
        if value is None and not (raw is None and self.optional):
            raise ConfigError(f"{source}: {self._shown(raw)} is wrong; it must be {self.allowed}")
        self.verify(value, source)
        return value

    def _convert(self, raw: object, is_text: bool) -> Value:
        if self.kind is str:
            return raw if isinstance(raw, str) else None
        if self.kind is bool:
            return _boolean(raw)
        if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
            return None
        try:
            if self.kind is int:
                return int(raw) if is_text or isinstance(raw, int) else None
            return float(raw)
        except ValueError:
            return None

    def verify(self, value: object, source: str) -> None:
        """Raises `ConfigError` naming `source` where `value` lies outside the bounds."""
        if value is None and self.optional:
            return
        good = isinstance(value, (int, float) if self.kind is float else self.kind)
        if good and isinstance(value, (int, float)) and not isinstance(value, bool):
            good = math.isfinite(value)
            good = good and (self.minimum is None or value >= self.minimum)
            good = good and (self.maximum is None or value <= self.maximum)
        if good and self.choices:
            good = value in self.choices
        if not good:
            hint = did_you_mean(str(value), self.choices) if self.choices else ""
            shown = self._shown(value)
            raise ConfigError(f"{source}: {shown} is wrong; it must be {self.allowed}{hint}")

    def _shown(self, value: object) -> str:
        return "what it is set to" if self.secret else repr(value)


def _boolean(raw: object) -> bool | None:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE + _FALSE:
        return raw.lower() in _TRUE
    return None


def setting(
    default: Any,
    doc: str,
    *,
    key: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """A dataclass field that users may set. `doc` says what it is, with its unit; `key` is its
    name where that is not the field's; a `secret` is kept out of the configuration's `repr`."""
    bounds = _Bounds(doc, key, minimum, maximum, choices, secret)
    return field(default=default, repr=not secret, metadata={_METADATA: bounds})


def settings_of(config: type) -> Mapping[str, Setting]:
    """The settings of a configuration dataclass by field name."""
    return _settings_of(config)


@cache
def _settings_of(config: type) -> Mapping[str, Setting]:
    """Once for each: to read types that are written as text takes long."""
    hints = typing.get_type_hints(config)
    found = {}
    for item in fields(config):
        bounds = item.metadata.get(_METADATA)
        if bounds is None:
            continue
        if item.default is MISSING:
            raise InvariantError(f"setting {item.name} has no default")
        kinds = [hints[item.name]]
        if isinstance(hints[item.name], types.UnionType):
            kinds = [kind for kind in typing.get_args(hints[item.name]) if kind is not type(None)]
        check(len(kinds) == 1 and kinds[0] in _KIND_NAMES, f"setting {item.name} has no kind")
        found[item.name] = Setting(
            key=bounds.key or item.name,
            kind=kinds[0],
            optional=kinds[0] is not hints[item.name],
            default=item.default,
            doc=bounds.doc,
            minimum=bounds.minimum,
            maximum=bounds.maximum,
            choices=bounds.choices,
            secret=bounds.secret,
        )
    return types.MappingProxyType(found)


def settings_by_key(*configs: type) -> dict[str, Setting]:
    """The settings of several configurations by key, in order; one key is one setting."""
    merged: dict[str, Setting] = {}
    for config in configs:
        for found in settings_of(config).values():
            known = merged.setdefault(found.key, found)
            check(known == found, f"setting {found.key} is defined twice, differently")
    return merged


def verify_settings(config: object) -> None:
    """Raises `ConfigError` naming the first field of `config` outside its bounds."""
    for name, found in settings_of(type(config)).items():
        found.verify(getattr(config, name), found.key)


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
