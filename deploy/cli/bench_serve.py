"""`outrider bench serve`: a load on a deployment of ours, or on any server with OpenAI's HTTP
interface."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import serving
from outrider.errors import SettingError

from .command import Arguments, declared, grouped, option
from .connection import connected, connection_options
from .options import REQUEST_KEYS
from .output import note, progress, show

if TYPE_CHECKING:
    from benchmarks.serving_http import HttpServer
    from benchmarks.serving_load import ServingRun
    from benchmarks.serving_records import ServingClient
    from benchmarks.serving_report import ServingReport

KEY_VARIABLE: Final = "OPENAI_API_KEY"
REFRESH_S: Final = 0.25
"""Between two states of the progress bar."""


def add_measurement(measurement: Any) -> None:
    """Adds the command."""
    server = (
        option(
            "--base-url", metavar="URL",
            help="a server with OpenAI's interface, such as http://127.0.0.1:8000; by default a "
            "deployment of ours, by gRPC",
        ),
        option(
            "--endpoint", metavar="PATH",
            help="with --base-url: /v1/chat/completions, or /v1/completions; by default the first, "
            "with --raw the second",
        ),
        option("--api-key", help=f"with --base-url: a bearer token [${KEY_VARIABLE}]"),
    )  # fmt: skip
    draft = option(
        "--num-draft-tokens", type=int, metavar="K",
        help="by gRPC: draft tokens a round; 0 = plain decoding; by default the deployment's own",
    )  # fmt: skip
    measurement(
        "serve", "latency and throughput under load, as `vllm bench serve` has them", run,
        *grouped("Server", server), *declared(serving.add_arguments), draft,
        *connection_options(without=(*REQUEST_KEYS, "api_key")),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Load:
    """What is being measured, for whoever reports when it is over or interrupted."""

    run: ServingRun
    options: serving.ServingOptions
    backend: str
    server: str
    model: str
    date: str

    def report(self, is_over: bool) -> ServingReport:
        """What there is by now."""
        from benchmarks.serving_report import ServingReport

        records = sorted(self.run.records, key=lambda record: record.index)
        return ServingReport(
            date=self.date,
            settings=serving.shown_settings(self.options, self.backend, self.server, self.model),
            options=self.options,
            duration_s=self.run.duration_s,
            records=tuple(records),
            is_over=is_over,
            lags_s=tuple(self.run.lags_s),
        )


def run(arguments: Arguments) -> int:
    """Measures and reports; 1 where requests failed. Interrupted, it reports what there is."""
    options = serving.ServingOptions.from_arguments(arguments, arguments.num_draft_tokens)
    options.load_prompts()  # What is wrong with them shows before anything is started.
    server = _http_server(arguments, options)
    for name in ("save_result", "report"):
        _check_writable(name, getattr(arguments, name))
    if arguments.save_detailed and arguments.save_result is None:
        raise SettingError("save_detailed", "needs --save-result")
    loads: list[_Load] = []
    try:
        asyncio.run(_run(arguments, options, server, loads))
    except KeyboardInterrupt:
        if loads:
            _announce(arguments, loads[0].report(is_over=False))
        raise
    return _announce(arguments, loads[0].report(is_over=True))


def _http_server(arguments: Arguments, options: serving.ServingOptions) -> HttpServer | None:
    """Where HTTP goes; None = gRPC it is. Raises `SettingError` for flags of the other."""
    if arguments.base_url is None:
        for name in ("endpoint", "api_key"):
            if getattr(arguments, name) is not None:
                raise SettingError(name, "needs --base-url")
        return None
    from benchmarks.serving_http import CHAT, TEXT, HttpServer

    flags = dict(arguments.settings)
    model = flags.pop("model", "")
    others = [*sorted(flags), *(name for name in ("server", "config") if getattr(arguments, name))]
    others += ["num_draft_tokens"] if options.num_draft_tokens is not None else []
    others += ["rounds"] if options.rounds else []
    if others:
        raise SettingError(others[0], "is for a deployment of ours by gRPC, not for --base-url")
    endpoint = arguments.endpoint or (TEXT if options.raw else CHAT)
    if options.raw and endpoint == CHAT:
        raise SettingError("raw", f"cannot go with --endpoint {CHAT}, which applies the template")
    key = os.environ.get(KEY_VARIABLE, "") if arguments.api_key is None else arguments.api_key
    return HttpServer(
        base_url=arguments.base_url, endpoint=endpoint, model=str(model), api_key=key.strip()
    )


def _check_writable(name: str, path: Path | None) -> None:
    """Now, and not when everything has been measured."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise SettingError(name, f"{path} is wrong; it must be a file in a folder that exists")


async def _run(
    arguments: Arguments,
    options: serving.ServingOptions,
    server: HttpServer | None,
    loads: list[_Load],
) -> None:
    """Measures; `loads` has the load from its first request on."""
    from benchmarks.serving_load import ServingRun

    async with _client(arguments, options, server) as (client, backend, address, model):
        run = ServingRun(options, client)
        if options.num_warmups:
            progress(f"warming up with {options.num_warmups} requests")
            await run.warm_up()
        date = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        loads.append(_Load(run, options, backend, address, model, date))
        gc.collect()
        gc.freeze()  # What is always there is not looked through while times are taken.
        async with _bar(run, options):
            await run.measure()


@asynccontextmanager
async def _client(
    arguments: Arguments, options: serving.ServingOptions, server: HttpServer | None
) -> AsyncIterator[tuple[ServingClient, str, str, str]]:
    """Who asks the server; how, where, and for which model."""
    async with AsyncExitStack() as stack:
        if server is not None:
            from benchmarks.serving_http import BACKENDS, HttpServingClient

            http = await stack.enter_async_context(HttpServingClient(server, options))
            await http.find_model()
            yield http, BACKENDS[server.endpoint], server.address, http.model
            return
        from benchmarks.serving_grpc import BACKEND, GrpcServingClient

        connection = await stack.enter_async_context(connected(arguments))
        # What fails is told as it is, and not tried again.
        client = connection.client(tries_again=False)
        await stack.enter_async_context(client)
        model = (await client.describe()).model
        yield GrpcServingClient(client, options), BACKEND, connection.address, model


@asynccontextmanager
async def _bar(run: ServingRun, options: serving.ServingOptions) -> AsyncIterator[None]:
    """Shows on standard error, where that is a terminal, how far the load is."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    total = run.num_planned or options.duration
    if console.is_terminal:
        progress.rest()
    else:
        progress("sending requests")
    bar = Progress(
        *columns, console=console, transient=True, auto_refresh=False,
        disable=not console.is_terminal or progress.quiet,
    )  # fmt: skip
    with bar as shown:
        task = shown.add_task("", total=total)

        def refresh() -> None:
            over, seconds = len(run.records), run.duration_s
            of = f" of {run.num_planned}" if run.num_planned else ""
            failed = f", {run.num_failed} failed" if run.num_failed else ""
            rate = run.num_tokens / seconds if seconds else 0.0
            text = (
                f"{over}{of} requests over, {run.num_running} running{failed}, {rate:.0f} tokens/s"
            )
            progress.update(text)
            shown.update(
                task,
                completed=over if run.num_planned else seconds,
                description=text,
                refresh=True,
            )

        async def keep() -> None:
            while True:
                refresh()
                await asyncio.sleep(REFRESH_S)

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()
            progress.rest()


def _announce(arguments: Arguments, report: ServingReport) -> int:
    """Writes what was asked for; the exit code."""
    from benchmarks.serving_report import failures, render, warnings

    if arguments.json:
        print(report.to_json())
    else:
        for table in render(report):
            show(table)
    if arguments.save_result is not None:
        text = report.to_detailed_json() if arguments.save_detailed else report.to_json()
        _write("save_result", arguments.save_result, text + "\n")
    if arguments.report is not None:
        from benchmarks.serving_page import page

        _write("report", arguments.report, page(report))
    sys.stdout.flush()
    failed = failures(report)
    for warning in warnings(report):
        note(warning)
    if failed:
        note("\n".join(failed))
    return 1 if failed else 0


def _write(name: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingError(name, f"cannot write {path}: {error.strerror}") from error
