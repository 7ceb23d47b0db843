"""Servers with OpenAI's HTTP interface as sides of `bench peers --servers`: one client for all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from outrider.errors import Unavailable

from .answering import START_TIMEOUT_S, STOP_TIMEOUT_S, ending
from .measurement import Completion, Decoding
from .peers_libraries import LibraryModel, Peer, Setting
from .prompts import BenchPrompt
from .references import reference_environment
from .serving import ServingOptions
from .serving_http import CHAT, TEXT, HttpServer, HttpServingClient
from .serving_records import Heard, RequestFailed

_POLL_S: Final = 0.5


class HttpSide:
    """A server as the measurement calls it. An async context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        raw: bool,
        api_key: str = "",
        extra_body: Mapping[str, object] | None = None,
    ) -> None:
        """`extra_body` is added to every request's."""
        self.base_url = base_url
        self._raw = raw
        self._api_key = api_key
        self._extra_body = extra_body or {}
        self._stack = AsyncExitStack()
        self._clients: dict[float, HttpServingClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        """Decodes one prompt. Raises `Unavailable` where the request fails."""
        client = await self._client(decoding.temperature)
        heard = Heard(time.perf_counter)
        started_s = time.perf_counter()
        try:
            answer = await client.answer(prompt, decoding.max_tokens, heard)
        except RequestFailed as failure:
            raise Unavailable(f"{self.base_url}: {failure}") from failure
        if heard.ended_s is None or not answer.output_tokens:
            raise Unavailable(f"{self.base_url}: an answer without tokens, or without their number")
        return Completion(
            token_ids=(),
            started_s=started_s,
            seconds=heard.ended_s - started_s,
            num_rounds=answer.output_tokens,
            num_draft_tokens=0,
            num_accepted_draft_tokens=0,
            first_token_s=heard.chunk_s[0] - started_s if heard.chunk_s else None,
            counted_tokens=answer.output_tokens,
        )

    async def _client(self, temperature: float) -> HttpServingClient:
        """The client for requests at a temperature. Raises `Unavailable`."""
        if temperature not in self._clients:
            server = HttpServer(
                base_url=self.base_url,
                endpoint=TEXT if self._raw else CHAT,
                api_key=self._api_key,
                extra_body=self._extra_body,
            )
            client = HttpServingClient(server, ServingOptions(temperature=temperature))
            await self._stack.enter_async_context(client)
            await client.find_model()
            self._clients[temperature] = client
        return self._clients[temperature]


class ServerProcess(HttpSide):
    """Another system's server, in processes of its own. Entering waits until it lists its model,
    and raises `Unavailable` where it ends before."""

    def __init__(
        self, peer: Peer, setting: Setting, model: LibraryModel, environments: Path, *, raw: bool
    ) -> None:
        ports = _free_ports(len(peer.server))
        super().__init__(f"http://127.0.0.1:{ports[-1]}", raw=raw)
        self._name = f"the server of {peer.name}"
        self.environment = peer.environment(setting, model.num_threads, environments)
        flags = [
            word
            for name, value in setting.options.items()
            if isinstance(value, dict)
            for word in (f"--{name.replace('_', '-')}", json.dumps(value))
        ]
        values = asdict(model) | dict(setting.options) | {"ports": ports}
        programs = peer.python(environments).parent
        self._commands = [
            [str(programs / program), *(word.format(**values) for word in words), *flags]
            for program, *words in peer.server
        ]
        self._ports = ports
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Self:
        environment = reference_environment(os.environ) | self.environment
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                for command, port in zip(self._commands, self._ports, strict=True):
                    process = await asyncio.create_subprocess_exec(
                        *command,
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=asyncio.subprocess.DEVNULL,
                        env=environment,
                        start_new_session=True,  # An interrupt is for the measurement.
                    )
                    self._processes.append(process)
                    await self._until(process, partial(_accepts, port))
                await self._until(process, self._lists_a_model)
        except TimeoutError:
            await self._stop()
            raise Unavailable(f"{self._name} did not start in {START_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            await self._stop()
            raise Unavailable(f"{self._name} cannot be started: {error}") from error
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            await self._stop()

    async def _until(
        self, process: asyncio.subprocess.Process, is_ready: Callable[[], Awaitable[bool]]
    ) -> None:
        while not await is_ready():
            if process.returncode is not None:
                raise Unavailable(f"{self._name} {ending(process.returncode)} while it started")
            await asyncio.sleep(_POLL_S)

    async def _lists_a_model(self) -> bool:
        try:
            await self._client(0.0)
        except Unavailable:
            return False
        return True

    async def _stop(self) -> None:
        """Ends the processes and all that they have started."""
        while self._processes:
            process = self._processes.pop()
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(TimeoutError):
                    async with asyncio.timeout(STOP_TIMEOUT_S):
                        await process.wait()


async def _accepts(port: int) -> bool:
    """Whether a local port accepts connections."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def _free_ports(number: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
