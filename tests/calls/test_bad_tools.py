"""Requests with too many, too large or misshapen tools and calls are refused at once, in little memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from tests.traffic.tool_templates import HERMES

SECONDS, BYTES = 2, 64 << 20
"""The bars; a test waits five times as long."""


def tool(i: int = 0, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{i}", **more}}


def calling(arguments: str, count: int = 1) -> list[dict[str, Any]]:
    calls = [{"function": {"name": "f", "arguments": arguments}}] * count
    return [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]


def attack(name: str) -> dict[str, Any]:
    """The fields of a request."""
    wide = {f"p{i}": {"type": "string"} for i in range(25)}
    every: dict[str, Callable[[], dict[str, Any]]] = {
        "a million tools": lambda: {"tools": [{}] * 10**6},
        "too many tools": lambda: {"tools": [tool(i) for i in range(1025)]},
        "long texts": lambda: {"tools": [tool(i, description="x" * 15000) for i in range(1024)]},
        "many values": lambda: {"tools": [tool(i, parameters={"properties": wide}) for i in range(1024)]},
        "a long name": lambda: {"tools": [{"type": "function", "function": {"name": "f" * 10**6}}]},
        "a long choice": lambda: {
            "tools": [tool()],
            "tool_choice": {"type": "function", "function": {"name": "g" * 10**6}},
        },
        "a list of types": lambda: {"tools": [tool(parameters={"type": ["object"] * 10**5})]},
        "many calls": lambda: {"messages": calling("{}", 20000)},
        "deep arguments": lambda: {"messages": calling("[" * 10**5)},
        "wide arguments": lambda: {"messages": calling('{"a":[' + "1," * 66000 + "1]}")},
    }
    return every[name]()


ATTACKS = {
    "a million tools": None,
    "too many tools": "tools",
    "long texts": "input_tokens",
    "many values": "input_tokens",
    "a long name": "tools[0].function.name",
    "a long choice": "tool_choice",
    "a list of types": "tools[0].function.parameters.type",
    "many calls": "messages[1].tool_calls[16384].function.arguments",
    "deep arguments": "messages[1].tool_calls[0].function.arguments",
    "wide arguments": "messages[1].tool_calls[0].function.arguments",
}
"""Name -> ``param``. A body with too many values is refused before anybody knows its fields."""


def check(harness: Any, name: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], **attack(name)}).encode()
    headers = {"content-type": "application/json"}
    start = time.process_time()
    response = harness.call("/v1/chat/completions", method="POST", content=body, headers=headers)
    assert time.process_time() - start < 5 * SECONDS
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, ATTACKS[name]) and len(error["message"]) < 200


@pytest.mark.parametrize("name", ATTACKS)
def test_large_tools_are_refused_at_once(serve: Any, name: str) -> None:
    check(serve(HERMES), name)


@pytest.mark.long
def test_large_tools_take_little_memory(serve: Any) -> None:
    harness = serve(HERMES)
    harness.chat("warm")
    for name in ATTACKS:
        tracemalloc.start()
        try:
            check(harness, name)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        print(f"{name}: {peak / 2**20:.1f} MiB, the body included")
        assert peak < BYTES
