"""What a launch that sees images makes once, for all layers that see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracles.transformers_model import make_image
from tests.vision.cross_attention.mllama_oracle import BASE, START
from trencadis import LLM, SamplingParams
from trencadis.core.models import model_loader


class MadeNumbers(TorchDispatchMode):
    """Counts operations that give int64 tensors of ``count`` values, and take none of int64."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.found = count, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = isinstance(out, torch.Tensor) and out.dtype == torch.int64 and out.numel() == self.count
        self.found += made and not any(isinstance(t, torch.Tensor) and t.dtype == torch.int64 for t in args)
        return out


def test_rows_of_images_are_numbered_once_in_a_launch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a decoder with two layers that see, one launch of a prompt with an image."""
    image = make_image(np.random.default_rng(3), low=32, high=200, aspect=2)
    counted: list[int] = []

    def build(*args: Any, was: Any = model_loader.load_model) -> Any:
        model = was(*args)
        assert len(model.cross_attention_layers) == 2

        def text(inputs: Any, was: Any = model.text) -> None:
            with MadeNumbers(
                model.tower.cross_attention_rows
                * (0 if inputs.cross_attention is None else len(inputs.cross_attention.units))
            ) as mode:
                was(inputs)
            if inputs.cross_attention is not None:
                counted.append(mode.found)

        model.text = text
        return model

    monkeypatch.setattr(model_loader, "load_model", build)
    with LLM(str(path), **BASE) as llm:
        prompt: Any = {"prompt": f"{START}Say what <|image|> shows.", "multi_modal_data": {"image": image}}
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert counted == [1, 1, 1]
