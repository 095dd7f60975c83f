"""``bench throughput``, ``offline_benchmarks`` and ``startup``: an engine of their own, vLLM's flags and JSON names."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from trencadis.core.errors import StartupError
from trencadis.server.bench import bench_command, bench_startup, bench_startup_child, offline_benchmarks
from trencadis.server.bench.bench_command import make_serve_parser
from trencadis.server.cli import run_batch as batch_command
from trencadis.server.config.flag_table_and_lookup import get_flag_table

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--kv-cache-memory-bytes", "32MiB", "--threads", "1", "--max_model_len", "512"]


def run(tmp_path, name: str, *words: str) -> dict:
    out = tmp_path / "out.json"
    assert bench_command.main([name, *SMALL, *words, "--output-json", str(out)]) == 0
    return json.loads(out.read_text())


def test_throughput_counts_the_tokens_that_were_asked_for(tmp_path, capsys):
    lengths = ["--num-prompts", "3", "--input-len", "12", "--output-len", "4", "--n", "2"]
    found = run(tmp_path, "throughput", *lengths, "--disable-tqdm")
    assert set(found) == {
        "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second",
        "output_tokens_per_second",
    }  # fmt: skip
    assert (found["num_requests"], found["total_num_tokens"]) == (3, 3 * (12 + 2 * 4))
    assert found["tokens_per_second"] == pytest.approx(found["total_num_tokens"] / found["elapsed_time"])
    assert "Throughput: " in capsys.readouterr().out


def test_latency_repeats_a_batch_that_computes_its_prompts(tmp_path, capsys):
    lengths = ["--input-len", "8", "--output-len", "2", "--batch-size", "2"]
    found = run(tmp_path, "latency", *lengths, "--num-iters", "2", "--num-iters-warmup", "1")
    assert len(found["latencies"]) == 2 and set(found["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 2)
    assert "Avg latency: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["latency", "--port", "1"], "--port is a server's"), (["latency", "--num-iters", "0"], "must be at least 1"),
        (["throughput", "--config", "x.yaml"], "--config is a file for a server"), (["sweep"], "bench does not know"),
        (["throughput", "--no-such-flag"], "unknown flag --no-such-flag"), (["throughput", "--n", "x"], "invalid int"),
        (["startup", "--num-iters-warm", "0"], "must be at least 1"),
    ],
)  # fmt: skip
def test_wrong_command_lines_are_one_line(words, why):
    with pytest.raises(StartupError) as raised:
        bench_command.main(words)
    assert why in str(raised.value) and "\n" not in str(raised.value)


def test_the_clock_of_a_start_up_adds_up(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 4.0, 9.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = bench_startup_child.PhaseClock()
    for name in ("weights", "caches", "weights"):
        clock(name, "x", 0.5)
    assert clock.end() == {"weights": 2.0 + 5.0, "caches": 1.0}


def test_a_start_up_that_fails_is_one_line(tmp_path):
    with pytest.raises(StartupError, match="no model folder"):
        bench_startup.start(
            {"model": str(tmp_path / "none/of/it")}, {"PATH": "", "PYTHONPATH": os.environ["PYTHONPATH"]}
        )


@pytest.mark.long
def test_start_ups_are_timed_cold_and_warm(tmp_path, capsys):
    found = run(tmp_path, "startup", "--num-iters-cold", "1", "--num-iters-warm", "2", "--num-iters-warmup", "0")
    assert found["cold_pages_dropped"] and len(found["warm_startup_times"]) == 2
    for phase in ("cold", "warm"):
        assert found[f"avg_{phase}_startup_time"] > sum(found[f"{phase}_phases"][0].values()) > 0
        assert set(found[f"{phase}_startup_percentiles"]) == {"10", "25", "50", "75", "90", "99"}
        assert f"avg_{phase}_compilation_time" in found
    with capsys.disabled():
        print(f"\ncold {found['avg_cold_startup_time']:.2f} s, warm {found['avg_warm_startup_time']:.2f} s")


def test_the_pages_name_flags_that_there_are():
    own = [
        make_serve_parser(),
        offline_benchmarks.make_latency_parser(),
        offline_benchmarks.make_throughput_parser(),
        bench_startup.parser(),
        batch_command.parser(),
    ]
    known = {flag for parser in own for action in parser._actions for flag in action.option_strings}
    known |= {flag.written for flag in get_flag_table().values()}
    page = (ROOT / "docs" / "offline.md").read_text(encoding="utf-8")
    for title in ("Batches of requests", "Measuring"):
        section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        assert len(found := set(re.findall(r"(?<![\w-])--[a-z][\w-]*", section))) > 8
        assert found <= known, f"{title}: {found - known}"
