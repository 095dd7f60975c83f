"""Hugging Face transformers in float32: prompts, pixel values, greedy answers and how sure it was of each token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.harness.vision_ops import usable_torchvision

usable_torchvision()

GAP = 1e-4
"""Two best logits closer than this are a tie: another order of summation may pick the other."""


@dataclass
class Answer:
    """Greedy tokens; ``gaps[i]`` is the distance of the two best logits where token i was chosen."""

    tokens: list[int]
    gaps: list[float]
    logits: torch.Tensor  # [len(tokens), vocabulary]


def same_tokens(ours: list[int], answer: Answer) -> str:
    """``equal``, ``tie`` (first different where the oracle's two best are closer than GAP) or ``different``."""
    for i, (a, b) in enumerate(zip(ours, answer.tokens, strict=False)):
        if a != b:
            return "tie" if answer.gaps[i] < GAP else "different"
    return "equal" if len(ours) == len(answer.tokens) else "different"


def assert_same(pairs: list[tuple[list[int], Answer]], ties: float = 0.01) -> None:
    """All same_tokens, at most ``ties`` of them (but always one) by a tie."""
    verdicts = [same_tokens(ours, answer) for ours, answer in pairs]
    assert "different" not in verdicts, f"answer {verdicts.index('different')} differs"
    assert verdicts.count("tie") <= max(1, ties * len(verdicts))


class Oracle:
    """A checkpoint in transformers, float32."""

    def __init__(self, path: Path, *, vision: bool = True, **pixels: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.vision = vision
        if vision:
            from transformers import AutoModelForImageTextToText
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            self.images = Qwen2VLImageProcessorPil.from_pretrained(path)
            low, high = pixels.get("min_pixels", 3136), pixels.get("max_pixels", 12_845_056)
            self.pixels: dict[str, Any] = {"size": {"shortest_edge": low, "longest_edge": high}} if pixels else {}
            self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        else:
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def inputs(self, messages: list[dict[str, Any]], images: list[Image.Image]) -> dict[str, torch.Tensor]:
        """input_ids and, with images, pixel_values, grids and token types, as transformers makes them."""
        text: Any = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        out: dict[str, torch.Tensor] = {}
        if images:
            made = self.images(images=images, return_tensors="pt", **self.pixels)
            out.update(pixel_values=made["pixel_values"], image_grid_thw=made["image_grid_thw"])
            pieces = text.split("<|image_pad|>")
            assert len(pieces) == len(images) + 1
            counts = [int(g.prod()) // 4 for g in made["image_grid_thw"]]
            text = pieces[0] + "".join("<|image_pad|>" * c + p for c, p in zip(counts, pieces[1:], strict=True))
        encoded = self.tokenizer(text, return_tensors="pt")
        out["input_ids"], out["attention_mask"] = encoded["input_ids"], encoded["attention_mask"]
        if self.vision:
            image: Any = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
            out["mm_token_type_ids"] = out["input_ids"].eq(image).int()
        return out

    def answer(self, inputs: dict[str, torch.Tensor], length: int) -> Answer:
        """Greedy continuation of at most ``length`` tokens, EOS included."""
        with torch.inference_mode():
            out = self.model.generate(
                **inputs, max_new_tokens=length, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
        tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        logits = torch.stack([x[0].float() for x in out.logits])
        best = logits.topk(2).values
        return Answer(tokens, (best[:, 0] - best[:, 1]).tolist(), logits)


def make_image(rng: np.random.Generator, low: int = 28, high: int = 1500, aspect: float = 20.0) -> Image.Image:
    """An image of coloured rectangles over smooth noise; sides log-uniform in [low, high], aspect up to ``aspect``."""
    while True:
        w, h = (round(float(np.exp(rng.uniform(np.log(low), np.log(high))))) for _ in range(2))
        if max(w, h) <= aspect * min(w, h):
            break
    noise = rng.integers(0, 256, (max(2, h // 40), max(2, w // 40), 3), dtype=np.uint8)
    canvas = np.array(Image.fromarray(noise).resize((w, h), Image.Resampling.BICUBIC))
    for _ in range(int(rng.integers(1, 5))):
        x, y = int(rng.integers(0, w)), int(rng.integers(0, h))
        canvas[y : y + max(4, h // 3), x : x + max(4, w // 3)] = rng.integers(0, 256, 3)
    return Image.fromarray(canvas)


QUESTIONS = (
    "What is in the picture?",
    "Which colour is the circle?",
    "how many shapes are there",
    "Describe the image in detail, please.",
    "Compare the pictures.",
    "Who are you?",
    "Is there a red square? Answer yes or no.",
    "Zwölf Boxkämpfer jagen Viktor – quer über den großen Sylter Deich. 你好 🙂",
)


def conversation(
    rng: np.random.Generator, most: int = 3, **size: Any
) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """A chat of one or three turns with up to ``most`` images before, between or after the words."""
    images: list[Image.Image] = []
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": "You answer briefly."})
    turns = 2 if rng.random() < 0.3 else 1
    left = int(rng.integers(0, most + 1))
    for turn in range(turns):
        here = left if turn == turns - 1 else int(rng.integers(0, left + 1))
        left -= here
        parts: list[dict[str, Any]] = []
        for _ in range(here):
            images.append(make_image(rng, **size))
            parts.append({"type": "image", "image": images[-1]})
        question = {"type": "text", "text": QUESTIONS[int(rng.integers(len(QUESTIONS)))]}
        parts.insert(int(rng.integers(0, len(parts) + 1)), question)
        messages.append({"role": "user", "content": parts})
        if turn < turns - 1:
            messages.append({"role": "assistant", "content": "Yes, one."})
    return messages, images
