"""Qwen3.5 with images against transformers: the tower on every device, whole chats, weights of the draft layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.oracles.reference_towers import normalised
from tests.vision.family_harness import DEVICES, VARIANTS, FamilyHarness, Shown, worst_packing
from tests.vision.test_qwen3_vl import BAR, BASE, LARGEST, chats
from tests.vision.vision_checkpoints import qwen3_5
from trencadis import LLM, SamplingParams
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.errors import StartupError
from trencadis.multimodal.patch_packing import count_slots
from trencadis.multimodal.pixel_normalisation_and_fixed_point import IMAGENET_STANDARD

FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"experts": True, "seed": 2},
    "tied, one KV head": {"num_key_value_heads": 1, "tie_word_embeddings": True, "seed": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: qwen3_5(tmp_path_factory.mktemp("qwen3_5"), **FORMS[name]))


def shown(model: Any, h: int, w: int, rng: np.random.Generator) -> Shown:
    """An image of h x w patches and its rows in transformers."""
    pixels = rng.integers(0, 256, (h * w, 1536), dtype=np.uint8)
    with torch.no_grad():
        made = model.model.visual(
            normalised(pixels, (IMAGENET_STANDARD.mean, IMAGENET_STANDARD.std)), grid_thw=torch.tensor([[1, h, w]])
        )
    return Shown((1, h, w), count_slots((1, h, w), windows=False), pixels, made.pooler_output)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_the_tower_equal_transformers(device: str, form: Any, oracle: Any) -> None:
    path = form("dense")
    worst = worst_packing(FamilyHarness(path, device, LARGEST), partial(shown, oracle(path)), 3, 1, 16)
    print(f"{device}: worst {worst:.1e} of the largest value")
    assert worst <= BAR


@pytest.mark.parametrize("variant", ["padded, chunks of 7", "emulated hpu"])
def test_chats_answer_as_transformers(variant: str, form: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(form(list(FORMS)[variant == "emulated hpu"]), range(3), **VARIANTS[variant])


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FORMS)
def test_forty_chats(variant: str, name: str, form: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(form(name), range(100, 140), **VARIANTS[variant])


@pytest.mark.long
def test_forty_chats_on_two_ranks(form: Any) -> None:
    chats(form("dense"), range(100, 140), tensor_parallel_size=2)


def test_a_file_has_no_key_for_deepstack_and_weights_of_the_draft_layer_are_named(
    form: Any, tmp_path: Path, caplog: Any
) -> None:
    folder = form("dense")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    held = load_file(folder / "model.safetensors")
    held |= {"mtp.fc.weight": torch.ones(2, 2), "mtp.norm.weight": torch.ones(2)}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_config(tmp_path).vision.deepstack == 0  # type: ignore[union-attr]
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        llm = LLM(str(tmp_path), **BASE)
    try:
        assert "2 of mtp.* are not used" in caplog.text
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    finally:
        llm.close()


@pytest.mark.parametrize(("key", "value", "words"), [
    ("attn_output_gate", False, "attn_output_gate is false"),
    ("mamba_ssm_dtype", "float16", "mamba_ssm_dtype"),
    ("layer_types", ["linear_attention", "full_attention", "mamba"], "layer_types"),
    ("layer_types", ["linear_attention"] * 3, "layer_types"),
    ("linear_num_value_heads", 5, "linear_num_value_heads"),
    ("attention_bias", True, "attention_bias"),
    ("hidden_act", "gelu", "hidden_act"),
])  # fmt: skip
def test_a_key_that_is_not_implemented_is_named(form: Any, key: str, value: object, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        load_config(form("dense"), overrides={"text_config": {key: value}})
