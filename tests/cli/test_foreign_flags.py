"""Flags of other servers: what changes nothing is accepted, what would change something is refused, none misleads."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.fakes.command_line import from_command_line
from trencadis.core import envs
from trencadis.core.errors import StartupError
from trencadis.server.cli import main as cli
from trencadis.server.config import foreign_flags, legacy
from trencadis.server.config.flags import lookup, table


def refused(line):
    with pytest.raises(StartupError) as caught:
        from_command_line(line.split(), {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--cpu-offload-gb 4", "weights in host memory"),
        ("--tokenizer-mode mistral", "tokenizer.json"),
        ("--config-format mistral", "config.json"),
        ("--model-impl transformers", "implementations"),
        ("--api-server-count 4", "several API processes"),
        ("--worker-use-ray", "Ray"),
        ("--engine-use-ray", "Ray"),
        ("--swap-space 4", "swapping"),
        ("--preemption-mode swap", "swapping"),
        ("--task reward", "reward models"),
        ("--convert reward", "reward models"),
        ("--mm-encoder-tp-mode data", "ranks"),
        ("--pipeline-parallel-size 0", "pipeline parallelism"),
        ("-dp 0", "data parallelism"),
        ("--nnodes 0", "several machines"),
        ("--max-num-active-seqs 1", "active requests"),
        ("--swap-space 1", "swapping of KV blocks"),
        ("--quantization gguf", "quantised"),
        ("--distributed-executor-backend ray", "ray"),
        ("--max-lora-rank 8", "LoRA adapters"),
        ("--lora-dtype auto", "LoRA adapters"),
        ("--decode-context-parallel-size 2", "context parallelism"),
    ],
)
def test_flags_that_would_change_something_are_refused(line, part, capsys):
    message = refused(line)
    assert "is not supported yet" in message and part in message and "did you mean" not in message
    assert cli.main(["serve", *line.split()]) == 2
    assert capsys.readouterr().err == f"trencadis: {message}\n"


@pytest.mark.parametrize(
    "line",
    [
        "--cpu-offload-gb 0", "--tokenizer-mode auto", "--tokenizer-mode hf", "--config-format hf", "--model-impl vllm",
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
    (tmp_path / "c.yaml").write_text("task: reward\n")
    assert "reward models" in refused(f"--config {tmp_path}/c.yaml")


def test_no_name_stands_in_two_tables():
    tables: list[Iterable[str]] = [legacy.NO_EFFECT, legacy.LATER, legacy.MEANS, foreign_flags.names(), table()]
    every = [name for one in tables for name in one]
    assert len(every) == len(set(every))


def test_a_known_flag_of_another_server_is_never_taken_for_a_typo():
    for name in foreign_flags.names():
        found = lookup("--" + name.replace("_", "-"))
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
        ("--max-rank", ""),
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
