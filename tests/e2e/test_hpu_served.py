"""The demo on an emulated card behind a real server: the CPU's answers, warm-up in all modes, a crash in a capture."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import Live, server
from oracle import Answer, assert_same, conversation
from torch import empty

from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.core.config import EngineConfig
from trencadis.core.models.config import load_config
from trencadis.server.plan_cli import plan_for

LENGTH = 20
SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 256,
    "mm_processor_kwargs": {"max_pixels": 50_176},
}  # fmt: skip
FLAGS = (
    "--device", "hpu", "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4",
    "--max-num-batched-tokens", "256", "--mm-processor-kwargs", '{"max_pixels": 50176}',
)  # fmt: skip
EMULATED = {"TRENCADIS_HPU_EMULATOR": "1", "VLLM_MULTIMODAL_BUCKETS": "256,576,1024"}


def wire(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation with its pictures as data URLs."""

    def part(p: dict[str, Any]) -> dict[str, Any]:
        if p["type"] != "image":
            return p
        buffer = io.BytesIO()
        p["image"].save(buffer, "PNG")
        return {"type": "image_url", "image_url": {
            "url": f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"}}  # fmt: skip

    return [
        {**m, "content": m["content"] if isinstance(m["content"], str) else [part(p) for p in m["content"]]}
        for m in messages
    ]


@pytest.fixture(scope="module")
def cpu() -> Iterator[LLM]:
    llm = LLM(str(demo_path()), kv_cache_memory_bytes=64 << 20, **SMALL)
    yield llm
    llm.close()


def expected(llm: LLM, messages: list[dict[str, Any]]) -> Answer:
    """The CPU's answer and how sure it was of each token."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=2)
    out = llm.chat([messages], params)[0].outputs[0]
    assert out.logprobs is not None
    return Answer(out.token_ids, [x.top_logprobs[0] - x.top_logprobs[1] for x in out.logprobs], empty(0))


def served(live: Live, messages: list[dict[str, Any]]) -> list[int]:
    """The server's answer as token ids."""
    body = {"messages": wire(messages), "temperature": 0, "max_tokens": LENGTH, "return_token_ids": True}
    reply = live.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def same(live: Live, cpu: LLM, seeds: range) -> None:
    talks = [conversation(np.random.default_rng(seed), high=300)[0] for seed in seeds]
    assert_same([(served(live, messages), expected(cpu, messages)) for messages in talks])


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("hpu")
    with server(folder, *FLAGS, **EMULATED, TRENCADIS_CACHE=str(folder)) as running:
        yield running


def test_it_says_that_it_is_emulated(live: Live) -> None:
    assert live.http.get("/version").json()["device"] == "hpu (emulated)"
    assert live.http.get("/health").json()["device"] == "hpu (emulated)"
    assert 'device="hpu (emulated)"' in live.http.get("/metrics").text
    assert "hpu (emulated): no Gaudi computes here" in live.text()
    for row in ("KV cache", "graph reserve unused", "margin", "decode graphs"):
        assert row in live.text()


def test_chats_have_the_cpus_tokens_and_compile_nothing(live: Live, cpu: LLM) -> None:
    same(live, cpu, range(6))
    time.sleep(0.6)
    plan = live.http.get("/buckets").json()
    assert plan["lazy_compiles"] == plan["recompiles"] == 0 and not plan["unplanned"]
    assert sum(row["bytes"] for row in plan["ledger"]) == plan["total"]
    assert {b["state"] for b in plan["buckets"]} == {"captured"}
    used = [b for b in plan["buckets"] if b["hits"]]
    assert {"fresh", "decode", "vision", "sample"} <= {b["stage"] for b in used}
    assert all(b["hits"] == b["replays"] and 0 <= b["padding"] < 1 for b in used)
    metrics = live.http.get("/metrics").text
    assert 'vllm:graph_bytes{engine="0",model_name="trencadis-demo",pool="decode"}' in metrics
    assert "vllm:recompiles_total" in metrics and "vllm:graph_bucket_padded_tokens_total" in metrics


def test_skipped_by_the_variable_and_in_the_background(cpu: LLM, tmp_path: Path) -> None:
    environ = {**EMULATED, "TRENCADIS_CACHE": str(tmp_path)}
    with server(tmp_path, *FLAGS, **environ, VLLM_SKIP_WARMUP="true") as live:
        assert live.http.get("/buckets").json()["mode"] == "skip"
        same(live, cpu, range(2))
        time.sleep(0.6)
        plan = live.http.get("/buckets").json()
        assert plan["lazy_compiles"] > 0 == plan["recompiles"]
    with server(tmp_path, *FLAGS, "--warmup", "background", **environ) as live:
        assert live.http.get("/health").json()["progress"]["phase"] in (
            "planned",
            "compiling",
            "capturing",
            "validating",
        )
        same(live, cpu, range(2))
        end = time.monotonic() + 90
        while "progress" in live.http.get("/ready").json():
            assert time.monotonic() < end
            time.sleep(0.2)
        plan = live.http.get("/buckets").json()
        assert {b["state"] for b in plan["buckets"]} == {"captured"} and plan["recompiles"] == 0


def test_a_crash_in_a_capture_is_skipped_after_the_restart(
    cpu: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last capture kills the engine; without that bucket there is one capture less, so the next start comes up."""
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", EMULATED["VLLM_MULTIMODAL_BUCKETS"])
    config = EngineConfig(model=str(demo_path()), device="hpu", **SMALL)
    count = len(plan_for(config, load_config(demo_path()), 96 << 30).plan.buckets)
    faults = {"TRENCADIS_HPU_EMULATOR_FAULTS": f"crash@capture:{count}", "TRENCADIS_CACHE": str(tmp_path)}
    with server(tmp_path, *FLAGS, **EMULATED, **faults) as live:
        assert "the engine died while" in live.text()
        plan = live.http.get("/buckets").json()
        (skipped,) = [b for b in plan["buckets"] if b["state"] != "captured"]
        assert skipped["state"] == "compiled" and "an earlier start ended in its capture" in skipped["failed"]
        same(live, cpu, range(1))


@pytest.mark.long
def test_three_hundred_chats(live: Live, cpu: LLM) -> None:
    same(live, cpu, range(300))
    time.sleep(0.6)
    plan = live.http.get("/buckets").json()
    assert plan["lazy_compiles"] == plan["recompiles"] == 0
