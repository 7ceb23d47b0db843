"""`outrider bench WHAT`: measurements of a deployment, or of one that the command starts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import capacity, emulate, peers, speedup
from deploy.fleet.local_state import running_deployment, state_directory
from outrider.api_keys import new_key
from outrider.config import CoordinatorConfig
from outrider.drafters.names import LookupKind, parse_drafter
from outrider.replica.process_setup import available_cores

from . import bench_front_door, bench_models, bench_serve
from .command import Arguments, Command, Group, Option, declared, option
from .connection import Connection, connected, connection_options
from .options import REQUEST_KEYS, with_settings
from .output import progress, show

if TYPE_CHECKING:
    from benchmarks.references import ReferenceModel
    from benchmarks.report import SpeedupReport
    from outrider.client import Client

ASKED_NAME: Final = "measured-prompts.json"
"""In the state directory: what measurements have asked the deployment that runs."""


def _run_speedup(arguments: Arguments) -> int:
    options = speedup.SpeedupOptions.from_arguments(
        arguments, num_draft_tokens=arguments.num_draft_tokens
    )
    options.load_prompts()  # What is wrong with them shows before anything is started.
    reports = asyncio.run(_speedup(options, arguments))
    from benchmarks.report import render, to_json, warnings

    for report in reports:
        for warning in warnings(report):
            progress(warning)
    if arguments.json:
        print(to_json(reports))
        return 0
    for report in reports:
        show(render(report))
        found = report.overall
        print(
            f"speculative decoding runs at {found.speedup:.2f}x the speed of plain decoding, the "
            f"median over the prompts; over all {found.speculative_tokens_per_second:.1f} against "
            f"{found.plain_tokens_per_second:.1f} tokens/s"
        )
    return 0


def _run_peers(arguments: Arguments) -> int:
    options = peers.PeersOptions.from_arguments(
        arguments, num_draft_tokens=arguments.num_draft_tokens
    )
    options.load_prompts()  # What is wrong with them shows before anything is started.
    if options.servers:
        arguments = with_settings(arguments, http="true", port="0")
    report = asyncio.run(peers.run(options, lambda: _two_tenants(arguments, options.raw), progress))
    from benchmarks.peers_report import render

    if arguments.json:
        print(report.to_json())
    else:
        show(render(report))
    return 0


def _run_capacity(arguments: Arguments) -> int:
    report = asyncio.run(capacity.run(capacity.CapacityOptions.from_arguments(arguments), progress))
    if arguments.json:
        print(report.to_json())
    else:
        show(capacity.render(report))
    return 0


def _run_emulate(arguments: Arguments) -> int:
    options = emulate.EmulateOptions.from_arguments(arguments)
    report = asyncio.run(emulate.run(options, progress))
    from benchmarks.emulate_report import render

    if arguments.json:
        print(report.to_json())
    else:
        show(render(report))
    return 0


async def _speedup(options: speedup.SpeedupOptions, arguments: Arguments) -> list[SpeedupReport]:
    """A report for each concurrency. A deployment that the command starts is for one of them: the
    next one's prompts are the same, and answered ones are not measured as new ones are."""
    reports = []
    for level in options.levels():
        async with _subject(arguments, options.raw, _reference) as subject:
            reports.append(await speedup.run(level, subject, progress))
    return reports


@asynccontextmanager
async def _subject(
    arguments: Arguments,
    raw: bool,
    reference: Callable[[Connection], ReferenceModel | None],
) -> AsyncIterator[speedup.Subject]:
    """The deployment that is measured: the one that is named, the one that runs, or an own one."""
    async with connected(arguments) as connection, connection.client() as client:
        yield _subject_of(connection, client, raw, reference)


@asynccontextmanager
async def _two_tenants(
    arguments: Arguments, raw: bool
) -> AsyncIterator[tuple[speedup.Subject, speedup.Subject]]:
    """One deployment twice: where this command starts it as two tenants, neither of which finds
    cached what the other one asked."""
    key = new_key()
    is_own = (
        not arguments.server
        and "api_key" not in arguments.settings
        and running_deployment(state_directory(os.environ)) is None
    )
    if is_own:
        arguments = with_settings(arguments, api_key=key)
    async with connected(arguments) as connection, connection.client() as client:
        subject = _subject_of(connection, client, raw, _drafting_reference)
        if not is_own:
            yield subject, subject
            return
        other = replace(connection, api_key=key)
        async with other.client() as other_client:
            yield _subject_of(other, other_client, raw, _drafting_reference), subject


def _subject_of(
    connection: Connection,
    client: Client,
    raw: bool,
    reference: Callable[[Connection], ReferenceModel | None],
) -> speedup.Subject:
    settings = connection.settings
    return speedup.Subject(
        client=speedup.ServiceClient(client, raw=raw),
        model=str(settings.get("model", connection.address)),
        draft_model=str(settings.get("draft_model", "its own")),
        dtype=_dtype(connection),
        num_draft_tokens=int(
            settings.get("num_draft_tokens") or CoordinatorConfig().num_draft_tokens
        ),
        reference=reference(connection),
        keeps_answers=_keeps_answers(connection),
        asked=_asked(connection),
        http_url=connection.http_address and f"http://{connection.http_address}",
        api_key=connection.api_key,
    )


def _asked(connection: Connection) -> speedup.AskedPrompts | None:
    """What it was asked by measurements; None for a server of which only the address is known."""
    if connection.is_own:
        return speedup.AskedPrompts(None, "")
    if not connection.deployment:
        return None
    return speedup.AskedPrompts(state_directory(os.environ) / ASKED_NAME, connection.deployment)


def _keeps_answers(connection: Connection) -> bool:
    """Whether drafts copy from earlier answers; true where nothing is known of them."""
    settings = connection.settings
    if not settings:
        return True
    rooms = (settings["suffix_tokens_per_tenant"], settings["suffix_tokens_total"])
    return parse_drafter(str(settings["draft_model"])).lookup is LookupKind.SUFFIX and all(rooms)


def _dtype(connection: Connection) -> str:
    """What the target runs in: `auto` is what its files say."""
    asked = str(connection.settings.get("dtype", "unknown"))
    path = Path(connection.target_directory) / "config.json"
    if asked != "auto" or not connection.target_directory:
        return asked
    values = json.loads(path.read_text(encoding="utf-8"))
    return str(values.get("dtype") or values.get("torch_dtype") or asked)


def _reference(connection: Connection) -> ReferenceModel | None:
    """The target once more, without services; None where its files are not here."""
    if not connection.target_directory:
        return None
    from benchmarks.references import ReferenceModel

    settings = connection.settings
    return ReferenceModel(
        directory=connection.target_directory,
        dtype=str(settings["dtype"]),
        device=str(settings["device"]),
        num_threads=int(settings["target_num_threads"] or available_cores()),
        trust_remote_code=bool(settings["trust_remote_code"]),
    )


def _drafting_reference(connection: Connection) -> ReferenceModel | None:
    """The target and, where a model drafts, that model once more, on as many threads as the
    services have in all: theirs take turns."""
    target = _reference(connection)
    if target is None:
        return None
    from benchmarks.references import ReferenceDrafter
    from outrider.models.sources import resolve_model

    settings = connection.settings
    num_threads = max(target.num_threads, int(settings["draft_num_threads"] or 0))
    model = parse_drafter(str(settings["draft_model"])).model
    if model is None or model.name is None:
        return replace(target, num_threads=num_threads)
    directory = resolve_model(model.name, trust_remote_code=target.trust_remote_code)
    drafter = ReferenceDrafter(
        directory=str(directory), name=model.name, dtype=str(settings["draft_dtype"])
    )
    return replace(target, num_threads=num_threads, drafter=drafter)


bench: Final = Group("bench", subcommand_metavar="WHAT")


def _measurement(name: str, purpose: str, run: Callable[[Arguments], int], *params: Any) -> None:
    bench.add_command(
        Command(name, params=params, callback=run, help=f"{purpose[0].upper()}{purpose[1:]}.")
    )


def _deployment_options() -> list[Option]:
    draft = option(
        "--num-draft-tokens", type=int, metavar="K",
        help="draft tokens a round; by default the deployment's own",
    )  # fmt: skip
    return [draft, *connection_options(without=REQUEST_KEYS)]


_measurement(
    "speedup", "speculative against plain decoding, prompt by prompt", _run_speedup,
    *declared(speedup.add_arguments), *_deployment_options(),
)  # fmt: skip
_measurement(
    "peers",
    "Outrider beside vLLM, OpenVINO, llama.cpp, amd-pace and transformers, with the same "
    "weights, prompts and threads",
    _run_peers, *declared(peers.add_arguments), *_deployment_options(),
)  # fmt: skip
bench_serve.add_measurement(_measurement)
bench_front_door.add_measurement(_measurement)
_measurement(
    "capacity", "how many rounds one coordinator plays for many sessions", _run_capacity,
    *declared(capacity.add_arguments),
)  # fmt: skip
_measurement(
    "emulate",
    "ways to decode, by real services on emulated models of stated speed and acceptance",
    _run_emulate, *declared(emulate.add_arguments),
)  # fmt: skip
bench_models.add_measurements(_measurement)
