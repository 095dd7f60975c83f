"""Checks `evaluate`, which judges answers without generating them, against transformers' generation."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer

from demo import config as c
from demo.evaluate import exact
from demo.export import from_hub
from demo.language.held_out import items
from demo.language.tokenizer import SYSTEM
from demo.packing import ASSISTANT, IM_END, USER, Encoder, image_ids


@torch.inference_mode()
def agreement(folder: Path, count: int) -> str:
    """A sentence for the results: how often transformers' greedy generation and `evaluate` agree on what is right."""
    from transformers import Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encode, ours = Encoder(words), from_hub(folder)
    same = right = 0
    requested = items(count, "oracle")
    for item in requested:
        ids = encode(f"<|im_start|>system\n{SYSTEM}{IM_END}{USER}") + image_ids(item.grid) * len(item.images)
        tokens = torch.tensor([ids + encode(item.wordings[1]) + encode(ASSISTANT)])
        extra = {}
        if item.images:
            seen = processor(images=[Image.fromarray(p.pixels) for p in item.images], return_tensors="pt")
            extra = {**seen, "mm_token_type_ids": (tokens == c.IDS["<|image_pad|>"]).int()}
        out = reference.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=48, do_sample=False, **extra
        )
        answer = words.decode(out[0, tokens.shape[1] :].tolist(), skip_special_tokens=True)
        good = answer == item.answer
        right += good
        same += good == exact(ours, item, encode)[1]
    return (
        f"transformers' own greedy generation, asked {len(requested)} of such questions in unseen wordings, is right "
        f"on {100 * right / len(requested):.1f} % and agrees with `evaluate` on {same} of {len(requested)}."
    )
