"""Values of every token: written in slices that are dropped, and bounded before they are computed."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.fakes.scripted_app import ScriptedApp
from tests.pooling.test_routes import EMBED, WIDTH, start
from trencadis.server.protocol import pooler_output
from trencadis.server.protocol.pooler_output import read_raw_values
from trencadis.server.protocol.pooling_params import PoolingParams

__all__ = ["start"]

ASKED: dict[str, Any] = {"input": [[5, 6, 7, 8, 9], [7], [8, 9, 10]], "task": "token_embed"}


@pytest.mark.parametrize("values", [1, 5, 3 * WIDTH, 1 << 14])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_slices_are_the_whole(
    start: Callable[..., ScriptedApp], values: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooler_output, "VALUES", values)
    harness = start()
    floats = [np.asarray(one["data"], np.float32) for one in harness.call("/pooling", ASKED).json()["data"]]
    assert [one.shape for one in floats][:2] == [(5, WIDTH), (1, WIDTH)]
    form = {"embed_dtype": dtype}
    for one, item in zip(
        floats, harness.call("/pooling", ASKED | form | {"encoding_format": "base64"}).json()["data"], strict=True
    ):
        found = np.frombuffer(base64.b64decode(item["data"], validate=True), dtype)
        assert np.array_equal(found.reshape(one.shape), one.astype(dtype))
    sent = harness.call("/pooling", ASKED | form | {"encoding_format": "bytes"})
    for one, head in zip(floats, json.loads(sent.headers["metadata"])["data"], strict=True):
        found = np.frombuffer(sent.content[head["start"] : head["end"]], dtype)
        assert head["shape"] == [*one.shape] and np.array_equal(found.reshape(one.shape), one.astype(dtype))
    assert harness.made is not None and harness.made.state.trencadis.answers.held == 0


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/pooling", {"input": [[5] * 900] * 20, "task": "token_embed"}, "input"),
        ("/v1/embeddings", {"input": [[5]] * 700}, "input"),
        ("/rerank", {"query": "a", "documents": [f"word {i}" for i in range(700)]}, "documents"),
    ],
)
def test_an_answer_beyond_the_flag_is_refused_before_it_runs(
    start: Callable[..., ScriptedApp], path: str, body: dict[str, Any], field: str
) -> None:
    harness = start(max_answer_bytes=65536)
    refused = harness.call(path, body)
    assert refused.status_code == 400, refused.text[:200]
    assert refused.json()["error"]["param"] == field and f"Lower {field}" in refused.json()["error"]["message"]
    assert not harness.engine.submitted and harness.made is not None
    assert harness.made.state.trencadis.answers.held == 0


def test_writing_takes_a_slice_of_memory() -> None:
    """6 MB of values: as objects they would be two hundred."""
    pooled, params = np.zeros((6_000, 256), "<f4"), PoolingParams(task="token_embed")
    raw = read_raw_values(pooled.tobytes(), EMBED, params, range(len(pooled)))
    assert raw.dtype == np.float32 and not raw.flags.owndata
    tracemalloc.start()
    size = sum(map(len, pooler_output.write_numbers(raw, EMBED, params)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size > 4_000_000 and peak < 4 << 20
    assert pooler_output.get_finished_shape(raw, EMBED, params) == (6_000, 256)
