"""A Python file as bytes and as a tree, with the exact place of every node, those in f-strings and strings too."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

PREFIX = re.compile(rb"[rRbBuUfF]{0,2}(\"\"\"|'''|\"|')")
IDENTIFIER = re.compile(r"[^\W\d]\w*")


class Field(NamedTuple):
    """A replacement field of an f-string: its expression, and the fields of its format."""

    start: int
    end: int
    inner: list[Field]


class Literal(NamedTuple):
    """One string token: from its prefix to its last quote, its text, the plain parts of it and its fields."""

    start: int
    end: int
    body: tuple[int, int]
    prefix: str
    plain: list[tuple[int, int]]
    fields: list[Field]


@dataclass
class Source:
    """``path`` as the repository names it; offsets count bytes."""

    path: str
    data: bytes
    tree: ast.Module
    starts: list[int]
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    parsed: list[tuple[ast.Constant, ast.expr]] = field(default_factory=list)
    """Annotations written as strings, parsed; their nodes have places too."""

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def line(self, offset: int) -> int:
        return bisect_right(self.starts, offset)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The bytes of a node that has a position."""
        found = self.places.get(id(node))
        if found is not None:
            return found
        n: ast.expr = node  # type: ignore[assignment]
        return self.at(n.lineno, n.col_offset), self.at(n.end_lineno or 0, n.end_col_offset or 0)

    def text(self, start: int, end: int) -> str:
        return self.data[start:end].decode()

    def word(self, start: int, name: str, limit: int | None = None) -> tuple[int, int] | None:
        """The first whole word ``name`` at or after ``start``, outside comments."""
        pattern = re.compile(rb"#[^\n]*|(?<![\w.])" + re.escape(name.encode()) + rb"(?!\w)")
        for found in pattern.finditer(self.data, start, len(self.data) if limit is None else limit):
            if not found.group().startswith(b"#"):
                return found.span()
        return None

    def annotation(self, node: ast.Constant) -> ast.expr | None:
        """The expression that a string annotation holds; None where it is not one plain token."""
        start, end = self.span(node)
        raw = self.data[start:end]
        found = re.fullmatch(rb"([\"'])([^\"'\\\n{}]+)\1", raw)
        if found is None or not isinstance(node.value, str):
            return None
        return self._placed(start + 1, end - 1, node)

    def _placed(self, start: int, end: int, key: ast.Constant | None = None) -> ast.expr | None:
        try:
            tree = ast.parse(b"(" + self.data[start:end] + b"\n)", mode="eval")
        except (SyntaxError, ValueError):
            return None
        starts = _line_starts(b"(" + self.data[start:end])
        for node in ast.walk(tree.body):
            if isinstance(node, ast.expr | ast.keyword | ast.arg):
                self.places[id(node)] = (
                    start - 1 + starts[node.lineno - 1] + node.col_offset,
                    start - 1 + starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0),
                )
        if key is not None:
            self.parsed.append((key, tree.body))
        return tree.body


def read(path: str, data: bytes) -> Source:
    """Parses a file; raises SyntaxError."""
    source = Source(path, data, ast.parse(data), _line_starts(data))
    for node in _outer_joined(source.tree):
        _place_fields(source, node, *source.span(node))
    return source


def _line_starts(data: bytes) -> list[int]:
    return [0, *(m.end() for m in re.finditer(rb"\n", data))]


def _outer_joined(tree: ast.AST) -> list[ast.JoinedStr]:
    found: list[ast.JoinedStr] = []
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.JoinedStr):
            found.append(node)
        else:
            todo += ast.iter_child_nodes(node)
    return found


def _place_fields(source: Source, node: ast.JoinedStr, start: int, end: int) -> None:
    """Places of all nodes inside an f-string: before Python 3.12, those of ast are wrong."""
    source.places[id(node)] = (start, end)
    fields = [f for literal in literals(source.data, start, end) for f in literal.fields]
    _place_values(source, node, fields)


def _place_values(source: Source, node: ast.JoinedStr, fields: list[Field]) -> None:
    values = [v for v in node.values if isinstance(v, ast.FormattedValue)]
    if len(values) != len(fields):
        raise SyntaxError(f"{source.path}:{node.lineno}: {len(values)} fields of an f-string, {len(fields)} found")
    for value, at in zip(values, fields, strict=True):
        source.places[id(value)] = (at.start, at.end)
        parsed = source._placed(at.start, at.end)
        if parsed is None:
            raise SyntaxError(f"{source.path}:{node.lineno}: {source.text(at.start, at.end)!r}")
        _same_places(source, value.value, parsed)
        if isinstance(value.format_spec, ast.JoinedStr):
            _place_values(source, value.format_spec, at.inner)


def _same_places(source: Source, real: ast.AST, parsed: ast.AST) -> None:
    if id(parsed) in source.places:
        source.places[id(real)] = source.places[id(parsed)]
    if isinstance(real, ast.JoinedStr):
        _place_fields(source, real, *source.places[id(parsed)])
        return
    for a, b in zip(ast.iter_child_nodes(real), ast.iter_child_nodes(parsed), strict=True):
        _same_places(source, a, b)


def literals(data: bytes, start: int, end: int) -> list[Literal]:
    """The string tokens between two offsets that hold nothing else but space, comments and parentheses."""
    found = []
    at = start
    while at < end:
        if data[at : at + 1] == b"#":
            at = data.find(b"\n", at) + 1 or end
            continue
        prefix = PREFIX.match(data, at)
        if prefix is None:
            at += 1
            continue
        literal = literal_at(data, at)
        found.append(literal)
        at = literal.end
    return found


def literal_at(data: bytes, start: int) -> Literal:
    """The string token that begins at an offset."""
    prefix = PREFIX.match(data, start)
    assert prefix is not None
    quote, at = prefix.group(1), prefix.end()
    kind = data[start : prefix.start(1)].decode().lower()
    plain: list[tuple[int, int]] = []
    fields: list[Field] = []
    since = at
    while not data.startswith(quote, at):
        if at >= len(data):
            raise SyntaxError("a string without an end")
        if data[at : at + 1] == b"\\":
            at = (
                data.index(b"}", at) + 1 if "f" in kind and data.startswith(b"\\N{", at) and "r" not in kind else at + 2
            )
            if "f" in kind and data[at - 1 : at] in b"{}" and data[at - 2 : at] in (b"\\{", b"\\}"):
                at -= 1
        elif "f" in kind and data[at : at + 2] in (b"{{", b"}}"):
            at += 2
        elif "f" in kind and data[at : at + 1] == b"{":
            plain.append((since, at))
            one, at = _field(data, at + 1)
            fields.append(one)
            since = at
        else:
            at += 1
    plain.append((since, at))
    return Literal(start, at + len(quote), (prefix.end(), at), kind, plain, fields)


def _field(data: bytes, start: int) -> tuple[Field, int]:
    """A field from behind its brace, and the offset behind its closing one."""
    at, depth = start, 0
    while True:
        char = data[at : at + 1]
        if not char:
            raise SyntaxError("a field without an end")
        if char in b"\"'":
            at = literal_at(data, at).end
            continue
        if char in b"([{":
            depth += 1
        elif char in b")]}" and depth:
            depth -= 1
        elif not depth and (char in b"}:" or (char == b"!" and data[at + 1 : at + 2] != b"=")):
            break
        at += 1
    end = at
    text = data[start:end].rstrip()
    if text.endswith(b"=") and text[-2:-1] not in b"=!<>":
        end = start + len(text) - 1
    if data[at : at + 1] == b"!":
        while data[at : at + 1] not in (b":", b"}"):
            at += 1
    inner: list[Field] = []
    if data[at : at + 1] == b":":
        at += 1
        while data[at : at + 1] != b"}":
            if data[at : at + 1] == b"{":
                one, at = _field(data, at + 1)
                inner.append(one)
            else:
                at += 1
    return Field(start, end, inner), at + 1
