"""Converts GBNF, the grammars of llama.cpp and of vLLM's EBNF, to Lark.

llguidance's lexer takes the longest match of a terminal without backtracking: a name followed by blanks would consume
the line end that a rule requires. So every part without recursion is one terminal, in which all divisions of a text are
found; and if text that may follow a terminal could also extend it, each character is a terminal, which is exact and
slow.

Checks that a lexer with longest matches finds every division of a text into the terminals of a grammar.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from trencadis.core.errors import BadRequest
from trencadis.server.grammars.regex_translation import literal, translate_regex

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


MOST_NESTED = 64
MOST_REPEATS = 4
MOST_TERMINALS = 1 << 18
"""Maximum total characters of all terminals, each written out wherever it is used."""
_BLANKS = re.compile(r"(?:\s+|#[^\n]*)*+")
_RULE = re.compile(r"([A-Za-z0-9_][\w.-]*)(?:\s+|#[^\n]*)*+::=")
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_STRING = re.compile(r'"((?:[^"\\\n]|\\[^\n])*)"')
_CLASS = re.compile(r"\[\^?(?:[^\]\\]|\\.)*\]")
_BOUNDS = re.compile(r"\{\s*([0-9]{1,6})\s*(,?)\s*([0-9]{0,6})\s*\}")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r"}


def is_gbnf(text: str) -> bool:
    """Returns True if a grammar is GBNF rather than Lark."""
    return "::=" in text


def convert_to_lark(text: str, param: str) -> str:
    """Converts a GBNF grammar to Lark; ``root`` becomes the first rule.

    Raises:
        BadRequest: it is invalid, or its terminals are too large when written out.
    """
    rules = _GbnfReader(text, param).read_rules()
    if "root" not in rules:
        raise BadRequest("The grammar has no rule named 'root'.", param=param)
    return _LarkWriter(rules, param).write()


class _GbnfReader:
    def __init__(self, text: str, param: str) -> None:
        self.text, self.param, self.at, self.depth = text, param, 0, 0

    def make_error(self, what: str) -> BadRequest:
        line = self.text.count("\n", 0, self.at) + 1
        return BadRequest(f"The grammar, line {line}: {what}.", param=self.param)

    def skip_blanks(self) -> None:
        match = _BLANKS.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def read_rules(self) -> dict[str, GrammarNode]:
        found: dict[str, GrammarNode] = {}
        self.skip_blanks()
        while self.at < len(self.text):
            head = _RULE.match(self.text, self.at)
            if head is None:
                raise self.make_error("a rule 'name ::= ...' is expected")
            if head[1] in found:
                raise self.make_error(f"the rule {head[1][:40]!r} stands twice")
            self.at = head.end()
            found[head[1]] = self.read_alternatives()
        return found

    def read_alternatives(self) -> GrammarNode:
        options = [self.read_sequence()]
        while self.text.startswith("|", self.at):
            self.at += 1
            options.append(self.read_sequence())
        return options[0] if len(options) == 1 else GrammarNode("any", parts=options)

    def read_sequence(self) -> GrammarNode:
        parts: list[GrammarNode] = []
        while True:
            self.skip_blanks()
            head = self.text[self.at : self.at + 1]
            if not head or head in "|)" or _RULE.match(self.text, self.at):
                return parts[0] if len(parts) == 1 else GrammarNode("all", parts=parts)
            parts.append(self.read_repetition(self.read_item(head)))

    def read_item(self, head: str) -> GrammarNode:
        if head == "(":
            self.at += 1
            self.depth += 1
            if self.depth > MOST_NESTED:
                raise self.make_error("brackets nest too deeply")
            inner = self.read_alternatives()
            self.depth -= 1
            if not self.text.startswith(")", self.at):
                raise self.make_error("a bracket is not closed")
            self.at += 1
            return inner
        if head == ".":
            self.at += 1
            return GrammarNode("text", "(?s:.)")
        kind, pattern = ("string", _STRING) if head == '"' else ("class", _CLASS) if head == "[" else ("name", _NAME)
        match = pattern.match(self.text, self.at)
        if match is None:
            raise self.make_error(f"{head!r} begins nothing that is known")
        self.at = match.end()
        if kind == "string":
            text = _ESCAPE.sub(self._read_character, match[1])
            return GrammarNode("all", parts=[GrammarNode("text", literal(one)) for one in text])
        return (
            GrammarNode("name", match[0])
            if kind == "name"
            else GrammarNode("text", translate_regex(match[0], self.param))
        )

    def _read_character(self, match: re.Match[str]) -> str:
        code = match[1] or match[2] or match[3]
        if not code:
            return _LETTERS.get(match[4], match[4])
        if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
            raise self.make_error("an escape names no character")
        return chr(int(code, 16))

    def read_repetition(self, node: GrammarNode) -> GrammarNode:
        for _ in range(MOST_REPEATS):
            head = self.text[self.at : self.at + 1]
            if head and head in "*+?":
                self.at += 1
                node = GrammarNode("repeat", head, [node])
            elif match := _BOUNDS.match(self.text, self.at):
                self.at = match.end()
                node = GrammarNode("repeat", f"{{{match[1]}{match[2]}{match[3]}}}", [node])
            else:
                return node
        raise self.make_error("a repetition is repeated too often")


class _LarkWriter:
    def __init__(self, rules: dict[str, GrammarNode], param: str) -> None:
        self.rules, self.param = rules, param
        for name, node in rules.items():
            missing = next((n for n in node.list_rule_names() if n not in rules), None)
            if missing is not None:
                raise BadRequest(
                    f"The grammar's rule {name[:40]!r} names {missing[:40]!r}, which is no rule.", param=param
                )
        self.order, self.regular = self._sort_rules()
        self.regexes: dict[str, str] = {}
        self.size = 0
        self.single = "root" not in self.regular and LexerConflicts(rules, self.regular, self.order).ambiguous

    def _sort_rules(self) -> tuple[list[str], set[str]]:
        """Returns the rules without recursion, each after those that it names (Kahn's algorithm)."""
        users: dict[str, list[str]] = {name: [] for name in self.rules}
        open_names: dict[str, int] = {}
        for name, node in self.rules.items():
            named = set(node.list_rule_names())
            open_names[name] = len(named)
            for one in named:
                users[one].append(name)
        order = [name for name, count in open_names.items() if not count]
        for name in order:
            for user in users[name]:
                open_names[user] -= 1
                if not open_names[user]:
                    order.append(user)
        return order, set(order)

    def write(self) -> str:
        if self.single:
            self.order, self.regular = [], set()
        for name in self.order:
            self.regexes[name] = self._check_size(self._write_regex(self.rules[name]))
        if "root" in self.regular:
            return f"start: ROOT\nROOT: /{self.regexes['root'] or '(?:)'}/\n"
        numbers = {name: f"r{i}" for i, name in enumerate(n for n in self.rules if n not in self.regular)}
        lines = [f"start: {numbers['root']}"]
        lines += [f"{number}: {self._write_rule(self.rules[name], numbers)}" for name, number in numbers.items()]
        return "\n".join(lines) + "\n"

    def _check_size(self, regex: str) -> str:
        self.size += len(regex)
        if self.size > MOST_TERMINALS:
            raise BadRequest("The grammar's rules are too large once they are written out.", param=self.param)
        return regex

    def _write_regex(self, node: GrammarNode) -> str:
        if node.kind == "text":
            return node.text
        if node.kind == "name":
            return f"(?:{self.regexes[node.text]})"
        inner = [self._write_regex(part) for part in node.parts]
        if node.kind == "all":
            return "".join(f"(?:{one})" if "|" in one else one for one in inner)
        return "|".join(inner) if node.kind == "any" else f"(?:{inner[0]}){node.text}"

    def _write_rule(self, node: GrammarNode, numbers: dict[str, str]) -> str:
        """Writes a part of a rule in Lark; a part without recursion is one terminal."""
        if node.kind == "name" and node.text in numbers:
            return numbers[node.text]
        whole = (
            node.kind == "text" or not node.parts
            if self.single
            else all(n in self.regular for n in node.list_rule_names())
        )
        if whole:
            regex = self._check_size(self._write_regex(node))
            return f"/{regex}/" if regex else '""'
        inner = [
            self._write_rule(part, numbers) for part in (node.parts if self.single else self._join_regular_parts(node))
        ]
        if node.kind == "all":
            return " ".join(f"({one})" if " | " in one else one for one in inner)
        return " | ".join(inner) if node.kind == "any" else f"({inner[0]}){node.text}"

    def _join_regular_parts(self, node: GrammarNode) -> list[GrammarNode]:
        """Returns the parts of a node; in a sequence, neighbours without recursion are joined."""
        if node.kind != "all":
            return node.parts
        parts: list[GrammarNode] = []
        for part in node.parts:
            plain = all(name in self.regular for name in part.list_rule_names())
            if plain and parts and parts[-1].kind == "all":
                parts[-1].parts.append(part)
            else:
                parts.append(GrammarNode("all", parts=[part]) if plain else part)
        return parts
