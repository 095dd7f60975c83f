"""Breaks long lines of code that no formatter breaks: tables that it leaves alone, and strings."""

from __future__ import annotations

import io
import tokenize
from typing import NamedTuple

WIDTH = 120


class Spot(NamedTuple):
    """Where a line may be broken: behind a comma, or in a string with the quotes that follow."""

    depth: int
    column: int
    text: str


def wrap(text: str) -> str:
    """The text of a Python file with long lines inside brackets broken; what cannot be broken stays."""
    tried: set[str] = set()
    while True:
        lines = text.split("\n")
        long = [i for i, line in enumerate(lines) if len(line) > WIDTH and line not in tried]
        if not long:
            return text
        at = long[0]
        tried.add(lines[at])
        outer, spots = _spots(text, at + 1)
        if not spots:
            continue
        spot = min(spots, key=lambda s: (s.depth, -s.column))
        line = lines[at]
        indent = line[: len(line) - len(line.lstrip())] + ("" if spot.depth <= outer else "    ")
        head = line[: spot.column].rstrip() if not spot.text else line[: spot.column]
        tail = line[spot.column :] if spot.text else line[spot.column :].lstrip()
        opening = spot.text[:1]
        lines[at : at + 1] = [head + opening, indent + spot.text[1:] + tail]
        text = "\n".join(lines)


def _spots(text: str, line: int) -> tuple[int, list[Spot]]:
    """The depth of brackets at the start of a line, and where it may be broken."""
    depth, outer, found = 0, None, []
    strings = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.start[0] > line:
            break
        if token.start[0] == line and outer is None:
            outer = depth
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        if token.start[0] != line or not depth or token.end[0] != line:
            continue
        if token.string == "," and token.end[1] <= WIDTH and token.end[1] < len(token.line.rstrip("\n")):
            found.append(Spot(depth, token.end[1], ""))
        elif token.type == tokenize.STRING and token.start[1] < WIDTH < token.end[1]:
            strings.append((token.string, token.start[1], depth))
    for string, start, inside in strings:
        spot = _in_string(string, start, inside)
        if spot is not None:
            found = [spot]
    return outer or 0, found


def _in_string(string: str, start: int, depth: int) -> Spot | None:
    """Behind the last space of a string that leaves room for a quote, outside the fields of an f-string."""
    quote = string.lstrip("rRbBfFuU")[:1]
    prefix = string[: string.index(quote)]
    if string.startswith(quote * 3, len(prefix)):
        return None
    field = 0
    best = None
    for i in range(len(prefix) + 1, min(len(string) - 1, WIDTH - 1 - start)):
        if "f" in prefix.lower() and string[i] in "{}":
            field += 1 if string[i] == "{" else -1
        elif string[i] == " " and not field:
            best = i + 1
    return Spot(depth, start + best, quote + prefix + quote) if best is not None else None
