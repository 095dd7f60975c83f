"""Conversations with images: made by seed, sent as data URLs, answered with how sure the engine was."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from typing import Any

import numpy as np
from PIL import Image
from torch import empty

from tests.oracles.transformers_model import Answer, conversation
from trencadis import LLM, SamplingParams

Chat = list[dict[str, Any]]


def make_conversations(seeds: Iterable[int], high: int) -> list[Chat]:
    """Chats with up to three images of at most ``high`` pixels a side; the same one for each seed."""
    return [conversation(np.random.default_rng(seed), high=high)[0] for seed in seeds]


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    """``image`` as a server takes it."""
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def wire(messages: Chat) -> Chat:
    """A conversation with its images as data URLs."""

    def part(p: dict[str, Any]) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": data_url(p["image"])}} if p["type"] == "image" else p

    return [
        {**m, "content": m["content"] if isinstance(m["content"], str) else [part(p) for p in m["content"]]}
        for m in messages
    ]


def answers(llm: LLM, chats: list[Chat], params: SamplingParams) -> list[Answer]:
    """Greedy answers to ``chats``, sent together, with the gaps of the two best; ``params`` ask for two logprobs."""
    found = []
    for output in llm.chat(chats, params, use_tqdm=False):
        (out,) = output.outputs
        assert out.logprobs is not None
        gaps = [x.top_logprobs[0] - x.top_logprobs[1] for x in out.logprobs]
        found.append(Answer(out.token_ids, gaps, empty(0)))
    return found
