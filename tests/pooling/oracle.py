"""transformers' hidden states in float32, pooled here: what embeddings, classes and yes/no logits are held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from tests.oracles.transformers_model import Oracle, conversation

Float64 = NDArray[np.float64]
LEAST_COSINE = 0.999999


class PooledOracle(Oracle):
    """Hidden states of a chat model."""

    def hidden(self, inputs: dict[str, torch.Tensor]) -> Float64:
        """[tokens, hidden], after the last norm."""
        with torch.inference_mode():
            out: Any = self.model.model(**inputs)
        found: Float64 = out.last_hidden_state[0].double().numpy()
        return found

    def pooled(self, inputs: dict[str, torch.Tensor], kind: str) -> Float64:
        """[hidden]: ``last``, ``mean`` or ``first``, not normalised."""
        hidden = self.hidden(inputs)
        found: Float64 = hidden.mean(0) if kind == "mean" else hidden[-1 if kind == "last" else 0]
        return found

    def logits(self, inputs: dict[str, torch.Tensor]) -> Float64:
        """[vocabulary] at the last token."""
        with torch.inference_mode():
            out: Any = self.model(**inputs)
        found: Float64 = out.logits[0, -1].double().numpy()
        return found


def ask(oracle: Oracle, seed: int, high: int, most: int = 2) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A prompt with up to ``most`` images as ``LLM.embed`` takes it, and transformers' inputs of it."""
    rng = np.random.default_rng(seed)
    messages, images = conversation(rng, most=most, low=28, high=high)
    if rng.random() < 0.3:
        messages.append({"role": "user", "content": "again and again, " * int(rng.integers(1, 12))})
    return prompt_of(oracle, messages, images), oracle.inputs(messages, images)


def prompt_of(oracle: Oracle, messages: list[dict[str, Any]], images: list[Image.Image]) -> dict[str, Any]:
    """The rendered chat with its images beside it."""
    text = oracle.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}


def cosine(a: Any, b: Any) -> float:
    """In float64."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


def class_logits(path: Path, tokens: list[int]) -> Float64:
    """[classes]: the scores of transformers' sequence classification."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: Float64 = model(input_ids=torch.tensor([tokens])).logits[0].double().numpy()
    return found
