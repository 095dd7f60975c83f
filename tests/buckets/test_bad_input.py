"""Settings of shapes and graphs that cannot be used: one line that names variable, value and rule, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.traffic.launch_lines import GUIDE, model_of
from trencadis.backends.hpu.hpu_settings import settings
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.buckets import LORA, Stage
from trencadis.core.checkpoint.model_registry import family_options
from trencadis.core.errors import StartupError
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.bucket_profile import learn_from_profile, write_profile
from trencadis.core.shapes.launch_costs import work_of
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.shapes.shape_need_histogram import NeedHistogram
from trencadis.multimodal.qwen2_vl.smart_resize import square_sizes
from trencadis.server.cli.main import main

BAD: list[tuple[dict[str, str], list[str]]] = [
    ({"VLLM_MULTIMODAL_BUCKETS": "1600, 1601"}, ["VLLM_MULTIMODAL_BUCKETS=1600, 1601", "'1601'", "divisible by 64"]),
    ({"VLLM_MULTIMODAL_BUCKETS": ","}, ["VLLM_MULTIMODAL_BUCKETS=','", "no bucket"]),
    ({"VLLM_PROMPT_SEQ_BUCKET_MIN": "512", "VLLM_PROMPT_SEQ_BUCKET_MAX": "256"},
     ["VLLM_PROMPT_SEQ_BUCKET_MIN=512", "VLLM_PROMPT_SEQ_BUCKET_MAX=256", "not be above"]),
    ({"VLLM_GRAPH_RESERVED_MEM": "1"}, ["VLLM_GRAPH_RESERVED_MEM=1", "must be in [0, 1)"]),
    ({"VLLM_GRAPH_RESERVED_MEM": "-0.1"}, ["VLLM_GRAPH_RESERVED_MEM=-0.1", "must be in [0, 1)"]),
    ({"VLLM_GRAPH_PROMPT_RATIO": "1.01"}, ["VLLM_GRAPH_PROMPT_RATIO=1.01", "must be in [0, 1]"]),
    ({"VLLM_GRAPH_MULTIMODAL_PROMPT_RATIO": "-1"}, ["VLLM_GRAPH_MULTIMODAL_PROMPT_RATIO=-1", "must be in [0, 1]"]),
    ({"VLLM_GRAPH_MULTIMODAL_PROMPT_RATIO": "nan"}, ["VLLM_GRAPH_MULTIMODAL_PROMPT_RATIO", "'nan'", "not a number"]),
    ({"VLLM_GRAPH_PROMPT_STRATEGY": "min"}, ["VLLM_GRAPH_PROMPT_STRATEGY", "'min'", "min_tokens"]),
    ({"VLLM_GRAPH_DECODE_STRATEGY": "max"}, ["VLLM_GRAPH_DECODE_STRATEGY", "'max'", "max_bs"]),
    ({"VLLM_BUCKETING_STRATEGY": "expo"}, ["VLLM_BUCKETING_STRATEGY='expo'", "exp, lin, pad"]),
    ({"VLLM_DECODE_BS_BUCKET_STEP": "4.5"}, ["VLLM_DECODE_BS_BUCKET_STEP='4.5'", "whole number"]),
    ({"VLLM_DECODE_BS_BUCKET_MAX": "0"}, ["VLLM_DECODE_BS_BUCKET_MAX=0", "at least 1"]),
    ({"VLLM_BUCKETING_FROM_FILE": "/nowhere/x"}, ["VLLM_BUCKETING_FROM_FILE=/nowhere/x", "No such file"]),
    ({"VLLM_SKIP_WARMUP": "ture"}, ["VLLM_SKIP_WARMUP='ture'", "neither true", "nor false"]),
    ({"VLLM_FP32_SOFTMAX": "2"}, ["VLLM_FP32_SOFTMAX='2'", "neither true"]),
    ({"VLLM_EXPONENTIAL_BUCKETING": "2"}, ["VLLM_EXPONENTIAL_BUCKETING='2'", "neither true"]),
    ({"TRENCADIS_HPU_EMULATOR": "maybe"}, ["TRENCADIS_HPU_EMULATOR='maybe'", "neither true"]),
]  # fmt: skip


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("trencadis: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("environ, parts", BAD)
@pytest.mark.parametrize("words", [["serve", "--device", "hpu"], ["plan", "--device", "hpu", "--memory", "96GiB"]])
def test_variables(
    words: list[str], environ: dict[str, str], parts: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    line = refused(words, capsys)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("flag, value, rule", [
    ("--graph-reserved-mem", "1.5", "must be in [0, 1)"), ("--graph-prompt-ratio", "2", "must be in [0, 1]"),
    ("--graph-multimodal-prompt-ratio", "x", "not a number"), ("--graph-decode-strategy", "most", "max_bs"),
])  # fmt: skip
def test_flags(flag: str, value: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(["plan", "--device", "hpu", "--memory", "96GiB", flag, value], capsys)
    assert flag in line and value in line and rule in line, line


def test_a_malformed_bucket_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "buckets"
    path.write_text("(1, 128, 0)\n(1, 2)\n")
    monkeypatch.setenv("VLLM_BUCKETING_FROM_FILE", str(path))
    line = refused(["serve", "--device", "hpu"], capsys)
    assert f"VLLM_BUCKETING_FROM_FILE={path}" in line and "line 2" in line


@pytest.mark.parametrize("name, nearest", [
    ("VLLM_GRAPH_RESERVE_MEM", "VLLM_GRAPH_RESERVED_MEM"), ("TRENCADIS_HPU_EMULATER", "TRENCADIS_HPU_EMULATOR"),
])  # fmt: skip
def test_a_variable_that_nothing_reads(
    name: str, nearest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    assert main(["plan", "--device", "hpu", "--memory", "96GiB"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert len(lines) == 1 and nearest in lines[0]


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_shapes_and_graphs_have_no_effect_on_a_cpu(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_GRAPH_RESERVED_MEM", "0.2")
    monkeypatch.setenv("VLLM_DECODE_BS_BUCKET_MAX", "8")
    assert main(["plan", "--device", device, "--memory", "8GiB"]) == 0
    out = capsys.readouterr().out
    for name in ("VLLM_GRAPH_RESERVED_MEM", "VLLM_DECODE_BS_BUCKET_MAX"):
        assert [f"{name} has no effect on a CPU" in line for line in out.splitlines()].count(True) == 1, out


@pytest.mark.parametrize("text", ["true", "t", "1", "yes", "y", "on", "TRUE", "On"])
def test_booleans(text: str) -> None:
    assert settings({"VLLM_FP32_SOFTMAX_VISION": text}).fp32_softmax_vision
    opposite = {"true": "false", "t": "f", "1": "0", "yes": "no", "y": "n", "on": "off", "TRUE": "FALSE", "On": "Off"}
    assert not settings({"VLLM_FP32_SOFTMAX": opposite[text]}).fp32_softmax
    with pytest.raises(StartupError, match="VLLM_FP32_SOFTMAX"):
        settings({"VLLM_FP32_SOFTMAX": text + "x"})


@pytest.mark.parametrize("architecture, on", [
    ("Qwen2ForCausalLM", True), ("Qwen2_5_VLForConditionalGeneration", True), ("LlamaForCausalLM", False),
])  # fmt: skip
def test_softmax_in_float32_where_nobody_says(architecture: str, on: bool) -> None:
    options = family_options(architecture)
    assert settings({}, options).fp32_softmax is on
    assert settings({"VLLM_FP32_SOFTMAX": "1"}, options).fp32_softmax
    assert not settings({"VLLM_FP32_SOFTMAX": "0"}, options).fp32_softmax


def test_a_list_that_ends_too_early_names_both_figures() -> None:
    """1260x1260 pixels: 8,100 patches as the guide counts them; 12 x 12 windows of 64 slots, above 11 x 11."""
    for step, side, patches in ((28, 1260, 8100), (112, 1344, 9216)):
        limits = ShapeLimits(8, 2048, 2048, 128, 16384, squares=tuple(square_sizes(16384, step)))
        (line,) = make_plan(SERVING, limits, BucketOptions(vision=(1600, 7744))).notes
        assert f"{side}x{side} pixels ({patches} patches, 9216 slots)" in line, line


PROFILE = {"format": "trencadis bucket profile", "version": 1, "block_size": 128}


@pytest.mark.parametrize("cells, rule", [
    ('[["DECODE", "", [1, 2], 9.0], ["DEC', "no profile"), (" " * 300_000, "larger than 256 KiB"),
    ({"version": 2}, "not version 1"), ({"block_size": 64}, "recorded with KV blocks of 64 tokens"),
    ([["DECODE", "", [1, 2], float("nan")]], "finite numbers above 0"), ([["DECODE", "", [1, 2], -1]], "above 0"),
    ([["DECODE", "", [1, -2], 1]], "whole numbers from 1"),
    ([["DECODE", "", [1, 2], 1]] * 4097, "more than 4096 cells"),
    ([["LUNCH", "", [1, 2], 1]], "no profile"), (None, "No such file"),
])  # fmt: skip
def test_bad_profiles(
    cells: Any, rule: str, vl_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "needs.json"
    if isinstance(cells, str):
        path.write_text(cells)
    elif cells is not None:
        path.write_text(json.dumps({**PROFILE, **(cells if isinstance(cells, dict) else {"cells": cells})}))
    words = ["plan", str(vl_checkpoint), "--device", "hpu", "--memory", "8GiB", "--bucket-profile", str(path)]
    line = refused(words, capsys)
    assert "--bucket-profile" in line and rule in line, line


@pytest.mark.parametrize("words, rule", [
    (["--max-graphs", "2"], "--max-graphs 2: these limits need at least"), (["--max-graphs", "0"], "--max-graphs"),
    (["--bucket-half-life", "0"], "--bucket-half-life"), (["--learn-buckets", "perhaps"], "--learn-buckets"),
])  # fmt: skip
def test_bad_settings_of_learning(
    words: list[str], rule: str, vl_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "needs.json"
    path.write_text(json.dumps({**PROFILE, "cells": [["DECODE", "", [1, 2], 9.0]]}))
    device = ["--device", "hpu", "--memory", "8GiB", "--bucket-profile", str(path)]
    assert rule in refused(["plan", str(vl_checkpoint), *device, *words], capsys)


@pytest.mark.parametrize("lines, rule", [
    ([{"arrival": 1}, {"arrival": 0}], "line 2"), ([{"prompt": 0}], "line 1"), ([{"lunch": 1}], "'lunch'"),
])  # fmt: skip
def test_bad_traces(
    lines: list[dict[str, Any]], rule: str, vl_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps({"arrival": 0, "prompt": 5, "output": 1, **line}) for line in lines))
    words = ["plan", str(vl_checkpoint), "--device", "hpu", "--memory", "8GiB", "--trace", str(path)]
    assert rule in refused(words, capsys)


def test_a_profile_of_a_model_with_other_variants_is_searched_again(tmp_path: Path) -> None:
    """Needs of adapters, which this model does not serve, and none of images, which it does."""
    model = model_of(3584, 28, 28, 4, 18944)
    plan, plain, both = make_plan(SERVING, GUIDE, BucketOptions(), model), NeedHistogram(), NeedHistogram()
    for rows in range(1, 40):
        plain.add(Stage.DECODE, (rows, 9 * rows), rows)
        both.add(Stage.DECODE, (rows, 9 * rows), rows)
        both.add(Stage.DECODE, (3 * rows, 9 * rows), rows, LORA)
    found = []
    for needs in (plain, both):
        write_profile(str(tmp_path / "needs.json"), needs, 128)
        work = work_of(model, 128)
        found.append(learn_from_profile(str(tmp_path / "needs.json"), plan, BucketOptions(), 40, work).plan.buckets)
    assert found[0] == found[1] and any(b.stage is Stage.VISION for b in found[0])
