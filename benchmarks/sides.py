"""One side of the comparison in its own process: ``python -P -m benchmarks.sides {ours,theirs} MODEL THREADS``.

Work comes as JSON lines on standard input, a line of result goes back for each; the end of input is the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from PIL import Image

from benchmarks.checkpoints import WORDS

Message = dict[str, Any]
SIDE = 448
"""Pixels of an image's side: 1,024 patches, 256 tokens."""


@dataclass(frozen=True)
class Work:
    """``count`` prompts of ``words`` words and ``images`` images each, ``out`` tokens for each; made from ``seed``."""

    count: int
    out: int
    words: int = 100
    images: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Done:
    """Wall and CPU time from messages to the last token, prompt lengths, and what came out."""

    seconds: float
    cpu: float
    prompt: list[int]
    tokens: list[list[int]]


def picture(seed: int, side: int = SIDE) -> Image.Image:
    """Smooth noise, another one for each seed."""
    grain = np.random.default_rng(seed).integers(0, 256, (14, 14, 3), dtype=np.uint8)
    return Image.fromarray(grain).resize((side, side), Image.Resampling.BICUBIC)


def words(rng: random.Random, count: int) -> str:
    """``count`` words, one token each."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


def conversations(work: Work) -> list[list[Message]]:
    """The prompts; the i-th of n is up to a quarter shorter, as prompts of a batch are not equally long."""
    rng = random.Random(work.seed)
    made = []
    for i in range(work.count):
        parts: list[Message] = [{"type": "image", "image": picture(rng.randrange(1 << 30))} for _ in range(work.images)]
        length = work.words - (work.words // 4) * i // max(1, work.count - 1)
        made.append([{"role": "user", "content": [*parts, {"type": "text", "text": words(rng, length)}]}])
    return made


class Side(Protocol):
    """Answers greedily, exactly ``out`` tokens for each conversation."""

    def answer(self, talks: list[list[Message]], out: int) -> tuple[list[int], list[list[int]]]: ...


class Ours:
    """The engine in this process, no prefix cache: every prompt is computed."""

    def __init__(self, model: str, threads: int) -> None:
        from trencadis import LLM

        cache = 1 << 30
        self.llm = LLM(
            model, dtype="float32", threads=threads, kv_cache_memory_bytes=cache, enable_prefix_caching=False
        )

    def answer(self, talks: list[list[Message]], out: int) -> tuple[list[int], list[list[int]]]:
        from trencadis import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        done = self.llm.chat(talks, params, use_tqdm=False)
        return [len(d.prompt_token_ids) for d in done], [d.outputs[0].token_ids for d in done]


class Theirs:
    """transformers: the PIL image processor, one static left-padded batch, ``generate`` with SDPA attention."""

    def __init__(self, model: str, threads: int) -> None:
        import torch

        for op in ("nms", "qnms"):  # torchvision beside CPU torch may register kernels for operators nobody declared
            with contextlib.suppress(RuntimeError):
                torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        torch.set_num_threads(threads)
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.images = Qwen2VLImageProcessorPil.from_pretrained(model)
        make = Qwen2_5_VLForConditionalGeneration.from_pretrained
        self.model = make(model, dtype=torch.float32, attn_implementation="sdpa").eval()

    def answer(self, talks: list[list[Message]], out: int) -> tuple[list[int], list[list[int]]]:
        import torch

        inputs = self._inputs(talks)
        with torch.inference_mode():
            ids = self.model.generate(**inputs, max_new_tokens=out, min_new_tokens=out, do_sample=False)
        return inputs["attention_mask"].sum(1).tolist(), ids[:, inputs["input_ids"].shape[1] :].tolist()

    def _inputs(self, talks: list[list[Message]]) -> dict[str, Any]:
        texts = [self.tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for t in talks]
        pictures = [p["image"] for talk in talks for p in talk[0]["content"] if p["type"] == "image"]
        made: dict[str, Any] = {}
        if pictures:
            pixels = self.images(images=pictures, return_tensors="pt")
            made.update(pixel_values=pixels["pixel_values"], image_grid_thw=pixels["image_grid_thw"])
            counts = iter((pixels["image_grid_thw"].prod(1) // 4).tolist())
            for i, text in enumerate(texts):
                first, *rest = text.split("<|image_pad|>")
                texts[i] = first + "".join("<|image_pad|>" * next(counts) + r for r in rest)
        encoded = self.tokenizer(texts, return_tensors="pt", padding=True)
        made.update(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"])
        pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        made["mm_token_type_ids"] = (encoded["input_ids"] == pad).int()
        return made


def run(side: Side, work: Work) -> Done:
    """Answers ``work``; the clock runs from messages (decoded images) to the last token."""
    talks = conversations(work)
    start, used = time.perf_counter(), time.process_time()
    prompt, tokens = side.answer(talks, work.out)
    seconds, cpu = time.perf_counter() - start, time.process_time() - used
    assert all(len(t) == work.out for t in tokens), "an answer is too short"
    return Done(seconds, cpu, prompt, tokens)


def main() -> None:
    """Reads Work, writes Done; whatever a library prints goes to standard error."""
    which, model, threads = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side: Side = Ours(model, int(threads)) if which == "ours" else Theirs(model, int(threads))
    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(run(side, Work(**json.loads(line))))), file=replies, flush=True)


if __name__ == "__main__":
    main()
