"""The words of this project: field terms in names, verbs for functions, sentences that a stranger reads once.

Old words are denied with their successors in the message; what counts rather than forbids may fall, not grow.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.syntax import parse, statements

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("core", "backends", "multimodal", "server", "trencadis")
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
FILES = [f for f in TRACKED if f.endswith(".py") and (ROOT / f).is_file()]
PRODUCT_FILES = [f for f in FILES if f.split("/")[0] in PRODUCT]

SUCCESSORS = {
    "picture": "image",
    "pictures": "images",
    "seat": "persistent row",
    "seats": "persistent rows",
    "desk": "manager",
    "slumber": "sleep state",
    "doze": "sleep",
    "dialled": "connect",
    "outlet": "writer",
    "divert": "set_delta_callback",
    "taker": "callback",
    "rents": "replication policy",
    "brokerage": "broker",
    "haunted": "padding window",
    "ghost": "padding window",
    "ghosts": "padding windows",
    "sight": "cross attention",
    "sights": "cross attention",
    "seers": "queries",
    "tidier": "heap trimmer",
    "deepening": "deepstack",
}
"""Words of before, with what is said now. In names, file names, docstrings, comments and documents."""

KEPT = ("tools/demo/language/", "tests/test_words.py", "README.md")
"""Files that may use an old word: the demo's questions and answers, and what speaks of the words themselves."""

KEPT_NAMES = {"pictures_kernel": "docs/kernels.csv", "pictures_join_kernel": "docs/kernels.csv"}
"""Identifier with an old word -> why it stays: users or files on disk name it."""

SAME_NAME = {"__init__", "__main__", "model", "family", "config", "processor", "ops", "backend", "shape_policy"}
"""File names that may stand in several folders."""

OPENINGS = ("As", "Of", "Where", "Who", "Until", "It", "That", "Behind", "What")
"""First words that make a reader look for the sentence before."""

MOST_PARTICIPLES = 40
MOST_ODD_OPENINGS = 48
MOST_SAME_NAMES = 0

IRREGULAR = re.compile(
    "begun|bent|borne|bought|bound|broken|brought|built|chosen|dealt|done|drawn|driven|dug|fallen|fed|felt|found|fought|"
    "forgotten|frozen|given|gone|got|grown|heard|held|hidden|hung|kept|known|laid|led|left|lent|lit|lost|made|meant|met|"
    "paid|proven|risen|rung|said|seen|sent|shown|sold|spent|spoken|stood|struck|stuck|sunk|taken|taught|thought|thrown|"
    "told|torn|understood|undone|withdrawn|woken|won|worn|wound|written|[a-z]+ed"
)
NO_PARTICIPLE = frozenset(("bed", "breed", "embed", "exceed", "feed", "need", "proceed", "red", "seed", "speed"))


def is_participle(name: str) -> bool:
    """Whether a function is called by one bare past participle: ``made``, ``opened``."""
    word = name.strip("_")
    return word not in NO_PARTICIPLE and IRREGULAR.fullmatch(word) is not None


def tree_of(file: str) -> ast.Module:
    return parse(ROOT / file)


@cache
def suspects() -> list[str]:
    """Files whose text holds an old word anywhere; most need no closer look."""
    texts = ((f, (ROOT / f).read_text(encoding="utf-8").lower()) for f in FILES if not f.startswith(KEPT))
    return [f for f, text in texts if any(word in text for word in SUCCESSORS)]


def words_of(name: str) -> list[str]:
    """The words of an identifier in any case: ``ChunkWriter`` and ``chunk_writer`` have two."""
    return re.findall(r"[a-z]+|[0-9]+", re.sub(r"([a-z0-9])([A-Z])|([A-Z])([A-Z][a-z])", r"\1\3_\2\4", name).lower())


def defined_names(file: str) -> Iterator[tuple[int, str]]:
    """Every name that a file gives to something: (line, name)."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def prose_of(file: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a file: (line, text)."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    text = (ROOT / file).read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def old_words(text: str) -> list[str]:
    """Old words in a text, outside of backticks, flags and names of files."""
    plain = re.sub(r"``[^`]*``|`[^`]*`|--[\w-]+|[\w./-]*\.(?:md|py|png|jpe?g|js|csv|json)\b|\w*[_/]\w*", " ", text)
    return [word for word in re.findall(r"[a-z]+", plain.lower()) if word in SUCCESSORS]


def say(file: str, line: int, word: str, name: str = "") -> str:
    return f"{file}:{line}: {name or word!r}: say {SUCCESSORS[word]!r} for {word!r}"


def test_names_have_no_old_word() -> None:
    wrong = [
        say(file, line, word, name)
        for file in suspects()
        for line, name in defined_names(file)
        if name not in KEPT_NAMES
        for word in words_of(name)
        if word in SUCCESSORS
    ]
    assert not wrong, "\n".join(wrong[:50])


def test_file_names_have_no_old_word() -> None:
    wrong = [
        say(file, 0, word)
        for file in FILES
        if not file.startswith(KEPT)
        for word in words_of(Path(file).stem)
        if word in SUCCESSORS
    ]
    assert not wrong, "\n".join(wrong[:50])


def test_docstrings_and_comments_have_no_old_word() -> None:
    wrong = [say(file, line, word) for file in suspects() for line, text in prose_of(file) for word in old_words(text)]
    assert not wrong, "\n".join(wrong[:50])


@pytest.mark.parametrize("file", [f for f in TRACKED if f.endswith(".md") and not f.startswith("tests/")])
def test_documents_have_no_old_word(file: str) -> None:
    if file.startswith(KEPT):
        return
    text, code = [], False
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            code = not code
        text.append("" if code else line)
    wrong = [say(file, n, word) for n, line in enumerate(text, 1) for word in old_words(line)]
    assert not wrong, "\n".join(wrong[:50])


def test_functions_are_named_by_verbs() -> None:
    """Pure functions that return a changed copy of their first argument may be participles, as torch has it."""
    found = []
    for file in PRODUCT_FILES:
        for node in statements(tree_of(file)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not is_participle(node.name):
                continue
            if not any("property" in ast.unparse(one) for one in node.decorator_list):
                found.append(f"{file}:{node.lineno} {node.name}")
    assert len(found) <= MOST_PARTICIPLES, "\n".join(found)


def test_file_names_tell_folders_apart() -> None:
    folders: dict[str, list[str]] = defaultdict(list)
    for file in PRODUCT_FILES:
        if Path(file).stem not in SAME_NAME:
            folders[Path(file).stem].append(file)
    double = {name: files for name, files in folders.items() if len(files) > 1}
    assert len(double) <= MOST_SAME_NAMES, double


def test_docstrings_open_with_what_is_done_or_returned() -> None:
    found = []
    for file in PRODUCT_FILES:
        for node in (tree_of(file), *statements(tree_of(file))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                doc = ast.get_docstring(node)
                if doc and doc.split(maxsplit=1)[0].rstrip(",:") in OPENINGS:
                    found.append(f"{file}:{getattr(node, 'lineno', 1)} {doc.splitlines()[0]}")
    assert len(found) <= MOST_ODD_OPENINGS, "\n".join(found)


def described_names(doc: str) -> Iterator[str]:
    """The names that the entries of ``Args:`` and ``Attributes:`` describe."""
    section = ""
    for line in doc.split("\n"):
        title = re.match(r"(\w+):\s*$", line)
        entry = re.match(r"    (\w+(?:, \w+)*): ", line)
        if title is not None:
            section = title[1]
        elif entry is not None and section in ("Args", "Attributes"):
            yield from entry[1].split(", ")


def names_in(node: ast.AST) -> set[str]:
    """Every identifier inside a definition."""
    found = set()
    for one in ast.walk(node):
        for field in ("arg", "id", "attr", "name"):
            found.add(getattr(one, field, None))
    return {name for name in found if isinstance(name, str)}


@pytest.mark.parametrize("folder", PRODUCT)
def test_docstrings_describe_arguments_that_exist(folder: str) -> None:
    """An entry whose name was changed in the code alone would describe nothing."""
    found = []
    for file in (f for f in PRODUCT_FILES if f.startswith(f"{folder}/")):
        for node in statements(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                doc = ast.get_docstring(node) or ""
                missing = set(described_names(doc)) - names_in(node) if "Args:" in doc or "Attributes:" in doc else ()
                found += [f"{file}:{node.lineno} {node.name}: {name}" for name in sorted(missing)]
    assert not found, "\n".join(found)
