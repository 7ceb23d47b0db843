"""Options for settings, requests and connections. This module also connects a command to a
deployment, and formats error messages."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider import errors, limits
from outrider.cli.vllm_flags import hint
from outrider.config import deployment as config
from outrider.config.deployment import DeploymentConfig, deployment_settings, merge
from outrider.drafters.names import same_drafter
from outrider.errors import BadRequest, ConfigError, OutriderError, SettingError, UnknownSetting
from outrider.fleet import local_state
from outrider.fleet.local_state import DeploymentLocation, DeploymentRecord, running_deployment
from outrider.foundation.settings import Setting, Value, settings_of
from outrider.speculation.sampling_params import Rule, SamplingParams, check_sampling

from .command import Arguments, Option, flag_of, grouped
from .output import progress

if TYPE_CHECKING:
    from outrider.client import Client
    from outrider.fleet.launcher import Deployment
    from outrider.transport.channel import Trust

SECRETS = tuple(key for key, setting in deployment_settings().items() if setting.secret)
KEY_VARIABLE = "OUTRIDER_API_KEY"
OF_CALLERS = ("api_key",)
"""Settings of the caller, which may differ from the settings of the running deployment."""
PLACE_KEYS = ("address", "deployment_name")
"""Settings that identify a deployment on a Ray cluster."""
REQUEST_KEYS = ("seed", "num_draft_tokens", "deadline_ms")
"""In `generate`, `chat` and `bench`, these options set the request's fields, not settings."""
COMMON = (
    "draft_model",
    "device",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "num_draft_tokens",
    "num_targets",
    "num_drafts",
    "grpc_port",
    "port",
    "host",
    "api_key_file",
    "redis_url",
    "telemetry",
)
"""Settings that `serve` and `upgrade` show under plain `--help`."""
_RARE_NUMBERS = (
    "--min-p",
    "--presence-penalty",
    "--frequency-penalty",
    "--repetition-penalty",
    "--draft-deadline-ms",
)
_PROMPT_FIELDS = ("prompt", "text", "chat")


def setting_options(
    without: Collection[str] = (),
    common: Collection[str] = ("draft_model",),
    only: Collection[str] | None = None,
) -> Iterator[Option]:
    """`--config`, and an option for each setting in `only` (None = all settings) that is not in
    `without`. Plain `--help` shows only the settings in `common`."""
    yield Option(
        "--config",
        type=Path,
        metavar="FILE",
        group="Settings",
        help="YAML file of settings; environment variables (OUTRIDER_NAME) override the file, and "
        "options override both",
    )
    for setting in deployment_settings().values():
        if setting.key not in without and (only is None or setting.key in only):
            yield setting_option(setting, rare=setting.key not in common)


def setting_option(setting: Setting, rare: bool = False, doc: str = "") -> Option:
    """An option for a setting. `merge` parses its value. `doc` replaces the help of the setting."""
    shown = "" if setting.default in (None, "") else f" [{str(setting.default).lower()}]"
    flags = setting.flag
    kind: dict[str, Any] = {"metavar": setting.metavar}
    if setting.schema["type"] == "boolean":
        flags, kind = f"{setting.flag}/--no-{setting.flag[2:]}", {}
    return Option(
        flags,
        setting.key,
        setting=setting,
        group=setting.group,
        rare=rare,
        default=None,
        help=(doc or setting.doc) + shown,
        multiple=setting.key == "api_key",
        **kind,
    )


def class_options(kind: type) -> list[Option]:
    """An option for each field of a subclass of `outrider.bench.options.Options`."""
    return [_field_option(setting) for setting in settings_of(kind).values()]


def _field_option(setting: Setting) -> Option:
    def parse(raw: object) -> object:
        try:
            return setting.parse(raw, setting.flag)
        except ConfigError as error:
            raise click.UsageError(error.message) from error

    kind: dict[str, Any] = {"type": parse, "metavar": setting.metavar}
    if setting.schema["type"] == "boolean":
        kind = {"is_flag": True}
    return Option(setting.flag, default=setting.default, help=setting.doc, **kind)


def request_options(max_tokens: int) -> list[Option]:
    numbers: Mapping[str, tuple[float | None, str]] = {
        "--max-tokens": (max_tokens, "largest number of tokens to generate"),
        "--temperature": (0.0, "sampling temperature, 0 to 2; 0 = greedy"),
        "--top-p": (1.0, "sample from the likeliest tokens with this total probability; 1 = all"),
        "--top-k": (0, "sample from this many likeliest tokens; 0 or -1 = all"),
        "--min-p": (0.0, "sample from tokens with at least this share of the top probability"),
        "--presence-penalty": (0.0, "subtracted from logits of tokens already seen, -2 to 2"),
        "--frequency-penalty": (0.0, "subtracted from a logit for each use of its token, -2 to 2"),
        "--repetition-penalty": (1.0, "over 1 makes tokens already seen less likely; at most 10"),
        "--seed": (None, "seed of the request's random numbers"),
        "--num-draft-tokens": (None, "largest number of draft tokens in a round; 0 = no drafts"),
        "--deadline-ms": (None, "time limit of the request, ms"),
        "--draft-deadline-ms": (
            None,
            "time limit of each proposal, ms; by default the deployment's --draft-timeout-ms",
        ),
    }
    return grouped(
        "Request",
        [
            *(
                Option(
                    flag,
                    type=float if isinstance(default, float) else int,
                    default=default,
                    rare=flag in _RARE_NUMBERS,
                    help=words,
                )
                for flag, (default, words) in numbers.items()
            ),
            Option(
                "--stop",
                multiple=True,
                metavar="TEXT",
                help=f"stop before this text; can be given up to {limits.STOP_STRINGS_MAX} times",
            ),
            Option("--ignore-eos", is_flag=True, rare=True, help="do not stop at the EOS token"),
            Option(
                "--rule",
                type=click.Choice([rule.value for rule in Rule]),
                help="acceptance rule; default: greedy (temperature 0), coupled (above 0, with "
                "--seed) or block (above 0, without --seed)",
            ),
        ],
    )


def request_fields(arguments: Arguments) -> dict[str, Any]:
    """The fields of a `GenerateRequest` that the request options set. Raises `BadRequest` for wrong
    sampling parameters. At temperature 0, also raises it for a rule other than greedy."""
    from outrider.interfaces.request import GenerateRequest

    if arguments.rule not in (None, Rule.GREEDY) and arguments.temperature == 0:
        raise BadRequest(
            "rule", f"{arguments.rule} needs --temperature above 0; at 0 the rule is greedy"
        )
    given = vars(arguments)
    names = SamplingParams.__dataclass_fields__.keys() & given.keys()
    sampling = SamplingParams(**{name: given[name] for name in names})
    check_sampling(sampling)
    fields = {name: given[name] for name in GenerateRequest.__dataclass_fields__ if name in given}
    return fields | {"sampling": sampling, "rule": given["rule"] and Rule(given["rule"])}


def given_settings(arguments: Arguments) -> dict[str, Value]:
    return merge(arguments.settings, os.environ, arguments.config)


def deployment_config(arguments: Arguments) -> DeploymentConfig:
    return config.load_config(arguments.settings, os.environ, arguments.config)


def refuse_other_settings(arguments: Arguments, record: DeploymentRecord) -> None:
    """Raises `ConfigError` if a flag contradicts the settings of the running deployment."""
    for key, asked in merge(arguments.settings, {}).items():
        runs = record.settings.get(key)
        same = same_drafter(str(asked), str(runs)) if key == "draft_model" else asked == runs
        if key not in OF_CALLERS and (key in SECRETS or not same):
            shown = "" if key in SECRETS else f", which has {runs!r}"
            raise SettingError(
                key,
                f"differs from the running deployment ({record.grpc_address}){shown}; stop "
                "the deployment first (outrider stop), or leave this flag out",
            )


def error_line(error: OutriderError, arguments: Arguments) -> str:
    """The line that reports an error. It begins with the source of the wrong value: a flag, a
    variable, a file and key, or PROMPT."""
    if isinstance(error, SettingError):
        return f"{_setting_name(error.key, arguments)}: {error.reason}"
    if isinstance(error, BadRequest):
        return f"{_field_name(error.field, arguments)}: {error.reason}"
    if isinstance(error, UnknownSetting) and (
        instead := hint("outrider serve", flag_of(error.key))
    ):
        return f"{error.source}: there is no such setting: {instead}"
    return error_message(error)


def error_message(error: OutriderError) -> str:
    if isinstance(error, errors.Unauthenticated):
        return f"{error.message} (set {KEY_VARIABLE}, or give --api-key)"
    return error.message


def _setting_name(key: str, arguments: Arguments) -> str:
    if key in arguments.given:
        return flag_of(key)
    if key == "model" and getattr(arguments, "target", None):
        return "TARGET"
    try:
        given = config.translated_layers(arguments.settings, os.environ, arguments.config)
        return {setting.key: source for setting, _, source in given}.get(key, key)
    except ConfigError:  # A second setting is wrong, so the source of `key` cannot be found.
        return key


def _field_name(field: str, arguments: Arguments) -> str:
    """The option of a field: `--top-p` for `sampling.top_p`, `--stop (number 2)` for `stop[1]`."""
    names = re.findall(r"[a-z]\w*", field)
    if names and names[0] in _PROMPT_FIELDS and hasattr(arguments, "prompt"):
        return "PROMPT"
    index = re.search(r"\[(\d+)\]", field)
    number = f" (number {int(index[1]) + 1})" if index else ""
    return next((flag_of(name) + number for name in names if name in arguments.given), field)


TRUST_OPTIONS = {
    "ca_cert": "certificate authority of the coordinator, PEM",
    "client_cert": "client certificate, if the coordinator requires one, PEM",
    "client_key": "private key of the client certificate, PEM",
}


@dataclass(frozen=True)
class Connection:
    address: str
    """HOST:PORT of the coordinators, separated by commas."""
    target_directory: str = ""
    """Directory of the target's files on this machine; empty = no directory is known."""
    tokenizer_directory: str = ""
    settings: Mapping[str, Value] = field(default_factory=dict)
    """The deployment's settings by key; empty with `--server`, because they are not known."""
    is_own: bool = False
    """Whether this command has started the deployment."""
    api_key: str = field(default="", repr=False)
    trust: Trust | None = field(default=None, repr=False)
    """None = no TLS."""
    target_addresses: tuple[str, ...] = ()
    """HOST:PORT of each target; empty with `--server`."""
    find: Callable[[], str] | None = None
    """Returns the coordinators' current addresses; None = the addresses do not change."""

    def client(self, *, tries_again: bool = True) -> Client:
        """With `tries_again`, the client repeats calls after temporary failures."""
        from outrider.client import Client
        from outrider.client.failover import RESUME_TIMEOUT_S
        from outrider.transport.channel import PLAIN

        return Client(
            self.find or self.address,
            api_key=self.api_key,
            trust=self.trust or PLAIN,
            resume_timeout_s=RESUME_TIMEOUT_S if tries_again else 0.0,
        )


def connection_options(without: Iterable[str]) -> list[Option]:
    """`--server`, options for TLS, and settings. The settings configure the temporary deployment
    that a command starts if no deployment runs."""
    server = Option(
        "--server",
        metavar="HOST:PORT",
        help="the coordinator to call; by default the deployment on this machine, or a temporary "
        "deployment if none runs",
    )
    return [
        *grouped("Connection", [server, *trust_options()]),
        *setting_options(tuple(without), ("model", "draft_model")),
    ]


def caller_options() -> list[Option]:
    doc = f"API key to send to coordinators [${KEY_VARIABLE}]"
    key = setting_option(deployment_settings()["api_key"], doc=doc)
    return grouped("Connection", [key, *trust_options()])


def trust_options() -> list[Option]:
    tls = "use TLS and trust the system's certificate authorities"
    return [
        Option("--tls", is_flag=True, rare=True, help=tls),
        *(
            Option(
                flag_of(name),
                type=lambda text: Path(text).expanduser(),
                metavar="FILE",
                envvar=f"OUTRIDER_{name.upper()}",
                rare=True,
                help=f"{words} [$OUTRIDER_{name.upper()}]",
            )
            for name, words in TRUST_OPTIONS.items()
        ),
    ]


def caller_trust_of(arguments: Arguments, settings: Mapping[str, Value]) -> Trust | None:
    """TLS for calls to a deployment with these settings; None = no TLS. Without `--tls` and
    `--ca-cert`, trusts the certificate in the settings. Raises `ConfigError` for wrong files."""
    authority, *shown = (getattr(arguments, name) for name in TRUST_OPTIONS)
    pinned = str(settings.get("ssl_certfile") or "")
    if not (pinned or arguments.tls or authority or any(shown)):
        return None
    from outrider.transport.tls import caller_trust, pinned_trust

    if pinned and authority is None and not arguments.tls:
        return pinned_trust(Path(pinned), *shown)
    return caller_trust(authority, *shown)


@asynccontextmanager
async def connected(arguments: Arguments) -> AsyncIterator[Connection]:
    """Yields a connection to the deployment at `--server`, or to this machine's deployment, or to a
    temporary deployment, which stops when the context ends. Raises `ConfigError` if flags
    contradict the settings of a running deployment."""
    state = local_state.state_directory(os.environ)
    if arguments.server:
        if given := arguments.settings.keys() - set(OF_CALLERS):
            raise SettingError(min(given), "cannot change the running deployment at --server")
        address, trust = checked_address(arguments.server), caller_trust_of(arguments, {})
        yield Connection(address, api_key=caller_key(arguments), trust=trust)
    elif (record := running_deployment(state)) is not None:
        refuse_other_settings(arguments, record)
        key = caller_key(arguments) or local_state.local_key(state)

        def find() -> str:
            now = running_deployment(state)
            return "" if now is None else now.grpc_address

        yield _connection(arguments, record, key, find)
    else:
        async with _own_deployment(arguments) as own:
            connection = _connection(arguments, own.record, own.api_key, lambda: own.address)
            yield replace(connection, is_own=True)


def _connection(
    arguments: Arguments, record: DeploymentRecord, api_key: str, find: Callable[[], str]
) -> Connection:
    return Connection(
        record.grpc_address,
        record.target_directory,
        record.tokenizer_directory,
        record.settings,
        api_key=api_key,
        trust=caller_trust_of(arguments, record.settings),
        find=find,
        target_addresses=tuple(record.target_addresses),
    )


def caller_key(arguments: Arguments) -> str:
    """The first key of --api-key, by default of `KEY_VARIABLE`. Raises `ConfigError` for a hash."""
    keys = str(arguments.settings.get("api_key", os.environ.get(KEY_VARIABLE, "")))
    key = keys.partition(",")[0].strip()
    if key.startswith("sha256:"):
        raise SettingError("api_key", "is the hash of a key; a caller must send the key itself")
    return key


def own_config(arguments: Arguments) -> DeploymentConfig:
    """The configuration of a temporary deployment. By default, gRPC takes any free port, and HTTP
    is on only if `port` is set."""
    given = given_settings(arguments)
    own: dict[str, Value] = {"grpc_port": 0} if "port" in given else {"grpc_port": 0, "http": False}
    return config.configuration(own | given)


def checked_address(server: str) -> str:
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--server: {server!r} is wrong; it must be HOST:PORT")
    return server


@asynccontextmanager
async def _own_deployment(arguments: Arguments) -> AsyncIterator[Deployment]:
    from outrider.fleet.launcher import Deployment

    own = own_config(arguments)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def stop() -> None:
        """Stops the deployment, and then this process. A second signal ends both at once."""
        loop.remove_signal_handler(signal.SIGTERM)
        if task is not None:
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory(prefix="outrider-") as state:
        async with Deployment(own, Path(state), report=progress) as deployment:
            progress.rest()
            try:
                yield deployment
            finally:
                progress("stopping the deployment", at_once=False)
        progress.rest()


def find_deployment(arguments: Arguments) -> DeploymentLocation:
    """Returns the deployment that the `PLACE_KEYS` identify, by default the deployment of this
    machine. Raises `Unavailable` if no deployment here matches and one of the keys is missing."""
    values = given_settings(arguments)
    address, name = (str(values.get(key) or "") for key in PLACE_KEYS)
    record = running_deployment(local_state.state_directory(os.environ))
    if (
        record is not None
        and name in ("", record.name)
        # The user may have given `serve` another name of the same cluster, such as `auto`.
        and address in ("", record.ray_address, record.settings.get("address"))
    ):
        token = Path(record.ray_token) if record.ray_token else None
        return DeploymentLocation(record.ray_address, record.name, token=token)
    if address and name:
        return DeploymentLocation(address, name)
    if address:
        raise errors.Unavailable(
            f"no deployment of this machine is on the Ray cluster at {address}; give the name "
            "of a deployment on that cluster with --deployment-name"
        )
    raise errors.Unavailable(
        "nothing runs here; start a deployment with `outrider serve`, or name one on another "
        "Ray cluster with --address and --deployment-name"
    )
