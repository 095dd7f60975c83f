"""What a start-up that does not fit is told: do less at a time, smaller weights, host memory, then more cards."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.vision.cross_attention.test_plans import HUB
from trencadis.core.errors import StartupError
from trencadis.server.plan import plan_command

TEXT = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16", "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 152064,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path / "cache"))


def advice(tmp_path: Path, raw: object, *words: str) -> str:
    """The remedy of a plan that is refused."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(StartupError) as refused:
        plan_command.main(["--model", str(tmp_path), *words])
    return str(refused.value).rpartition("; ")[2]


def test_the_advice_comes_in_the_order_of_what_a_user_has(tmp_path: Path) -> None:
    line = ["--device", "cuda", "--max-num-seqs", "4", "--max-num-batched-tokens", "2048", "--max-model-len", "2048"]
    found: list[str] = []
    for size in (20, 16, 12, 10, 6, 5):
        try:
            assert plan_command.main(["--model", str(write(tmp_path)), *line, "--memory", f"{size}GiB", "--json"]) == 0
        except StartupError as error:
            found.append(re.sub(r"--([a-z-]+).*", r"\1", str(error).rpartition("; ")[2]))
    order = ["max-num-seqs", "quantization", "cpu-offload-gb", "tensor-parallel-size"]
    ranks = [order.index(one) for one in found if one in order]
    assert ranks == sorted(ranks) and {"quantization", "tensor-parallel-size"} <= set(found), found


def write(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    return tmp_path


def test_a_model_that_layers_attend_to_is_quantised_before_it_gets_a_second_card(tmp_path: Path) -> None:
    said = advice(tmp_path, HUB, "--device", "cuda", "--memory", "22GiB")
    assert re.match(r"--quantization (fp8|int8|int4)", said), said
    kind = said.split()[1]
    assert (
        plan_command.main(["--model", str(tmp_path), "--device", "cuda", "--memory", "22GiB", *said.split()[:-1]]) == 0
    )
    assert kind in ("fp8", "int8", "int4")


def test_what_is_quantised_already_is_not_quantised(tmp_path: Path) -> None:
    said = advice(tmp_path, TEXT, "--device", "cuda", "--memory", "5GiB", "--quantization", "int4")
    assert "quantization" not in said and ("offload" in said or "tensor-parallel" in said), said
