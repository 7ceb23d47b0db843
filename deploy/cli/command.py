"""Commands on click. Help shows a command's own options and the settings that are set most often;
`--help=all` shows the rest."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.settings import Setting

_NUMBER = re.compile(r"-\d*\.?\d+$")
_ALL = "outrider.all"


class Arguments(argparse.Namespace):
    """What a command line says: an attribute for each option of the command's own, and
    `settings`, those of a deployment by key. `given` names the options on the command line."""

    run: Callable[[Arguments], int]
    settings: dict[str, object]
    given: frozenset[str]
    config: Path | None


class Option(click.Option):
    """An option under the title `group`. Only `--help=all` shows a `rare` one. `setting` is the
    setting that it gives. One of `several` words takes those up to the next option."""

    def __init__(
        self,
        names: list[str],
        *,
        group: str = "Options",
        rare: bool = False,
        setting: Setting | None = None,
        several: bool = False,
        **attributes: Any,
    ) -> None:
        self.group, self.rare, self.setting, self.several = group, rare, setting, several
        super().__init__(names, multiple=several or attributes.pop("multiple", False), **attributes)


def option(*names: str, choices: Iterable[str] = (), **attributes: Any) -> Option:
    """An option of a command's own."""
    if choices:
        attributes["type"] = click.Choice([str(one) for one in choices])
    return Option(list(names), **attributes)


def argument(name: str, help: str, metavar: str = "", **attributes: Any) -> click.Argument:  # noqa: A002
    """What a command takes without a flag; NAME in the help, unless there is a `metavar`."""
    shown = metavar or name.upper()
    if not attributes.get("required", True):
        shown = f"[{shown}]"
    return click.Argument([name], help=help, metavar=shown, **attributes)


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
        common = [
            option("--verbose", "-v", is_flag=True, help="log what happens to standard error"),
            option(
                "--quiet", "-q", is_flag=True, help="only warnings and errors on standard error: "
                "no progress, no figures (as with --json)",
            ),
            _help_option(),
        ]  # fmt: skip
        super().__init__(
            name,
            params=[*params, *common],
            add_help_option=False,
            context_settings={"show_default": True, "max_content_width": 100},
            **attributes,
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeats an option of several words before each of them, as click knows it. A word that
        begins with a dash and is a number or has spaces may be no option, but a text; unless it is
        the value of one."""
        options = [one for one in self.params if isinstance(one, Option)]
        several = {name for one in options if one.several for name in one.opts}
        valued = {name for one in options if not (one.is_flag or one.count) for name in one.opts}
        words: list[str] = []
        repeated = ""
        for word in args:
            if word.startswith("-"):
                repeated = word if word in several else ""
            elif repeated and words[-1] != repeated:
                words.append(repeated)
            words.append(word)
        try:
            return super().parse_args(ctx, [*words])
        except click.NoSuchOption:
            texts: list[str] = []
            others: list[str] = []
            for before, word in pairwise(["", *words]):
                is_text = _NUMBER.match(word) or (word[:1] == "-" and " " in word)
                is_value = before in valued or word.partition("=")[0] in valued
                (texts if is_text and not is_value else others).append(word)
            if not texts or "--" in words:
                raise
            return super().parse_args(ctx, [*others, "--", *texts])

    def invoke(self, ctx: click.Context) -> Arguments:
        """Its arguments, with those of the group that it is in."""
        given = frozenset(
            name for name in ctx.params
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        )  # fmt: skip
        own, settings = {}, {}
        for one in self.params:
            name, value = str(one.name), ctx.params.get(str(one.name))
            if not isinstance(one, Option) or one.setting is None:
                own[name] = value
            elif name in given:
                settings[name] = ",".join(value) if isinstance(value, tuple) else value
        of_group = {} if ctx.parent is None else ctx.parent.params
        return Arguments(
            **{"config": None, **of_group, **own}, run=self.callback, settings=settings,
            given=given,
        )  # fmt: skip

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """By group; without rare ones, unless all are asked for."""
        groups: dict[str, list[tuple[str, str]]] = {}
        num_hidden = 0
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is None or not isinstance(one, Option):
                continue
            if one.rare and _ALL not in ctx.meta:
                num_hidden += 1
                continue
            title = one.group if one.setting is None or _ALL in ctx.meta else "Settings"
            groups.setdefault(title, []).append(record)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)
        if num_hidden:
            formatter.write_paragraph()
            formatter.write_text(f"--help=all shows {num_hidden} more options.")


class Group(click.Group):
    """Commands under one word, by name with their purposes. Only the one that runs is loaded."""

    def __init__(
        self,
        name: str,
        purposes: Mapping[str, str],
        load: Callable[[str], click.Command],
        *,
        params: Iterable[click.Parameter] = (),
        **attributes: Any,
    ) -> None:
        self._purposes = purposes
        self._load = load
        super().__init__(
            name, params=[*params, _help_option()], add_help_option=False,
            no_args_is_help=True, **attributes,
        )  # fmt: skip

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the help."""
        return list(self._purposes)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of this name, loaded now."""
        if name.startswith("-"):
            return None
        if name not in self._purposes:
            raise click.NoSuchCommand(name, possibilities=self._purposes, ctx=ctx)
        found = self._load(name)
        found.help = f"{self._purposes[name][0].upper()}{self._purposes[name][1:]}."
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each with its purpose."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._purposes.items()))


def command(name: str, *params: click.Parameter, **attributes: Any) -> Callable[[Any], Command]:
    """Makes a command of the function that runs it with its `Arguments`."""
    return lambda run: Command(name, params=params, callback=run, **attributes)


def exclusive(arguments: Arguments, *names: str) -> None:
    """Raises `ConfigError` where more than one of these options was given."""
    given = [f"--{name.replace('_', '-')}" for name in names if name in arguments.given]
    if len(given) > 1:
        raise ConfigError(f"{given[1]}: cannot go with {given[0]}")


def _help_option() -> Option:
    def show(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is None:
            return
        if value == "all":
            ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()

    return option(
        "--help", "-h", is_flag=False, flag_value="common", metavar="[=all]", is_eager=True,
        choices=("all", "common"), expose_value=False, callback=show,
        help="this help, or that of all options",
    )  # fmt: skip
