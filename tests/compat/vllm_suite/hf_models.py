"""``HfRunner`` of vLLM's tests for encoders: what transformers computes with the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .remote_server import find_checkpoint


class HfRunner:
    """A model of transformers in float32 that embeds texts or scores pairs, as sentence-transformers would.

    Args:
        model_name: of the hub; the checkpoint that stands for it is read.
        is_cross_encoder: it has a class head.
    """

    def __init__(self, model_name: str, *, is_cross_encoder: bool = False, **_: Any) -> None:
        import transformers

        self._folder = Path(find_checkpoint(model_name))
        kind = "AutoModelForSequenceClassification" if is_cross_encoder else "AutoModel"
        load = getattr(transformers, kind).from_pretrained
        self._model: Any = load(self._folder, dtype=torch.float32).eval()
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(self._folder))

    def __enter__(self) -> HfRunner:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing."""

    def encode(self, prompts: Sequence[str], *_: Any, **__: Any) -> list[list[float]]:
        """Returns the vector of each text, of length 1, of the token that modules.json names."""
        settings = self._folder / "1_Pooling" / "config.json"
        mean = settings.exists() and json.loads(settings.read_text())["pooling_mode_mean_tokens"]
        found = []
        for text in prompts:
            with torch.inference_mode():
                rows = self._model(**self._tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            row = rows.mean(0) if mean else rows[0]
            found.append((row / row.norm()).tolist())
        return found

    def predict(self, prompts: Sequence[Sequence[str]], *_: Any, **__: Any) -> torch.Tensor:
        """Returns the score of each pair, from 0 to 1."""
        found = []
        for first, second in prompts:
            with torch.inference_mode():
                logits = self._model(**self._tokenizer(first, second, return_tensors="pt")).logits
            found.append(torch.sigmoid(logits[0, 0]))
        return torch.stack(found)
