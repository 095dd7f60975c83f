"""Plans of models with recurrent layers: rows of the ledger, how many sequences and snapshots, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trencadis.core.checkpoint.model_config import RecurrentConfig
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


@pytest.mark.parametrize(("words", "sequences", "snapshots"), [
    (["--device", "cuda", "--memory", "80GiB"], 53, 5),
    (["--device", "cuda", "--memory", "80GiB", "--no-enable-prefix-caching"], 53, 0),
    (["--device", "cuda", "--memory", "80GiB", "--max-num-seqs", "32"], 32, 6),
    (["--device", "hpu", "--memory", "96GiB", "--state-snapshot-memory", "0.5"], 118, 60),
    (["--device", "cuda", "--memory", "24GiB", "--quantization", "int4", "--max-num-batched-tokens", "2048"], 6, 0),
])  # fmt: skip
def test_sequences_and_snapshots_are_a_row(
    capsys: Any, large: Path, words: list[str], sequences: int, snapshots: int
) -> None:
    plan = planned(capsys, large, *words)
    assert ledger(plan)["recurrent state"] == (sequences + 2 + snapshots) * SLOT
    assert sum(ledger(plan).values()) == int(words[3].removesuffix("GiB")) * GIB
    kept = f"{snapshots} snapshots" if snapshots else "no snapshots"
    assert any(f"{sequences} sequences and {kept}" in note for note in plan["notes"])


def test_what_does_not_fit_is_refused_with_the_number_that_would(capsys: Any, large: Path) -> None:
    cuda = ("--device", "cuda", "--memory")
    line = refused(capsys, large, *cuda, "80GiB", "--max-num-seqs", "256")
    assert "256 sequences" in line and "(--max-num-seqs 109)" in line
    fitting = ("--max-num-seqs", "109", "--max-model-len", "128", "--state-snapshot-memory", "0")
    assert "109 sequences" in str(planned(capsys, large, *cuda, "80GiB", *fitting)["notes"])
    assert "--quantization int4 fits" in refused(capsys, large, *cuda, "24GiB")
    assert "16 key heads of recurrent layers" in refused(capsys, large, *cuda, "80GiB", "-tp", "3")
    assert "cannot be taken back" in refused(
        capsys, large, "--device", "cpu", "--memory", "256GiB", "--spec-method", "ngram"
    )


def test_stages_agree_on_the_slots(capsys: Any, large: Path) -> None:
    capsys.readouterr()
    assert main(["plan", str(large), "--device", "cuda", "--memory", "60GiB", "-pp", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "sequences and" in line]
    assert len(lines) == 2 and len({line.partition(" of ")[0] for line in lines}) == 1
