"""Pooling behind a real server, on two ranks, and by AsyncLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.pooling.oracle import LEAST_COSINE, cosine
from tests.pooling.test_embeddings import BASE, check
from tests.traffic.image_chats import make_conversations, wire
from tests.traffic.server_process import server
from trencadis import LLM, AsyncLLM, PoolingParams
from trencadis.assets import demo_path
from trencadis.core.errors import BadRequest

SMALL: dict[str, Any] = {k: v for k, v in BASE.items() if k != "mm_processor_kwargs"}


def test_two_ranks_pool_alike(vl_checkpoint: Path) -> None:
    """Sums over ranks are made before the last norm; every rank pools the same rows."""
    with LLM(vl_checkpoint, **BASE, tensor_parallel_size=2, pooler_config={"pooling_type": "MEAN"}) as llm:
        assert "2 ranks" in llm.engine.info().device
        assert check(llm, vl_checkpoint, "mean", range(3)) > LEAST_COSINE


def test_async_llm_encodes(checkpoint: Callable[..., Path]) -> None:
    path, prompts = checkpoint("qwen2"), [{"prompt_token_ids": [5, 6, 7 + i]} for i in range(4)]
    with LLM(path, **SMALL) as llm:
        wanted = llm.encode(prompts, use_tqdm=False)

    async def all_of() -> list[Any]:
        async with AsyncLLM(path, **SMALL) as llm:

            async def one(i: int) -> Any:
                return [o async for o in llm.encode(prompts[i], PoolingParams(), f"r{i}")]

            with pytest.raises(BadRequest, match="classify"):
                await anext(llm.encode("a", PoolingParams(task="classify"), "x"))
            return await asyncio.gather(*(one(i) for i in range(4)))

    for found, output in zip(asyncio.run(all_of()), wanted, strict=True):
        (made,) = found
        assert made.finished and made.prompt_token_ids == output.prompt_token_ids
        assert cosine(made.outputs.data, output.outputs.data) > LEAST_COSINE


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "hpu"])
def test_a_real_server_embeds_as_llm_does(device: str, tmp_path: Path) -> None:
    """2,000 texts and chats with images, by OpenAI's client and plainly; on a card nothing compiles or misses."""
    flags = ["--runner", "pooling", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"]
    flags += ["--max-num-batched-tokens", "256", "--mm-processor-kwargs", '{"max_pixels": 50176}', "--device", device]
    environ: dict[str, Any] = {
        "TRENCADIS_HPU_EMULATOR": "1",
        "VLLM_MULTIMODAL_BUCKETS": "256",
        "TRENCADIS_CACHE": str(tmp_path),
    }
    rng, chats = np.random.default_rng(0), [wire(c) for c in make_conversations(range(60), high=200)]
    texts = ["".join(chr(97 + int(i)) for i in rng.integers(0, 26, rng.integers(1, 300))) for _ in range(200)]
    with server(tmp_path, *flags, "--served-model-name", "demo", **environ) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0)
        done = 0
        while done < 2000:
            some = [texts[int(i)] for i in rng.integers(0, 200, rng.integers(1, 60))]
            assert len(client.embeddings.create(model="demo", input=some).data) == len(some)
            chat = chats[int(rng.integers(len(chats)))]
            made = running.http.post("/v1/embeddings", json={"messages": chat})
            assert made.status_code == 200 or "maximum context" in made.text, made.text
            done += len(some) + 1
        metrics = running.http.get("/metrics").text
        vectors = [d.embedding for d in client.embeddings.create(model="demo", input=texts[:20]).data]
    with LLM(demo_path(), **BASE) as llm:
        for output, vector in zip(llm.embed(list(texts[:20]), use_tqdm=False), vectors, strict=True):
            assert cosine(output.outputs.embedding, vector) > LEAST_COSINE
    names = ("vllm:recompiles_total", "vllm:lazy_compiles_total", "vllm:graph_bucket_misses_total")
    counted = [line for line in metrics.splitlines() if line.startswith(names)]
    print(device, done, "requests", *counted, sep="\n")
    assert all(float(line.rpartition(" ")[2]) == 0 for line in counted) and len(counted) >= 2
