"""Requests to /v1/responses and /v1/messages, and what a scripted model answers to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.fakes.text_checkpoint import TEMPLATE
from tests.traffic.tool_templates import HERMES, THINKING_HERMES

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a":  1}}</tool_call>'
BARE = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'


@dataclass(frozen=True, slots=True)
class Script:
    """One exchange.

    Args:
        limit: most tokens.
        tools: whether the request has the functions ``f`` and ``g``.
        breaks: the token at which the engine fails.
    """

    template: str
    answer: str
    limit: int = 200
    tools: bool = False
    stop: str = ""
    logprobs: bool = False
    breaks: int | None = None

    def responses(self, **more: Any) -> dict[str, Any]:
        """A body for /v1/responses."""
        body: dict[str, Any] = {"model": "m", "input": "Hi", "max_output_tokens": self.limit}
        if self.tools:
            body["tools"] = [{"type": "function", "name": n, "parameters": SCHEMA} for n in "fg"]
        if self.stop:
            body["stop"] = [self.stop]
        if self.logprobs:
            body["include"] = ["message.output_text.logprobs"]
        return body | more

    def messages(self, **more: Any) -> dict[str, Any]:
        """A body for /v1/messages."""
        conversation = [{"role": "user", "content": "Hi"}]
        body: dict[str, Any] = {"model": "m", "max_tokens": self.limit, "messages": conversation}
        if self.tools:
            body["tools"] = [{"name": n, "input_schema": SCHEMA} for n in "fg"]
        if self.stop:
            body["stop_sequences"] = [self.stop]
        return body | more


SCRIPTS = {
    "text": Script(TEMPLATE, "Hi ö!"),
    "logprobs": Script(TEMPLATE, "ö 日", logprobs=True),
    "all": Script(THINKING_HERMES, f"Hm.\n</think>\n\nOne.\n{CALL}\n{BARE}\nTwo.", tools=True),
    "cut text": Script(TEMPLATE, "ö 日", limit=3),
    "cut thought": Script(THINKING_HERMES, "Hm, well", limit=3),
    "cut call": Script(HERMES, CALL, limit=30, tools=True),
    "stopped": Script(TEMPLATE, "One. Two.", stop=" Tw"),
    "empty": Script(TEMPLATE, ""),
    "broken": Script(TEMPLATE, "ö 日", breaks=3),
}
