"""Test images of ``trencadis check-model`` for models with a vision tower, computed by our model on the CPU and by
transformers: rows of the tower, and logits of a prompt with the image.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from trencadis.backends.conformance.check_model.cpu_reference_model import BLOCK, CpuReferenceModel, PromptArrays
from trencadis.backends.conformance.check_model.transformers_oracle import (
    ProcessedImage,
    TransformersOracle,
    process_image,
)
from trencadis.backends.conformance.check_result import Skipped
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.model_config import ModelConfig, reserved_rows
from trencadis.core.cross_attention_inputs import ENDLESS, compute_cross_attention
from trencadis.core.errors import StartupError
from trencadis.core.media_spans import RESERVED_ROWS, MediaSpan, TokenRun
from trencadis.core.step import Encode

SIZES = ((60, 90), (200, 110), (97, 300))
"""Height and width of each image in pixels."""

BEFORE, AFTER = 5, 7
"""Tokens of text before and after an image."""


@dataclass(frozen=True)
class CheckedImage:
    """An image on both sides: its items, a prompt with it, and the arena rows and visibility of the prompt's tokens."""

    processed: ProcessedImage
    encoded: list[Encode]
    ids: list[int]
    prompt: PromptArrays

    @property
    def rows(self) -> list[int]:
        """Arena rows of the image, in the prompt's order; all its rows if tokens use cross-attention."""
        if self.prompt.cross_attention is not None:
            return [int(row) for row in self.encoded[0].rows]
        return [int(row) for row in self.prompt.rows if row]

    @property
    def blocks(self) -> int:
        """Number of KV blocks for the prompt, including two reserved ones."""
        return 3 + len(self.ids) // BLOCK


def make_images(config: ModelConfig, folder: Path, seed: int) -> list[CheckedImage]:
    """Makes images of several sizes; raises Skipped if ``folder`` has no image processor."""
    try:
        processor = model_registry.image_processor(config, {})
    except StartupError as error:
        raise Skipped(f"no image can be made: {str(error).replace(f'{folder}/', '')}") from None
    return [_make_image(config, folder, processor, np.random.default_rng([seed, *size]), *size) for size in SIZES]


def _make_image(
    config: ModelConfig, folder: Path, processor: Any, rng: np.random.Generator, height: int, width: int
) -> CheckedImage:
    coarse = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    made = processor.prepare(image, "picture")
    items, first = made.items or (made,), reserved_rows(config)
    encoded: list[Encode] = []
    for item in items:
        rows = np.arange(first, first + item.tokens, dtype=np.int32)
        encoded.append(Encode(str(len(encoded)), item.grid, item.slots, item.pixels, rows))
        first += item.tokens
    ids, rows = _prompt(config, made, encoded, rng)
    return CheckedImage(
        process_image(folder, image, config.image_token), encoded, ids, _make_prompt(config, made, rows)
    )


def _prompt(
    config: ModelConfig, made: Any, encoded: list[Encode], rng: np.random.Generator
) -> tuple[list[int], NDArray[np.int32]]:
    """Returns the ids of a prompt, and the arena row of each token; text inside an image's layout is any token."""
    media = {config.image_token, config.video_token, config.placeholder_token}
    words = [t for t in range(min(config.text.vocab, 512)) if t not in media]

    def text(count: int) -> list[tuple[int, int]]:
        return [(int(rng.choice(words)), 0) for _ in range(count)]

    tokens = text(BEFORE)
    for piece in made.layout or [None]:
        if isinstance(piece, str):
            tokens += text(1)
        elif piece is None:
            tokens += [(config.image_token, int(row)) for row in encoded[0].rows]
        elif piece.constant >= 0:
            tokens += [(config.image_token, RESERVED_ROWS + piece.constant)] * piece.tokens
        else:
            taken = encoded[piece.item].rows[piece.first : piece.first + piece.tokens]
            tokens += [(config.image_token, int(row)) for row in taken]
    tokens += text(AFTER)
    return [token for token, _ in tokens], np.array([row for _, row in tokens], np.int32)


def _make_prompt(config: ModelConfig, made: Any, rows: NDArray[np.int32]) -> PromptArrays:
    """Builds the prompt's positions by its family, and which tokens see each other or the image."""
    n, side = len(rows), model_registry.family_of(config.architecture).vision
    if config.text.cross_attention_layers:
        return _make_cross_attention_prompt(made, rows)
    at = np.flatnonzero(rows)
    positions = np.tile(np.arange(n, dtype=np.int32), (3, 1))
    if side is not None and side.positions and config.text.mrope_section is not None:
        span = MediaSpan(int(at[0]), made.tokens, "", made.grid, made.slots)
        positions = model_registry.import_object(side.positions)(n, [span], config.vision, [None])[0].astype(np.int32)
    upto = None
    if config.text.upto:
        upto = np.arange(n, dtype=np.int32)
        if config.text.causal:
            upto[at[0] : at[-1] + 1] = at[-1]
        else:
            upto[:] = n - 1
    return PromptArrays(rows, positions, upto)


def _make_cross_attention_prompt(made: Any, rows: NDArray[np.int32]) -> PromptArrays:
    """Builds the prompt of an image that tokens attend to by cross-attention, so that no token takes its rows."""
    n, start, (taken,) = len(rows), int(np.flatnonzero(rows)[0]), made.layout
    run, held = TokenRun(start, taken.tokens), made.items[0].tokens
    span = MediaSpan(0, ENDLESS, "", made.grid, made.slots, held, (run,), taken.visible_rows)
    positions = np.tile(np.arange(n, dtype=np.int32), (3, 1))
    return PromptArrays(
        np.zeros(n, np.int32), positions, None, compute_cross_attention([span], [int(rows[start])], 0, n)
    )


class ComparedImage(NamedTuple):
    """What both sides computed of an image: ``rows`` and transformers' ``their_rows``, float32 [rows, width] each, and
    our ``logits``, float32 [n, vocabulary], of a prompt with it.
    """

    image: CheckedImage
    rows: Tensor
    their_rows: Tensor
    logits: Tensor


def compare_images(config: ModelConfig, folder: Path, seed: int, oracle: TransformersOracle) -> list[ComparedImage]:
    """Computes the rows and logits of each test image on both sides."""
    images = make_images(config, folder, seed)
    arena = max(int(p.encoded[-1].rows[-1]) + 1 for p in images)
    ours = CpuReferenceModel(config, blocks=max(p.blocks for p in images), arena=arena)
    found = []
    for one in images:
        rows = ours.encode(one.encoded)[torch.tensor(one.rows)]
        found.append(
            ComparedImage(
                one,
                rows,
                oracle.rows(one.processed, config.text.cross_attention_layers),
                ours.logits(one.ids, len(one.ids), one.prompt),
            )
        )
    return found
