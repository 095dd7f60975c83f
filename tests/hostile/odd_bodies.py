"""Valid request bodies with one value replaced by an odd one, drawn by a seed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

LONE = "\ud800"
IMAGE = "data:image/png;base64,AAAA"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PARTS = [
    {"type": "text", "text": "see"},
    {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}, "uuid": "u"},
    {"type": "image", "image": IMAGE, "min_pixels": 3136, "max_pixels": 9000},
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": PARTS, "name": "x"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "5"},
    {"role": "user", "content": "And?"},
]
TEMPLATE: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "chat_template_kwargs": {"enable_thinking": False, "x": [1]},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{{ c.text if c.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}{% endfor %}{% endif %}"
        "{{ m.tool_calls | default([]) | tojson }}{{ m.name }}{% endfor %}{{ tools | tojson }}{{ x }}"
    ),
}
MEDIA: dict[str, Any] = {"cache_salt": "s", "mm_processor_kwargs": {"min_pixels": 3136}, "return_image_sizes": True}
SHARED: dict[str, Any] = {
    "model": "m", "temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 1, "stop": ["a", "b"],
    "stop_token_ids": [5], "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0, "seed": 1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1},
    "prompt_logprobs": 1, "skip_special_tokens": True, "truncate_prompt_tokens": 500, "stream": False,
    "priority": 1, "request_id": "r", "return_token_ids": True, "max_tokens": 3, "user": "u", "made_up": {"a": 1},
}  # fmt: skip
CHAT = {
    "messages": MESSAGES, **SHARED, **MEDIA, **TEMPLATE, "max_completion_tokens": 3, "logprobs": True,
    "top_logprobs": 2, "response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"],
    "documents": [{"title": "t"}], "reasoning_effort": "low", "service_tier": "auto", "echo": False,
}  # fmt: skip
COMPLETION = {"prompt": ["Hi", "Ho"], **SHARED, "echo": True, "logprobs": 1, "add_special_tokens": True}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [CHAT],
    "/v1/completions": [COMPLETION, {**COMPLETION, "prompt": [[1, 2], [3]]}, {**COMPLETION, "prompt": "Hi"}],
    "/tokenize": [
        {"messages": MESSAGES, "model": "m", **MEDIA, **TEMPLATE, "return_token_strs": True},
        {"prompt": "Hi", "model": "m", "add_special_tokens": True, "return_token_strs": True},
    ],
    "/detokenize": [{"tokens": [1, 2], "model": "m"}],
}
ATOMS: list[Any] = [
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e300, float("inf"), float("nan"),
    "", " ", "x", "5", "--5", "5" * 5000, "\0", "é", "😀", LONE, "a" + LONE, "\udfff", "[" * 100_000, "1" * 5000,
    '"\\ud800"', '{"a": "\\ud800"}', "{}", "null", "http://[", "data:,x", "file:///x", IMAGE, "a" * 5000, "{{ x }}",
    "<|im_end|>", "<|image_pad|>", "/", "../..", "constructor", "__class__",
]  # fmt: skip
KEYS = ["a", "5", "--5", "type", "url", "text", "role", "content", "function", "", LONE, "٣", "²", "5" * 5000]


def odd(random: Random, depth: int = 0) -> Any:
    """A value that hardly fits: an atom, a container of some, or one nested deeper than anything walks."""
    kind = random.randrange(12)
    if kind == 0 and depth < 3:
        return [odd(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 1 and depth < 3:
        return {random.choice(KEYS): odd(random, depth + 1) for _ in range(random.randrange(4))}
    if kind == 2:
        return nested(random.choice([10, 70, 300, 900]), random.random() < 0.5)
    if kind == 3:
        return json.dumps(nested(random.choice([70, 900]), random.random() < 0.5))
    return random.choice(ATOMS)


def nested(depth: int, objects: bool) -> Any:
    """``depth`` lists or objects within each other."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if objects else [value]
    return value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) below ``value``."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def drawn(random: Random, path: str) -> tuple[str, dict[str, Any]]:
    """A body for ``path`` with one odd value or key in it, and the name of the field that it is in."""
    body = copy.deepcopy(random.choice(BODIES[path]))
    field = random.choice(list(body))
    inner = list(places(body[field])) if isinstance(body[field], dict | list) else []
    container, key = random.choice([(body, field), *inner])
    if isinstance(container, dict) and container is not body and random.random() < 0.2:
        container[random.choice(KEYS)] = odd(random)
    else:
        container[key] = odd(random)
    return field, body
