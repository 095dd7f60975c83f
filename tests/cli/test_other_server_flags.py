"""Flags of other servers: what changes nothing is accepted, what would change something is refused, none misleads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.command_line import from_command_line
from trencadis.core import envs
from trencadis.core.errors import StartupError
from trencadis.server.cli import main as cli
from trencadis.server.config.flag_table_and_lookup import find_flag, get_flag_table
from trencadis.server.config.vllm_flag_and_env_table import ROWS, find_variable, read_variables


def refused(line):
    with pytest.raises(StartupError) as caught:
        from_command_line(line.split(), {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--cpu-offload-params mlp", "--cpu-offload-gb puts the last layers into host memory"),
        ("--tokenizer-mode mistral", "tokenizer.json"),
        ("--config-format mistral", "config.json"),
        ("--model-impl transformers", "the server's own"),
        ("--engine-use-ray", "ray places its ranks"),
        ("--task transcription", "audio"),
        ("--convert mm_encoder_only", "the vision tower alone"),
        ("--data-parallel-rank 1", "all engines"),
        ("--quantization gguf", "quantised"),
        ("--enable-moe-shared-loras", "adapters of experts"),
        ("--decode-context-parallel-size 2", "whole sequences"),
    ],
)
def test_flags_that_would_change_something_are_refused(line, part, capsys):
    message = refused(line)
    assert "is refused: " in message and part in message and "did you mean" not in message
    assert cli.main(["serve", *line.split()]) == 2
    assert capsys.readouterr().err == f"trencadis: {message}\n"


@pytest.mark.parametrize(
    "line",
    [
        "--offload-backend auto", "--tokenizer-mode auto", "--tokenizer-mode hf", "--config-format hf",
        "--model-impl vllm",
        "--api-server-count 1", "--swap-space 0", "--preemption-mode recompute",
        "--task generate", "--task auto", "--runner generate", "--convert none", "--mm-encoder-tp-mode weights",
        "--data-parallel-size 1", "--nnodes 1", "--distributed-executor-backend mp", "--quantization null",
        "--h11-max-header-count 256", "--no-enable-ssl-refresh", "--decode-context-parallel-size 1", "--no-enable-eplb",
        "--distributed-executor-backend uni", "--swap-space 0",
    ],
)  # fmt: skip
def test_values_that_say_what_happens_anyway_are_accepted_in_silence(line):
    assert from_command_line([*line.split(), "--port", "5"], {}).notes == []


def test_a_flag_that_another_replaced_does_what_it_says(tmp_path):
    s = from_command_line(["--disable-mm-preprocessor-cache", "m"], {})
    assert (s.engine.mm_processor_cache_gb, s.engine.model, s.notes) == (0, "m", [])
    assert from_command_line(["--no-disable-mm-preprocessor-cache"], {}).engine.mm_processor_cache_gb == 1
    (tmp_path / "c.yaml").write_text("disable-mm-preprocessor-cache: true\ntask: generate\n")
    assert from_command_line(["--config", f"{tmp_path}/c.yaml"], {}).engine.mm_processor_cache_gb == 0
    (tmp_path / "c.yaml").write_text("task: transcription\n")
    assert "audio" in refused(f"--config {tmp_path}/c.yaml")


def test_rays_older_flag_means_the_backend():
    s = from_command_line(["--worker-use-ray", "m"], {})
    assert (s.engine.distributed_executor_backend, s.notes) == ("ray", [])
    assert from_command_line(["--no-worker-use-ray"], {}).engine.distributed_executor_backend == ""
    s = from_command_line(["-n", "2", "-r", "1", "--headless", "--master-addr", "10.0.0.1"], {})
    assert (s.engine.nnodes, s.engine.node_rank, s.engine.headless, s.engine.master_addr) == (2, 1, True, "10.0.0.1")


def test_a_known_flag_of_another_server_is_never_taken_for_a_typo():
    for name in ROWS:
        found = find_flag("--" + name.replace("_", "-"))
        assert (found.name, found.flag) == (name, None)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--max-modle-len", "--max-model-len"),
        ("--max-model-length", "--max-model-len"),
        ("--prot", "--port"),
        ("--kv-cache-bytes", "--kv-cache-memory-bytes"),
        ("--gpu-util", "--gpu-memory-utilization"),
        ("--tensor-paralel-size", "--tensor-parallel-size"),
        ("--no-enforce-eagre", "--no-enforce-eager"),
        ("--enable-lorra", "--enable-lora"),
        ("--max-shards", ""),
        ("--max-rank", "--max-lora-rank"),
        ("--additional-options", ""),
        ("--code-branch", ""),
        ("--rope-base", ""),
        ("--dtype-of-weights", ""),
        ("--enable-magic", ""),
        ("--model-name-suffix", ""),
    ],
)
def test_only_a_misspelling_is_asked_about(written, meant):
    hint = f"; did you mean {meant}?" if meant else "; see --help."
    assert refused(written) == f"unknown flag {written}{hint}"


def test_variables_alike():
    assert list(envs.review({"VLLM_SKIP_WARM_UPP": "1"})) == [
        "VLLM_SKIP_WARM_UPP is not a variable that Trencadis reads."
    ]
    assert "did you mean VLLM_SKIP_WARMUP?" in next(envs.review({"VLLM_SKIP_WARMPU": "1"}))
    assert "did you mean" not in next(envs.review({"VLLM_USE_FLASHINFER_SAMPLER": "1"}))


def test_vllms_variables_are_all_known_and_none_is_silent():
    """vllm_variables.txt has the names of vLLM 0.33's envs.py that begin with VLLM_."""
    names = (Path(__file__).parent / "vllm_variables.txt").read_text().split()
    read = {name for flag in get_flag_table().values() for name in flag.env} | set(envs.BY_NAME)
    assert len(names) > 290 and [n for n in names if n not in read and find_variable(n) is None] == []
    assert not read & set(read_variables())
    for name in set(names) - read:
        env = find_variable(name)
        assert env is not None
        if env.effect == envs.REFUSED:
            with pytest.raises(StartupError, match=f"{name}='1' is refused: "):
                from_command_line([], {name: "1"})
        else:
            assert from_command_line([], {name: "1"}).notes == [f"{name} has no effect: {env.meaning}."]


@pytest.mark.parametrize(
    ("environ", "name", "value"),
    [
        ({"VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": "3"}, "max_media_bytes", 3 << 20),
        ({"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}, "media_redirects", False),
        ({"VLLM_ENGINE_READY_TIMEOUT_S": "600"}, "compile_timeout", 600.0),
        ({"VLLM_LOG_STATS_INTERVAL": "2"}, "log_stats_interval", 2.0),
        ({"VLLM_SKIP_MODEL_NAME_VALIDATION": "1"}, "skip_model_name_validation", True),
        ({"VLLM_MM_INPUT_CACHE_GIB": "2"}, "mm_processor_cache_gb", 2.0),
        ({"VLLM_CPU_KVCACHE_SPACE": "2"}, "kv_cache_memory_bytes", 2 << 30),
        ({"VLLM_CPU_KVCACHE_SPACE": "0"}, "kv_cache_memory_bytes", None),
    ],
)
def test_vllms_variables_that_change_something_are_honoured(environ, name, value):
    s = from_command_line(["--device", "cpu"], environ)
    assert getattr(s.server, name, None) == value or getattr(s.engine, name, None) == value
    assert s.notes == []


def test_space_for_a_cpu_is_none_of_a_cards():
    assert from_command_line(["--device", "cuda"], {"VLLM_CPU_KVCACHE_SPACE": "2"}).engine.kv_cache_memory_bytes is None
    with pytest.raises(StartupError, match="VLLM_CPU_KVCACHE_SPACE"):
        from_command_line(["--device", "cpu"], {"VLLM_CPU_KVCACHE_SPACE": "much"})
