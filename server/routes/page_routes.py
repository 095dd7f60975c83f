"""``GET /``: the web page, and its files under ``/page/``. It loads nothing from other servers."""

from __future__ import annotations

import hashlib
import html
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    data: bytes
    type: str
    etag: str

    @classmethod
    def from_bytes(cls, data: bytes, suffix: str) -> PageFile:
        """Makes a file of these bytes; ``suffix`` gives its type."""
        return cls(data, TYPES[suffix], f'"{hashlib.sha256(data).hexdigest()[:20]}"')


@cache
def read_page_files() -> dict[str, bytes]:
    """Reads the files of the page by name."""
    found = (f for f in files("trencadis.server.page").iterdir() if f.is_file())
    return {f.name: f.read_bytes() for f in found if f.name[f.name.rfind(".") :] in TYPES}


def list_open_paths() -> frozenset[str]:
    """Returns the paths that need no key, since the page itself asks for one."""
    return frozenset({"/", *(f"/page/{name}" for name in read_page_files())})


def router(root_path: str) -> APIRouter:
    """Returns the routes of the page, whose links begin with ``root_path``."""
    routes = APIRouter(include_in_schema=False)
    base = html.escape(f"{root_path.rstrip('/')}/", quote=True)
    index = read_page_files()["index.html"].replace(b'<base href="/">', f'<base href="{base}">'.encode())
    sent = {f"page/{name}": data for name, data in read_page_files().items() if name != "index.html"} | {"": index}

    def add(path: str, file: PageFile) -> None:
        async def answer(http: Request) -> Response:
            headers = {**HEADERS, "etag": file.etag}
            if http.headers.get("if-none-match") == file.etag:
                return Response(status_code=304, headers=headers)
            return Response(file.data, headers={**headers, "content-type": file.type})

        routes.add_api_route(f"/{path}", answer, methods=["GET", "HEAD"])

    for path, data in sent.items():
        add(path, PageFile.from_bytes(data, path[path.rfind(".") :] if path else ".html"))
    return routes
