"""``trencadis plan`` refuses what a start refuses, with the same line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.command_line import from_command_line
from tests.families.text_checkpoints import CLASSES, FORMS
from tests.vision.cross_attention.test_plans import HUB
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.devices import policy_of
from trencadis.core.engine import engine_builder
from trencadis.core.engine.startup_checks import check_start
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.shapes.pipeline_partition import split_model
from trencadis.server.plan import plan_command

TYPES = {"qwen3": "qwen3", "gemma3": "gemma3_text"}
REFUSALS: list[tuple[str, list[str], str]] = [
    ("mllama", ["-pp", "2"], "layers of every pipeline stage attend to images"),
    ("mllama", ["--batch-invariant"], "attends to all images of a launch at once"),
    ("mllama", ["-tp", "2", "--mm-encoder-tp-mode", "data"], "does not apply; weights does"),
    ("mllama", ["--cpu-offload-gb", "2"], "--cpu-offload-gb 2"),
    ("qwen3", ["--cpu-offload-gb", "1"], "weights lie in host memory already"),
    ("qwen3", ["--kv-offloading-size", "1"], "lies in host memory already"),
    ("qwen3", ["--itl-target", "20", "--no-enable-chunked-prefill"], "needs --enable-chunked-prefill"),
    ("qwen3", ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "64"], "without chunked prefill"),
    ("qwen3", ["--max-model-len", "4096"], "is more than the model supports"),
    ("qwen3", ["--block-size", "7"], "--block-size 7 is not supported here"),
    ("qwen3", ["-tp", "3"], "--tensor-parallel-size 3 does not divide"),
    ("qwen3", ["--runner", "pooling", "--batch-invariant", "--pooler-config.pooling_type", "MEAN"], "not for sums"),
    ("qwen3", ["--runner", "pooling", "--convert", "none"], "--convert none"),
]  # fmt: skip
"""A model, flags, and a part of the line."""


def folder(tmp_path: Path, name: str) -> Path:
    """A checkpoint's config.json, and nothing else: what is refused is refused before weights."""
    raw: dict[str, Any] = HUB if name == "mllama" else {
        "architectures": [CLASSES[name][1]], "model_type": TYPES[name], "torch_dtype": "float32",
        **next(iter(FORMS[name].values())),
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


def refusal_of_start(config: EngineConfig) -> str:
    with pytest.raises(StartupError) as refused:
        engine_builder.create_engine(config)
    return str(refused.value)


@pytest.mark.parametrize(("name", "words", "line"), REFUSALS)
def test_plan_and_start_refuse_alike(tmp_path: Path, name: str, words: list[str], line: str) -> None:
    given = ["--model", str(folder(tmp_path, name)), "--device", "cpu", *words]
    with pytest.raises(StartupError) as refused:
        plan_command.main([*given, "--memory", "64GiB"])
    assert line in str(refused.value)
    assert refusal_of_start(from_command_line(given, {}).engine) == str(refused.value)


@pytest.mark.parametrize("device", ["cuda", "hpu", "cpu"])
def test_what_a_device_refuses_its_plan_refuses(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies without what a model needs, each of which a start meets by the same list."""
    less: list[tuple[str, dict[str, Any], list[str]]] = [
        ("mllama", {"cross_attention": False}, []), ("gemma3", {"windows": False}, []),
        ("qwen3", {"invariant_rows": 0}, ["--batch-invariant"]), ("qwen3", {"stages": False}, ["-pp", "2"]),
        ("qwen3", {"kv_codes": ()}, ["--kv-cache-dtype", "fp8"]), ("qwen3", {"host_kv": False, "host_weights": False},
                                                                   ["--kv-offloading-size", "1"]),
    ]  # fmt: skip
    for name, changes, words in less:
        bare = replace(policy_of(device, ""), **changes)
        monkeypatch.setattr("trencadis.server.plan.plan_command.policy_of", lambda *_, bare=bare: bare)
        given = ["--model", str(folder(tmp_path, name)), "--device", device, *words]
        with pytest.raises(StartupError) as planned:
            plan_command.main([*given, "--memory", "64GiB"])
        config = from_command_line(given, {}).engine
        part = split_model(load_model_config(config), config.pipeline_parallel_size, "")[0]
        with pytest.raises(StartupError) as started:
            check_start(config, part, bare, device)
        assert str(planned.value) == str(started.value)
