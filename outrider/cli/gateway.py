"""`outrider gateway` serves HTTP in front of the coordinators, and resumes streams that break."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import ssl
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.bench.report import Report
from outrider.config import deployment as config
from outrider.errors import ConfigError, SettingError, Unavailable
from outrider.fleet.local_state import DeploymentRecord, running_deployment, state_directory
from outrider.fleet.preflight import check_security_files, whole_paths
from outrider.foundation.refusals import REFUSALS
from outrider.foundation.settings import build

from .command import Arguments, Option, Seconds, command, grouped, json_option
from .options import caller_trust_of, setting_option, trust_options
from .output import progress, tell

if TYPE_CHECKING:
    from coordinator.http_api.gateway import Coordinators
    from outrider.telemetry.setup import Exports, Scrape

PORT = 8080
STOP_S = 10.0
_URL = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:]+\])(?::(\d{1,5}))?")
SETTINGS = ("host", "insecure", "api_key_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
"""Settings of a coordinator that the gateway also has."""
_DOCS = {
    "api_key_file": "the coordinators' file of API keys; the gateway then refuses a request "
    "without one of these keys before it reads the body, and limits the bodies of each tenant"
}


@command(
    "gateway",
    Option(
        "--coordinators",
        metavar="URL,URL",
        help="base URLs of the coordinators, such as http://10.0.0.5:8000; by default all "
        "coordinators of this machine's deployment, including those that start later",
    ),
    Option(
        "--port",
        type=click.IntRange(0, config.PORT_MAX),
        default=PORT,
        help="port to bind; 0 = any free port",
    ),
    Option(
        "--stop-timeout-s",
        type=Seconds(0, config.WAIT_S_MAX),
        default=STOP_S,
        metavar="S",
        help="how long a stop waits for running requests, s",
    ),
    *(
        setting_option(config.deployment_settings()[key], doc=_DOCS.get(key, ""))
        for key in SETTINGS
    ),
    json_option(),
    *grouped("Coordinators with TLS", trust_options()),
)
def gateway(arguments: Arguments) -> int:
    return asyncio.run(_serve(arguments))


async def _serve(arguments: Arguments) -> int:
    from coordinator.auth.access_control import OPEN, AccessControl, watch_keys
    from coordinator.http_api.gateway import build_gateway
    from coordinator.http_api.server import HttpOptions, HttpServer, TlsFiles
    from outrider.telemetry.metrics import HttpTimes
    from outrider.telemetry.setup import Scrape

    _open_many_files()
    record = None if arguments.coordinators is not None else _running()
    given = whole_paths(config.merge(arguments.settings, {}))
    host = given.pop("host", config.LOOPBACK)
    is_keyed = given.pop("insecure", False) or "api_key_file" in given
    is_keyed = is_keyed or (record is not None and record.asks_for_keys)
    if not (is_keyed or config.is_loopback(host) or given.get("ssl_ca_certs")):
        raise SettingError(
            "host",
            f"{host!r} is reachable from other machines, but the coordinators possibly "
            "require no API key; use 127.0.0.1, give the coordinators' --api-key-file, or give "
            "--insecure if the coordinators require keys or the network is trusted",
        )
    coordinators = _coordinators(arguments, record)
    checked = build(config.CoordinatorConfig, given)
    check_security_files(checked)
    access = OPEN
    if checked.api_key_file:
        access = AccessControl(watch_keys(Path(checked.api_key_file)))
    scrape = Scrape()
    exports = _exports(scrape)
    options = HttpOptions(
        host,
        arguments.port,
        metrics=scrape.render,
        access=access,
        tls=TlsFiles.of(checked),
        times=HttpTimes(exports.meter),
        spools=True,
    )
    hosts = () if is_keyed else options.hosts
    server = HttpServer(options, build_gateway(coordinators, hosts, access, options.metrics))
    await server.start()
    scheme = "http" if options.tls is None else "https"
    url = f"{scheme}://{server.address}"
    named = [*coordinators.pool.each]
    leads = f"gateway to {', '.join(named) or 'coordinators, once there are any'}"
    report = Report({"url": url, "coordinators": named}, [leads, f"  OpenAI  {url}/v1"])
    tell(report, arguments.json)
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    ends = [asyncio.create_task(wait) for wait in (asked.wait(), server.wait())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for number in (signal.SIGINT, signal.SIGTERM):  # A second signal ends the process at once.
        asyncio.get_running_loop().remove_signal_handler(number)
    progress("stopping", at_once=False)
    await server.stop(arguments.stop_timeout_s)
    await coordinators.transport.aclose()
    await exports.close()
    if server.failed:
        raise Unavailable("the HTTP server failed; --verbose shows its log")
    return 0


def _open_many_files() -> None:
    """Allows this process as many open files as it may allow itself, because each request may need
    three: two sockets and a temporary file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # Some systems refuse a limit that they state.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _exports(scrape: Scrape) -> Exports:
    """`scrape` then has the numbers of refused requests."""
    from outrider.telemetry.metrics import READINGS, watch
    from outrider.telemetry.setup import Exports

    exports = Exports("gateway", None, [scrape.reader], scrape)
    watch(exports.meter, "refusals", lambda: dict(REFUSALS), *READINGS["refusals"])
    return exports


def _running() -> DeploymentRecord:
    record = running_deployment(state_directory(os.environ))
    if record is None:
        raise Unavailable(
            "nothing runs here; start a deployment with `outrider serve`, or give the URLs of "
            "coordinators with --coordinators"
        )
    if record.settings.get("http") is False:
        raise ConfigError("the deployment on this machine serves no HTTP (--no-http)")
    return record


def _coordinators(arguments: Arguments, record: DeploymentRecord | None) -> Coordinators:
    from coordinator.http_api.gateway import Coordinators, open_transport
    from outrider.client.failover import EndpointPool

    state, given = state_directory(os.environ), arguments.coordinators
    for url in (given or "").split(",") if record is None else ():
        match = _URL.fullmatch(url.strip())
        if match is None or int(match[2] or 0) > config.PORT_MAX:
            raise SettingError(
                "coordinators",
                f"{url!r} is wrong; it must be http://HOST:PORT or https://HOST:PORT. Separate "
                "several URLs by commas",
            )
    context, name = _trust(arguments, record)
    scheme = "https" if record is not None and record.settings.get("ssl_certfile") else "http"

    def find() -> str:
        now = running_deployment(state)
        addresses = [] if now is None else now.http_address.split(",")
        return ",".join(f"{scheme}://{address}" for address in addresses if address)

    pool = EndpointPool(given or find, str)
    return Coordinators(pool, open_transport(context), name)


def _trust(arguments: Arguments, record: DeploymentRecord | None) -> tuple[ssl.SSLContext, str]:
    """Returns the TLS context for calls to coordinators, and the host name that their certificate
    must have. If this name is empty, the certificate must have the name of the called host."""
    settings = {} if record is None else record.settings
    trust, authority, name = caller_trust_of(arguments, settings), arguments.ca_cert, ""
    if trust is not None and trust.server_name:
        authority, name = settings["ssl_certfile"], trust.server_name
    context = ssl.create_default_context(cafile=authority)
    if name:  # Trust only this certificate, not all certificates of its authority.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if arguments.client_cert is not None:
        context.load_cert_chain(arguments.client_cert, arguments.client_key)
    return context, name
