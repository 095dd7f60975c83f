"""Bodies put together at random from right and odd values: never a 5xx, and every ticket comes back."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from tests.fakes.scripted_app import scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis.core.checkpoint.pooling_description import CLASSIFY, Pooling
from trencadis.core.request import Delta
from trencadis.server.protocol.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolRequest,
    RerankRequest,
    ScoreRequest,
)

KINDS: dict[str, Any] = {
    "/v1/embeddings": EmbeddingRequest, "/pooling": PoolRequest, "/classify": ClassifyRequest,
    "/score": ScoreRequest, "/v2/rerank": RerankRequest,
}  # fmt: skip
SERVERS = (
    Pooling(), Pooling(dimensions=()), Pooling(CLASSIFY, classes=3, labels=("a", "b", "c")),
    Pooling(CLASSIFY, classes=1), Pooling(CLASSIFY, classes=2, label_tokens=(7, 8), labels=("no", "yes")),
)  # fmt: skip
RIGHT: dict[str, Any] = {
    "input": "a", "messages": [{"role": "user", "content": "a"}], "text_1": "a", "text_2": "b", "query": "q",
    "documents": ["a", "b"],
}  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**63, 1.5, "", "a", "\ud83d", "x" * 3000, [], ["a"], ["a", ""], [1, 2], [[1]], [None],
    [[1], [2.5]], [[]], {}, {"content": "a"}, {"content": []}, {"content": [3]}, {"text": 3}, {"text": "b"}, {"a": 1},
    {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}, "float", "base64", "left",
    [{"role": "query", "content": "a"}], [{"role": "user", "content": [{"type": "image_url"}]}], "classify", "embed",
]  # fmt: skip


def body_of(rng: random.Random, kind: Any) -> dict[str, Any]:
    names = [n for n in kind.model_fields if n != "model"]
    body = {n: RIGHT[n] for n in names if n in RIGHT and rng.random() < 0.7}
    if "input" in body:
        body.pop("messages", None)
    return body | {n: rng.choice(ODD) for n in rng.sample(names, rng.randint(0, 3))}


@pytest.mark.parametrize("count", [30, pytest.param(4000, marks=pytest.mark.long)])
def test_odd_bodies_are_never_our_fault(count: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_text_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    rng, seen = random.Random(7), Counter[int]()
    for pooling in SERVERS:
        harness = scripted_app(path)
        harness.service.config, harness.service.min_output_tokens = replace(harness.service.config, pooling=pooling), 0
        values = np.ones(pooling.classes or 64, "<f4").tobytes()

        async def deltas(request: Any, values: bytes = values) -> Any:
            yield Delta(request.id, finish="stop", pooled=values)

        harness.engine._deltas = deltas  # type: ignore[method-assign]
        app = harness.app(trust_request_chat_template=True)

        async def ask(app: Any = app) -> None:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                for _ in range(count):
                    name = rng.choice([*KINDS])
                    where = "/invocations" if rng.random() < 0.1 else name
                    sent = json.dumps(body_of(rng, KINDS[name]))
                    found = await client.post(where, content=sent, headers={"content-type": "application/json"})
                    assert found.status_code < 500, (where, sent, found.text)
                    seen[found.status_code] += bool(found.json())

        asyncio.run(ask())
        assert app.state.trencadis.admission.inside == [0, 0, 0]
    print(dict(seen))
    assert seen[200] > count / 2 and seen[400] > count / 2 and set(seen) == {200, 400}
