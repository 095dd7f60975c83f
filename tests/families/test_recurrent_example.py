"""The example of a family with a recurrent layer of its own: installed as a package, it answers as transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import IDS, randomise, text_settings, write_tokenizer
from tests.families.test_check_model import forget
from tests.families.test_recurrent_layers import answers, random_ids
from tests.families.test_same_tokens import BASE, pairs
from tests.oracles.transformers_model import assert_same
from trencadis import LLM
from trencadis.server.cli.main import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "model_bamba"
MODULES = ("model_bamba", "bamba_layers")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after ``pip install ./examples/model_bamba``."""
    folder = tmp_path / "site"
    info = folder / "trencadis_model_bamba-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trencadis-model-bamba\nVersion: 0.1.0\n")
    points = (EXAMPLE / "pyproject.toml").read_text().partition('"trencadis.models"]\n')[2].partition("\n\n")[0]
    (info / "entry_points.txt").write_text("[trencadis.models]\n" + points.replace('"', "") + "\n")
    for name in MODULES:
        (folder / f"{name}.py").write_text((EXAMPLE / f"{name}.py").read_text())
    monkeypatch.syspath_prepend(str(folder))
    forget()
    yield
    for name in MODULES:
        sys.modules.pop(name, None)
    forget()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    import transformers

    settings: dict[str, Any] = text_settings(
        num_hidden_layers=4, attn_layer_indices=[2], mamba_n_heads=8, mamba_d_state=32, mamba_d_head="auto",
        mamba_chunk_size=64, pad_token_id=1,
    )  # fmt: skip
    model = transformers.BambaForCausalLM(transformers.BambaConfig(**settings))
    randomise(model, 0)
    for name, p in model.named_parameters():
        if name.endswith("conv1d.weight"):
            p.data.mul_(5)
        if name.endswith("A_log"):
            p.data.sub_(3)
    model.generation_config = transformers.GenerationConfig(eos_token_id=IDS["<|im_end|>"], do_sample=False)
    folder = tmp_path / "bamba"
    model.float().eval().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def test_it_passes_the_checks(package: None, checkpoint: Path, capsys: Any) -> None:
    assert main(["check-model", str(checkpoint)]) == 0
    assert "logits.chunks-of-7" in capsys.readouterr().out


def test_it_answers_as_transformers_and_shares_prefixes(package: None, checkpoint: Path, greedy: Any) -> None:
    requested = [tuple(random_ids(30 + 40 * i, i)) for i in range(4)]
    assert_same(pairs(greedy, checkpoint, requested, 6, max_num_batched_tokens=64))
    llm = LLM(str(checkpoint), **BASE)
    try:
        shared = random_ids(200)
        first, second = (answers(llm, [[*shared, *random_ids(9, i)]])[0] for i in (1, 2))
        assert (first[1], second[1]) == (0, 192)
    finally:
        llm.close()
