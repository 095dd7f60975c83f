"""The demo on an emulated card behind a real server: the CPU's answers, warm-up in all modes, a crash in a capture."""

from __future__ import annotations

import base64
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.oracles.transformers_model import Answer, assert_same
from tests.oracles.video_chats import chat
from tests.traffic import video_clips
from tests.traffic.image_chats import Chat, answers, make_conversations, wire
from tests.traffic.server_process import RunningServer, server
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.engine_config import EngineConfig
from trencadis.server.plan.plan_command import make_plan

LENGTH = 20
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=2)
SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 256,
    "mm_processor_kwargs": {"max_pixels": 50_176},
}  # fmt: skip
FLAGS = (
    "--device", "hpu", "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4",
    "--max-num-batched-tokens", "256", "--mm-processor-kwargs", '{"max_pixels": 50176}',
)  # fmt: skip
EMULATED: dict[str, Any] = {"TRENCADIS_HPU_EMULATOR": "1", "VLLM_MULTIMODAL_BUCKETS": "256,576,1024"}
COARSE: dict[str, Any] = {
    **EMULATED, "VLLM_PROMPT_QUERY_BUCKET_MIN": "256", "VLLM_DECODE_BLOCK_BUCKET_MIN": "32",
    "VLLM_MULTIMODAL_BUCKETS": "576,1024",
}  # fmt: skip
"""A plan of fewer than half the buckets, where a start captures all of them; the long tests take every one."""

TWO = ("--max-num-seqs", "2")
"""Goes with ``COARSE``."""


def chats(count: int) -> list[Chat]:
    """The same ones for each count."""
    return make_conversations(range(count), high=300)


@pytest.fixture(scope="module")
def cpu() -> Iterator[LLM]:
    llm = LLM(str(demo_path()), kv_cache_memory_bytes=64 << 20, **SMALL)
    yield llm
    llm.close()


def served(running: RunningServer, messages: list[dict[str, Any]]) -> list[int]:
    """The server's answer as token ids."""
    body = {"messages": wire(messages), "temperature": 0, "max_tokens": LENGTH, "return_token_ids": True}
    reply = running.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def same(running: RunningServer, wanted: list[Answer], together: int = 1) -> None:
    """The CPU's tokens, ``together`` chats at a time."""
    with ThreadPoolExecutor(together) as pool:
        found = list(pool.map(lambda messages: served(running, messages), chats(len(wanted))))
    assert_same(list(zip(found, wanted, strict=True)))


@pytest.fixture(scope="module")
def few(cpu: LLM) -> list[Answer]:
    """The CPU's first six answers."""
    return answers(cpu, chats(6), GREEDY)


@pytest.fixture(scope="module")
def many(cpu: LLM) -> list[Answer]:
    """Three hundred."""
    return answers(cpu, chats(300), GREEDY)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("hpu")
    with server(folder, *FLAGS, *TWO, **COARSE, TRENCADIS_CACHE=str(folder)) as running:
        yield running


def test_it_says_that_it_is_emulated(running: RunningServer) -> None:
    assert running.http.get("/version").json()["device"] == "hpu (emulated)"
    assert running.http.get("/health").json()["device"] == "hpu (emulated)"
    assert 'device="hpu (emulated)"' in running.http.get("/metrics").text
    assert "hpu (emulated): no Gaudi computes here" in running.text()
    for row in ("KV cache", "graph reserve unused", "margin", "decode graphs"):
        assert row in running.text()


def test_chats_have_the_cpus_tokens_and_compile_nothing(running: RunningServer, few: list[Answer]) -> None:
    same(running, few)
    time.sleep(0.6)
    plan = running.http.get("/buckets").json()
    assert plan["lazy_compiles"] == plan["recompiles"] == plan["graph_breaks"] == 0 and not plan["unplanned"]
    assert sum(row["bytes"] for row in plan["ledger"]) == plan["total"]
    assert {b["state"] for b in plan["buckets"]} == {"captured"}
    used = [b for b in plan["buckets"] if b["hits"]]
    assert {"fresh", "decode", "vision", "sample"} <= {b["stage"] for b in used}
    assert all(b["hits"] == b["replays"] and 0 <= b["padding"] < 1 for b in used)
    metrics = running.http.get("/metrics").text
    assert 'vllm:graph_bytes{engine="0",model_name="trencadis-demo",pool="decode"}' in metrics
    assert "vllm:warmup_progress" in metrics and not misses(running)
    assert "vllm:recompiles_total" in metrics and "vllm:graph_bucket_padded_tokens_total" in metrics


def test_a_video_has_the_cpus_tokens_and_compiles_nothing(running: RunningServer, cpu: LLM) -> None:
    """A lossless WebP of 24 frames, more temporal patches than one VISION launch takes."""
    array = video_clips.frames(np.random.default_rng(0), 24, 90, 130)
    data = video_clips.animation(array, "WEBP", 100)
    (want,) = answers(cpu, [chat(data, nframes=24)], GREEDY)
    url = {"url": f"data:image/webp;base64,{base64.b64encode(data).decode()}"}
    content = [{"type": "video_url", "video_url": url, "nframes": 24}, chat(None)[0]["content"][1]]
    assert_same([(served(running, [{"role": "user", "content": content}]), want)])
    time.sleep(0.6)
    plan = running.http.get("/buckets").json()
    assert plan["lazy_compiles"] == plan["recompiles"] == 0 and not plan["unplanned"]


def misses(running: RunningServer) -> dict[str, float]:
    """``graph_bucket_misses_total`` by reason, over all stages."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(running.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "vllm:graph_bucket_misses_total":
                reason = sample.labels["reason"]
                found[reason] = found.get(reason, 0) + sample.value
    return found


@contextlib.contextmanager
def started(folder: Path, *flags: str, **environ: str) -> Iterator[tuple[RunningServer, float]]:
    """A server and the seconds until it was ready."""
    begun = time.monotonic()
    with server(folder, *FLAGS, *flags, **{**EMULATED, "TRENCADIS_CACHE": str(folder), **environ}) as running:
        yield running, time.monotonic() - begun


def until(fine: Callable[[], bool], seconds: float = 450) -> None:
    """Waits for what a machine with other load shows late."""
    end = time.monotonic() + seconds
    while not fine():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.parametrize("plan", [COARSE, pytest.param(EMULATED, marks=pytest.mark.long)], ids=["coarse", "fine"])
def test_in_the_background(plan: dict[str, Any], few: list[Answer], tmp_path: Path) -> None:
    with started(tmp_path, "--warmup", "background", *(TWO if plan is COARSE else ()), **plan) as (running, _):
        phase = running.http.get("/health").json()["progress"]["phase"]
        assert phase in ("planned", "compiling", "capturing", "validating")
        same(running, few[:2])
        until(lambda: "progress" not in running.http.get("/ready").json())
        reported = running.text()
        assert reported.index("Application startup complete.") < reported.index("engine: validating"), (
            "it is not waited for"
        )
        told_plan = running.http.get("/buckets").json()
        assert {b["state"] for b in told_plan["buckets"]} == {"captured"} and told_plan["recompiles"] == 0
        assert set(misses(running)) <= {"warming"}
        before = misses(running)
        same(running, few)
        time.sleep(0.6)
        assert misses(running) == before, "everything is captured now"


@pytest.mark.long
def test_background_is_ready_as_soon_as_skip(tmp_path: Path) -> None:
    """Five starts of each, one after the other in turn; the medians differ by less than a second."""
    took: dict[str, list[float]] = {"skip": [], "background": []}
    for _ in range(5):
        for mode, seconds in took.items():
            with started(tmp_path, "--warmup", mode) as (_, ready):
                seconds.append(ready)
    skip, background = (statistics.median(took[mode]) for mode in ("skip", "background"))
    print(f"\nready after (median of 5): skip {skip:.2f} s, background {background:.2f} s; {took}")
    assert abs(background - skip) < 1


def test_a_crash_in_a_capture_is_skipped_after_the_restart(
    few: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last capture kills the engine; without that bucket there is one capture less, so the next start comes up.

    One request at a time: half the buckets, which two starts capture.
    """
    for name, value in COARSE.items():
        monkeypatch.setenv(name, value)
    flags = ["1" if word == "4" else word for word in FLAGS]
    config = EngineConfig(model=str(demo_path()), device="hpu", **{**SMALL, "max_num_seqs": 1})
    count = len(make_plan(config, load_config(demo_path()), 96 << 30).plan.buckets)
    faults: dict[str, Any] = {
        "TRENCADIS_HPU_EMULATOR_FAULTS": f"crash@capture:{count}",
        "TRENCADIS_CACHE": str(tmp_path),
    }
    with server(tmp_path, *flags, **COARSE, **faults) as running:
        assert "the engine crashed during the capture of" in running.text()
        plan = running.http.get("/buckets").json()
        (skipped,) = [b for b in plan["buckets"] if b["state"] != "captured"]
        assert skipped["state"] == "compiled" and "an earlier start ended in its capture" in skipped["failed"]
        same(running, few[:1])
        time.sleep(0.6)
        assert set(misses(running)) <= {"failed"}


@pytest.mark.long
def test_three_hundred_chats(many: list[Answer], tmp_path: Path) -> None:
    with started(tmp_path) as (running, _):
        same(running, many, together=4)
        time.sleep(0.6)
        plan = running.http.get("/buckets").json()
        assert plan["lazy_compiles"] == plan["recompiles"] == 0 and not misses(running)


@pytest.mark.long
def test_three_hundred_chats_without_warmup(many: list[Answer], tmp_path: Path) -> None:
    with started(tmp_path, VLLM_SKIP_WARMUP="true") as (running, _):
        same(running, many, together=4)
        time.sleep(0.6)
        plan = running.http.get("/buckets").json()
        assert plan["recompiles"] == 0 and set(misses(running)) == {"skip"}


@pytest.mark.parametrize("kind", ["meta", pytest.param("compute", marks=pytest.mark.long)])
def test_the_guides_launch_line_starts_on_hpu_and_skips_warm_up_by_the_variable(kind: str, tmp_path: Path) -> None:
    """tests/hpu/test_serving.py holds the tokens of a start without warm-up to the CPU's; a card without values makes
    the same plan and launches.
    """
    line = (
        f"--model {demo_path()} --tensor-parallel-size 1 --max-num-seqs 128 --dtype bfloat16 --gpu-memory-util 0.9 "
        "--max-num-batched-tokens 32768 --max-model-len 32768 --block-size 128 --device hpu"
    ).split()
    environ: dict[str, Any] = {
        "TRENCADIS_HPU_EMULATOR": "1",
        "TRENCADIS_CACHE": str(tmp_path),
        "VLLM_SKIP_WARMUP": "true",
        "TRENCADIS_HPU_EMULATOR_KIND": kind,
    }
    with server(tmp_path, *line, "--served-model-name", "demo", **environ) as running:
        plan = running.http.get("/buckets").json()
        assert 100 < len(plan["buckets"]) < 220 and plan["mode"] == "skip"
        body = {"messages": wire(chats(1)[0]), "max_tokens": 8, "temperature": 0, "model": "demo"}
        reply = running.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200
        assert kind == "meta" or reply.json()["choices"][0]["message"]["content"].strip()
        until(lambda: misses(running).get("skip", 0) > 0)
        time.sleep(0.6)
        plan = running.http.get("/buckets").json()
        assert plan["lazy_compiles"] > 0 == plan["recompiles"]
        assert set(misses(running)) == {"skip"} and misses(running)["skip"] == plan["lazy_compiles"]
