"""Replaces paths, dotted names, phrases and names in backticks in any text."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import PurePosixPath
from typing import NamedTuple

from tools.renaming.names import Names
from tools.renaming.project import Symbol

PATH = re.compile(r"(?<![\w./-])(?:[\w.{}-]+/)+[\w.-]*[\w-]|(?<![\w./-])[\w-]+\.(?:py|md|c|h|inc|sh)\b(?![/\w-])")
PREFIXES = re.compile(r"(?:\.\.?/)+|.*/(?:blob|tree)/main/|trencadis/(?=(?:core|backends|multimodal|server|assets)/)")
CODE = re.compile(r"(`{1,2})(?!`)([^`]+?)\1(?!`)")
CHAIN = re.compile(r"(?<![\w.$/-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
GUARDED = re.compile(
    r"(?<![\w`])`{1,2}[^`]+`{1,2}|--[\w-]+|\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b|\w+:\w+(?:_\w+)+|[\w.-]+/[\w./-]+\.\w+"
)
IMPORT = re.compile(r"(?m)^(\s*(?:>>> )?)from ([\w.]+) import ([\w, ]+)$")
COMPOUND = re.compile(r"[A-Z]+[a-z0-9]+(?:[A-Z][a-z0-9]*)+|\w*[a-z0-9]_[a-z0-9]\w*|_?[A-Z0-9]+(?:_[A-Z0-9]+)+")
"""Names that cannot be words of prose."""


class Change(NamedTuple):
    """A replacement within a text."""

    start: int
    end: int
    new: str


Lookup = Callable[[str], str | None]
"""The new name of a name in the context of a text; None: unknown."""


class Texts:
    """Finds changes in texts; ``words`` are the phrases by file glob."""

    def __init__(self, names: Names, words: dict[str, dict[str, str]]) -> None:
        self.names, self.words = names, words
        self.moves, self.folders = names.plan.moves, names.plan.folders
        roots = sorted({m.split(".")[0] for m in (*names.project.modules, *names.project.packages)})
        tops = "|".join(map(re.escape, roots))
        self.dotted_pattern = re.compile(
            rf"(?<![\w./-])(?:{tops})(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)?(?![\w/-])"
        )

    def changes(
        self, path: str, text: str, prose: bool, notes: bool = True, lookup: Lookup | None = None
    ) -> list[Change]:
        """All changes of a text in file ``path``.

        Words and names in backticks only where it is ``prose``, names without them only where these are ``notes`` for
        readers of the code: a message may quote names of metrics or fields.
        """
        found = [*self.dotted(text), *self.paths(text, prose)]
        if prose:
            taken = [c for c in self.phrases(path, text)]
            found += [c for c in taken if not _overlaps(c, found)]
            named = list(self.code_names(text, notes, lookup or self.names.unique))
            found += [c for c in named if not _overlaps(c, found)]
        return found

    def dotted(self, text: str) -> Iterable[Change]:
        for m in self.dotted_pattern.finditer(text):
            if re.search(r"\.(?:py|md|toml|json|sh|yml)$", m.group()):
                continue
            new = self.names.dotted(m.group())
            if new != m.group():
                yield Change(*m.span(), new)
        for m in IMPORT.finditer(text):
            if m[2] in self.names.project.modules:
                for part in re.finditer(r"\w+", m[3]):
                    new = self.names.dotted(f"{m[2]}.{part.group()}").rpartition(".")[2]
                    if new != part.group():
                        yield Change(m.start(3) + part.start(), m.start(3) + part.end(), new)

    def paths(self, text: str, prose: bool) -> Iterable[Change]:
        for m in PATH.finditer(text):
            head = PREFIXES.match(m.group())
            start = m.start() + (head.end() if head is not None else 0)
            token = text[start : m.end()]
            new = self.path(token, prose or "/" in token)
            if new is not None and new != token:
                yield Change(start, m.end(), new)

    def path(self, token: str, partial: bool) -> str | None:
        """The new path of a file or folder that a token names; ``partial``: by the end of its path too."""
        if token in self.moves:
            return self.moves[token]
        best = max((f for f in self.folders if f"{token}/".startswith(f)), key=len, default=None)
        if best is not None:
            return (self.folders[best] + f"{token}/"[len(best) :]).rstrip("/")
        if not partial or "." not in token:
            return None
        owners = self._ends.get(PurePosixPath(token).name, [])
        owners = [o for o in owners if o == token or o.endswith(f"/{token}")]
        if len(owners) == 1 and owners[0] in self.moves:
            return "/".join(self.moves[owners[0]].split("/")[-len(token.split("/")) :])
        return None

    @cached_property
    def _ends(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for name in self.names.project.names:
            found[PurePosixPath(name).name].append(name)
        return found

    def phrases(self, path: str, text: str) -> Iterable[Change]:
        pattern, table = self._phrases(path)
        if pattern is None:
            return
        guarded = [m.span() for m in GUARDED.finditer(text)]
        for m in pattern.finditer(text):
            if any(a < m.end() and m.start() < b for a, b in guarded) and "`" not in m.group():
                continue
            old = re.sub(r"\s+(?:#\s*)?", " ", m.group())
            new = table.get(old)
            if new is None and old[:1].isupper():
                new = table[old[:1].lower() + old[1:]]
                new = new[:1].upper() + new[1:]
            if new is not None:
                yield Change(*m.span(), _rewrapped(m.group(), new))

    def _phrases(self, path: str) -> tuple[re.Pattern[str] | None, dict[str, str]]:
        table: dict[str, str] = {}
        for glob, words in sorted(self.words.items(), key=lambda w: len(w[0])):
            if glob == "**" or fnmatchcase(path, glob) or fnmatchcase(path, glob.replace("**/", "")):
                table.update(words)
        key = tuple(sorted(table, key=lambda w: (-len(w), w)))
        return _pattern(key), table

    def code_names(self, text: str, notes: bool, lookup: Lookup) -> Iterable[Change]:
        """Names in backticks, and in ``notes`` compound names anywhere."""
        for m in CODE.finditer(text):
            inside, base = m.group(2), m.start(2)
            if re.search(r"--|[\"'/]|\$", inside):
                continue
            for c in CHAIN.finditer(inside):
                alone = c.start() == 0 and re.fullmatch(r"(?:\(.*\))?", inside[c.end() :], re.S) is not None
                new = self.chain(c.group(), lookup, alone)
                if new != c.group():
                    yield Change(base + c.start(), base + c.end(), new)
        spans = [m.span() for m in CODE.finditer(text)]
        for c in CHAIN.finditer(text) if notes else ():
            head, dot, last = c.group().partition(".")
            of_class = bool(dot) and head in self._classes
            if (of_class or COMPOUND.fullmatch(last.split(".")[-1] or head)) and not _inside(c.start(), spans):
                new = self.chain(c.group(), self.names.unique, of_class)
                if new != c.group():
                    yield Change(*c.span(), new)

    def chain(self, text: str, lookup: Lookup, alone: bool) -> str:
        """A name, or names with dots between; a plain word counts only where it is all that backticks hold."""
        parts = text.split(".")
        out = []
        owner = None
        for i, part in enumerate(parts):
            new = None
            if owner is not None:
                new = self.names.member(owner, part)
            if new is None and (alone or len(parts) > 1 or COMPOUND.fullmatch(part)):
                new = lookup(part) if i == 0 else self.names.unique(part)
            owner = self._classes.get(part)
            out.append(part if new is None else new)
        return ".".join(out)

    @cached_property
    def _classes(self) -> dict[str, Symbol]:
        found: dict[str, list[Symbol]] = defaultdict(list)
        for symbol in self.names.groups.index.classes:
            found[symbol.name.rpartition(".")[2]].append(symbol)
        return {name: owners[0] for name, owners in found.items() if len(owners) == 1}


@cache
def _pattern(words: tuple[str, ...]) -> re.Pattern[str] | None:
    if not words:
        return None
    gap = r"(?:[ \t]+|[ \t]*\n[ \t]*(?:#[ \t]*)?)"
    alternatives = []
    for word in words:
        parts = [re.escape(p) for p in word.split()]
        if word[:1].islower():
            parts[0] = f"[{word[0]}{word[0].upper()}]{re.escape(word.split()[0][1:])}"
        alternatives.append(gap.join(parts))
    body = "|".join(alternatives)
    return re.compile(rf"(?<![\w/])(?<!--)(?<!\w\.)(?:{body})(?!\w)(?!\.\w)(?!/\w)(?![=(]\w)")


def _rewrapped(old: str, new: str) -> str:
    """``new`` with the line break of ``old`` where it has one."""
    gap = re.search(r"[ \t]*\n[ \t]*(?:#[ \t]*)?", old)
    if gap is None:
        return new
    before = len(old[: gap.start()].split())
    parts = new.split(" ")
    if len(parts) == 1:
        return parts[0]
    at = min(before, len(parts) - 1)
    return " ".join(parts[:at]) + gap.group() + " ".join(parts[at:])


def _inside(at: int, spans: list[tuple[int, int]]) -> bool:
    return any(a <= at < b for a, b in spans)


def _overlaps(one: Change, others: Iterable[Change]) -> bool:
    return any(o.start < one.end and one.start < o.end for o in others)
