"""The CPU twin of a card behind a real server: the guide's line, what a device error does, and what ``auto`` says."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from tests.traffic.image_chats import wire
from tests.traffic.launch_lines import GUIDE as LIMITS
from tests.traffic.launch_lines import model_of
from tests.traffic.server_process import server
from trencadis.assets import demo_path
from trencadis.backends.cuda.shape_policy import policy
from trencadis.core.buckets import Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device_shape_policy import capturable
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan as plan_buckets
from trencadis.server.config import command_line_parser
from trencadis.server.config.resolve_settings import resolve_settings
from trencadis.server.plan.plan_command import make_plan

TWIN = ("--device", "cuda", "--policy", "twin", "--dtype", "float32")
SMALL = (
    "--max-model-len", "256", "--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--mm-processor-kwargs",
    '{"max_pixels": 50176}', "--num-gpu-blocks-override", "40",
)  # fmt: skip
GUIDE = (
    f"--model {demo_path()} --tensor-parallel-size 1 --max-num-seqs 128 --dtype bfloat16 --gpu-memory-util 0.9 "
    "--max-num-batched-tokens 32768 --max-model-len 32768 --block-size 128 --device cuda"
).split()
ASK = [{"role": "user", "content": "What colour is the sky?"}]


@pytest.mark.long
def test_a_device_error_ends_requests_with_a_retryable_503_and_the_engine_comes_back(tmp_path: Path) -> None:
    """An error that is no lack of memory says that nothing on the card can be trusted: the engine is made anew."""
    faults: dict[str, Any] = {"TRENCADIS_CUDA_TWIN_FAULTS": "error@launch:60", "VLLM_SKIP_WARMUP": "true"}
    with server(tmp_path, *TWIN, *SMALL, "--enforce-eager", **faults) as running:
        body = {"messages": ASK, "max_tokens": 200, "ignore_eos": True}
        seen: list[httpx.Response] = []

        def ask() -> None:
            seen.append(httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60, trust_env=False))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [r.status_code for r in seen] == [503, 503], [r.text for r in seen]
        assert all("Retry-After" in r.headers for r in seen)
        running.wait()
        assert running.http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 2}).status_code == 200
        assert "CUDA error" in running.text()
        assert "restart in 1 s" in running.text()
        counted = [
            x for x in running.http.get("/metrics").text.splitlines() if x.startswith("vllm:engine_restarts_total")
        ]
        assert [x.rsplit(" ", 1)[1] for x in counted] == ["1.0"]


@pytest.mark.long
def test_a_crash_in_a_capture_is_skipped_after_the_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last capture kills the engine; without that bucket there is one capture less, so the next start comes up."""
    buckets = {"VLLM_MULTIMODAL_BUCKETS": "256"}
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", buckets["VLLM_MULTIMODAL_BUCKETS"])
    flags = (*TWIN, *SMALL, "--max-model-len", "128")
    config = resolve_settings(command_line_parser.parse(["--model", str(demo_path()), *flags]), {}).engine
    count = len(make_plan(config, load_config(demo_path()), 8 << 30).plan.buckets)
    faults = {"TRENCADIS_CUDA_TWIN_FAULTS": f"crash@capture:{count}", "TRENCADIS_CACHE": str(tmp_path)}
    with server(tmp_path, *flags, seconds=300, **buckets, **faults) as running:
        assert "the engine crashed during the capture of" in running.text()
        plan = running.http.get("/buckets").json()
        (skipped,) = [b for b in plan["buckets"] if b["state"] != "captured"]
        assert skipped["state"] == "compiled" and "an earlier start ended in its capture" in skipped["failed"]
        assert running.http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 2}).status_code == 200
        print(f"{count} buckets; {skipped['failed']}")


def test_the_guides_launch_line_is_taken_and_planned() -> None:
    """Verbatim with ``--device cuda``; every launch of 80 GiB's plan that gains gets a graph: all of so small a model,
    prompts of up to 2,048 tokens of a 7B.
    """
    config = resolve_settings(command_line_parser.parse(GUIDE), {"VLLM_SKIP_WARMUP": "true"}).engine
    assert (config.device, config.gpu_memory_utilization, config.warmup) == ("cuda", 0.9, "skip")
    planned = make_plan(config, load_config(demo_path()), 80 << 30)
    captured = {p.bucket for prices in planned.selection.taken.values() for p in prices}
    assert captured == set(planned.plan.buckets)
    assert max(b.dims[0] for b in captured if b.stage is Stage.PREFILL) == 32768
    large = plan_buckets(policy(""), LIMITS, BucketOptions(), model_of(3584, 28, 28, 4, 18944))
    prompts = [b for b in large.buckets if b.stage is Stage.PREFILL]
    assert [b for b in prompts if capturable(large.policy, b)] == [b for b in prompts if b.dims[0] <= 2048]
    assert sum(dict(planned.ledger.rows()).values()) == 80 << 30


@pytest.mark.parametrize("skipped", ["true", pytest.param("false", marks=pytest.mark.long)])
def test_the_guides_launch_line_starts_on_the_twin(tmp_path: Path, skipped: str) -> None:
    """Verbatim; only the environment says that the card is a twin. Its largest launches are run, of padding alone."""
    environ = {"TRENCADIS_CUDA_TWIN": "1", "TRENCADIS_CACHE": str(tmp_path), "VLLM_SKIP_WARMUP": skipped}
    begun = time.monotonic()
    with server(tmp_path, *GUIDE, seconds=600, **environ) as running:
        took = time.monotonic() - begun
        print(f"ready after {took:.1f} s (VLLM_SKIP_WARMUP={skipped})")
        plan = running.http.get("/buckets").json()
        assert len(plan["buckets"]) > 100
        question = {"type": "text", "text": "What is in the picture?"}
        image = {"type": "image", "image": Image.open(Path(demo_path()).with_name("demo_picture.png"))}
        requested = [{"role": "user", "content": [image, question]}]
        body = {"messages": wire(requested), "max_tokens": 24, "temperature": 0}
        reply = running.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        reported = reply.json()["choices"][0]["message"]["content"]
        assert reported == "From left to right: a red circle, a blue square and a green triangle."
        plan = running.http.get("/buckets").json()
        assert plan["recompiles"] == 0 and any(b["state"] == "captured" for b in plan["buckets"])
        assert (plan["lazy_compiles"] == 0) == (skipped == "false")


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card, which auto takes")
def test_serve_without_flags_says_that_it_uses_the_cpu(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        lines = [x for x in running.text().splitlines() if "using the CPU" in x]
        assert len(lines) == 1 and "--device auto: no NVIDIA card can be used" in lines[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.long), "cuda:x"])
def test_what_cannot_start_is_one_line_and_exit_2(tmp_path: Path, device: str) -> None:
    with pytest.raises(AssertionError), server(tmp_path, "--device", device) as running:
        raise RuntimeError(f"it started: {running.text()}")
    (log,) = tmp_path.glob("server-*.log")
    last = log.read_text().strip().splitlines()[-1]
    assert last.startswith("trencadis: --device cuda") and ("--device cpu runs anywhere" in last or "no index" in last)
