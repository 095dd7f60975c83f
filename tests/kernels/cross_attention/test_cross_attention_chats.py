"""A model whose layers attend to images, served with interpreted kernels: as transformers answers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.transformers_model import assert_same, make_image
from tests.vision.cross_attention.mllama_oracle import START, MllamaOracle, write
from trencadis import LLM, SamplingParams
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda import support_checks
from trencadis.backends.cuda.kernels import cross_attend
from trencadis.backends.cuda.kernels.attention_metadata import SingleCrossAttention

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 3, "max_num_batched_tokens": 32, "max_model_len": 256, "block_size": 16,
    "kv_cache_memory_bytes": 4 << 20, "encoder_cache_images": 3, "device": "cuda", "enforce_eager": True,
}  # fmt: skip


SMALL: dict[str, Any] = {
    "image": 28, "tiles": 2, "taken": [0], "cross": [1], "num_hidden_layers": 3,
    "vision": {"num_hidden_layers": 1, "num_global_layers": 1},
}  # fmt: skip
"""A tower of two layers, and one layer of three that sees: the interpreter takes its time."""


@pytest.mark.parametrize("form", [SMALL, pytest.param({"seed": 2, "num_key_value_heads": 1}, marks=pytest.mark.long)])
def test_chats_that_see(
    form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Requests with two images, one and none at once: prompts, decoding rows, and both in one launch."""
    if device.type == "cpu":
        monkeypatch.setattr(support_checks, "pick_device", lambda *_: device)
    launches = Counter[str]()

    def note(*args: Any, was: Any = cross_attend.cross_attend) -> None:
        launches[type(args[3]).__name__] += 1
        was(*args)

    monkeypatch.setattr(cross_attend, "cross_attend", note)
    monkeypatch.setattr(ReferenceOps, "cross_attend_rows", None)
    path = write(tmp_path, **form)
    reference, rng = MllamaOracle(path), np.random.default_rng(2)
    one, two = make_image(rng, high=100), make_image(rng, high=100)
    requested: list[tuple[str, list[Any]]] = [
        (f"{START}Say what <|image|> shows, and <|image|> too.", [one, two]),
        (f"{START}<|image|>What?", [two]),
        (f"{START}No image.", []),
    ]
    want = [reference.answer(text, images, 3)[1] for text, images in requested]
    llm = LLM(str(path), **SETTINGS)
    try:
        prompts: Any = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in requested]
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        got = llm.generate(prompts, params, use_tqdm=False)
        assert_same([(g.outputs[0].token_ids, w) for g, w in zip(got, want, strict=True)])
    finally:
        llm.close()
    assert launches["CrossAttentionItems"] >= 2 and launches[SingleCrossAttention.__name__] >= 2, launches
