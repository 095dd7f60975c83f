"""Checkpoints of the families' forms and transformers' models of them, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.text_checkpoints import family_checkpoint
from tests.oracles.transformers_model import Answer

Form = Callable[[str, str], Path]
Greedy = Callable[[Path, tuple[int, ...], int], Answer]


@pytest.fixture(scope="session")
def form(tmp_path_factory: pytest.TempPathFactory) -> Form:
    """``form("opt", "350m")``: its folder."""
    return cache(lambda family, name: family_checkpoint(tmp_path_factory.mktemp(family), family=family, form=name))


@pytest.fixture(scope="session")
def greedy(oracle: Callable[[Path], Any]) -> Greedy:
    """``greedy(folder, prompt, length)``: transformers' tokens, without a cache, whatever they are."""

    @cache
    def answer(path: Path, prompt: tuple[int, ...], length: int) -> Answer:
        tokens, rows = list(prompt), []
        model = oracle(path)
        with torch.inference_mode():
            for _ in range(length):
                rows.append(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1])
                tokens.append(int(rows[-1].argmax()))
        logits = torch.stack(rows)
        best = logits.topk(2).values
        return Answer(tokens[len(prompt) :], (best[:, 0] - best[:, 1]).tolist(), logits)

    return answer
