"""The files of the page, as they lie in the package."""

from __future__ import annotations

import asyncio
import tomllib
from importlib.resources import files
from pathlib import Path

import httpx

from coordinator.http_api.app import PAGE_PATHS, build_app, load_page

ROOT = Path(__file__).resolve().parents[4]
PAGE_BYTES_MAX = 100_000


def test_every_file_is_packaged_and_served() -> None:
    """What lies in the folder is in the wheel, and is answered; nothing else is."""
    lying = {one.name for one in files("coordinator.http_api").joinpath("page").iterdir()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["coordinator"]
    package = ROOT / "coordinator"
    packaged = {path.name for pattern in patterns for path in package.glob(pattern)}
    assert packaged == lying
    served = {"index.html" if path == "/" else path.removeprefix("/page/") for path in PAGE_PATHS}
    assert served == lying


def test_it_is_small() -> None:
    assert sum(len(one.content) for one in load_page().values()) < PAGE_BYTES_MAX


class Times:
    """Keeps the routes and statuses that it is told of."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int | None]] = []

    def add(self, seconds: float, method: str, scheme: str, route: str, status: int | None) -> None:
        self.seen.append((route, status))


async def test_each_is_timed_by_its_route() -> None:
    """As what else is asked for."""
    times = Times()
    app = build_app(None, asyncio.Event(), None, times=times)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        for path in sorted(PAGE_PATHS):
            await http.get(path)
    assert times.seen == [(path, 200) for path in sorted(PAGE_PATHS)]
