"""Structural tags: texts in which certain marks begin parts of a fixed form.

Both forms of vLLM are read: ``structures`` with ``triggers``, and ``format``, a tree of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping
from trencadis.server.grammars import gbnf, lark_grammar_and_tool_functions
from trencadis.server.grammars.json_schema_normaliser import normalise_schema, parse_if_text, parse_schema
from trencadis.server.grammars.lark_grammar_and_tool_functions import GrammarWriter, WhitespaceRule
from trencadis.server.grammars.regex_translation import translate_regex

LEVELS = 32
MOST_PARTS = 4_096
FREE = ("any_text", "triggered_tags")
"""Parts that end only at the mark after them."""


class TagReader:
    """Converts structural tags to rules.

    Args:
        writer: collects the rules.
        spaces: rule for blanks of JSON in them.
    """

    def __init__(self, writer: GrammarWriter, spaces: WhitespaceRule) -> None:
        self._writer, self._spaces, self._count = writer, spaces, 0
        self._parts: dict[str, Callable[[JsonMapping, str, int], str]] = {
            "const_string": lambda part, at, level: writer.write_text(_get_text(part, "value", at)),
            "token": self._read_token,
            "json_schema": self._read_schema,
            "grammar": self._read_grammar,
            "regex": lambda part, at, level: writer.add_rule(
                f"/{translate_regex(_get_text(part, 'pattern', at), at)}/"
            ),
            "any_text": lambda part, at, level: writer.write_free_text(*_get_texts(part, "excludes", at)),
            "sequence": lambda part, at, level: writer.add_rule(" ".join(self._read_elements(part, at, level))),
            "or": lambda part, at, level: writer.add_rule(" | ".join(self._read_elements(part, at, level))),
            "optional": lambda part, at, level: self._repeat_elements(part, at, level, "?"),
            "star": lambda part, at, level: self._repeat_elements(part, at, level, "*"),
            "plus": lambda part, at, level: self._repeat_elements(part, at, level, "+"),
            "repeat": self._read_repeat,
            "tag": self._read_tag,
            "triggered_tags": lambda part, at, level: self._make_triggered_rule(part, at, level, ""),
            "tags_with_separator": self._make_separated_tags,
        }

    def read(self, value: Json, where: str) -> str:
        """Writes the rule of a structural tag and returns its name.

        Raises:
            BadRequest: it is invalid.
        """
        value = parse_if_text(value, where)
        if not isinstance(value, Mapping):
            raise BadRequest(f"{where} must be an object.", param=where)
        if "format" in value:
            return self._read_part(value["format"], f"{where}.format", 0)
        if "structures" not in value:
            raise BadRequest(f"{where} needs 'format', or 'structures' and 'triggers'.", param=where)
        structures = value["structures"]
        if not isinstance(structures, Sequence) or not structures:
            raise BadRequest(f"{where}.structures must be a list with something in it.", param=f"{where}.structures")
        tags = []
        for i, one in enumerate(structures):
            at = f"{where}.structures[{i}]"
            if not isinstance(one, Mapping):
                raise BadRequest(f"{at} must be an object.", param=at)
            content = {"type": "json_schema", "json_schema": one.get("schema", {}), "_where": f"{at}.schema"}
            tags.append({"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end")})
        return self._make_triggered_rule({"triggers": value.get("triggers"), "tags": tags}, where, 0, "")

    def _read_part(self, part: Json, at: str, level: int) -> str:
        self._count += 1
        if level > LEVELS or self._count > MOST_PARTS:
            raise BadRequest(f"{at[:100]} holds too many parts.", param=at[:120])
        kind = part.get("type") if isinstance(part, Mapping) else None
        read = self._parts.get(str(kind))
        if read is None:
            raise BadRequest(f"{at[:60]}.type {str(kind)[:40]!r} is not supported.", param=f"{at[:110]}.type")
        return read(part, at, level)

    def _read_token(self, part: JsonMapping, at: str, level: int) -> str:
        text = _get_text(part, "token", at)
        if not self._writer.is_token(text):
            raise BadRequest(f"{at}.token {text[:40]!r} is no control token.", param=f"{at[:110]}.token")
        return self._writer.write_text(text)

    def _read_schema(self, part: JsonMapping, at: str, level: int) -> str:
        if part.get("style", "json") != "json" or part.get("any_order"):
            raise BadRequest(f"{at[:80]}: only JSON with properties in order is supported.", param=at[:120])
        where = str(part.get("_where", f"{at}.json_schema"))
        return self._writer.add_json(
            normalise_schema(parse_schema(part.get("json_schema"), where), where), self._spaces
        )

    def _read_grammar(self, part: JsonMapping, at: str, level: int) -> str:
        text, where = _get_text(part, "grammar", at), f"{at}.grammar"
        made = (
            gbnf.convert_to_lark(text, where)
            if gbnf.is_gbnf(text)
            else lark_grammar_and_tool_functions.check_lark_grammar(text, where, self._spaces)
        )
        return self._writer.add_grammar(made)

    def _read_elements(self, part: JsonMapping, at: str, level: int, key: str = "elements") -> list[str]:
        some = part.get(key)
        if not isinstance(some, list) or not some:
            raise BadRequest(f"{at[:80]}.{key} must be a list with something in it.", param=f"{at[:100]}.{key}")
        return [self._read_part(one, f"{at}.{key}[{i}]", level + 1) for i, one in enumerate(some)]

    def _repeat_elements(self, part: JsonMapping, at: str, level: int, mark: str) -> str:
        return self._writer.add_rule(f"({self._read_part(part.get('content'), f'{at}.content', level + 1)}){mark}")

    def _read_repeat(self, part: JsonMapping, at: str, level: int) -> str:
        least, most = part.get("min"), part.get("max")
        if not isinstance(least, int) or not isinstance(most, int) or least < 0 or not (most < 0 or most >= least):
            raise BadRequest(f"{at[:80]} needs 'min' and 'max'.", param=at[:120])
        return self._repeat_elements(part, at, level, f"{{{least},{'' if most < 0 else most}}}")

    def _read_tag(self, part: JsonMapping, at: str, level: int) -> str:
        begin = self._read_mark(part.get("begin"), f"{at}.begin")
        return self._writer.add_rule(f"{self._writer.write_text(begin)} {self._read_tag_rest(part, at, level)}")

    def _read_tag_rest(self, part: JsonMapping, at: str, level: int) -> str:
        """Writes the content and end of a tag."""
        given = part.get("end", "")
        ends = [self._read_mark(one, f"{at}.end") for one in (given if isinstance(given, list) and given else [given])]
        content = part.get("content")
        kind = content.get("type") if isinstance(content, Mapping) else None
        if kind not in FREE or ends == [""]:
            inner = self._read_part(content, f"{at}.content", level + 1)
            return f"{inner} {self._make_choice([self._writer.write_text(end) for end in ends])}"
        assert isinstance(content, Mapping)
        if kind == "triggered_tags":
            if len(ends) > 1:
                raise BadRequest(f"{at[:80]}.end must be one text here.", param=f"{at[:110]}.end")
            return self._make_triggered_rule(content, f"{at}.content", level + 1, ends[0])
        return self._make_choice([self._writer.write_until(end) for end in ends])

    def _make_choice(self, rules: Sequence[str]) -> str:
        return rules[0] if len(rules) == 1 else f"({' | '.join(rules)})"

    def _read_mark(self, value: Json, at: str) -> str:
        """Returns a text, or the text of a token."""
        if isinstance(value, Mapping) and value.get("type") == "token":
            value = value.get("token")
        if not isinstance(value, str):
            raise BadRequest(f"{at[:100]} must be a text.", param=at[:120])
        return value

    def _make_triggered_rule(self, part: JsonMapping, at: str, level: int, end: str) -> str:
        """Writes a rule for free text in which a trigger begins a tag; ``end`` ends all of it, if not empty."""
        triggers = _get_texts(part, "triggers", at)
        tags = part.get("tags")
        if not triggers or not all(triggers) or not isinstance(tags, list) or not tags:
            raise BadRequest(f"{at[:80]} needs 'triggers' and tags.", param=at[:120])
        choices: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            here = f"{at}.tags[{i}]" if "type" in part else f"{at}.structures[{i}]"
            begin = self._read_mark(tag.get("begin") if isinstance(tag, Mapping) else None, f"{here}.begin")
            trigger = next((t for t in sorted(triggers, key=len, reverse=True) if begin.startswith(t)), None)
            if trigger is None:
                raise BadRequest(f"{here[:80]}.begin starts with no trigger.", param=f"{here[:100]}.begin")
            rest = begin.removeprefix(trigger)
            follows = f"{self._writer.write_text(rest) if rest else ''} {self._read_tag_rest(tag, here, level + 1)}"
            choices.setdefault(trigger, []).append(self._writer.add_rule(follows.strip()))
        last = self._writer.write_until(end) if end else self._writer.write_free_text(*triggers)
        calls = [f"{self._writer.write_until(t)} ({' | '.join(some)})" for t, some in choices.items()]
        one = self._writer.add_rule(" | ".join(calls))
        direct = [f"{self._writer.write_text(t)} ({' | '.join(some)})" for t, some in choices.items()]
        first = self._writer.add_rule(" | ".join(direct)) if part.get("at_least_one") else one
        if part.get("stop_after_first"):
            tail = f" {self._writer.write_text(end)}" if end else ""
            return self._writer.add_rule(f"{first}{tail}" if part.get("at_least_one") else f"{one}{tail} | {last}")
        return self._writer.add_rule(f"{first} ({one})* {last}" if part.get("at_least_one") else f"({one})* {last}")

    def _make_separated_tags(self, part: JsonMapping, at: str, level: int) -> str:
        tags = self._read_elements(part, at, level, "tags")
        one = self._writer.add_rule(" | ".join(tags))
        separator = self._writer.write_text(_get_text(part, "separator", at)) if part.get("separator") else ""
        many = one if part.get("stop_after_first") else f"{one} ({separator} {one})*"
        return self._writer.add_rule(many if part.get("at_least_one") else f"({many})?")


def _get_text(part: JsonMapping, key: str, at: str) -> str:
    value = part.get(key)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{at[:80]}.{key} must be a text that is not empty.", param=f"{at[:100]}.{key}")
    return value


def _get_texts(part: JsonMapping, key: str, at: str) -> list[str]:
    value = part.get(key) or []
    if not isinstance(value, list) or any(not isinstance(one, str) for one in value):
        raise BadRequest(f"{at[:80]}.{key} must be a list of texts.", param=f"{at[:100]}.{key}")
    return value
