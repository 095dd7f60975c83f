"""Writes one combined grammar: Lark rules of an answer's outline, with schemas and users' grammars as sub-grammars.

Functions that an answer may call become rules too. A user's Lark grammar is checked: its schemas are read as all others
are, and options without effect are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.server.grammars.json_schema_normaliser import normalise_schema
from trencadis.server.grammars.regex_translation import escaped

ANY = "(?s:.*)"
"""Any text, as a regex; control tokens are none."""
BLANKS = r" |\r?\n(?: {1,32}|\t{1,16})?"
"""Blanks at one place of a JSON text, as a regex, unless a request says otherwise: one space, or a line break with the
indentation of a nested text. Small models write blanks up to the limit of an answer where they may."""
BETWEEN = r"/[ \t\n\r]{0,16}/"
"""Regex of the blanks between a thought, or a call, and the text after it."""
ESCAPES = 'nrbtf\\"'
"""Characters allowed after a backslash in JSON strings."""


@dataclass(frozen=True, slots=True)
class WhitespaceRule:
    """Rule for blanks in JSON texts.

    Args:
        pattern: regex of the blanks at one place, where none are always allowed; empty: no blanks.
    """

    pattern: str = BLANKS

    def make_options(self, schema: Json) -> JsonObject:
        """Returns the library's options for a normalised schema.

        If an object may have names besides those that the schema lists, the escape ``\\u`` is not allowed: the library
        would not recognise a listed name in that spelling, and would not apply its schema.
        """
        escapes = ESCAPES if _names_some_properties(schema) else ESCAPES + "u"
        if not self.pattern:
            return {"whitespace_flexible": False, "json_allowed_escapes": escapes}
        return {"whitespace_pattern": self.pattern, "json_allowed_escapes": escapes}


def _names_some_properties(schema: Json) -> bool:
    """Returns True if a part of a schema lists names of properties and allows others."""
    todo = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            lists = "properties" in node or "required" in node or "patternProperties" in node
            if lists and node.get("additionalProperties") is not False:
                return True
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)
    return False


def quoted(text: str) -> str:
    """Returns a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class GrammarWriter:
    """Collects the rules of one grammar.

    Args:
        control: ids of control tokens by their texts. Such a text in an outline is written as its token.
    """

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        names = sorted(control, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._rules: list[str] = []
        self._sides: dict[str, JsonObject] = {}
        self._known: dict[str, str] = {}

    def is_token(self, text: str) -> bool:
        """Returns True if a text is one control token."""
        return text in self._control

    def write_text(self, text: str) -> str:
        """Returns a text in Lark; control tokens in it are written as tokens."""
        parts = [text] if self._split is None else self._split.split(text)
        return " ".join(f"<[{self._control[p]}]>" if p in self._control else quoted(p) for p in parts if p) or '""'

    def add_rule(self, body: str, options: str = "") -> str:
        """Adds a rule and returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{f'[{options}]' if options else ''}: {body}")
        return name

    def add_terminal(self, body: str) -> str:
        """Adds a terminal, which the lexer matches as a whole, and returns its name."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def add_json(self, schema: Json, spaces: WhitespaceRule = WhitespaceRule()) -> str:
        """Adds a JSON text that fits a normalised schema; returns its name."""
        whole = {} if schema is True else {"not": {}} if schema is False else dict(schema)
        return self._add_nested("json_schema", {**whole, "x-guidance": spaces.make_options(schema)})

    def add_grammar(self, lark: str) -> str:
        """Adds a text of a separate Lark grammar; returns its name."""
        return self._add_nested("lark_grammar", lark)

    def _add_nested(self, kind: str, value: Json) -> str:
        key = kind + json.dumps(value)
        if key not in self._known:
            name = f"g{len(self._sides)}"
            self._sides[name] = {"name": name, kind: value}
            self._known[key] = f"@{name}"
        return self._known[key]

    def write_until(self, end: str, some: str = "") -> str:
        """Adds a rule for any text up to and including ``end``, which the text before must not contain, nor the control
        token that it begins with.

        Args:
            some: a regex of the text, instead of any text.
        """
        if self._split is not None and self._split.match(end):  # no text before it can hold that token
            return self.add_rule(f"/{some or ANY}/ {self.write_text(end)}")
        if some:
            return self.add_rule(f"/{some}/ {self.write_text(end)}")
        return self.add_rule(f"/{ANY}{escaped(end)}/", "lazy")

    def write_free_text(self, *without: str) -> str:
        """Adds a terminal for any text that contains none of some texts."""
        plain = [one for one in without if one and not self.is_token(one)]
        return self.add_terminal(f"/{ANY}/" + "".join(f" & ~/{ANY}{escaped(one)}{ANY}/" for one in plain))

    def write_grammar(self, start: str) -> str:
        """Returns the grammar in the form that ``LLMatcher`` takes."""
        if not self._rules and re.fullmatch(r"@g\d+", start):
            return json.dumps({"grammars": [self._sides[start[1:]]]})
        lark = "\n".join((f"start: {start}", *self._rules)) + "\n"
        return json.dumps({"grammars": [{"name": "answer", "lark_grammar": lark}, *self._sides.values()]})


_PIECE = re.compile(
    r"""(?P<skip>\s++|//[^\n]*+|\#[^\n]*+|"(?:[^"\\]|\\.)*+"i?|/(?![/*])(?:[^/\\\n]|\\.)++/[a-z]*+)"""
    r"""|(?P<json>%json\b)|(?P<options>\[[a-z_]+\s*[=,\]])|(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)
_OPTION = re.compile(r"\b(temperature|max_tokens|stop)\s*=")
_SIGN = re.compile(r"(?m)^\s*[?!]?start\b[^:\n]*:")


def check_lark_grammar(text: str, param: str, spaces: WhitespaceRule) -> str:
    """Returns a user's grammar, ready to be compiled.

    Raises:
        BadRequest: it has no ``start``, an option that is not supported, or a bad schema.
    """
    if not _SIGN.search(text):
        raise BadRequest("The grammar has neither a rule 'start: ...' (Lark) nor 'root ::= ...' (GBNF).", param=param)
    out: list[str] = []
    at = 0
    while at < len(text):
        match = _PIECE.match(text, at)
        assert match is not None  # always matches at least one character
        at = match.end()
        if match["json"]:
            start = re.compile(r"\s*").match(text, at)
            try:
                schema, at = json.JSONDecoder().raw_decode(text, start.end() if start else at)
            except (ValueError, RecursionError):
                raise BadRequest("The grammar has no JSON behind %json.", param=param) from None
            made = normalise_schema(schema, f"{param}.%json")
            whole = made if isinstance(made, dict) else {} if made else {"not": {}}
            out.append("%json " + json.dumps({**whole, "x-guidance": spaces.make_options(made)}))
            continue
        if match["options"]:
            end = text.find("]", match.start())
            option = _OPTION.search(text, match.start(), end if end > 0 else len(text))
            if option:
                raise BadRequest(f"The grammar's option {option[1]!r} is not supported.", param=param)
        out.append(match[0])
    return "".join(out)


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_PLAIN = frozenset({"type", "properties", "required", "additionalProperties", "$defs"})


@dataclass(frozen=True, slots=True)
class ToolParameter:
    """One parameter of a function; ``schema`` is complete, including the definitions that it refers to."""

    name: str
    schema: Json
    required: bool
    where: str


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function and the schema of its arguments, normalised.

    Args:
        where: JSON path of the schema in the request.
        fault: why ``schema`` accepts any object instead of the tool's schema.
    """

    name: str
    schema: Json
    where: str
    fault: BadRequest | None = None

    @classmethod
    def from_tool(cls, tool: JsonMapping, index: int, exact: bool) -> ToolFunction:
        """Returns the function of a checked tool.

        Args:
            exact: True if the arguments must fit the schema; else any object is accepted for a schema without a
            grammar.

        Raises:
            BadRequest: ``exact``, and the schema has no grammar.
        """
        function = tool["function"]
        where = f"tools[{index}].function.parameters"
        given = function.get("parameters")
        try:
            return cls(
                function["name"],
                normalise_schema({"type": "object", **given} if given else NO_PARAMETERS, where),
                where,
            )
        except BadRequest as error:
            if exact:
                raise
            return cls(function["name"], {"type": "object"}, where, error)

    def list_parameters(self) -> list[ToolParameter]:
        """Returns the parameters one by one, for call formats that do not write them as one JSON text.

        A required name that ``properties`` lacks has the schema of additional properties.

        Raises:
            BadRequest: the schema has more than names, schemas and required names of parameters, or requires a name
                that it does not allow.
        """
        if self.fault is not None:
            # A schema for any object has no list of parameters: none of them could be written.
            raise self.fault
        root = self.schema if isinstance(self.schema, dict) else {}
        defs = root.get("$defs", {})
        node = root
        while isinstance(node.get("$ref"), str) and set(node) <= {"$ref", "$defs"}:
            node = defs.get(node["$ref"].removeprefix("#/$defs/"), {})
        if not set(node) <= _PLAIN or _refers_to_root(root):
            raise BadRequest(
                f"{self.where}: in this form of calls a grammar takes properties and required ones, and nothing that "
                "concerns several at once.",
                param=self.where,
            )
        required, named = node.get("required", ()), node.get("properties", {})
        others = node.get("additionalProperties", {})
        made = []
        for name, schema in {**named, **{one: others for one in required if one not in named}}.items():
            where = f"{self.where}.{'properties' if name in named else 'required'}.{name}"[:120]
            if schema is False:
                if name in required:
                    raise BadRequest(f"{where}: the schema requires this name and allows no value of it.", param=where)
                continue
            whole = {**schema, "$defs": defs} if isinstance(schema, dict) and defs else schema
            made.append(ToolParameter(name, whole, name in required, where))
        return made


def _refers_to_root(root: Json) -> bool:
    """Returns True if a schema refers to itself as a whole."""
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            if node.get("$ref") == "#":
                return True
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)
    return False


def make_separated_rule(writer: GrammarWriter, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """Writes the rule of items in order with a separator between them; optional ones may be left out."""
    behind, alone = '""', '""'
    for item, required in reversed(items):
        if required:
            behind, alone = writer.add_rule(f"{separator} {item} {behind}"), writer.add_rule(f"{item} {behind}")
        else:
            alone = writer.add_rule(f"{item} {behind} | {alone}")
            behind = writer.add_rule(f"({separator} {item})? {behind}")
    return alone


def make_list_rule(writer: GrammarWriter, items: Sequence[str], many: bool) -> str:
    """Writes the rule of a list in brackets: one of ``items``, or with ``many`` one or more, each any of them."""
    each = writer.add_rule(" | ".join(items))
    more = f"({quoted(', ')} {each})*" if many else ""
    return writer.add_rule(f"{quoted('[')} {each} {more} {quoted(']')}")
