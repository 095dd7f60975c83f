"""A model whose layers attend to pictures, served with interpreted kernels: as transformers answers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.transformers_model import assert_same, picture
from tests.vision.cross.mllama import START, Theirs, write
from trencadis import LLM, SamplingParams
from trencadis.backends.cpu.reference import ReferenceOps
from trencadis.backends.cuda import capability
from trencadis.backends.cuda.kernels.attn import SingleSeen
from trencadis.backends.cuda.kernels.pictures import attend

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
    """Requests with two pictures, one and none at once: prompts, decoding rows, and both in one launch."""
    if device.type == "cpu":
        monkeypatch.setattr(capability, "pick_device", lambda *_: device)
    launches = Counter[str]()

    def note(*args: Any, was: Any = attend.attend_pictures) -> None:
        launches[type(args[3]).__name__] += 1
        was(*args)

    monkeypatch.setattr(attend, "attend_pictures", note)
    monkeypatch.setattr(ReferenceOps, "attend_rows", None)
    path = write(tmp_path, **form)
    theirs, rng = Theirs(path), np.random.default_rng(2)
    one, two = picture(rng, high=100), picture(rng, high=100)
    asked: list[tuple[str, list[Any]]] = [
        (f"{START}Say what <|image|> shows, and <|image|> too.", [one, two]),
        (f"{START}<|image|>What?", [two]),
        (f"{START}No picture.", []),
    ]
    want = [theirs.answer(text, images, 3)[1] for text, images in asked]
    llm = LLM(str(path), **SETTINGS)
    try:
        prompts: Any = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in asked]
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        got = llm.generate(prompts, params, use_tqdm=False)
        assert_same([(g.outputs[0].token_ids, w) for g, w in zip(got, want, strict=True)])
    finally:
        llm.close()
    assert launches["SeenItems"] >= 2 and launches[SingleSeen.__name__] >= 2, launches
