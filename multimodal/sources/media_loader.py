"""Loads the bytes of an image or video from a data URL, a web address or a local file."""

from __future__ import annotations

import asyncio
import binascii
import os
import re
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeGuard, TypeVar
from urllib.parse import quote, unquote

from trencadis.core.errors import BadRequest, Forbidden, TooLarge, Unprocessable, attach_param
from trencadis.multimodal.sources.http_fetch import MAX_REDIRECTS, AddressRules, Fetcher, Resolver, check_content_type

T = TypeVar("T")
MAX_MEDIA_BYTES = 50_000_000
"""Default of --max-media-bytes."""
FETCH_TIMEOUT = 5.0
"""Default of VLLM_IMAGE_FETCH_TIMEOUT, seconds."""
MAX_OPEN_FILES = 8
"""Maximum number of local files to read at a time."""
SMALL = 1 << 16
CHUNK = 1 << 20
BLANKS = b" \t\r\n\f"
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):")
PATH_NOT_ALLOWED = "The path is not allowed by this server."


class MediaLoader:
    """Loads the bytes that a content part names, under the operator's limits.

    Args:
        allowed_domains: hosts, or suffixes with a leading dot, to download from; empty: every public host.
        allowed_local_path: folder below which ``file://`` URLs may read; None: file URLs are refused.
        max_bytes: most bytes of one file.
        timeout: seconds of one download.
        max_redirects: most redirects to follow.
        concurrent: maximum number of downloads at a time.
        resolver: replaces the system's name look-up, for tests.
        any_path: let a bare path name any file: the caller is the operator (offline use).
    """

    def __init__(
        self,
        allowed_domains: Sequence[str] = (),
        allowed_local_path: Path | None = None,
        max_bytes: int = MAX_MEDIA_BYTES,
        timeout: float = FETCH_TIMEOUT,
        max_redirects: int = MAX_REDIRECTS,
        concurrent: int = 32,
        resolver: Resolver | None = None,
        any_path: bool = False,
    ) -> None:
        self.max_bytes = max_bytes
        self._root = allowed_local_path
        self._any_path = any_path
        self._fetcher = Fetcher(AddressRules.from_hosts(allowed_domains), max_bytes, timeout, max_redirects, resolver)
        self._download_slots = LoopSemaphore(concurrent)
        self._files = LoopSemaphore(MAX_OPEN_FILES)
        self._pool = ThreadPoolExecutor(MAX_OPEN_FILES, thread_name_prefix="media")

    async def load(self, source: str | Path, param: str) -> bytes:
        """Returns the bytes of a URL or a bare path; errors name ``param``, the JSON path of the content part.

        A relative path starts at ``allowed_local_path``, or with ``any_path`` at the working folder.

        Raises:
            BadRequest: another scheme, a malformed URL, wrong base64.
            Forbidden: an address or path outside the rules.
            TooLarge: more than ``max_bytes``.
            UnsupportedMedia: the content type is not one of an image, a video or plain bytes.
            Unprocessable: the download failed, or the file cannot be read.
        """
        with attach_param(param):
            if isinstance(source, str) and source[:5].lower() == "data:":
                if len(source) <= SMALL:
                    return decode_data_url(source, self.max_bytes)
                return await self._in_thread(decode_data_url, source)
            return await self._load_external(source)

    async def _load_external(self, source: str | Path) -> bytes:
        """Returns the bytes of a source that is not in the request itself."""
        if isinstance(source, Path):
            async with self._files.current():
                return await self._in_thread(self._read_path, str(source))
        match = _SCHEME.match(source)
        scheme = match[1].lower() if match else ""
        if scheme == "file":
            async with self._files.current():
                return await self._in_thread(self._read_file, source)
        if scheme in ("http", "https"):
            async with self._download_slots.current():
                return await self._fetcher.get(source)
        raise BadRequest("The URL must be either a HTTP, data or file URL.")

    def close(self) -> None:
        """Shuts down the threads when their work is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._fetcher.close()

    async def _in_thread(self, work: Callable[[str, int], bytes], source: str) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, source, self.max_bytes)

    def _read_file(self, url: str, max_bytes: int) -> bytes:
        if self._root is None:
            raise Forbidden(PATH_NOT_ALLOWED)
        return read_file(url, self._root, max_bytes)

    def _read_path(self, path: str, max_bytes: int) -> bytes:
        if self._any_path:
            return read_file(f"file://{quote(os.path.abspath(path))}", Path("/"), max_bytes)
        if self._root is None:
            raise Forbidden(PATH_NOT_ALLOWED)
        return read_file(f"file://{quote(os.path.join(self._root.absolute(), path))}", self._root, max_bytes)


def is_web_url(source: object) -> TypeGuard[str]:
    """Returns True if ``source`` is an http(s) URL."""
    return isinstance(source, str) and source[:8].lower().startswith(("http:", "https:"))


class LoopSemaphore:
    """One asyncio semaphore per event loop: a semaphore serves only the loop that first waited on it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._semaphores: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    def current(self) -> asyncio.Semaphore:
        """Returns the running loop's semaphore."""
        loop = asyncio.get_running_loop()
        found = self._semaphores.get(loop)
        return self._add(loop) if found is None else found

    def _add(self, loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
        # A semaphore refers to its loop, so weak keys would never drop a loop.
        self._semaphores = {k: v for k, v in self._semaphores.items() if not k.is_closed()}
        made = self._semaphores[loop] = asyncio.Semaphore(self._size)
        return made


class MediaPermits:
    """Bounds how many media are in preparation, and how many are downloading.

    Media acquire a permit for preparation only once they are downloaded, so slow hosts delay no other media. Until then
    they hold a permit for downloads, so downloaded bytes that wait are bounded too.

    Args:
        concurrent: media in preparation: loaded, not yet cut into patches.
        downloads: media that are downloading, or downloaded and waiting for their preparation.
    """

    def __init__(self, concurrent: int, downloads: int) -> None:
        self._preparations = LoopSemaphore(concurrent)
        self._downloads = LoopSemaphore(downloads)

    def preparing(self) -> asyncio.Semaphore:
        """Returns the semaphore for preparing media that need no download."""
        return self._preparations.current()

    @asynccontextmanager
    async def hold(self, download: Callable[[], Awaitable[T]] | None) -> AsyncIterator[T | None]:
        """Holds a permit for preparation, after ``download`` if it is given, and yields its result (else None)."""
        semaphore = self.preparing()
        if download is None:
            async with semaphore:
                yield None
            return
        async with self._hold_after_download(download, semaphore) as found:
            yield found

    @asynccontextmanager
    async def _hold_after_download(
        self, download: Callable[[], Awaitable[T]], semaphore: asyncio.Semaphore
    ) -> AsyncIterator[T]:
        async with self._downloads.current():
            found = await download()
            await semaphore.acquire()
        try:
            yield found
        finally:
            semaphore.release()


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """Decodes ``data:[type][;...];base64,...``; blanks are skipped.

    Raises:
        UnsupportedMedia: the content type is not one of an image, a video or plain bytes.
        BadRequest: not base64, a character outside its alphabet, or missing or misplaced padding.
        TooLarge: more than ``max_bytes``.
    """
    comma = url.find(",", 0, 1024)
    if comma < 0 or not url[:comma].lower().rstrip().endswith(";base64"):
        raise BadRequest("Only base64 data URLs are supported.")
    check_content_type(url[len("data:") : comma])
    try:
        return _decode_base64(url, comma + 1, max_bytes)
    except ValueError:
        raise BadRequest("Non-base64 digit found in the data URL.") from None


def _decode_base64(url: str, start: int, max_bytes: int) -> bytes:
    """Decodes the characters from ``start`` on; raises ValueError for other characters or padding before the end."""
    out, rest, padded = bytearray(), b"", False
    for at in range(start, len(url), CHUNK):
        rest += url[at : at + CHUNK].encode("ascii").translate(None, BLANKS)
        whole = len(rest) // 4 * 4
        if whole and padded:
            raise ValueError("digits behind the padding")
        out += binascii.a2b_base64(rest[:whole], strict_mode=True)
        padded = padded or rest[:whole].endswith(b"=")
        rest = rest[whole:]
        if len(out) > max_bytes:
            raise TooLarge(f"The data URL holds more than {max_bytes} bytes.")
    if rest:
        raise BadRequest("The data URL's base64 is cut off or lacks its padding.")
    return bytes(out)


def read_file(url: str, root: Path, max_bytes: int) -> bytes:
    """Reads the file of a ``file://`` URL, which must lie below ``root`` after links are resolved.

    Raises:
        BadRequest: a malformed URL, or one with another host than localhost.
        Forbidden: outside ``root``, whether or not the file exists.
        TooLarge: more than ``max_bytes``.
        Unprocessable: not a regular file, or not readable.
    """
    match = re.fullmatch(r"file://(?:localhost)?(/[^?#]*)", url, re.IGNORECASE | re.DOTALL)
    path = unquote(match[1]) if match else "\0"
    if "\0" in path:
        raise BadRequest("The file URL is malformed.")
    try:
        base = root.resolve(strict=True)
        parts = Path(path).resolve().relative_to(base).parts
    except (OSError, RuntimeError, ValueError):
        raise Forbidden(PATH_NOT_ALLOWED) from None
    try:
        return _read_without_links(base, parts, max_bytes)
    except OSError:
        raise Unprocessable("The file could not be read.") from None


def _read_without_links(base: Path, parts: tuple[str, ...], max_bytes: int) -> bytes:
    """Reads a file, opening each folder on the way without following links, in case one was replaced by a link
    since the check.
    """
    folder = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for i, name in enumerate(parts):
            kind = os.O_DIRECTORY if i + 1 < len(parts) else os.O_NONBLOCK
            entry = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=folder)
            os.close(folder)
            folder = entry
        status = os.fstat(folder)
        if not stat.S_ISREG(status.st_mode):
            raise Unprocessable("The file could not be read.")
        with open(folder, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise TooLarge(f"The file is larger than {max_bytes} bytes.")
        return data
    finally:
        os.close(folder)
