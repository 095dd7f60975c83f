"""Checkpoints, adapters of them, and transformers' models of the checkpoints that they are merged into."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import checkpoints
from tests.fakes.adapters import adapter_of
from tests.families.text_checkpoints import family_checkpoint
from tests.oracles.transformers_model import Answer
from trencadis.core.quant.writing.merge_adapter import merge_adapter

Base = Callable[[str], Path]
Adapter = Callable[..., Path]
Merged = Callable[[Path, Path, tuple[int, ...], int], Answer]

FORMS = {
    "mistral": "window of 20", "gemma3": "windows of 8, four layers", "qwen3": "plain", "phi3": "half of a head turns",
    "gemma4": "keys as values, heads of 16 and 32",
}  # fmt: skip


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """``base("llama")``: its folder."""

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        if family in FORMS:
            return family_checkpoint(folder, family=family, form=FORMS[family])
        maker: Callable[[Path], Path] = getattr(checkpoints, family)
        return maker(folder)

    return make


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    """``adapter(checkpoint, seed=1, rank=4)``: a folder with an adapter of it."""

    @cache
    def make(checkpoint: Path, **settings: Any) -> Path:
        return adapter_of(checkpoint, tmp_path_factory.mktemp("adapter"), **settings)

    return make


@pytest.fixture(scope="session")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, Path], Path]:
    """``merged(checkpoint, adapter)``: the folder of the merged checkpoint."""

    @cache
    def make(checkpoint: Path, adapter: Path) -> Path:
        out = tmp_path_factory.mktemp("merged")
        merge_adapter(checkpoint, adapter, out)
        return out

    return make


@pytest.fixture(scope="session")
def greedy() -> Callable[[Path, tuple[int, ...], int], Answer]:
    """``greedy(folder, prompt, length)``: transformers' tokens, without a cache, whatever they are."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    @cache
    def model_of(path: Path) -> Any:
        sees = hasattr(AutoConfig.from_pretrained(path), "vision_config")
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        return kind.from_pretrained(path, dtype=torch.float32).eval()

    @cache
    def answer(path: Path, prompt: tuple[int, ...], length: int) -> Answer:
        tokens, rows = list(prompt), []
        with torch.inference_mode():
            for _ in range(length):
                rows.append(model_of(path)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1])
                tokens.append(int(rows[-1].argmax()))
        best = torch.stack(rows).topk(2).values
        return Answer(tokens[len(prompt) :], (best[:, 0] - best[:, 1]).tolist(), torch.stack(rows))

    return answer
