"""Requests for JSON and short objects that answer them: strings, numbers and lists that end soon."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tokenizers import Tokenizer

from demo.images.palette import COLOURS
from demo.images.scene import SHAPES
from demo.language import chat_dialogues
from demo.language.tokenizer import SYSTEM

WORDS = (
    "name", "age", "title", "color", "shape", "count", "items", "id", "city", "date", "price", "total", "status",
    "type", "value", "result", "answer", "reason", "setup", "punchline", "rating", "steps", "user", "email", "address",
    "note", "size", "kind", "label", "text", "number", "list", "weather", "country", "person", "order", "amount",
    "tags", "year",
)  # fmt: skip
PLACES = ("Rome", "Paris", "Oslo", "Lima", "Bonn", "Kyoto", "Cairo", "Quito")
NAMES = ("Anna", "Ben", "Carla", "David", "Eva", "Farid", "Grace", "Hugo", "Ines", "Jan")
REQUESTS = (
    "Give me a JSON object about {}.", "Describe {} as JSON.", "Answer in JSON: {}", "Return JSON with {}.", "json {}",
    "Write {} as a JSON object.", "Reply with JSON only. {}", "{} Respond in JSON.", "Extract {} as JSON.", "{}", "{}?",
    "List {} in JSON.", "Tell me about {}.", "I need {} in JSON, please.",
)  # fmt: skip
SYSTEMS = (
    "You answer with JSON only.", "Reply in JSON.", "You are a helpful assistant. Use JSON.",
    "Extract what the text says.",
)  # fmt: skip
QUOTED = '"\\'
"""Characters that a JSON string escapes."""


class JsonWriter:
    """Draws requests and their answers.

    Args:
        tokenizer: the tokenizer, whose pieces also make strings without a sense: under a grammar the model has to end
            whatever it has begun.
    """

    def __init__(self, tokenizer: Tokenizer, rng: Random) -> None:
        self._rng = rng
        pieces = (tokenizer.decode([i]) for i in range(1002))
        self._pieces = [p for p in pieces if p.isprintable() and "\ufffd" not in p and not set(p) & set(QUOTED)]

    def draw(self) -> tuple[str, str, str]:
        """Returns a system prompt, a user's message and the assistant's answer."""
        rng = self._rng
        system = SYSTEM if rng.random() < 0.7 else rng.choice(SYSTEMS)
        about = " ".join(rng.choices(WORDS, k=rng.randint(1, 4))) if rng.random() < 0.6 else self._text()
        made = self._value(0) if rng.random() < 0.05 else self._object(0)
        text = self._write(made)
        if rng.random() < 0.12:
            call = {"name": self._key(), "arguments": made if isinstance(made, dict) else {}}
            text = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
        return system, rng.choice(REQUESTS).format(about), text

    def _write(self, value: Any) -> str:
        way = self._rng.random()
        if way < 0.2:
            return json.dumps(value, indent=2, ensure_ascii=False)
        if way < 0.45:
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        return json.dumps(value, ensure_ascii=False)

    def _object(self, depth: int) -> dict[str, Any]:
        count = self._rng.choices((0, 1, 2, 3, 4), (1, 4, 5, 4, 2))[0]
        return {self._key(): self._value(depth + 1) for _ in range(count)}

    def _value(self, depth: int) -> Any:
        rng = self._rng
        kind = rng.choices(("text", "number", "word", "list", "object"), (12, 4, 2, 3, 2))[0]
        if kind == "number":
            number = rng.randint(0, 10 ** rng.randint(1, 3))
            return number if rng.random() < 0.75 else rng.choice((-number, number / 10, number + 0.5))
        if kind == "word":
            return rng.choice((True, False, None))
        if kind == "list" and depth < 3:
            return [self._value(depth + 1) for _ in range(rng.choices((0, 1, 2, 3), (1, 3, 4, 2))[0])]
        if kind == "object" and depth < 3:
            return self._object(depth)
        return self._text()

    def _key(self) -> str:
        parts = self._rng.choices(WORDS, k=self._rng.choices((1, 2, 3), (6, 3, 1))[0])
        if self._rng.random() < 0.1:
            return self._pieces_text(3) or "key"
        return "_".join(parts) if self._rng.random() < 0.8 else parts[0] + "".join(p.title() for p in parts[1:])

    def _text(self) -> str:
        rng, way = self._rng, self._rng.random()
        if way < 0.03:
            return ""
        if way < 0.3:
            return self._pieces_text(8)
        if way < 0.45:
            said = rng.choice(list(chat_dialogues.ANSWERS.values())).split(" ")
            return " ".join(said[: rng.randint(1, min(6, len(said)))])
        if way < 0.65:
            return rng.choice((*NAMES, *PLACES, *WORDS, *COLOURS, *SHAPES))
        if way < 0.75:
            return f"{rng.choice('ABCDEFGH')}{rng.choice(('', '-', '-2026-'))}{rng.randint(0, 999)}"
        count, pool = rng.randint(1, 5), (*WORDS, *COLOURS, *SHAPES, "a", "the", "of", "and", "is", "in")
        made = " ".join(rng.choices(pool, k=count))
        return made.capitalize() + rng.choice((".", "")) if rng.random() < 0.4 else made

    def _pieces_text(self, most: int) -> str:
        return "".join(self._rng.choices(self._pieces, k=self._rng.randint(1, most)))
