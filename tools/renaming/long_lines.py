"""Breaks lines that got too long and that no formatter breaks: comments, docstrings, strings, unformatted tables."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import NamedTuple

WIDTH = 120
KEPT = re.compile(r"# (?:type:|noqa|fmt:|pragma)")
LISTED = re.compile(r"\s*(?:[-*>|]|\d+\.|#|\w+:( |$)|>>>)")


def reflow(text: str) -> str:
    """The text of a Python file with its long comments and docstrings broken; other long lines stay."""
    lines = text.split("\n")
    docs = _doc_lines(text)
    behind = _behind(text)
    at = 0
    while at < len(lines):
        line = lines[at]
        if len(line) > WIDTH:
            if line.lstrip().startswith("# "):
                _break(lines, docs, at, line[: len(line) - len(line.lstrip())] + "# ")
            elif docs.get(at) is not None:
                _doc(lines, docs, at)
            elif at in behind and KEPT.search(line[behind[at] :]) is None:
                column = behind[at]
                indent = line[: len(line) - len(line.lstrip())]
                lines[at] = line[:column].rstrip()
                lines.insert(at, indent + line[column:])
                _shift(docs, at - 1)
                behind = {n + (n > at): c for n, c in behind.items() if n != at}
                continue
        at += 1
    return "\n".join(lines)


def _behind(text: str) -> dict[int, int]:
    """The columns of comments behind code, by line."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
            found[token.start[0] - 1] = token.start[1]
    return found


def _doc_lines(text: str) -> dict[int, str]:
    """The kind of each line in a docstring of three quotes: ``only``, ``first``, ``last`` or ``inner``."""
    found: dict[int, str] = {}
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if not isinstance(node.value.value, str):
            continue
        first, last = node.lineno - 1, (node.end_lineno or 1) - 1
        if not re.match(r'\s*[rR]?"""', lines[first]) or not lines[last].rstrip().endswith('"""'):
            continue
        for at in range(first, last + 1):
            found[at] = "inner"
        found[first], found[last] = "first", "last"
        if first == last:
            found[first] = "only"
    return found


def _shift(docs: dict[int, str], at: int) -> None:
    """Makes room for a line behind ``at``."""
    for line in sorted((n for n in docs if n > at), reverse=True):
        docs[line + 1] = docs.pop(line)


def _break(lines: list[str], docs: dict[int, str], at: int, prefix: str, width: int = WIDTH) -> None:
    """Moves the end of a line to the next one of its paragraph, or to a new one."""
    line = lines[at]
    cut = line.rfind(" ", len(prefix) + 1, width + 1)
    if cut < 0:
        return
    rest = line[cut + 1 :]
    lines[at] = line[:cut].rstrip()
    below = lines[at + 1] if at + 1 < len(lines) else ""
    joins = below.startswith(prefix) and below[len(prefix) :].strip() and not below[len(prefix)].isspace()
    if prefix.strip() != "#":
        joins = joins and docs.get(at + 1) in ("inner", "last") and below.strip() != '"""'
    if joins and not LISTED.match(below[len(prefix) :]):
        lines[at + 1] = f"{prefix}{rest} {below[len(prefix) :]}"
    else:
        lines.insert(at + 1, prefix + rest)
        _shift(docs, at)
        if docs.get(at) is not None:
            docs[at + 1] = "inner"


def _doc(lines: list[str], docs: dict[int, str], at: int) -> None:
    line, kind = lines[at], docs[at]
    indent = line[: len(line) - len(line.lstrip())]
    if kind in ("only", "last") and line.rstrip().endswith('"""') and line.strip() != '"""':
        lines[at] = line.rstrip().removesuffix('"""').rstrip()
        lines.insert(at + 1, indent + '"""')
        _shift(docs, at)
        docs[at + 1] = "last"
        docs[at] = "first" if kind == "only" else "inner"
        if kind == "only":  # the formatter would join what fits one line without the quotes
            _break(lines, docs, at, indent, WIDTH - 3)
            return
        if len(lines[at]) <= WIDTH:
            return
    _break(lines, docs, at, indent)


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
