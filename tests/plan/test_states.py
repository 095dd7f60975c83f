"""Plans of models with recurrent layers: rows of the ledger, how many sequences and snapshots, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trencadis.core.checkpoint.decoder_layer_config import RecurrentConfig
from trencadis.server.cli.main import main

GIB, MIB = 1 << 30, 1 << 20
LARGE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120,
    "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "dtype": "bfloat16", "attn_output_gate": True, "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}  # fmt: skip
"""What config.json of Qwen3.6-27B says of its decoder."""
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
    "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
"""Keys of Qwen3.6-35B-A3B that differ."""
SLOT = 153_944_064
"""48 layers of 48 matrices of 128 x 128 in float32, and three columns of 10,240 channels in 16 bits."""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    return tmp_path


def planned(capsys: Any, path: Path, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", str(path), "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: Any, path: Path, *words: str) -> str:
    capsys.readouterr()
    assert main(["plan", str(path), *words]) != 0
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    return line


def ledger(plan: dict[str, Any]) -> dict[str, int]:
    return {row["name"]: row["bytes"] for row in plan["ledger"]}


def test_the_state_of_the_published_sizes() -> None:
    layers = tuple(i for i in range(64) if (i + 1) % 4)
    assert len(layers) * RecurrentConfig(layers, 4, 16, 48, 128, 128).slot_bytes(2) == SLOT
    small = RecurrentConfig(tuple(range(24)), 4, 16, 32, 128, 128)
    assert 24 * small.slot_bytes(2) == 24 * (2 * MIB + 48 * 1024) and 2 * small.slot_bytes(2, 2) == small.slot_bytes(2)


def counts(plan: dict[str, Any]) -> tuple[int, int]:
    """Sequences and snapshots, as the line for users says."""
    line = next(note for note in plan["notes"] if note.startswith("recurrent state:"))
    found = re.match(r"recurrent state: (\d+) sequences and (no|\d+) snapshots", line)
    assert found is not None
    return int(found[1]), 0 if found[2] == "no" else int(found[2])


@pytest.mark.parametrize(("words", "least", "most"), [
    (["--device", "cuda", "--memory", "80GiB"], (30, 2), (60, 10)),
    (["--device", "cuda", "--memory", "80GiB", "--no-enable-prefix-caching"], (30, 0), (60, 0)),
    (["--device", "cuda", "--memory", "80GiB", "--max-num-seqs", "32"], (32, 2), (32, 10)),
    (["--device", "hpu", "--memory", "96GiB", "--state-snapshot-memory", "0.5"], (80, 30), (130, 70)),
    (["--device", "hpu", "--memory", "96GiB", "--state-snapshot-memory", "1GiB"], (80, 6), (130, 6)),
    (["--device", "cuda", "--memory", "24GiB", "--quantization", "int4", "--max-num-batched-tokens", "2048"],
     (2, 0), (10, 1)),
])  # fmt: skip
def test_sequences_and_snapshots_are_a_row(
    capsys: Any, large: Path, words: list[str], least: tuple[int, int], most: tuple[int, int]
) -> None:
    plan = planned(capsys, large, *words)
    found = counts(plan)
    assert ledger(plan)["recurrent state"] == (sum(found) + 2) * SLOT
    assert sum(ledger(plan).values()) == int(words[3].removesuffix("GiB")) * GIB
    assert all(low <= one <= high for low, one, high in zip(least, found, most, strict=True)), found


@pytest.mark.parametrize(("words", "least", "most"), [
    (["--device", "cuda", "--memory", "80GiB"], (10, 1), (25, 3)),
    (["--device", "cuda", "--memory", "24GiB", "--quantization", "int4", "--max-num-seqs", "16",
      "--max-num-batched-tokens", "2048", "--max-model-len", "32768"], (16, 0), (16, 2)),
    pytest.param(["--device", "hpu", "--memory", "96GiB"], (150, 12), (250, 25), marks=pytest.mark.long),
])  # fmt: skip
def test_a_model_with_experts(
    capsys: Any, large: Path, words: list[str], least: tuple[int, int], most: tuple[int, int]
) -> None:
    """Qwen3.6-35B-A3B: 30 recurrent layers of 32 matrices; 24 GiB hold it in int4, and are too few for bfloat16."""
    (large / "config.json").write_text(json.dumps(LARGE | EXPERTS))
    plan = planned(capsys, large, *words)
    found = counts(plan)
    assert ledger(plan)["recurrent state"] == (sum(found) + 2) * 30 * (2 * MIB + 48 * 1024)
    assert sum(ledger(plan).values()) == int(words[3].removesuffix("GiB")) * GIB
    assert all(low <= one <= high for low, one, high in zip(least, found, most, strict=True)), found
    line = refused(capsys, large, "--device", "cuda", "--memory", "24GiB")
    assert re.search(r"24\.00 GiB and \d+\.\d\d GiB are needed", line)


def test_what_does_not_fit_is_refused_with_the_number_that_would(capsys: Any, large: Path) -> None:
    cuda = ("--device", "cuda", "--memory")
    line = refused(capsys, large, *cuda, "80GiB", "--max-num-seqs", "256", "--state-snapshot-memory", "0")
    fits = re.search(r"256 sequences needs .* (\d+) fit \(--max-num-seqs \1\)", line)
    assert fits is not None
    for more in (0, 20):
        words = (*cuda, "80GiB", "--max-num-seqs", str(int(fits[1]) + more), "--max-model-len", "128")
        if more:
            assert "fit (--max-num-seqs" in refused(capsys, large, *words, "--state-snapshot-memory", "0")
        else:
            assert counts(planned(capsys, large, *words, "--state-snapshot-memory", "0")) == (int(fits[1]), 0)
    assert "--quantization int4" in refused(capsys, large, *cuda, "24GiB")
    assert "16 key heads of recurrent layers" in refused(capsys, large, *cuda, "80GiB", "-tp", "3")
    assert "cannot be taken back" in refused(
        capsys, large, "--device", "cpu", "--memory", "256GiB", "--spec-method", "ngram"
    )


def test_stages_agree_on_the_slots(capsys: Any, large: Path) -> None:
    capsys.readouterr()
    assert main(["plan", str(large), "--device", "cuda", "--memory", "60GiB", "-pp", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "sequences and" in line]
    assert len(lines) == 2 and len({line.partition(" of ")[0] for line in lines}) == 1
