"""Commands, options and arguments, made with click."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.foundation.settings import Setting

_ALL = "outrider.all"


class Arguments(argparse.Namespace):
    """A parsed command line. The command's own options are further attributes."""

    run: Callable[[Arguments], int]
    settings: dict[str, object]
    """The deployment settings that the command line sets, by key."""
    given: frozenset[str]
    """Names of the options and arguments that the command line has."""
    config: Path | None = None


class Seconds(click.FloatRange):
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number", param, ctx)
        return seconds


class Option(click.Option):
    """An option. The help shows the option under the heading `group`. Only `--help=all` shows a
    `rare` option. `setting` is the deployment setting that the option sets, if any."""

    def __init__(
        self,
        *names: str,
        group: str = "Options",
        rare: bool = False,
        setting: Setting | None = None,
        **attributes: Any,
    ) -> None:
        self.group, self.rare, self.setting = group, rare, setting
        super().__init__(names, **attributes)


def argument(name: str, help: str, metavar: str = "", **attributes: Any) -> click.Argument:  # noqa: A002
    shown = metavar or name.upper()
    if not attributes.get("required", True):
        shown = f"[{shown}]"
    return click.Argument([name], help=help, metavar=shown, **attributes)


def json_option() -> Option:
    """`--json`, which also turns progress reports off, except those of `bench`."""
    return Option("--json", is_flag=True, help="print one JSON object")


def grouped(group: str, options: Iterable[Option]) -> list[Option]:
    members = list(options)
    for option in members:
        option.group = group
    return members


class Command(click.Command):
    """A command. Parsing a command line returns `Arguments`, whose `run` executes the command."""

    def __init__(self, name: str, *, params: Iterable[click.Parameter], **attributes: Any) -> None:
        common = [
            Option("--verbose", "-v", is_flag=True, help="write an INFO log to standard error"),
            Option(
                "--quiet",
                "-q",
                is_flag=True,
                help="write neither progress nor statistics to standard error (implied by --json, "
                "except in bench)",
            ),
            _help_option(),
        ]
        super().__init__(
            name,
            params=[*params, *common],
            add_help_option=False,
            context_settings={"show_default": True, "max_content_width": 100},
            **attributes,
        )

    def invoke(self, ctx: click.Context) -> Arguments:
        given = frozenset(
            name
            for name in ctx.params
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        )
        own = dict(ctx.params if ctx.parent is None else ctx.parent.params | ctx.params)
        settings = {}
        for param in self.params:
            if isinstance(param, Option) and param.setting is not None:
                value = own.pop(param.name)
                if param.name in given:
                    settings[param.name] = ",".join(value) if isinstance(value, tuple) else value
        return Arguments(**own, run=self.callback, settings=settings, given=given)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        num_hidden = 0
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None or not isinstance(param, Option):
                continue
            shows_all = ctx.meta.get(_ALL)
            if param.rare and not shows_all:
                num_hidden += 1
                continue
            title = param.group if param.setting is None or shows_all else "Settings"
            groups.setdefault(title, []).append(record)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)
        if num_hidden:
            formatter.write_paragraph()
            formatter.write_text(f"--help=all shows {num_hidden} more options.")


class Group(click.Group):
    """A group of subcommands. `purposes` maps each subcommand's name to a line of help. `load`
    returns the subcommand with a given name."""

    def __init__(
        self,
        name: str,
        purposes: Mapping[str, str],
        load: Callable[[str], click.Command],
        *,
        params: Iterable[click.Parameter] = (),
        **attributes: Any,
    ) -> None:
        self._load = load
        super().__init__(
            name,
            params=[*params, _help_option()],
            add_help_option=False,
            no_args_is_help=True,
            commands=[
                click.Command(subcommand, short_help=words)
                for subcommand, words in purposes.items()
            ],
            **attributes,
        )

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name, named, left = super().resolve_command(ctx, args)
        if name is None or named is None:
            return name, named, left
        loaded = self._load(name)
        purpose = named.get_short_help_str()
        loaded.help = f"{purpose[0].upper()}{purpose[1:]}."
        return name, loaded, left


def command(name: str, *params: click.Parameter, **attributes: Any) -> Callable[[Any], Command]:
    return lambda run: Command(name, params=params, callback=run, **attributes)


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def exclusive(arguments: Arguments, *names: str) -> None:
    """Raises `ConfigError` if more than one of these options was given."""
    given = [flag_of(name) for name in names if name in arguments.given]
    if len(given) > 1:
        raise ConfigError(f"{given[1]}: cannot go with {given[0]}")


def _help_option() -> Option:
    def show(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None:
            ctx.meta[_ALL] = value == "all"
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return Option(
        "--help",
        "-h",
        is_flag=False,
        flag_value="common",
        metavar="[=all]",
        is_eager=True,
        type=click.Choice(("all", "common")),
        expose_value=False,
        callback=show,
        help="show this help; --help=all shows every option",
    )
