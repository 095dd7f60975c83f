"""Families of /metrics: the reference's list, vLLM's own boards, old names, HTTP sizes, the page of the docs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from tools.pages import gen_metrics
from trencadis.core.engine_config import EngineConfig
from trencadis.core.process.engine_messages import BucketUse, EngineStats, GraphCounters
from trencadis.core.startup_progress_and_warmup_pacing import Warming
from trencadis.server.metrics.process_tenant_and_sleep_collectors import DeprecatedCollector
from trencadis.server.metrics.prometheus import PrometheusMetrics
from trencadis.server.metrics.request_trace_queue import TraceQueue

IMAGE = {"type": "image_url", "image_url": "data:image/png;base64,A"}
OURS = {"model_name", "engine"}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> ScriptedApp:
    return scripted_app(write_text_checkpoint(tmp_path_factory.mktemp("metrics")))


def loaded(harness: ScriptedApp, folder: Path, **flags: Any) -> dict[str, set[str]]:
    """Labels of each series after requests, a refusal, a launch without a graph and a sleep."""
    keys = folder / "keys.yaml"
    digest = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8"
    keys.write_text(f"keys:\n- name: ann\n  sha256: {digest}\n  concurrency: 1\n")
    keys.chmod(0o600)
    app = harness.app(api_key_file=str(keys), **flags)
    headers = {"x-api-key": "password"}
    for content, n in (([IMAGE], 1), ("Hi", 1), ("Hi", 2), ([{**IMAGE, "image_url": "data:image/png;base64,bad"}], 1)):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "n": n, "temperature": 1}
        harness.call("/v1/chat/completions", body, headers=headers)
    harness.call("/v1/chat/completions", {}, headers=headers | {"origin": "http://another.example"})
    graphs = GraphCounters(1, 0, {"text": 5}, Warming(total=3), {"decode": 0.5})
    use = BucketUse("vision", 64, 128, 0.1, "vision[128]", "compiled", True, "warming", 1, 64)
    state = app.state.trencadis
    state.metrics.on_stats(EngineStats(step_tokens=[3], buckets=[use], graphs=graphs))
    harness.engine.stats = EngineStats(
        waiting=5, deferred=2, prompt_tokens=50, prompt_cached=16, generation_tokens=9, graphs=graphs
    )
    text = harness.call("/metrics", headers=headers).text
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


HISTOGRAMS = (
    "request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_max_tokens "
    "request_prefill_kv_computed_tokens iteration_tokens_total request_params_n request_num_preemptions "
    "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds encoder_forward_seconds"
)
PLAIN = (
    "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total "
    "mm_cache_queries_total mm_cache_hits_total num_preemptions_total prompt_tokens_total generation_tokens_total "
    "prompt_tokens_cached_total image_tokens_total encoder_cache_usage_perc"
)
LABELLED = {
    "vllm:num_requests_waiting_by_reason": OURS | {"reason"},
    "vllm:prompt_tokens_by_source_total": OURS | {"source"},
    "vllm:prompt_tokens_cached_by_source_total": OURS | {"source"},
    "vllm:request_success_total": OURS | {"finished_reason"},
    "vllm:engine_sleep_state": OURS | {"sleep_state"},
    "vllm:admission_rejections_total": {"model_name", "reason"},
    "vllm:padding_ratio": OURS | {"stage"},
    "vllm:graph_capture_seconds": OURS | {"stage"},
    "vllm:media_errors_total": OURS | {"reason"},
    "http_requests_total": {"handler", "method", "status"},
    "http_request_duration_seconds_bucket": {"handler", "method", "le"},
    "http_request_duration_highr_seconds_bucket": {"le"},
    "http_request_size_bytes_sum": {"handler"},
    "http_response_size_bytes_count": {"handler"},
    "process_cpu_seconds_total": set(), "process_resident_memory_bytes": set(), "process_open_fds": set(),
    "python_info": {"implementation", "major", "minor", "patchlevel", "version"},
    "python_gc_collections_total": {"generation"},
}  # fmt: skip
EXPECTED = {
    **{f"vllm:{name}_bucket": OURS | {"le"} for name in HISTOGRAMS.split()},
    **{f"vllm:{name}": OURS for name in PLAIN.split()},
    **LABELLED,
}
CACHE_CONFIG = (
    "block_size cache_dtype gpu_memory_utilization num_gpu_blocks kv_cache_size_tokens kv_cache_max_concurrency "
    "prefix_caching_hash_algo enable_prefix_caching num_gpu_blocks_override kv_cache_memory_bytes sliding_window "
    "is_attention_free num_cpu_blocks mamba_cache_mode kv_sharing_fast_prefill user_specified_block_size"
)


def test_every_family_of_the_list_is_there_with_its_labels_and_no_tenant(harness: ScriptedApp, tmp_path: Path) -> None:
    found = loaded(harness, tmp_path)
    assert {name: found.get(name) for name in EXPECTED} == EXPECTED
    assert set(CACHE_CONFIG.split()) | OURS <= found["vllm:cache_config_info"]
    for name, labels in found.items():
        assert "tenant" not in labels or name.startswith("vllm:tenant_"), name


def test_parts_sum_to_the_whole(harness: ScriptedApp) -> None:
    harness.app(engine=EngineConfig(block_size=16, kv_cache_memory_bytes=1 << 20, kv_offloading_size=2.0))
    harness.engine.stats = EngineStats(waiting=5, deferred=2, prompt_tokens=50, prompt_cached=16)
    text = harness.call("/metrics").text
    who = 'engine="0",model_name="m"'
    for line in (
        f'vllm:num_requests_waiting_by_reason{{{who},reason="capacity"}} 3.0',
        f'vllm:num_requests_waiting_by_reason{{{who},reason="deferred"}} 2.0',
        f'vllm:prompt_tokens_by_source_total{{{who},source="local_compute"}} 34.0',
        f'vllm:prompt_tokens_by_source_total{{{who},source="local_cache_hit"}} 16.0',
        f'vllm:prompt_tokens_cached_by_source_total{{{who},source="device"}} 16.0',
        f'vllm:engine_sleep_state{{{who},sleep_state="awake"}} 1.0',
        f'vllm:engine_sleep_state{{{who},sleep_state="discard_all"}} 0.0',
        'vllm:request_success_total{engine="0",finished_reason="repetition",model_name="m"} 0.0',
    ):
        assert line in text, line
    config = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    for label in (
        'block_size="16"',
        'kv_cache_memory_bytes="1048576"',
        'num_gpu_blocks="100"',
        'sliding_window="None"',
        'kv_cache_size_tokens="1600"',
        'kv_cache_max_concurrency="1.56"',
        'num_gpu_blocks_override="None"',
        'kv_offloading_size="2.0"',
        'kv_offloading_backend="native"',
    ):
        assert label in config, label  # fmt: skip


def test_bodies_are_counted_in_bytes(harness: ScriptedApp) -> None:
    harness.app()
    answers = [harness.chat("Hi"), harness.chat("Hi", stream=True)]
    text = harness.call("/metrics").text
    where = 'handler="/v1/chat/completions"'
    sent = sum(len(a.request.content) for a in answers), sum(len(a.content) for a in answers)
    assert f"http_request_size_bytes_sum{{{where}}} {float(sent[0])}" in text
    assert f"http_response_size_bytes_sum{{{where}}} {float(sent[1])}" in text
    assert f"http_response_size_bytes_count{{{where}}} 2.0" in text


VLLM_BOARDS = {
    "e2e_request_latency_seconds_bucket": "le model_name", "e2e_request_latency_seconds_sum": "model_name",
    "e2e_request_latency_seconds_count": "model_name", "prompt_tokens_total": "model_name",
    "generation_tokens_total": "model_name", "inter_token_latency_seconds_bucket": "le model_name",
    "inter_token_latency_seconds_sum": "model_name", "inter_token_latency_seconds_count": "model_name",
    "num_requests_running": "model_name", "num_requests_waiting": "model_name",
    "time_to_first_token_seconds_bucket": "le model_name", "time_to_first_token_seconds_sum": "model_name",
    "time_to_first_token_seconds_count": "model_name", "kv_cache_usage_perc": "model_name",
    "request_prompt_tokens_bucket": "le model_name", "request_generation_tokens_bucket": "le model_name",
    "request_success_total": "finished_reason model_name", "request_queue_time_seconds_sum": "model_name",
    "request_prefill_time_seconds_sum": "model_name", "request_decode_time_seconds_sum": "model_name",
    "request_max_num_generation_tokens_sum": "model_name", "iteration_tokens_total_count": "",
}  # fmt: skip
"""Series of the boards that vLLM ships (grafana.json, performance_statistics.json, query_statistics.json), and the
labels that their expressions ask for."""


def test_vllms_own_boards_find_their_series_and_labels(harness: ScriptedApp, tmp_path: Path) -> None:
    found = loaded(harness, tmp_path)
    for name, labels in VLLM_BOARDS.items():
        assert set(labels.split()) <= found[f"vllm:{name}"], name


def test_old_names_are_there_where_asked_for(harness: ScriptedApp) -> None:
    harness.app()
    assert "vllm:gpu_cache_usage_perc" not in harness.call("/metrics").text
    for flags in ({"show_hidden_metrics": True}, {"show_hidden_metrics_for_version": "0.11"}):
        app = harness.app(**flags)
        harness.engine.stats = EngineStats(kv_used=25, kv_total=100, prefix_queries=10, prefix_hits=5)
        harness.chat()
        text = harness.call("/metrics").text
        who = '{engine="0",model_name="m"}'
        for line in (
            f"vllm:gpu_cache_usage_perc{who} 0.25", f"vllm:num_requests_swapped{who} 0.0",
            f"vllm:cpu_cache_usage_perc{who} 0.0", f"vllm:gpu_prefix_cache_hits_total{who} 5.0",
            f"vllm:gpu_prefix_cache_hit_rate{who} 0.5", f"vllm:avg_prompt_throughput_toks_per_s{who} 0.0",
        ):  # fmt: skip
            assert line in text, line
        sums = [
            line
            for line in text.splitlines()
            if line.startswith(("vllm:inter_token_latency_seconds_bucket", "vllm:time_per_output_token_seconds_bucket"))
        ]
        old = [line.split("{")[1] for line in sums if "per_output" in line]
        assert old == [line.split("{")[1] for line in sums if "inter_token" in line] and old
        assert app.state.trencadis.metrics


def test_throughput_gauges_look_back_ten_seconds() -> None:
    now, stats = [0.0], EngineStats()
    registry = gen_metrics.server_registry()
    between = registry._names_to_collectors["vllm:inter_token_latency_seconds"]
    collector = DeprecatedCollector(("m", "0"), lambda: stats, between, lambda: now[0])  # type: ignore[arg-type]

    def rates() -> tuple[float, float]:
        values = {family.name: family.samples[0].value for family in collector.collect()}
        prompt, generated = "vllm:avg_prompt_throughput_toks_per_s", "vllm:avg_generation_throughput_toks_per_s"
        return values[prompt], values[generated]

    assert rates() == (0, 0)
    for second in range(5, 60, 5):
        now[0], stats = float(second), EngineStats(prompt_tokens=100 * second, generation_tokens=10 * second)
        assert rates() == (100, 10)
    now[0] = 65.0
    assert rates() == (0, 0), "nothing in ten seconds"
    stats = EngineStats(generation_tokens=3)
    assert rates() == (0, 0), "another engine"


def test_the_page_lists_what_a_live_scrape_has(
    harness: ScriptedApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gen_metrics.main(["--check"]) == 0
    monkeypatch.setattr(
        TraceQueue, "for_endpoint", lambda endpoint: TraceQueue(endpoint, lambda: (MagicMock(), MagicMock()), 600)
    )
    page = dict(gen_metrics.rows(gen_metrics.PAGE.read_text()))
    found = loaded(harness, tmp_path, show_hidden_metrics=True, enable_sleep_mode=True, otlp_traces_endpoint="http://c")
    live: dict[str, set[str]] = {}
    for name, labels in found.items():
        if not name.startswith(("process_", "python_")) and not name.endswith(("_created", "_bucket", "_sum")):
            live[name.removesuffix("_count")] = labels
    assert live.keys() == page.keys()
    assert {name: page[name] for name in live} == live


def test_no_directory_is_used_for_values(tmp_path: Path) -> None:
    code = (
        "from tools.pages import gen_metrics; from prometheus_client import generate_latest\n"
        "made = gen_metrics.server_registry(); print(len(generate_latest(made)) > 9999)"
    )
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=gen_metrics.ROOT)
    assert done.stdout.strip() == "True", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_reading_everything_is_cheap(harness: ScriptedApp) -> None:
    """A scrape must not hold the event loop up; the deadline is far above what it takes."""
    import time

    metrics: PrometheusMetrics = harness.app().state.trencadis.metrics
    begun = time.process_time()
    for _ in range(5):
        metrics.format_text()
    assert time.process_time() - begun < 1.0
