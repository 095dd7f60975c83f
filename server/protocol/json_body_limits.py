"""Bounds of JSON in requests: bodies are scanned while they arrive, and values are checked for what can use them.

Values must suit tokenizer, template and engine: Unicode text, and no deep nesting. A text in JSON may hold half of a
surrogate pair (``"\\ud800"``), which is not Unicode text and has no UTF-8 form, and values may nest deeper than the
functions that walk through them can go.

The scan bounds a body's size before anything is parsed. A placeholder replaces each long string (image, long text), so
what a parser sees (the *outline*) is small, however large the body is. Compiled expressions do all the work, a slice at
a time.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field

from trencadis.core.errors import BadRequest, TooLarge
from trencadis.core.json_types import Json

MAX_DEPTH = 64
"""Levels of objects and lists within a field (a JSON schema of a tool has a dozen)."""
LONE = "half of a surrogate pair, which is not Unicode text"
DEEP = f"more than {MAX_DEPTH} levels of lists and objects"


def has_lone_surrogate(text: str) -> bool:
    """Returns True if a text holds half of a surrogate pair; other threads may run between two slices of it."""
    if text.isascii():
        return False
    try:
        for at in range(0, len(text), SLICE):
            text[at : at + SLICE].encode()
    except UnicodeEncodeError:
        return True
    return False


def check_json(value: Json, where: str) -> None:
    """Raises BadRequest for a value with a lone surrogate or deep nesting; ``param`` is the JSON path of the fault."""
    if not is_sound(value):
        _refuse(value, where)


def _refuse(value: Json, where: str) -> None:
    """Raises BadRequest with the fault of a value that is not sound."""
    found = find_fault(value)
    if found is not None:
        path = where + found[0]
        raise BadRequest(f"{path[:100]} holds {found[1]}.", param=path[:100])


def is_sound(value: Json, left: int = MAX_DEPTH) -> bool:
    """Returns True if ``find_fault`` finds nothing."""
    if isinstance(value, str):
        return not has_lone_surrogate(value)
    if isinstance(value, dict):
        return left > 0 and all(is_sound(key, left) and is_sound(one, left - 1) for key, one in value.items())
    return not isinstance(value, list | tuple) or (left > 0 and all(is_sound(one, left - 1) for one in value))


def find_fault(value: Json, left: int = MAX_DEPTH) -> tuple[str, str] | None:
    """Returns the path and the description of the first fault below ``value``. Values that are not JSON (an image)
    pass.
    """
    if isinstance(value, str):
        return ("", LONE) if has_lone_surrogate(value) else None
    if isinstance(value, dict):
        items: Json = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return None
    if not left:
        return "", DEEP
    for key, one in items:
        if isinstance(key, str) and find_fault(key, 0):
            return "", LONE
        found = find_fault(one, left - 1)
        if found is not None:
            return (f".{key[:40]}" if isinstance(key, str) else f"[{key}]") + found[0], found[1]
    return None


SLICE = 1 << 16
"""Bytes scanned in one go, which takes a millisecond or two at worst."""
LONG = 4096
"""Length in bytes from which a placeholder replaces a string."""
MEDIA = (b"data:", b"/9j/", b"iVBORw0KGgo", b"R0lGOD", b"UklGR")
"""Beginnings of strings that hold media: data URLs, and bare base64 of JPEG, PNG, GIF and WebP."""
NONCE = f"0.{secrets.randbelow(10**20):020}e"
"""Prefix of a placeholder. It is a number, because the parser passes numbers to a hook without a walk in Python."""

# Possessive throughout: no backtracking, so the time is linear.
_SHORT = re.compile(rb'(?:[^"]++|"[^"\\]{0,4095}+(?:\\.[^"\\]{0,64}+){0,32}+")*+', re.DOTALL)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_REST = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_NO_BRACKET = bytes(b for b in range(256) if b not in b"[]{}")
_BLANKS = b" \t\r\n"


@dataclass(frozen=True)
class BodyLimits:
    """Limits of one body.

    Args:
        values: elements of lists and members of objects, in all.
        members: members of objects; the parser takes a microsecond for each new key, ten times as long as for a text.
        containers: lists and objects.
        depth: nesting of containers.
        outline: bytes without the long strings.
        text: bytes of long strings that are no media.
    """

    values: int = 1 << 18
    members: int = 1 << 16
    containers: int = 1 << 16
    depth: int = 100
    outline: int = 4 << 20
    text: int = 16 << 20


def is_within_limits(body: bytes) -> bool:
    """Returns True if a whole body is too small to exceed ``BodyLimits``: each value, container and level takes a
    byte.
    """
    return len(body) < LONG and body.count(b"[") + body.count(b"{") <= BodyLimits.depth


@dataclass(slots=True)
class BodyScan:
    """Scans a body piece by piece; counts its bytes (``size``), values, members, containers, and bytes of long texts.

    ``outline`` and ``long`` are complete after ``finish``. A long string is a list of pieces as they arrived, without
    quotes and still escaped.
    """

    limits: BodyLimits = field(default_factory=BodyLimits)
    long: list[list[bytes]] = field(default_factory=list)
    size: int = 0
    values: int = 0
    members: int = 0
    containers: int = 0
    text: int = 0
    _outline: list[bytes] = field(default_factory=list)
    _outlined: int = 0
    _depth: int = 0
    _open: list[bytes] | None = None  # pieces of the string that has begun
    _opened: int = 0
    _carry: bytes = b""
    _after_long: bool = False

    @property
    def outline(self) -> bytes:
        """The body with a placeholder for each long string."""
        return b"".join(self._outline)

    def feed(self, data: bytes) -> None:
        """Takes at most ``SLICE`` bytes.

        Raises:
            BadRequest: the body has too many values, is too deep, or has a key as long as a text.
            TooLarge: it has too many bytes of one kind.
        """
        self.size += len(data)
        data, at = self._carry + data, 0
        self._carry = b""
        while at < len(data):
            at = self._scan_plain(data, at) if self._open is None else self._scan_string(data, at, self._open)

    def finish(self) -> None:
        """Ends the body; an open string stays open in the outline, which the parser then refuses."""
        if self._open is not None:
            self._outline.append(b'"')

    def _scan_plain(self, data: bytes, at: int) -> int:
        match = _SHORT.match(data, at)
        assert match is not None  # it matches the empty text
        self._add_to_outline(match[0])
        if match.end() < len(data):
            self._open, self._opened = [], 0
        return match.end() + 1

    def _scan_string(self, data: bytes, at: int, held: list[bytes]) -> int:
        """Reads the rest of a string, or the part of it that has arrived."""
        match = _REST.match(data, at)
        assert match is not None
        end = match.end()
        if end > at:
            held.append(data[at:end])
            self._opened += end - at
            if not held[0].startswith(MEDIA) and self.text + self._opened > self.limits.text:
                raise TooLarge(f"The texts of the request exceed {self.limits.text} bytes.")
        if end == len(data):
            return end
        if data[end] != ord('"'):
            self._carry = data[end:]  # a backslash whose character is in the next piece
            return len(data)
        self._close(held)
        return end + 1

    def _close(self, held: list[bytes]) -> None:
        self._open = None
        if self._opened < LONG:
            self._add_to_outline(b'"' + b"".join(held) + b'"')
            return
        if not held[0].startswith(MEDIA):
            self.text += self._opened
        self._add_to_outline(f"{NONCE}{len(self.long)}".encode())
        self.long.append(held)
        self._after_long = True

    def _add_to_outline(self, piece: bytes) -> None:
        """Adds to the outline and counts its values."""
        if not piece:
            return
        limits = self.limits
        self._outlined += len(piece)
        if self._outlined > limits.outline:
            raise TooLarge(f"The request exceeds {limits.outline} bytes beside its long texts and media.")
        self._outline.append(piece)
        bare = _STRING.sub(b"", piece) if b'"' in piece else piece
        if self._after_long:
            self._check_not_key(piece.lstrip(_BLANKS))
        brackets = bare.translate(None, _NO_BRACKET)
        opened = brackets.count(b"[") + brackets.count(b"{")
        self.containers += opened
        self.values += bare.count(b",") + opened
        self.members += bare.count(b":")
        if self.values > limits.values:
            raise BadRequest(f"The request holds more than {limits.values} values.")
        if self.members > limits.members:
            raise BadRequest(f"The request holds more than {limits.members} members of objects.")
        if self.containers > limits.containers:
            raise BadRequest(f"The request holds more than {limits.containers} lists and objects.")
        self._count_nesting(brackets)

    def _check_not_key(self, rest: bytes) -> None:
        """Raises BadRequest if a long string was a key; ``rest`` follows it."""
        self._after_long = not rest
        if rest.startswith(b":"):
            raise BadRequest(f"A key of the request has {LONG} bytes or more.")

    def _count_nesting(self, brackets: bytes) -> None:
        for bracket in brackets:
            self._depth += 1 if bracket in b"[{" else -1
            if self._depth > self.limits.depth:
                raise BadRequest(f"The request nests deeper than {self.limits.depth} levels.")


def scan_text(scan: BodyScan, text: str) -> None:
    """Counts a JSON text inside a string of a request.

    Raises:
        TrencadisError: see ``BodyScan.feed``.
    """
    for at in range(0, len(text), SLICE):
        scan.feed(text[at : at + SLICE].encode("utf-8", "surrogatepass"))


def get_placeholder_index(literal: str) -> int | None:
    """Returns the index of the long string that a number in the outline stands for; None for a number of the client."""
    index = literal.removeprefix(NONCE)
    return int(index) if index != literal else None
