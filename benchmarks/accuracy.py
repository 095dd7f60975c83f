"""Teacher-forced choices: the token that ours in bfloat16, and transformers in both dtypes, choose after the same text.

python -m benchmarks.accuracy MODEL PROBE OUT [--device cuda]      PROBE: what benchmarks.gpu.probe wrote

A mismatch is a token at which the choice differs from float32 transformers'. Its gap is how far float32's logit of our
choice lies below its best. Noise is twice the largest error of transformers' bfloat16 among the ten best logits of any
token: both candidates may err.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.compared_engines import Work, conversations, words
from benchmarks.harness.vision_ops import usable_torchvision

if TYPE_CHECKING:
    from benchmarks.harness.compared_engines import Ours

OUT = 64
"""About so many forced tokens per answer."""
SEED = 40


def questions_of(count: int) -> list[list[dict[str, Any]]]:
    """``count`` questions, every other one about an image; the same in every process."""
    return [conversations(Work(1, 1, words=17, images=i % 2, seed=SEED + i))[0] for i in range(count)]


def forced(side: Ours, count: int, random_words: bool) -> list[dict[str, Any]]:
    """Our choices along forced answers, which are random words or the model's own answers.

    Returns:
        For each question: ids of prompt and answer, index of the answer's first id, our best id at each from there on.
    """
    from trencadis import SamplingParams

    chats, rng, rows = questions_of(count), random.Random(SEED), []
    greedy = SamplingParams(temperature=0, max_tokens=OUT)
    reported = [d.outputs[0].text for d in side.llm.chat(chats, greedy, use_tqdm=False)]
    reported = [words(rng, OUT) for _ in chats] if random_words else [t.strip() or "Yes." for t in reported]
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    one = SamplingParams(temperature=0, max_tokens=1)
    requested = side.llm.chat(chats, one, use_tqdm=False)
    whole = [
        [*conversation, {"role": "assistant", "content": text}]
        for conversation, text in zip(chats, reported, strict=True)
    ]
    kwargs = {"add_generation_prompt": False, "continue_final_message": True}
    done = side.llm.chat(whole, score, use_tqdm=False, **kwargs)
    for question, scored in zip(requested, done, strict=True):
        first = len(question.prompt_token_ids)
        assert scored.prompt_logprobs is not None
        picks = [x.top_ids[0] for x in scored.prompt_logprobs[first:] if x is not None]
        rows.append({"tokens": scored.prompt_token_ids, "first": first, "picks": picks})
    return rows


class Reference:
    """transformers in one dtype, which gives the logits of forced tokens."""

    def __init__(self, model: str, device: str, dtype: str) -> None:
        import torch

        usable_torchvision()
        from transformers import Qwen2_5_VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        torch.set_float32_matmul_precision("highest")  # NVIDIA's containers ask for TF32
        torch.backends.cudnn.allow_tf32 = (
            False  # transformers embeds patches by a convolution, which uses TF32 by default
        )
        make = Qwen2_5_VLForConditionalGeneration.from_pretrained
        self.device, self.images = device, Qwen2VLImageProcessorPil.from_pretrained(model)
        self.model = make(model, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval().to(device)

    def logits(self, conversation: list[dict[str, Any]], row: dict[str, Any]) -> Any:
        """float32 [forced, vocabulary] on the host: the logits that predict each id from ``first`` on."""
        import torch

        ids = torch.tensor([row["tokens"]])
        pad = self.model.config.image_token_id
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == pad).int()}
        images = [p["image"] for p in conversation[0]["content"] if p["type"] == "image"]
        if images:
            pixels = self.images(images=images, return_tensors="pt")
            made.update(pixel_values=pixels["pixel_values"], image_grid_thw=pixels["image_grid_thw"])
        with torch.inference_mode():
            out = self.model(**{k: v.to(self.device) for k, v in made.items()}).logits[0]
        return out[row["first"] - 1 : -1].float().cpu()


def compare(model: str, rows: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Mismatches, gaps and noise over all forced ids."""
    import torch

    chats = questions_of(len(rows))
    precise = Reference(model, device, "float32")
    exact = [precise.logits(t, r) for t, r in zip(chats, rows, strict=True)]
    del precise
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    rough, total = Reference(model, device, "bfloat16"), Counter[str]()
    noise = worst = 0.0
    for conversation, row, logits in zip(chats, rows, exact, strict=True):
        other, picks, best = rough.logits(conversation, row), torch.tensor(row["picks"]), logits.max(1)
        assert len(picks) == len(logits), "a choice is missing"
        ten = logits.topk(10, dim=1).indices
        noise = max(noise, 2 * float((logits - other).gather(1, ten).abs().max()))
        worst = max(worst, float((best.values - logits.gather(1, picks[:, None])[:, 0]).max()))
        total["tokens"] += len(picks)
        total["ours"] += int((picks != best.indices).sum())
        total["theirs"] += int((other.argmax(1) != best.indices).sum())
    counts = {name: total[name] for name in ("tokens", "ours", "theirs")}
    return {**counts, "noise": noise, "worst_gap": worst}


def main() -> None:
    """Runs the command line and writes OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("probe", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    rows = json.loads(args.probe.read_text())["forced"]
    args.out.write_text(json.dumps(compare(args.model, rows, args.device)))


if __name__ == "__main__":
    main()
