"""Files of a batch at URLs: input is downloaded into a file first, output is uploaded once complete."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from trencadis.core.errors import StartupError

TRIES = 5
PAUSE = 5.0
PIECE = 1 << 20
TIMEOUT = httpx.Timeout(60.0)


def is_url(name: str) -> bool:
    """Returns True if ``name`` is a URL and not a path."""
    return name.startswith(("http://", "https://"))


def redact_url(url: str) -> str:
    """Returns a URL without the parts that may be secret: user, password, and a signed query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def download(url: str, path: Path) -> None:
    """Downloads ``url`` to ``path``.

    Raises:
        StartupError: it cannot be fetched.
    """
    for left in reversed(range(TRIES)):
        try:
            with httpx.stream("GET", url, timeout=TIMEOUT, follow_redirects=True) as response:
                _check(response, url)
                with path.open("wb") as file:
                    for piece in response.iter_bytes(PIECE):
                        file.write(piece)
            return
        except httpx.HTTPError as error:
            if not left:
                raise StartupError(f"{redact_url(url)} could not be fetched ({type(error).__name__}).") from None
            time.sleep(PAUSE)


def upload(path: Path, url: str) -> None:
    """Uploads a file by PUT.

    Raises:
        StartupError: it cannot be sent; the file stays.
    """

    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece

    headers = {"content-type": "application/jsonl", "content-length": str(path.stat().st_size)}
    for left in reversed(range(TRIES)):
        try:
            _check(httpx.put(url, content=pieces(), headers=headers, timeout=TIMEOUT), url)
            return
        except httpx.HTTPError as error:
            if not left:
                what = f"{redact_url(url)} did not take the output ({type(error).__name__})"
                raise StartupError(f"{what}; it lies in {path}.") from None
            time.sleep(PAUSE)


def _check(response: httpx.Response, url: str) -> None:
    """Raises StartupError for an error that a retry does not change, HTTPError for one that it may change."""
    if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
        raise StartupError(f"{redact_url(url)}: the server answered {response.status_code}.")
    if not response.is_success:
        raise httpx.ReadError(f"{response.status_code}")
