"""Answers with calls as models of each style write them, with what a parser must find in them, known beforehand.

Nothing here uses the parsers: an answer is written from its contents and its calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WORDS = (
    "weather", "Äpfel", "東京", "a\tb", 'say "hi"', "C:\\dir", "x < y", "</tag>", "{brace}", "[list]", "it's", "🙂",
    "line\nbreak", "<tool", "[TOOL", "}}", ";", "",
)  # fmt: skip
TALK = ("I will look.", "Sure", "First\n\nsecond", "a < b and {c}", "list: [1, 2]", "ok;", "日本語", '"quoted"', "<b>")
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    },
    "find": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"type": "object"},
            "score": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
"""Functions of the requests, by name: the schemas of their parameters."""
Calls = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """An answer, its content without the blanks beside calls, and its calls as (name, decoded arguments)."""

    text: str
    content: str
    calls: Calls


def arguments(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A function and arguments that its schema allows."""

    def words() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randrange(4)))

    name = rng.choice(list(SCHEMAS))
    if name == "get_weather":
        return name, {"city": words(), "days": rng.randrange(-9, 99), "exact": rng.random() < 0.5}
    if name == "find":
        return name, {
            "query": words(),
            "tags": [words() for _ in range(rng.randrange(3))],
            "where": {words(): {"a": [1, {"b": words()}], "c": None}},
            "score": rng.choice([None, 1.5, -2]),
        }
    return name, {}


def dumped(value: Any, rng: random.Random) -> str:
    """JSON with or without blanks, escapes and line breaks."""
    indent, ascii_only = rng.choice([None, None, 1, 4]), rng.random() < 0.3
    separators = (",", ":") if indent is None and rng.random() < 0.5 else None
    return json.dumps(value, indent=indent, ensure_ascii=ascii_only, separators=separators)


def json_object(name: str, given: dict[str, Any], rng: random.Random, key: str = "arguments") -> str:
    """``{"name": ..., "arguments": ...}``, sometimes in the other order, with more keys, or with a string inside."""
    shown = dumped(given, rng)
    if rng.random() < 0.1:
        shown = json.dumps(shown)
    parts = [f'"name": "{name}"', f'"{key}": {shown}']
    if rng.random() < 0.2:
        parts.reverse()
    if rng.random() < 0.2:
        parts.insert(0, '"type": "function"')
    if not given and rng.random() < 0.3:
        parts = [f'"name": "{name}"']
    blank = rng.choice(["", " ", "\n"])
    return "{" + blank + f",{blank}".join(parts) + blank + "}"


def hermes(calls: Calls, rng: random.Random) -> str:
    def blank() -> str:
        return rng.choice(["", "\n"])

    return blank().join(
        f"<tool_call>{blank()}{json_object(name, given, rng)}{blank()}</tool_call>" for name, given in calls
    )


def llama3(calls: Calls, rng: random.Random) -> str:
    tag = rng.choice(["", "<|python_tag|>"])
    return tag + rng.choice(["; ", ";", "\n", ", "]).join(json_object(n, a, rng, "parameters") for n, a in calls)


def mistral(calls: Calls, rng: random.Random) -> str:
    if rng.random() < 0.5:
        return "[TOOL_CALLS]" + rng.choice(["", " "]) + "[" + ", ".join(json_object(n, a, rng) for n, a in calls) + "]"
    middle = rng.choice(["", "[ARGS]", "[CALL_ID]abcdefghi[ARGS]"])
    return "".join(f"[TOOL_CALLS]{n}{middle}{dumped(a, rng)}" for n, a in calls)


def qwen3(calls: Calls, rng: random.Random) -> str:
    def shown(value: Any) -> str:
        return value if isinstance(value, str) else dumped(value, rng)

    def one(name: str, given: dict[str, Any]) -> str:
        fields = "".join(f"<parameter={k}>\n{shown(v)}\n</parameter>\n" for k, v in given.items())
        return f"<tool_call>\n<function={name}>\n{fields}</function>\n</tool_call>"

    return rng.choice(["", "\n"]).join(one(n, a) for n, a in calls)


def pythonic(calls: Calls, rng: random.Random) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})"

    return "[" + rng.choice([", ", ","]).join(one(n, a) for n, a in calls) + "]"


def gemma4(calls: Calls, rng: random.Random) -> str:
    def quoted(text: str) -> str:
        return f'<|"|>{text}<|"|>'

    def shown(value: Any) -> str:
        blank = rng.choice(["", "", " "])
        if isinstance(value, str):
            return quoted(value)
        if isinstance(value, dict):
            names = (k if k.isidentifier() and k.isascii() else quoted(k) for k in value)
            return (
                "{"
                + f",{blank}".join(f"{k}:{blank}{shown(v)}" for k, v in zip(names, value.values(), strict=True))
                + "}"
            )
        if isinstance(value, list):
            return "[" + f",{blank}".join(map(shown, value)) + "]"
        return json.dumps(value)

    return rng.choice(["", "\n"]).join(f"<|tool_call>call:{n}{shown(a)}<tool_call|>" for n, a in calls)


def lfm2(calls: Calls, rng: random.Random) -> str:
    return f"<|tool_call_start|>{pythonic(calls, rng)}<|tool_call_end|>"


STYLES: dict[str, Callable[[Calls, random.Random], str]] = {
    "hermes": hermes,
    "qwen3": qwen3,
    "llama3_json": llama3,
    "mistral": mistral,
    "pythonic": pythonic,
    "lfm2": lfm2,
    "gemma4": gemma4,
}
BEFORE = {"hermes", "qwen3", "mistral", "llama3_json", "lfm2", "gemma4"}
"""Styles in which text may stand before a call."""


def written(style: str, rng: random.Random) -> WrittenAnswer:
    """An answer with none, one or several calls, and text around them."""
    calls = [arguments(rng) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]
    conversation = rng.choice(TALK)
    if not calls:
        blanks = rng.choice(["", "\n", "  "])
        return WrittenAnswer(blanks + conversation + blanks, blanks + conversation + blanks, [])
    before = conversation if style in BEFORE and rng.random() < 0.4 else ""
    after = rng.choice(["Done.", "東京 it is"]) if rng.random() < 0.2 else ""
    gap = "\n" if before else ""
    text = before + gap + STYLES[style](calls, rng) + ("\n" + after if after else "")
    content = before + (gap if before and after else "") + after
    return WrittenAnswer(text, content, [(n, a) for n, a in calls])


def damaged(text: str, rng: random.Random) -> str:
    """The text cut off, or with characters lost, doubled or exchanged."""
    if rng.random() < 0.5 or not text:
        return text[: rng.randrange(len(text) + 1)]
    out = list(text)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(out))
        kind = rng.randrange(3)
        if kind == 0 and len(out) > 1:
            del out[at]
        elif kind == 1:
            out.insert(at, out[at])
        else:
            out[at] = rng.choice('{}[]<>",:()\\ \n=;x')
    return "".join(out)


def pieces(text: str, rng: random.Random) -> Sequence[str]:
    """The text divided at random places: letter by letter, into words, or into a few long pieces."""
    most = rng.choice([1, 3, 8, 40, 400])
    out, at = [], 0
    while at < len(text):
        size = rng.randint(1, most)
        out.append(text[at : at + size])
        at += size
    return out
