"""Requests that are large in one way each: what they would cost the API process if it took them as they come."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

MB = 1_000_000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = b'{"role":"user","content":"x"}'
ABC = b'"abc"'


@dataclass(frozen=True)
class Flood:
    """A request by its path and body; ``status`` is what a server answers."""

    name: str
    path: str
    make: Callable[[], bytes]
    status: int = 400


def items(head: bytes, item: bytes, count: int, tail: bytes = b"]}") -> bytes:
    """A list of ``count`` equal items between ``head`` and ``tail``."""
    return head + b",".join([item] * count) + tail


def beside(field: bytes) -> bytes:
    """A chat request with one more field."""
    return b'{"max_tokens":1,"messages":[' + USER + b"]," + field + b"}"


def keys(count: int) -> bytes:
    """An unknown field of ``count`` different keys."""
    return b'"x":{' + b",".join(b'"%d":1' % i for i in range(count)) + b"}"


def nested(count: int) -> bytes:
    """About ``count`` bytes of lists in lists."""
    value = b"[" + b",".join([b"0"] * 10) + b"]"
    while len(value) < count // 100:
        value = b"[" + b",".join([value] * 10) + b"]"
    return b"[" + b",".join([value] * (count // len(value))) + b"]"


BEYOND = [
    Flood("199,000 messages", CHAT, lambda: items(b'{"messages":[', USER, 199_000)),
    Flood("2 million parts", CHAT, lambda: items(b'{"messages":[{"role":"user","content":[', b'"x"', 2 * MB, b"]}]}")),
    Flood("30 million ids to read", "/detokenize", lambda: items(b'{"tokens":[', b"1", 30 * MB)),
    Flood("60 MB of an unknown field", CHAT, lambda: beside(b'"x":' + nested(60 * MB))),
    Flood("45 MB of text in an unknown field", CHAT, lambda: beside(b'"x":"' + b"a" * 45 * MB + b'"'), 413),
    Flood("10 million prompts", COMPLETIONS, lambda: items(b'{"prompt":[', b'"a"', 10 * MB)),
    Flood("10 million prompts of ids", COMPLETIONS, lambda: items(b'{"prompt":[', b"[1]", 10 * MB)),
    Flood("35 MB of template kwargs", CHAT, lambda: beside(b'"chat_template_kwargs":{"x":' + nested(35 * MB) + b"}")),
    Flood("20 million stop ids", CHAT, lambda: beside(items(b'"stop_token_ids":[', b"1", 20 * MB, b"]"))),
    Flood("a million keys", CHAT, lambda: b"{" + b",".join(b'"%d":1' % i for i in range(MB)) + b"}"),
    Flood("200,000 keys of an unknown field", CHAT, lambda: beside(keys(MB // 5))),
    Flood("a key of 60 MB", CHAT, lambda: b'{"data:' + b"k" * 60 * MB + b'":1}'),
    Flood("a prompt of 60 MB", COMPLETIONS, lambda: b'{"prompt":"' + b"word " * 12 * MB + b'"}', 413),
    Flood("60 MB of blanks", CHAT, lambda: beside(b" " * 60 * MB + b'"x":1'), 413),
    Flood("60 MB of escapes", CHAT, lambda: beside(b'"x":"' + b"\\u0041" * 10 * MB + b'"'), 413),
    Flood("60 MB of quotes", CHAT, lambda: b'{"x":' + b'"' * 60 * MB, 413),
    Flood("60 million brackets", CHAT, lambda: b'{"messages":' + b"[" * 60 * MB),
    Flood("a number of 3 million digits", CHAT, lambda: beside(b'"n":' + b"9" * 3 * MB)),
    Flood("arguments of a million lists", CHAT, lambda: json.dumps({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": items(b"[", b"[]", MB, b"]").decode()}}]}]}).encode()),
]  # fmt: skip
"""Beyond a bound. The demo's vocabulary has the id 1."""

WITHIN = [
    Flood("8,000 messages", CHAT, lambda: items(b'{"messages":[', USER, 8000)),
    Flood("60,000 parts", CHAT, lambda: items(
        b'{"messages":[{"role":"user","content":[', b'{"text":"x"}', 60_000, b"]}]}")),
    Flood("260,000 ids to read", "/detokenize", lambda: items(b'{"tokens":[', b"1", 260_000)),
    Flood("260,000 wrong ids", "/detokenize", lambda: items(b'{"tokens":[', b'"a"', 260_000)),
    Flood("260,000 ids as a prompt", COMPLETIONS, lambda: items(b'{"prompt":[', b"1", 260_000)),
    Flood("260,000 values of an unknown field", CHAT, lambda: beside(items(b'"x":[', b'"value"', 260_000, b"]")), 200),
    Flood("65,000 objects of an unknown field", CHAT, lambda: beside(items(b'"x":[', b'{"a":1}', 65_000, b"]")), 200),
    Flood("1,000 prompts of 3,000 characters, the last too long", COMPLETIONS, lambda: json.dumps(
        {"prompt": ["word " * 600] * 1000 + ["x" * 100_000], "max_tokens": 1}).encode()),
    Flood("1,024 short prompts", COMPLETIONS, lambda: items(b'{"max_tokens":1,"prompt":[', b'"Hi"', 1024), 200),
    Flood("a prompt of 8 million letters", COMPLETIONS, lambda: b'{"prompt":"' + b"x" * 8 * MB + b'"}'),
    Flood("a message of 8 million letters", CHAT, lambda: items(b'{"messages":[{"role":"user","content":"',
                                                                b"x" * 8 * MB, 1, b'"}]}')),
    Flood("a text that begins like an image", CHAT, lambda: b'{"messages":[{"role":"user","content":"data:'
          + b"x" * 60 * MB + b'"}]}'),
    Flood("60 MB of no image", CHAT, lambda: b'{"messages":[{"role":"user","content":[{"type":"image_url",'
          b'"image_url":{"url":"data:image/png;base64,' + b"QUJD" * 15 * MB + b'"}}]}]}', 415),
    Flood("65,000 template kwargs", CHAT, lambda: beside(
        items(b'"chat_template_kwargs":{"x":[', b'["abc"]', 65_000, b"]}")), 200),
    Flood("65,000 template kwargs and half a pair", CHAT, lambda: beside(
        items(b'"chat_template_kwargs":{"x":[', b'["abc"]', 65_000, b',"\\ud800"]}'))),
    Flood("65,000 keys of an unknown field", CHAT, lambda: beside(keys(65_000)), 200),
    Flood("60,000 objects of a tool", CHAT, lambda: beside(items(
        b'"tools":[{"type":"function","function":{"name":"f","parameters":{"x":[', b'{"a":"b"}', 60_000, b"]}}}]"))),
    Flood("250,000 values of a schema", CHAT, lambda: beside(items(
        b'"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"enum":[', ABC, 250_000,
        b"]}}}"))),
    Flood("250,000 values of a response's schema", "/v1/responses", lambda: items(
        b'{"input":"x","text":{"format":{"type":"json_schema","name":"a","schema":{"enum":[', ABC, 250_000, b"]}}}}")),
    Flood("260,000 bad words", CHAT, lambda: beside(items(b'"bad_words":[', '"é"'.encode(), 260_000, b"]"))),
    Flood("a message of 5 million letters beyond ASCII", CHAT, lambda: items(
        b'{"messages":[{"role":"user","content":"', "€".encode() * 5 * MB, 1, b'"}]}')),
    Flood("a prediction of 15 MB", CHAT, lambda: beside(
        b'"prediction":{"type":"content","content":"' + b"word " * 3 * MB + b'"}'), 200),
    Flood("a path of 8 million folders", CHAT, lambda: items(
        b'{"messages":[{"role":"user","content":[{"type":"image","image":"', b"a/" * 8 * MB, 1, b'"}]}]}')),
    Flood("a text to count", "/tokenize", lambda: b'{"prompt":"' + b"Some words. " * 100_000 + b'"}'),
]  # fmt: skip
"""Just within the bounds of a body, or of its field; most are too long for a model."""
