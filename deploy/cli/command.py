"""Commands on click: what they are made of, their help, and what is said where words are wrong.

Help shows a command's own options and the settings that are set most often; `--help=all` the rest.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from outrider.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from benchmarks.options import Options
    from outrider.settings import Setting

NEAR: Final = 0.75
"""How alike an option must be to what was typed to be suggested; see `did_you_mean`."""
_ALL: Final = "outrider.all"


class Arguments(argparse.Namespace):
    """What a command line says: an attribute for each option of the command's own, and
    `settings`, those of a deployment by key. `given` names the options on the command line."""

    command: str
    action: str
    """The last word of `bench speedup` and the like; else the command."""
    run: Callable[[Arguments], int]
    settings: dict[str, object]
    given: frozenset[str]
    config: Path | None


_NUMBER: Final = re.compile(r"-\d+|-\d*\.\d+")


class Option(click.Option):
    """One option. `group` heads it in the help; a `rare` one is shown by `--help=all` alone, and a
    `variadic` one takes all words up to the next option."""

    def __init__(
        self,
        *words: Any,
        group: str = "Options",
        rare: bool = False,
        setting: Setting | None = None,
        variadic: bool = False,
        **attributes: Any,
    ) -> None:
        self.group = group
        self.variadic = variadic
        self.rare = rare
        self.setting = setting
        super().__init__(*words, **attributes)

    @property
    def needs_value(self) -> bool:
        """Whether it does not stand for itself."""
        return not (self.is_flag or self.count or "--help" in self.opts)

    def get_help_extra(self, ctx: click.Context) -> Any:
        """With the default of the setting, which the option itself has not."""
        extra = super().get_help_extra(ctx)
        if self.setting is not None and self.setting.default not in (None, ""):
            extra["default"] = str(self.setting.default).lower()
        return extra


class OneOf(click.Choice[str]):
    """A choice whose error suggests the one that was meant."""

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        """The choice itself."""
        if value not in self.choices:
            hint = did_you_mean(str(value), self.choices)
            self.fail(
                f"{value!r} is wrong; it must be one of {', '.join(self.choices)}{hint}", param
            )
        return str(value)


def option(*names: str, choices: Iterable[str] = (), **attributes: Any) -> Option:
    """An option of a command's own."""
    if choices:
        attributes["type"] = OneOf(tuple(choices))
    return Option(list(names), **attributes)


def argument(name: str, help: str, metavar: str = "", **attributes: Any) -> click.Argument:  # noqa: A002
    """What a command takes without a flag; NAME in the help, unless there is a `metavar`."""
    return click.Argument([name], help=help, metavar=metavar or name.upper(), **attributes)


def json_option() -> Option:
    """`--json`, which also silences progress."""
    return option("--json", is_flag=True, help="print one JSON object")


def grouped(group: str, options: Iterable[Option]) -> list[Option]:
    """The options under one title."""
    found = list(options)
    for one in found:
        one.group = group
    return found


class Command(click.Command):
    """A command whose result, once its words are read, is its `Arguments`."""

    def __init__(self, name: str, *, params: Iterable[click.Parameter], **attributes: Any) -> None:
        super().__init__(
            name,
            params=[*params, *common_options()],
            add_help_option=False,
            context_settings={"show_default": True, "max_content_width": 100},
            **attributes,
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeats a variadic option before each of its words, as click knows it. A word that begins
        with a dash and is a number or has spaces is no option, and an option is no value."""
        options = {name: one for one in self.params if isinstance(one, Option) for name in one.opts}
        words: list[str] = []
        texts: list[str] = []
        waiting = last = ""
        for place, word in enumerate(args):
            is_text = _NUMBER.fullmatch(word) or (" " in word and word.split("=")[0] not in options)
            is_option = word.startswith("-") and word != "-" and not is_text
            if waiting and is_option:
                raise click.BadOptionUsage(waiting, f"{waiting}: needs a value", ctx)
            if word == "--":
                texts += args[place + 1 :]
                break
            if is_option:
                one = options.get(word)
                waiting = word if one is not None and one.needs_value else ""
                last = word if one is not None and one.variadic else ""
            elif not waiting and last:
                words.append(last)
            elif not waiting and word.startswith("-"):
                texts.append(word)
                continue
            else:
                waiting = ""
            words.append(word)
        return super().parse_args(ctx, [*words, "--", *texts] if texts else words)

    def invoke(self, ctx: click.Context) -> Arguments:
        """Its arguments, with those of the groups that it is in."""
        chain = [ctx]
        while chain[0].parent is not None:
            chain.insert(0, chain[0].parent)
        values: dict[str, Any] = {"config": None}
        settings: dict[str, object] = {}
        given: set[str] = set()
        for one in chain:
            for param in one.command.get_params(one):
                name = str(param.name)
                is_given = one.get_parameter_source(name) is ParameterSource.COMMANDLINE
                setting = getattr(param, "setting", None)
                value = one.params.get(name)
                if is_given:
                    given.add(name if setting is None else setting.key)
                if setting is None and (is_given or name not in values):
                    values[name] = value
                elif setting is not None and is_given:
                    settings[setting.key] = ",".join(value) if isinstance(value, tuple) else value
        names = [str(one.info_name) for one in chain[1:]] or [str(self.name)]
        return Arguments(
            **values, run=self.callback, command=names[0], action=names[-1],
            settings=settings, given=frozenset(given),
        )  # fmt: skip

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """By group; without rare ones, unless all are asked for."""
        everything = _ALL in ctx.meta
        groups: dict[str, list[tuple[str, str]]] = {}
        num_hidden = 0
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is None or not isinstance(one, Option):
                continue
            if one.rare and not everything:
                num_hidden += 1
                continue
            title = one.group
            if one.setting is not None and not everything:
                title = "Settings"
            groups.setdefault(title, []).append(record)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)
        if num_hidden:
            formatter.write_paragraph()
            formatter.write_text(f"--help=all shows {num_hidden} more options.")


class Group(click.Group):
    """Commands under one word."""

    def __init__(self, *words: Any, params: Iterable[click.Parameter] = (), **attributes: Any):
        super().__init__(
            *words, params=[*params, *common_options()], add_help_option=False,
            callback=self._require_command, **attributes,
        )  # fmt: skip
        self.invoke_without_command, self.no_args_is_help = True, False

    def _require_command(self, **_: Any) -> None:
        ctx = click.get_current_context()
        if ctx.invoked_subcommand is None:
            ctx.fail(f"{self.subcommand_metavar.partition(' ')[0]} is missing")

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click does, with a suggestion where there is no such command."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            hint = did_you_mean(args[0], self.list_commands(ctx))
            ctx.fail(f"{args[0]!r} is no command{hint}")
        return super().resolve_command(ctx, args)


def command(name: str, *params: click.Parameter, **attributes: Any) -> Callable[[Any], Command]:
    """Makes a command of the function that runs it with its `Arguments`."""

    def made(run: Callable[[Arguments], int]) -> Command:
        return Command(name, params=params, callback=run, **attributes)

    return made


def parsed_by(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """What an option's text is parsed by; a default, which is no text, stays as it is."""

    def convert(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except argparse.ArgumentTypeError as error:
            raise click.BadParameter(str(error)) from None

    return convert


def declared(options: type[Options]) -> list[Option]:
    """An option for each field of a measurement's options."""
    defaults = {entry.name: entry.default for entry in fields(options)}
    found = []
    for name, flag in options.flags().items():
        default = defaults[name]
        more: dict[str, Any] = {"is_flag": True}
        if not isinstance(default, bool):
            plain = flag.parse in (int, float)
            more = {
                "type": flag.parse if plain else parsed_by(flag.parse), "default": default,
                "metavar": flag.metavar, "multiple": flag.several, "variadic": flag.several,
                "choices": () if isinstance(default, tuple) else flag.choices,
            }  # fmt: skip
        found.append(option("--" + name.replace("_", "-"), help=flag.help, **more))
    return found


def exclusive(arguments: Arguments, *names: str) -> None:
    """Raises `ConfigError` where more than one of these options was given."""
    given = [f"--{name.replace('_', '-')}" for name in names if name in arguments.given]
    if len(given) > 1:
        raise ConfigError(f"{given[1]}: cannot go with {given[0]}")


def common_options() -> list[Option]:
    """What every command takes."""

    def show_help(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is None or ctx.resilient_parsing:
            return
        if value not in ("all", "common"):
            raise click.BadParameter(f"{value!r} is wrong; it may be all", ctx, param)
        if value == "all":
            ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()

    return [
        option("--verbose", "-v", is_flag=True, help="log what happens to standard error"),
        option(
            "--quiet", "-q", is_flag=True, help="only warnings and errors on standard error: no "
            "progress, no figures (as with --json)",
        ),
        option(
            "--help", "-h", is_flag=False, flag_value="common", metavar="[=all]", is_eager=True,
            expose_value=False, callback=show_help, help="this help, or that of all options",
        ),
    ]  # fmt: skip


def usage_message(error: click.UsageError) -> str:
    """The error's line: what is wrong, what is allowed, and where the command's help is."""
    if isinstance(error, click.NoSuchOption):
        known = [] if error.ctx is None else error.ctx.command.get_params(error.ctx)
        names = [name for one in known for name in one.opts if name.startswith("--")]
        hint = did_you_mean(error.option_name, names, NEAR)
        message = f"{error.option_name}: there is no such option{hint}"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        wrong = "is missing" if isinstance(error, click.MissingParameter) else error.message
        message = f"{_shown(error.param)}: {wrong}"
    else:
        message = error.format_message()
    path = "outrider" if error.ctx is None else error.ctx.command_path
    return f"{message.rstrip('.')} (see {path} --help)"


def _shown(param: click.Parameter) -> str:
    if isinstance(param, click.Argument):
        return param.human_readable_name
    return max(param.opts, key=len)
