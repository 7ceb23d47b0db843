"""The files of the page, as they lie in the package."""

from __future__ import annotations

import asyncio
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import httpx

from coordinator.http_api.app import build_app

ROOT = Path(__file__).resolve().parents[4]
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
INLINE = r"<script(?! type=\"module\" src=)|<style|\son\w+=|\sstyle="
PAGE_BYTES_MAX = 100_000


async def test_every_file_is_packaged_and_served() -> None:
    """What lies in the folder is in the wheel, is answered with its type, and may be kept; nothing
    beside it is answered. It loads nothing from elsewhere, and every file is named by another."""
    folder = files("coordinator.http_api").joinpath("page")
    lying = {one.name: one.read_bytes() for one in folder.iterdir()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["coordinator"]
    packaged = {path.name for one in patterns for path in (ROOT / "coordinator").glob(one)}
    assert packaged == lying.keys()
    assert sum(map(len, lying.values())) < PAGE_BYTES_MAX
    app = build_app(None, asyncio.Event(), None)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app)
    named: set[tuple[str, str]] = set()
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        for path in ("/", *(f"/page/{name}" for name in lying)):
            name = path.rpartition("/")[2] or "index.html"
            found = await http.get(path)
            assert (found.status_code, found.content) == (200, lying[name])
            assert found.headers["content-type"].startswith(TYPES[name.rpartition(".")[2]])
            policy = dict(
                one.strip().split(" ", 1)
                for one in found.headers["content-security-policy"].split(";")
            )
            assert policy.pop("default-src") == "'none'"
            assert policy.pop("require-trusted-types-for") == "'script'"
            assert set(policy.values()) == {"'self'", "'none'"}
            assert found.headers["x-content-type-options"] == "nosniff"
            assert "://" not in found.text.replace("http://www.w3.org/2000/svg", "")
            assert not re.search(INLINE, found.text)
            named |= set(re.findall(r'(?:src|href)="page/([^"]+)"|from "\./([^"]+)"', found.text))
            again = await http.get(path, headers={"if-none-match": found.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert (await http.head(path)).status_code == 200
            assert (await http.post(path)).json()["error"]["code"] == "method_not_allowed"
        for path in ("/page", "/page/", "/page/x.js", "/page/../app.py", "/page/%2e%2e/app.py"):
            assert (await http.get(path)).json()["error"]["code"] == "not_found", path
    assert {"".join(one) for one in named} | {"index.html"} == lying.keys()
