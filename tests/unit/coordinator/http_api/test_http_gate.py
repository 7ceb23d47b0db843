"""The gate before HTTP: every route asks for a key, and each request is counted once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from told_coordinator import FINISHED, STARTED, TOKENS, MemorySlots
from told_coordinator import ToldCoordinator as Service

from coordinator.auth.access_control import AccessControl, watch_keys
from coordinator.auth.rate_limits import Limiter, rate_exceeded
from coordinator.http_api.app import build_app
from outrider.api_keys import Caller, add_key

BODY: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 3}
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "NOTHING")
OPEN_PATHS = {"/", "/health", "/page/page.js"}
NOWHERE = (
    "/v1/models?path=/health",
    "/v1/models/..%2f..%2fhealth",
    "/health%00",
    "/Health",
    "/health;x",
    "//",
    "/v1",
    "/v1/nothing",
    "/docs",
    "/redoc",
    "/health/",
    "/health/x",
    "//health",
)


class Locked:
    """An application behind a gate, and the key of its only caller."""

    def __init__(self, directory: Path, service: Service, concurrency: int = 1) -> None:
        self.key = add_key(directory / "keys", Caller("alice", "team", concurrency=concurrency))
        self.slots = MemorySlots(1500, 0.02)
        self.service = service
        keys = watch_keys(directory / "keys", (), lambda: 0.0)
        gate = AccessControl(keys, Limiter(self.slots))
        # As much of a coordinator as the routes call.
        self.app: FastAPI = build_app(service, asyncio.Event(), None, gate)  # type: ignore[arg-type]

    async def send(
        self, method: str, path: str, *headers: tuple[str, str], body: Any = None
    ) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.request(method, f"http://here{path}", headers=headers, json=body)

    async def post(self, **fields: Any) -> httpx.Response:
        shown = ("authorization", f"Bearer {self.key}")
        return await self.send("POST", "/v1/completions", shown, body={**BODY, **fields})

    async def freed(self) -> None:
        """Returns once nothing is counted as running."""
        async with asyncio.timeout(5):
            while self.slots.taken:
                await asyncio.sleep(0.001)


@pytest.fixture
def locked(tmp_path: Path) -> Locked:
    return Locked(tmp_path, Service(STARTED, TOKENS, FINISHED))


def paths_of(app: FastAPI) -> set[str]:
    """Of every route, whatever kind it is, with something for each parameter."""
    found = {str(getattr(route, "path", "")) for route in app.routes} - {"/page"}
    return {path.replace("{name:path}", "a/b").replace("{path:path}", "a") for path in found}


async def test_no_route_answers_without_a_key(locked: Locked) -> None:
    """Whatever the application has, by every method, and what it has not: without credentials, with
    a wrong key, another scheme or two keys it is a 401 in OpenAI's shape, before a body is looked
    at, but for the paths that are open. With a key each answers by itself."""
    key = locked.key
    refused: list[list[tuple[str, str]]] = [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", f"Bearer {key[:-2]}xx")],
        [("authorization", f"Basic {key}")],
        [("authorization", key)],
        [("authorization", f"Bearer {key}"), ("authorization", f"Bearer {key}")],
        [("x-api-key", key)],
        [("cookie", f"authorization=Bearer {key}")],
    ]
    paths = paths_of(locked.app)
    assert paths >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics"}
    assert paths >= {"/openapi.json", "/version", "/health", "/v1/models/a/b"}
    for path in (paths | set(NOWHERE)) - OPEN_PATHS:
        for method in METHODS:
            for headers in refused:
                found = await locked.send(method, path, *headers, body={"no": "body"})
                assert found.status_code == 401, (method, path, headers)
                assert found.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    error = found.json()["error"]
                    assert set(error) == {"message", "type", "param", "code"}
                    assert error["type"] == "authentication_error"
                    assert error["code"] == "invalid_api_key"
                assert key not in found.text
            shown = ("authorization", f"Bearer {key}")
            let_in = await locked.send(method, path, shown, body={"no": "body"})
            assert let_in.status_code not in (401, 500), (method, path)
    for path in OPEN_PATHS:
        for headers in refused:
            found = await locked.send("GET", path, *headers)
            assert found.status_code == 200, (path, headers)
    assert locked.service.tenants == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_counts_once_and_each_of_its_texts_has_a_place(
    tmp_path: Path, stream: bool
) -> None:
    """All places are taken at once, and free when its caller has the answer; a request that needs
    more than are free is refused whole, and one that needs more than there are for good."""
    locked = Locked(tmp_path, Service(STARTED, TOKENS, FINISHED), concurrency=4)
    found = await locked.post(n=2, prompt=[[1], [2]], stream=stream)
    assert found.status_code == 200
    assert len(locked.slots.depths) == 1
    assert locked.service.tenants == ["team"] * 4
    assert locked.slots.taken == set()
    for fields, param in (
        ({"n": 5}, "n"), ({"n": 2, "prompt": [[1]] * 3}, "n"), ({"prompt": [[1]] * 5}, "prompt"),
    ):  # fmt: skip
        found = await locked.post(**fields, stream=stream)
        error = found.json()["error"]
        assert (found.status_code, error["param"]) == (400, param)
        assert "the key 'alice' may run 4 at a time" in error["message"]
    locked.slots.taken.add("of another coordinator")
    found = await locked.post(n=4, stream=stream)
    assert found.status_code == 429
    assert len(locked.slots.depths) == 1
    assert (await locked.post(n=3, stream=stream)).status_code == 200
    assert len(locked.service.tenants) == 7


async def test_what_does_not_generate_is_not_counted(locked: Locked) -> None:
    """Nor is a body that is refused as it stands."""
    shown = ("authorization", f"Bearer {locked.key}")
    for path in ("/v1/models", "/version", "/openapi.json"):
        assert (await locked.send("GET", path, shown)).status_code == 200
    assert (await locked.post(n=0)).status_code == 400
    assert (await locked.post(nothing=1)).status_code == 400
    assert len(locked.slots.depths) == 0


async def test_no_body_is_read_for_a_key_whose_bucket_is_empty(
    locked: Locked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anybody asked, until there is a request again; other routes answer."""
    asked: list[Caller] = []

    async def take(caller: Caller, slots: Sequence[str], depth: int) -> None:
        asked.append(caller)
        raise rate_exceeded(caller, 300)

    monkeypatch.setattr(locked.slots, "take", take)
    begun = asyncio.get_running_loop().time()
    assert (await locked.post()).status_code == 429
    monkeypatch.setattr("coordinator.http_api.reading.read_body", None)  # Who calls it fails.
    for fields in ({}, {"nothing": 1}):
        found = await locked.post(**fields)
        assert (found.status_code, found.headers["retry-after"]) == (429, "1")
        assert "requests a minute" in found.json()["error"]["message"]
    assert len(asked) == 1
    shown = ("authorization", f"Bearer {locked.key}")
    assert (await locked.send("GET", "/v1/models", shown)).status_code == 200
    monkeypatch.undo()
    await asyncio.sleep(begun + 0.31 - asyncio.get_running_loop().time())
    assert (await locked.post()).status_code == 200


async def test_one_tenants_bodies_keep_no_other_out(
    locked: Locked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted apart, over all keys of a tenant, until they are whole or given up."""
    body = json.dumps(BODY).encode()
    monkeypatch.setattr("coordinator.http_api.reading.HTTP_TENANT_BODIES_BYTES_MAX", 2 * len(body))
    keys = {
        name: add_key(tmp_path / "more", Caller(name, tenant))
        for name, tenant in (("ann", "team"), ("bob", "team"), ("eve", "other"))
    }
    gate = AccessControl(watch_keys(tmp_path / "more", (), lambda: 0.0))
    app = build_app(locked.service, asyncio.Event(), None, gate)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app)
    go_on = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:-1]
        await go_on.wait()
        yield body[-1:]

    async def post(name: str, content: Any = body) -> httpx.Response:
        headers = {"authorization": f"Bearer {keys[name]}", "content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.post("/v1/completions", headers=headers, content=content)

    waiting = [asyncio.create_task(post(name, slowly())) for name in ("ann", "bob")]
    await asyncio.sleep(0.05)
    for name in ("ann", "bob"):
        refused = await post(name)
        assert refused.status_code == 429
        assert "the tenant 'team' sends bodies" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]
    assert (await post("eve")).status_code == 200
    go_on.set()
    assert [one.status_code for one in await asyncio.gather(*waiting)] == [200, 200]
    assert (await post("ann")).status_code == 200
