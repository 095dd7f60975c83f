"""Checks that JSON values of a request suit tokenizer, template and engine: Unicode text, and no deep nesting.

A text in JSON may hold half of a surrogate pair (``"\\ud800"``), which is not Unicode text and has no UTF-8 form, and
values may nest deeper than the functions that walk through them can go.
"""

from __future__ import annotations

import re

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json

MAX_DEPTH = 64
"""Levels of objects and lists within a field (a JSON schema of a tool has a dozen)."""
LONE = "half of a surrogate pair, which is not Unicode text"
DEEP = f"more than {MAX_DEPTH} levels of lists and objects"
_LONE = re.compile("[\ud800-\udfff]")


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
        return value.isascii() or _LONE.search(value) is None
    if isinstance(value, dict):
        return left > 0 and all(is_sound(key, left) and is_sound(one, left - 1) for key, one in value.items())
    return not isinstance(value, list | tuple) or (left > 0 and all(is_sound(one, left - 1) for one in value))


def find_fault(value: Json, left: int = MAX_DEPTH) -> tuple[str, str] | None:
    """Returns the path and the description of the first fault below ``value``. Values that are not JSON (an image)
    pass.
    """
    if isinstance(value, str):
        return ("", LONE) if not value.isascii() and _LONE.search(value) else None
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
