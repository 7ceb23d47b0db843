"""An HTTP client of the coordinator's application, without a server."""

from typing import Any

import httpx

from coordinator.auth.access_control import OPEN, AccessControl
from coordinator.http_api.app import build_app
from coordinator.http_api.server import HttpOptions
from coordinator.http_api.tools import ChatFormats

BODY: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 3}


class Front:
    """An application, called without a socket."""

    def __init__(
        self,
        service: Any,
        access: AccessControl = OPEN,
        key: str = "",
        formats: ChatFormats | None = None,
    ) -> None:
        self.service = service
        self.key = key
        self.app = build_app(service, HttpOptions(access=access), formats)

    async def send(
        self, method: str, path: str, headers: Any = None, **body: Any
    ) -> httpx.Response:
        """Sends a request, with the key of this object if there are no `headers`."""
        if headers is None:
            headers = [("authorization", f"Bearer {self.key}")] if self.key else []
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, f"http://localhost{path}", headers=headers, **body)

    async def post(self, headers: Any = None, **fields: Any) -> httpx.Response:
        return await self.send("POST", "/v1/completions", headers, json={**BODY, **fields})
