"""What ``LLM`` takes as keywords: the command line's names and values, and those that Python callers write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trencadis import engine_args
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest, StartupError


def config(**given: Any) -> EngineConfig:
    return engine_args.build_engine_config("m", given)


@pytest.mark.parametrize(
    "given",
    [
        {"task": "auto", "runner": "auto"},
        {"pipeline_parallel_size": 1},
        {"quantization": None},
        {"distributed_executor_backend": None},
        {"data_parallel_size": 1, "enable_lora": False, "hf_overrides": {}, "compilation_config": {"level": 3}},
        {"tokenizer": None, "seed": None, "max_model_len": None, "limit_mm_per_prompt": None},
        {"disable_log_stats": True, "disable_custom_all_reduce": True},
    ],
    ids=lambda given: " ".join(given),
)
def test_what_changes_nothing_is_taken(given: dict[str, Any]) -> None:
    assert config(**given) == EngineConfig("m")


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"dtype": torch.float32}, "dtype", "float32"),
        ({"dtype": torch.bfloat16}, "dtype", "bfloat16"),
        ({"dtype": "half"}, "dtype", "float16"),
        ({"tokenizer": Path("a/b")}, "tokenizer", "a/b"),
        ({"kv_cache_memory_bytes": "256MiB"}, "kv_cache_memory_bytes", 256 << 20),
        ({"max_model_len": "4k"}, "max_model_len", 4000),
        ({"device_memory_utilization": 0.5}, "gpu_memory_utilization", 0.5),
        ({"limit_mm_per_prompt": {"image": {"count": 2}}}, "limit_mm_per_prompt", {"image": 2}),
        ({"mm_processor_kwargs": {"max_pixels": 50176}}, "mm_processor_kwargs", {"max_pixels": 50176}),
    ],
    ids=str,
)
def test_pythons_own_values_are_read(given: dict[str, Any], name: str, value: object) -> None:
    assert getattr(config(**given), name) == value


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"data_parallel_size": 2}, "offline there is one engine"),
        ({"data_parallel_size_local": 4}, "offline there is one engine"),
        ({"data_parallel_backend": "ray"}, "offline there is one engine"),
        ({"dtype": torch.float64}, "dtype: 'float64' is not one of auto, float32"),
        ({"dtype": 16}, "dtype: '16' is not one of"),
        ({"max_model_len": [1]}, "max_model_len: .* does not fit --max-model-len"),
        ({"enforce_eager": "maybe"}, "enforce_eager"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 2 is refused"),
        ({"quantization": "gguf"}, "--quantization gguf is refused"),
        ({"enable_lora": True, "max_lora_rank": 513}, "must be in"),
        ({"distributed_executor_backend": "slurm"}, "'slurm' is not one of .*external_launcher, ray"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4 is refused"),
        ({"max_tokens": 7}, "unknown option 'max_tokens'; known: .*max_model_len"),
        ({"port": 8000}, "unknown option 'port'"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_one_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError, match=says) as caught:
        config(**given)
    assert "\n" not in str(caught.value) and "skip_captures" not in str(caught.value)


def test_a_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    text = "{{ messages[0].content }}"
    path = tmp_path / "own.jinja"
    path.write_text(text)
    assert [engine_args.read_template(given) for given in (None, text, path, str(path))] == [None, text, text, text]
    with pytest.raises(BadRequest, match="no such file") as caught:
        engine_args.read_template("/no/such.jinja")
    assert caught.value.param == "chat_template" and "--" not in caught.value.message
