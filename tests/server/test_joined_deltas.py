"""Streams of Chat and Completions whose deltas have several tokens, as steps that accept drafts make them.

They add up to what deltas of one token add up to: texts, token ids, log-probabilities, ends and usage.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.scripted_app import join_deltas

LAST = {"stream": True, "stream_options": {"include_usage": True}}

CHATS: dict[str, dict[str, Any]] = {
    "plain": {}, "token ids": {"return_token_ids": True}, "logprobs": {"logprobs": True, "top_logprobs": 2},
    "a stop string": {"stop": ["wör"], "logprobs": True}, "cut": {"max_tokens": 5}, "two choices": {"n": 2},
}  # fmt: skip
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "token ids": {"return_token_ids": True}, "logprobs": {"logprobs": 2},
    "a stop string": {"stop": ["wör"], "logprobs": 1}, "echo": {"echo": True}, "cut": {"max_tokens": 5},
    "two choices": {"n": 2},
}  # fmt: skip


def add_up(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds one choice of a chunk: texts and lists are joined, what is said once is kept."""
    for key, value in part.items():
        if key in ("role", "index", "object"):
            whole[key] = value
        elif isinstance(value, dict):
            add_up(whole.setdefault(key, {}), value)
        elif isinstance(value, str | list) and isinstance(whole.get(key), str | list):
            whole[key] = whole[key] + value
        elif value is not None:
            whole[key] = value


def sums(chunks: list[dict[str, Any]]) -> tuple[dict[int, dict[str, Any]], Any]:
    """(What the chunks of each choice add up to, usage)."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            add_up(found.setdefault(choice["index"], {}), choice)
    return found, chunks[-1]["usage"]


@pytest.mark.parametrize("count", [2, 5, 1000])
@pytest.mark.parametrize("name", CHATS)
def test_chats_add_up_to_the_same(harness: Any, name: str, count: int) -> None:
    single = harness.events(harness.chat(**LAST, **CHATS[name]))
    join_deltas(harness.engine, count)
    joined = harness.events(harness.chat(**LAST, **CHATS[name]))
    assert sums(joined) == sums(single) and len(joined) < len(single)


@pytest.mark.parametrize("count", [2, 5, 1000])
@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions_add_up_to_the_same(harness: Any, name: str, count: int) -> None:
    fields = {"max_tokens": 100, **LAST, **COMPLETIONS[name]}
    single = harness.events(harness.complete("Hi there", **fields))
    join_deltas(harness.engine, count)
    joined = harness.events(harness.complete("Hi there", **fields))
    assert sums(joined) == sums(single) and len(joined) < len(single)
    text = "".join(choice["text"] for choice in sums(joined)[0].values())
    assert text.startswith("Hi there" if name == "echo" else "Hello"), "something is compared"
