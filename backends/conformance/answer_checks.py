"""Checks of answers: chunked prompts with and without images, then decoding, against the CPU in float32.

Prompts are prefilled in two chunks, or whole if their tokens see each other, and decoded together; the device reads
each decoded token from its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trencadis.backends.conformance.backend_under_test import CheckTarget
from trencadis.backends.conformance.check_result import CheckFailed, Skipped
from trencadis.backends.conformance.launch_harness import SEQS, plan_of
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.device.backend import Backend
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent
from trencadis.core.launches.model_runner import ModelRunner
from trencadis.core.media_spans import MediaSpan
from trencadis.core.models import model_loader
from trencadis.core.step import PENDING, BidirectionalSpan, Draw, Encode, ImageRows, Reset, Row, Sample, Step

TIE_GAP = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.3}
"""Per dtype: answers may diverge at a tie, where the reference's two best log-probabilities are closer than this."""

TEXTS = (
    "Who are you?", "What colour is the sky?", "Count from one to five.", "Say hello to my friend.",
    "How many circles are there?", "What is in the picture?", "Describe the picture.", "What can you do?",
)  # fmt: skip
HEIGHT, WIDTH = 224, 168
"""Size of the images in pixels."""

MOST_TOKENS = 100
"""Maximum tokens of an image in a prompt here; models that need more are checked with texts only."""

DECODED, DECODED_QUICK = 16, 6


@dataclass
class CheckedPrompt:
    """One prompt, with its answer once it is computed.

    Args:
        positions: int32 [3, tokens].
        start: offset of the image's tokens; -1 without an image.
        pixels: uint8 [patches, patch values] of the image.
        gaps: per token, the difference between the two best log-probabilities, if computed.
    """

    ids: list[int]
    positions: NDArray[np.int32]
    start: int = -1
    pixels: NDArray[np.uint8] | None = None
    answer: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def prompts(config: ModelConfig, path: Path, count: int) -> list[CheckedPrompt]:
    """Returns prompts in the checkpoint's chat format; every other one has an image if the model takes images."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    found, outline = [], image_outline(config)
    for i, text in enumerate(TEXTS[:count]):
        before = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False).ids
        after = tokenizer.encode(f"{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids
        if outline is None or i % 2 == 0:
            ids = before + after
            found.append(CheckedPrompt(ids, np.tile(np.arange(len(ids), dtype=np.int32), (3, 1))))
            continue
        image, around = config.image_token, [t for t in (config.vision_start, config.vision_end) if t >= 0]
        if image < 0:
            raise Skipped("the checkpoint has no image token")
        start = len(before) + len(around) // 2
        ids = [*before, *around[:1], *[image] * outline.tokens, *around[1:], *after]
        found.append(
            CheckedPrompt(ids, _positions(config, outline, len(ids), start), start, _image(config, outline, i))
        )
    return found


def image_outline(config: ModelConfig) -> Any:
    """Returns the size of an image in tokens and slots (``multimodal.processor_interface.ImageGeometry``).

    None without a vision tower, or if an image has too many tokens.
    """
    if config.vision is None:
        return None
    made = model_registry.image_sizes(config, {})(HEIGHT, WIDTH)
    if made.layout:
        made = made.item  # only one tile, with its rows in order
    return made if made.tokens <= MOST_TOKENS else None


def _positions(config: ModelConfig, outline: Any, length: int, start: int) -> NDArray[np.int32]:
    """Returns positions, int32 [3, length], of a prompt with an image whose tokens begin at ``start``."""
    side = model_registry.family_of(config.architecture).vision
    if side is None or not side.positions:
        return np.tile(np.arange(length, dtype=np.int32), (3, 1))
    span = MediaSpan(start, outline.tokens, "", outline.grid, outline.slots)
    made: NDArray[np.int32] = model_registry.import_object(side.positions)(length, [span], config.vision, [None])[0]
    return made


def _image(config: ModelConfig, outline: Any, seed: int) -> NDArray[np.uint8]:
    """Returns an image of flat coloured tiles: uint8 [real slots, values]."""
    assert config.vision is not None
    rng, values = np.random.default_rng(seed), config.vision.slot.values
    tiles = rng.integers(0, 256, (outline.grid[1] * outline.grid[2], 12), dtype=np.uint8)
    return np.repeat(tiles, -(-values // 12), axis=1)[:, :values]


class PromptRunner:
    """Answers prompts on one backend, step by step."""

    def __init__(self, config: ModelConfig, backend: Backend, block: int) -> None:
        self.block, self.config, self.backend = block, config, backend
        model = model_loader.load_model(config, backend)
        self.per_row, self.shown = 16, image_outline(config)
        self.tokens = 0 if self.shown is None else self.shown.tokens
        model.bind(
            allocate_persistent(
                config, backend, blocks=SEQS * self.per_row, block_size=block, arena_rows=2 + SEQS * self.tokens,
                seqs=SEQS, tokens=256,
            )
        )  # fmt: skip
        self.runner = ModelRunner(backend, model, plan_of(backend, config, block))

    def answer(self, asked: list[CheckedPrompt], count: int, sample: Sample) -> None:
        """Fills ``answer`` and ``gaps`` of at most SEQS prompts."""
        given = [(i, p.pixels) for i, p in enumerate(asked) if p.pixels is not None]
        images = [
            Encode(f"image {i}", self.shown.grid, self.shown.slots, pixels, self._image_rows(i)) for i, pixels in given
        ]
        resets = [Reset(1 + i, tuple(sorted(set(p.ids))), ()) for i, p in enumerate(asked)]
        whole = not self.config.text.causal
        half = [0 if whole else len(p.ids) // 2 for p in asked]
        if not whole:
            self._step(0, [self._row(i, p, 0, half[i], None) for i, p in enumerate(asked)], asked, images, resets)
        rows_of = [self._row(i, p, half[i], len(p.ids), _with_uniform(sample, i, 0)) for i, p in enumerate(asked)]
        self._step(1, rows_of, asked, *((images, resets) if whole else ()))
        for step in range(1, count):
            decoding = []
            for i, p in enumerate(asked):
                context = len(p.ids) + step - 1
                at = np.full((3, 1), int(p.positions.max()) + step, np.int32)
                row = Row(i, 1 + i, context, (PENDING,), self._blocks(i, context + 1), at)
                decoding.append(_with_sample(row, _with_uniform(sample, i, step)))
            self._step(1 + step, decoding, asked)

    def _image_rows(self, i: int) -> NDArray[np.int32]:
        return np.arange(2 + i * self.tokens, 2 + (i + 1) * self.tokens, dtype=np.int32)

    def _blocks(self, i: int, tokens: int) -> tuple[int, ...]:
        """Returns the row's block ids, shuffled, since blocks of a row need not be consecutive."""
        own = [2 + i * self.per_row + (j * 7) % self.per_row for j in range(self.per_row)]
        return tuple(own[: -(-tokens // self.block)])

    def _row(self, i: int, p: CheckedPrompt, start: int, stop: int, sample: Sample | None) -> Row:
        images: tuple[ImageRows, ...] = ()
        if p.start >= 0:
            first, last = max(p.start, start), min(p.start + self.tokens, stop)
            if first < last:
                images = (ImageRows(first - start, self._image_rows(i)[first - p.start : last - p.start]),)
        blocks, at = self._blocks(i, stop), p.positions[:, start:stop]
        spans = () if self.config.text.causal else (BidirectionalSpan(0, stop - start),)
        row = Row(i, 1 + i, start, tuple(p.ids[start:stop]), blocks, at, images, spans=spans)
        return row if sample is None else _with_sample(row, sample)

    def _step(
        self,
        number: int,
        rows: list[Row],
        asked: list[CheckedPrompt],
        images: Sequence[Encode] = (),
        resets: Sequence[Reset] = (),
    ) -> None:
        out = self.runner.execute(Step(number, tuple(rows), tuple(images), tuple(resets))).result()
        for key, at in out.samples.items():
            assert out.head is not None
            asked[key].answer.append(int(out.head.token[at]))
            if out.head.top_logprob is not None:
                asked[key].gaps.append(float(out.head.top_logprob[at][0] - out.head.top_logprob[at][1]))


def _with_uniform(sample: Sample, row: int, step: int) -> Sample:
    """Returns the sample with the row's own random number, if it draws."""
    uniform = float(np.random.default_rng([row, step]).uniform(0.02, 0.98))
    return replace(sample, uniform=uniform) if sample.temperature else sample


def _with_sample(row: Row, sample: Sample) -> Row:
    return replace(row, samples=(Draw(row.key, row.slot, sample),))


ARGMAX = Sample()
ARGMAX_WITH_LOGPROBS = Sample(full=True, logprobs=0)
"""Sampling of the reference: its log-probabilities show which answers are ties."""
FILTERED_DRAW = Sample(0.8, 40, 0.95, 0.01, 0.2, 0.1, 1.1, full=True)


@lru_cache(maxsize=8)
def _reference(path: Path, count: int, decoded: int, sample: Sample) -> tuple[CheckedPrompt, ...]:
    """Returns the CPU's answers, computed once per process."""
    from trencadis.backends.cpu import make_backend

    target = CheckTarget("cpu", make_backend, path)
    asked = prompts(load_config(path), path, count)
    runner = PromptRunner(target.model, target.reference(), 16)
    for at in range(0, count, SEQS):
        runner.answer(asked[at : at + SEQS], decoded, sample)
    return tuple(asked)


def _answer_both(
    target: CheckTarget, mine: Sample, theirs: Sample
) -> tuple[Sequence[CheckedPrompt], Sequence[CheckedPrompt]]:
    """Answers the prompts on the backend and on the reference; returns both."""
    count, decoded = (SEQS, DECODED_QUICK) if target.quick else (len(TEXTS), DECODED)
    wanted = _reference(target.checkpoint, count, decoded, theirs)
    backend = target.backend()
    if not backend.values:
        raise Skipped("this device computes shapes only (Backend.values is False): it has no answers")
    asked = prompts(target.model, target.checkpoint, count)
    runner = PromptRunner(target.model, backend, target.block_size)
    for at in range(0, count, SEQS):
        runner.answer(asked[at : at + SEQS], decoded, mine)
    return asked, wanted


def greedy(target: CheckTarget) -> str:
    """Greedy answers equal the reference's, or diverge where its two best ids are all but tied."""
    asked, wanted = _answer_both(target, ARGMAX, ARGMAX_WITH_LOGPROBS)
    ties = 0
    for i, (one, other) in enumerate(zip(asked, wanted, strict=True)):
        parted = next((j for j, (a, b) in enumerate(zip(one.answer, other.answer, strict=True)) if a != b), None)
        if parted is None:
            continue
        if other.gaps[parted] >= TIE_GAP[target.dtype]:
            raise CheckFailed(
                f"answer {i} of {len(asked)} ({TEXTS[i]!r}{', with an image' if one.start >= 0 else ''}) diverges at "
                f"token {parted}, where the reference's two best log-probabilities are {other.gaps[parted]:.2g} apart"
            )
        ties += 1
    if target.dtype is torch.float32 and ties > max(1, len(asked) // 100):
        raise CheckFailed(f"{ties} of {len(asked)} answers diverge at ties")
    return f"{len(asked)} answers of {len(wanted[0].answer)} tokens, {ties} diverged at ties"


def random_sampling(target: CheckTarget) -> str:
    """Draws with filters and penalties equal the reference's, token for token."""
    if target.dtype is not torch.float32:
        raise Skipped("draws are compared in float32 only")
    asked, wanted = _answer_both(target, FILTERED_DRAW, FILTERED_DRAW)
    for i, (one, other) in enumerate(zip(asked, wanted, strict=True)):
        if one.answer != other.answer:
            at = next(j for j, (a, b) in enumerate(zip(one.answer, other.answer, strict=True)) if a != b)
            raise CheckFailed(f"answer {i} of {len(asked)} ({TEXTS[i]!r}) diverges at token {at}")
    return f"{len(asked)} answers of {len(wanted[0].answer)} tokens"
