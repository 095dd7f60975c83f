"""The texts inside Python files: comments, docstrings and string literals, and what changes in them."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from tools.renaming.guesses import Edits
from tools.renaming.names import Names
from tools.renaming.project import File, Symbol
from tools.renaming.scopes import Scope
from tools.renaming.source import literals
from tools.renaming.texts import Lookup, Texts


class Segment(NamedTuple):
    """Bytes of a text; ``prose``: words for people, not data; ``notes``: for readers of the code."""

    start: int
    end: int
    prose: bool
    notes: bool


def segments(file: File) -> Iterator[Segment]:
    """All comments and strings of a file, in no order."""
    yield from _comments(file)
    source = file.source
    inside: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(n) for n in ast.walk(node) if isinstance(n, ast.Constant | ast.JoinedStr) and n is not node}
    docs = set(_docstrings(source.tree))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.JoinedStr):
            if id(node) in inside and id(node) not in source.places:
                continue
            spoken, notes = any(isinstance(v, ast.Constant) and " " in str(v.value) for v in node.values), False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in inside:
            notes = id(node) in docs
            spoken = isinstance(node.value, str) and (" " in node.value or notes)
        else:
            continue
        for literal in literals(source.data, *source.span(node)):
            for start, end in literal.plain:
                if start < end:
                    yield Segment(start, end, spoken, notes)


def _docstrings(tree: ast.AST) -> Iterator[int]:
    """Strings that stand as statements."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)


def _comments(file: File) -> Iterator[Segment]:
    """Comments; lines of comments that follow each other are one text."""
    source = file.source
    held: tuple[int, int, int, int] | None = None
    for token in tokenize.tokenize(io.BytesIO(source.data).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        text = token.line
        start = source.starts[line - 1] + len(text[:column].encode())
        end = start + len(token.string.encode())
        alone = not text[:column].strip()
        if held is not None and alone and (line, column) == (held[2] + 1, held[3]):
            held = (held[0], end, line, column)
            continue
        if held is not None:
            yield Segment(held[0], held[1], True, True)
        held = (start, end, line, column) if alone else None
        if not alone:
            yield Segment(start, end, True, True)
    if held is not None:
        yield Segment(held[0], held[1], True, True)


def _innermost(file: File) -> Iterator[tuple[int, int, Scope]]:
    for scope in file.nodes.values():
        node = scope.node
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])  # type: ignore[attr-defined]
        yield file.source.starts[first - 1], file.source.span(node)[1], scope


def lookup_in(file: File, scope: Scope, names: Names) -> Lookup:
    """What a name in backticks means in a text inside ``scope``: what the code there would mean, or a unique name."""

    def lookup(name: str) -> str | None:
        at: Scope | None = scope
        while at is not None:
            if name in at.bindings:
                return names.final(file, at.bindings[name])
            if at.kind == "class":
                found = names.member(Symbol(file.path, at.qualname), name)
                if found is not None:
                    return found
            at = at.parent
        return names.unique(name)

    return lookup


def collect_prose(file: File, names: Names, texts: Texts, out: Edits) -> None:
    """Adds the changes of a file's comments and strings; edits of code come first."""
    source = file.source
    taken = sorted(out.by_file.get(file.path, {}))
    scopes = sorted(_innermost(file), key=lambda s: (s[0], -s[1]))
    for segment in segments(file):
        text = source.text(segment.start, segment.end)
        scope = file.scopes.top
        for start, end, inner in scopes:
            if start > segment.start:
                break
            if segment.end <= end:
                scope = inner
        lookup = lookup_in(file, scope, names)
        for change in texts.changes(file.path, text, segment.prose, segment.notes, lookup):
            a = segment.start + len(text[: change.start].encode())
            b = a + len(text[change.start : change.end].encode())
            if not any(x < b and a < y for x, y in taken):
                out.put(file.path, (a, b), change.new)
