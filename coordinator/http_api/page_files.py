"""The window: a page that shows speculative decoding at work, and its files.

They are read once, lie in memory, and need no key: all that they show is asked for by `/api/`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files
from typing import Final

from fastapi import FastAPI, Request, Response

PAGE: Final = "index.html"
FOLDER: Final = "/page/"
"""Where files other than the page itself are."""
CONTENT_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # No text becomes HTML.
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # Kept, and asked for again: a 304 is quick.
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is served."""

    content: bytes
    content_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """The file, or that it has not changed."""
        headers = {**_HEADERS, "etag": self.etag}
        known = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or f"W/{self.etag}" in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "content-type": self.content_type})


def load_page() -> dict[str, PageFile]:
    """All files of the page, by the paths that they are served at."""
    found = {}
    for one in files("coordinator.http_api").joinpath("page").iterdir():
        kind = CONTENT_TYPES.get(one.name.rpartition(".")[2])
        if kind is None:
            continue
        content = one.read_bytes()
        etag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
        path = "/" if one.name == PAGE else FOLDER + one.name
        found[path] = PageFile(content, kind, etag)
    return found


_FILES: Final = load_page()
PAGE_PATHS: Final = frozenset(_FILES)
"""Where the page and its files are."""


def add_page(app: FastAPI) -> None:
    """Adds a route for each file."""
    for path, file in sorted(_FILES.items()):
        app.add_api_route(path, _server(file), methods=["GET", "HEAD"], include_in_schema=False)


def _server(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return file.response(request)

    return serve
