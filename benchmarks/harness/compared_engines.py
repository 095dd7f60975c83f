"""One side of the comparison in its own process.

``python -m benchmarks.harness.compared_engines {ours,eager,theirs,vllm} SETUP``

SETUP is a ``Setup`` as JSON; the first line of output holds the seconds of each phase of the start-up.

It reads Work as JSON lines from standard input and writes one line of results for each, until the input ends.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from PIL import Image

from benchmarks.harness.checkpoints import WORDS
from benchmarks.harness.vision_ops import usable_torchvision
from trencadis.core.startup_progress_and_warmup_pacing import SilentProgress

Message = dict[str, Any]
SIDE = 448
"""Pixels along an image's side; gives 1,024 patches and 256 tokens."""


@dataclass(frozen=True)
class Work:
    """``count`` prompts of ``words`` words and ``images`` images each, ``out`` tokens for each; made from ``seed``."""

    count: int
    out: int
    words: int = 100
    images: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Answers:
    """Prompt lengths, token ids, when each token arrived (``time.perf_counter``; empty: unknown), and real and padded
    tokens, slots or rows by stage (ours only)."""

    prompt: list[int]
    tokens: list[list[int]]
    stamps: list[list[float]] = field(default_factory=list)
    padding: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """Wall and CPU time from messages to the last token, and the Answers; stamps count from the start of the work."""

    seconds: float
    cpu: float
    prompt: list[int]
    tokens: list[list[int]]
    stamps: list[list[float]] = field(default_factory=list)
    padding: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """How to make a side. ``kv``: bytes of our KV cache; ``policy``: a test policy of ours (``twin``); ``seqs`` and
    ``tokens``: limits of our steps, ``pixels``: of an image; 0: the default. ``quantization``: ours alone."""

    model: str
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    eager: bool = False
    kv: int = 1 << 30
    policy: str = ""
    max_model_len: int = 0
    seqs: int = 0
    tokens: int = 0
    pixels: int = 0
    quantization: str = ""

    @property
    def torch_device(self) -> str:
        """The torch device on which transformers runs."""
        return "cuda" if self.device == "cuda" and not self.policy else "cpu"

    def limits(self) -> dict[str, Any]:
        """Keyword arguments of ``LLM`` that limit lengths and sizes."""
        return {
            "kv_cache_memory_bytes": self.kv, "max_model_len": self.max_model_len or None,
            "max_num_seqs": self.seqs or None, "max_num_batched_tokens": self.tokens or None,
            "mm_processor_kwargs": {"max_pixels": self.pixels} if self.pixels else {},
        }  # fmt: skip


def random_image(seed: int, side: int = SIDE) -> Image.Image:
    """Smooth noise, different for each seed."""
    grain = np.random.default_rng(seed).integers(0, 256, (14, 14, 3), dtype=np.uint8)
    return Image.fromarray(grain).resize((side, side), Image.Resampling.BICUBIC)


def words(rng: random.Random, count: int) -> str:
    """``count`` words, one token each."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


def conversations(work: Work) -> list[list[Message]]:
    """The prompts. Later ones are up to a quarter shorter, so that a batch holds several lengths."""
    rng = random.Random(work.seed)
    made = []
    for i in range(work.count):
        parts: list[Message] = [
            {"type": "image", "image": random_image(rng.randrange(1 << 30))} for _ in range(work.images)
        ]
        length = work.words - (work.words // 4) * i // max(1, work.count - 1)
        made.append([{"role": "user", "content": [*parts, {"type": "text", "text": words(rng, length)}]}])
    return made


class Side(Protocol):
    """Answers greedily, exactly ``out`` tokens for each conversation."""

    def answer(self, chats: list[list[Message]], out: int) -> Answers: ...


class Ours:
    """Our engine in this process, without prefix cache: it computes every prompt."""

    def __init__(self, setup: Setup) -> None:
        from trencadis import LLM

        self.phases = Phases()
        self.llm = LLM(
            setup.model, dtype=setup.dtype, quantization=setup.quantization, threads=setup.threads,
            device=setup.device, enforce_eager=setup.eager, policy=setup.policy, enable_prefix_caching=False,
            progress=self.phases, **setup.limits(),
        )  # fmt: skip
        self.phases.end()
        self._marks: dict[str, list[float]] = {}
        self._step, self.llm.engine.step = self.llm.engine.step, self._stamped  # type: ignore[method-assign]

    def _stamped(self) -> list[Any]:
        """Runs one step of the engine and records when each token arrived."""
        deltas = self._step()
        now = time.perf_counter()
        for delta in deltas:
            self._marks.setdefault(delta.id, []).extend([now] * len(delta.tokens))
        return deltas

    def answer(self, chats: list[list[Message]], out: int) -> Answers:
        from trencadis import SamplingParams

        self._marks = {}
        self.llm.engine.stats()
        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        done = self.llm.chat(chats, params, use_tqdm=False)
        stamps = [self._marks[d.request_id] for d in done]
        padding: dict[str, list[int]] = {}
        for use in self.llm.engine.stats().buckets:
            found = padding.setdefault(use.stage, [0, 0])
            found[0], found[1] = found[0] + use.real, found[1] + use.padded
        return Answers([len(d.prompt_token_ids) for d in done], [d.outputs[0].token_ids for d in done], stamps, padding)


class Phases(SilentProgress):
    """``core.startup_progress_and_warmup_pacing.Progress``: seconds of each phase of a start-up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._begun = "imports and config", time.perf_counter()

    def __call__(
        self, name: str, detail: str = "", fraction: float = 0.0, done: int = 0, total: int = 0, eta: float = 0.0
    ) -> None:
        if name != self._name:
            self.end()
            self._name = name

    def end(self) -> None:
        """Records the seconds since the phase began."""
        now = time.perf_counter()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._begun
        self._begun = now


class TransformersEngine:
    """transformers: the PIL image processor, one static left-padded batch, ``generate`` with SDPA attention."""

    def __init__(self, setup: Setup) -> None:
        import torch

        usable_torchvision()
        from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        torch.set_num_threads(setup.threads)
        self.device = setup.torch_device
        self.tokenizer = AutoTokenizer.from_pretrained(setup.model, padding_side="left")
        self.images = Qwen2VLImageProcessorPil.from_pretrained(setup.model)
        make = Qwen2_5_VLForConditionalGeneration.from_pretrained
        dtype = getattr(torch, setup.dtype)
        self.model = make(setup.model, dtype=dtype, attn_implementation="sdpa").eval().to(self.device)
        self.model.generation_config.eos_token_id = None  # ours continues after EOS; min_new_tokens would forbid EOS

    def answer(self, chats: list[list[Message]], out: int) -> Answers:
        import torch

        inputs = {k: v.to(self.device) for k, v in self._inputs(chats).items()}
        marks: list[float] = []

        def stamp(ids: Any, scores: Any) -> Any:
            if self.device == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
            return scores

        with torch.inference_mode():
            ids = self.model.generate(**inputs, max_new_tokens=out, do_sample=False, logits_processor=[stamp])
        tokens = ids[:, inputs["input_ids"].shape[1] :].tolist()
        return Answers(inputs["attention_mask"].sum(1).tolist(), tokens, [marks] * len(chats))

    def _inputs(self, chats: list[list[Message]]) -> dict[str, Any]:
        texts = [self.tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for t in chats]
        images = [p["image"] for conversation in chats for p in conversation[0]["content"] if p["type"] == "image"]
        made: dict[str, Any] = {}
        if images:
            pixels = self.images(images=images, return_tensors="pt")
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


class Vllm:
    """vLLM in this process, if installed; it records no token times."""

    def __init__(self, setup: Setup) -> None:
        from vllm import LLM

        self.llm: Any = LLM(
            setup.model, dtype=setup.dtype, enforce_eager=setup.eager, enable_prefix_caching=False,
            gpu_memory_utilization=0.3, max_model_len=setup.max_model_len or 4096,
        )  # fmt: skip

    def answer(self, chats: list[list[Message]], out: int) -> Answers:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        named = [
            [{**conversation[0], "content": [_vllm_part(p) for p in conversation[0]["content"]]}]
            for conversation in chats
        ]
        done = self.llm.chat(named, params, use_tqdm=False)
        return Answers([len(d.prompt_token_ids) for d in done], [list(d.outputs[0].token_ids) for d in done])


def _vllm_part(part: Message) -> Message:
    return {"type": "image_pil", "image_pil": part["image"]} if part["type"] == "image" else part


SIDES: dict[str, Callable[[Setup], Side]] = {
    "ours": Ours,
    "eager": lambda setup: Ours(replace(setup, eager=True)),
    "theirs": TransformersEngine,
    "vllm": Vllm,
}
"""By name; ``eager`` is ours without graphs."""


def run(side: Side, work: Work) -> Done:
    """Answers ``work``; the clock runs from messages (decoded images) to the last token."""
    chats = conversations(work)
    start, used = time.perf_counter(), time.process_time()
    found = side.answer(chats, work.out)
    seconds, cpu = time.perf_counter() - start, time.process_time() - used
    assert all(len(t) == work.out for t in found.tokens), "an answer is too short"
    stamps = [[at - start for at in one] for one in found.stamps]
    return Done(seconds, cpu, found.prompt, found.tokens, stamps, found.padding)


def main() -> None:
    """Reads Work and writes Done as JSON lines; what libraries print goes to standard error."""
    which, setup = sys.argv[1], Setup(**json.loads(sys.argv[2]))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    begun = time.perf_counter()
    side = SIDES[which](setup)
    phases = side.phases.seconds if isinstance(side, Ours) else {"all": time.perf_counter() - begun}
    print(json.dumps({"startup": phases}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(run(side, Work(**json.loads(line))))), file=replies, flush=True)


if __name__ == "__main__":
    main()
