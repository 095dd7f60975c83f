"""Kinds of streams: what is asked for, and the bytes that each token's event holds once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
SAID = b'"content":"'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of stream.

    Args:
        mark: occurs once in the event of a token.
        body: beside the model, the limit and ``stream``.
        flags: what the server needs for it.
    """

    path: str = CHAT
    mark: bytes = SAID
    body: dict[str, Any] = field(default_factory=lambda: dict(TALK))
    flags: tuple[str, ...] = ()

    def request(self, tokens: int) -> bytes:
        """The bytes of a request for ``tokens`` tokens."""
        limit = "max_output_tokens" if self.path == "/v1/responses" else "max_tokens"
        body = json.dumps({"model": "m", "stream": True, "ignore_eos": True, limit: tokens, **self.body}).encode()
        head = f"POST {self.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
USAGE: dict[str, Any] = {"include_usage": True}

KINDS = {
    "chat": Kind(),
    "usage": Kind(body=TALK | {"stream_options": USAGE}),
    "running usage": Kind(body=TALK | {"stream_options": USAGE | {"continuous_usage_stats": True}}),
    "stop strings": Kind(body=TALK | {"stop": ["never said", "nor this"]}),
    "tools": Kind(body=TALK | {"tools": TOOLS}, flags=("--tool-call-parser", "hermes")),
    "logprobs": Kind(body=TALK | {"logprobs": True}),
    "top logprobs": Kind(body=TALK | {"logprobs": True, "top_logprobs": 5}),
    "completions": Kind("/v1/completions", b'"text":"', {"prompt": "Hi"}),
    "completions logprobs": Kind("/v1/completions", b'"text":"', {"prompt": "Hi", "logprobs": 1}),
    "responses": Kind("/v1/responses", b"event: response.output_text.delta", {"input": "Hi"}),
    "messages": Kind("/v1/messages", b"event: content_block_delta"),
}
"""By the name that ``--kinds`` takes."""
