"""Checks that a lexer with longest matches finds every division of a text into the terminals of a grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

_SAMPLE = [chr(i) for i in range(128)] + ["é", "中", "😀"]
"""Sample characters that represent all; sets of them are the bits of an integer."""
_EVERY = (1 << len(_SAMPLE)) - 1
_MOST_WORK = 200_000
"""Maximum parts of rules to examine, about 0.2 s; a grammar that needs more counts as ambiguous."""


@dataclass(slots=True)
class GrammarNode:
    """A part of a rule: ``text`` a character's regex, ``name`` a rule, ``all``, ``any``, or a repetition ``repeat``."""

    kind: str
    text: str = ""
    parts: list[GrammarNode] = field(default_factory=list)

    def list_rule_names(self) -> Iterator[str]:
        """Yields the rules that this part names."""
        if self.kind == "name":
            yield self.text
        for part in self.parts:
            yield from part.list_rule_names()


@dataclass(slots=True)
class CharacterSets:
    """Sample characters that a part may begin with (``first``), or continue with once complete (``more``); ``empty``:
    may be empty.
    """

    first: int
    more: int
    empty: bool


class LexerConflicts:
    """Finds conflicts between characters that extend a terminal and those that may follow it.

    Args:
        rules: the rules by name.
        regular: names of rules that become parts of terminals.
    """

    def __init__(self, rules: Mapping[str, GrammarNode], regular: set[str], order: list[str]) -> None:
        self.rules, self.regular = rules, regular
        self._classes: dict[str, int] = {}
        self._work = 0
        self.ambiguous = False
        self._ends: dict[str, CharacterSets] = {name: CharacterSets(0, 0, False) for name in rules}
        for name in order:
            self._ends[name] = self._get_character_sets(rules[name])
        self._repeat_until_stable(self._grow_first)
        self._follow = dict.fromkeys(rules, 0)
        self._repeat_until_stable(self._propagate_follow)

    def _repeat_until_stable(self, step: Callable[[str], bool]) -> None:
        """Repeats a step over the recursive rules until nothing changes."""
        names = [name for name in self.rules if name not in self.regular]
        while not self.ambiguous and any([step(name) for name in names]):
            self.ambiguous |= self._work > _MOST_WORK

    def _grow_first(self, name: str) -> bool:
        before, self._ends[name] = self._ends[name], self._get_character_sets(self.rules[name])
        return before != self._ends[name]

    def _propagate_follow(self, name: str) -> bool:
        self._changed = False
        self._walk(self.rules[name], self._follow[name])
        return self._changed

    def _walk(self, node: GrammarNode, follow: int) -> None:
        """Passes the characters that may follow a part to the parts within; checks each terminal."""
        if all(name in self.regular for name in node.list_rule_names()):
            self.ambiguous |= bool(self._get_character_sets(node).more & follow)
        elif node.kind == "name":
            known = self._follow[node.text]
            self._follow[node.text] |= follow
            self._changed |= known != self._follow[node.text]
        elif node.kind == "all":
            for part in reversed(node.parts):
                self._walk(part, follow)
                ends = self._get_character_sets(part)
                follow = ends.first | (follow if ends.empty else 0)
        else:
            again = self._get_character_sets(node).first if node.kind == "repeat" and node.text != "?" else 0
            for part in node.parts:
                self._walk(part, follow | again)

    def _get_character_sets(self, node: GrammarNode) -> CharacterSets:
        self._work += 1
        if node.kind == "name":
            return self._ends[node.text]
        if node.kind == "text":
            return CharacterSets(self._match_samples(node.text), 0, not node.text)
        inner = [self._get_character_sets(part) for part in node.parts]
        if node.kind == "any":
            made = CharacterSets(0, 0, any(one.empty for one in inner))
            for one in inner:
                made.first |= one.first
                made.more |= one.more
            # If one option may be empty, every other one extends it.
            made.more |= made.first if made.empty else 0
            return made
        if node.kind == "repeat":
            one = inner[0]
            many = node.text != "?" and node.text not in ("{1}", "{0}")
            least = node.text in "*?" or node.text.startswith("{0")
            return CharacterSets(one.first, one.more | (one.first if many or least else 0), one.empty or least)
        made = CharacterSets(0, 0, True)
        for one in inner:
            made.first |= one.first if made.empty else 0
            made.more = one.more | (made.more | one.first if one.empty else 0)
            made.empty &= one.empty
        return made

    def _match_samples(self, text: str) -> int:
        """Returns the sample characters that a regex of one character matches; all if Python cannot evaluate it."""
        if text not in self._classes:
            plain = re.sub(r"\\x\{([0-9a-f]+)\}", lambda m: re.escape(chr(int(m[1], 16))), text)
            try:
                pattern = re.compile(plain)
                bits = sum(1 << i for i, one in enumerate(_SAMPLE) if pattern.fullmatch(one))
            except re.error:
                bits = _EVERY
            self._classes[text] = bits
        return self._classes[text]
