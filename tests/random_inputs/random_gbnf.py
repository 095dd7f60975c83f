"""Grammars at random, as GBNF and as a recogniser of its own that knows nothing of lexers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Part = tuple[Any, ...]
"""("text", t), ("class", characters), ("rule", name), ("all", parts), ("any", parts), ("repeat", part, least, most)."""
CLASSES = {"[a-c]": "abc", "[0-9]": "0123456789", "[ \\n]": " \n"}


@dataclass
class RandomGrammar:
    """Rules by name; ``root`` is the first."""

    rules: dict[str, Part]

    @classmethod
    def of(cls, number: int) -> RandomGrammar:
        rng = random.Random(number)
        names = ["root", *(f"rule-{i}" for i in range(rng.randrange(1, 4)))]
        return cls({name: _part(rng, names[i + 1 :], names, 3) for i, name in enumerate(names)})

    def text(self) -> str:
        """The grammar in GBNF."""
        return "".join(f"{name} ::= {_written(part)}\n" for name, part in self.rules.items())

    def takes(self, text: str) -> bool:
        """Whether a text is one of the grammar's."""
        return len(text) in _Recogniser(self.rules, text).rule("root", 0)


class _Recogniser:
    """Ends of rules and parts in one text, found by trying everything."""

    def __init__(self, rules: dict[str, Part], text: str) -> None:
        self.rules, self.text = rules, text
        self.known: dict[tuple[str, int], frozenset[int]] = {}
        self.busy: set[tuple[str, int]] = set()

    def rule(self, name: str, at: int) -> frozenset[int]:
        key = (name, at)
        if key in self.known:
            return self.known[key]
        if key in self.busy:
            return frozenset()  # left recursion gives no new end here
        self.busy.add(key)
        found = frozenset(self.ends(self.rules[name], at))
        self.busy.discard(key)
        if not self.busy:
            self.known[key] = found
        return found

    def ends(self, part: Part, at: int) -> Iterable[int]:
        kind = part[0]
        if kind == "text":
            return [at + len(part[1])] if self.text.startswith(part[1], at) else []
        if kind == "class":
            return [at + 1] if at < len(self.text) and self.text[at] in CLASSES[part[1]] else []
        if kind == "rule":
            return self.rule(part[1], at)
        if kind == "any":
            return {end for one in part[1] for end in self.ends(one, at)}
        if kind == "repeat":
            return self.repeated(part, at)
        places = {at}
        for one in part[1]:
            places = {end for place in places for end in self.ends(one, place)}
        return places

    def repeated(self, part: Part, at: int) -> set[int]:
        places, seen = {at}, set[int]()
        for count in range(part[3] + 1 if part[3] >= 0 else len(self.text) + part[2] + 2):
            if count >= part[2]:
                seen |= places
            places = {end for place in places for end in self.ends(part[1], place)}
            if not places:
                break
        return seen


def _part(rng: random.Random, later: list[str], names: list[str], depth: int) -> Part:
    turn = rng.randrange(8) if depth else rng.randrange(3)
    if turn < 2:
        return ("text", rng.choice(["a", "ab", "x=", "(", '"q"', "\\", "/", "é\n"]))
    if turn == 2:
        return ("class", rng.choice(list(CLASSES)))
    if turn == 3:
        # Recursion stands between marks, so that each turn goes on in the text.
        inner: Part = ("rule", rng.choice(names))
        return ("any", [("all", [("text", "("), inner, ("text", ")")]), ("text", "z")])
    if turn == 4 and later:
        return ("rule", rng.choice(later))
    if turn == 5:
        least = rng.randrange(2)
        return ("repeat", _part(rng, later, names, depth - 1), least, rng.choice([-1, least + 2]))
    parts = [_part(rng, later, names, depth - 1) for _ in range(rng.randrange(2, 4))]
    return ("all" if turn == 6 else "any", parts)


def _written(part: Part) -> str:
    kind = part[0]
    if kind == "text":
        escaped = part[1].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if kind in ("class", "rule"):
        return str(part[1])
    if kind == "repeat":
        most = "" if part[3] < 0 else part[3]
        return f"({_written(part[1])}){{{part[2]},{most}}}"
    joint = " " if kind == "all" else " | "
    return f"({joint.join(map(_written, part[1]))})"
