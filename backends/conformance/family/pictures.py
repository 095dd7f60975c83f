"""The checks of ``trencadis check-model`` for models that see: rows of the tower, logits of prompts with a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from trencadis.backends.conformance.family.by_hand import BLOCK, ByHand, SeenPrompt
from trencadis.backends.conformance.family.oracle import Shown, TheirModel, shown
from trencadis.backends.conformance.result import Skipped
from trencadis.core.checkpoint.model_config import ModelConfig, reserved_rows
from trencadis.core.errors import StartupError
from trencadis.core.kv.sights import sight
from trencadis.core.kv.spans import MediaSpan, TokenRun
from trencadis.core.layout import RESERVED_ROWS
from trencadis.core.models import registry
from trencadis.core.shapes.seen import ENDLESS
from trencadis.core.step import Encode

SIZES = ((60, 90), (200, 110), (97, 300))
"""Height and width of the pictures."""

BEFORE, BEHIND = 5, 7
"""Tokens of text around a picture."""


@dataclass(frozen=True)
class Pictured:
    """A picture on both sides: its items, a prompt with it, and what the prompt's tokens take and see."""

    theirs: Shown
    encoded: list[Encode]
    ids: list[int]
    seen: SeenPrompt

    @property
    def rows(self) -> list[int]:
        """The arena rows that stand for it, in the prompt's order; all of one that tokens attend to."""
        if self.seen.sight is not None:
            return [int(row) for row in self.encoded[0].rows]
        return [int(row) for row in self.seen.rows if row]

    @property
    def blocks(self) -> int:
        """KV blocks that the prompt needs, and two that are reserved."""
        return 3 + len(self.ids) // BLOCK


def pictured(config: ModelConfig, folder: Path, seed: int) -> list[Pictured]:
    """Pictures of several sizes; raises Skipped where ``folder`` has no image processor."""
    try:
        processor = registry.image_processor(config, {})
    except StartupError as error:
        raise Skipped(f"no picture can be made: {str(error).replace(f'{folder}/', '')}") from None
    return [_one(config, folder, processor, np.random.default_rng([seed, *size]), *size) for size in SIZES]


def _one(
    config: ModelConfig, folder: Path, processor: Any, rng: np.random.Generator, height: int, width: int
) -> Pictured:
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
    return Pictured(shown(folder, image, config.image_token), encoded, ids, _seen(config, made, rows))


def _prompt(config: ModelConfig, made: Any, encoded: list[Encode], rng: np.random.Generator) -> tuple[list[int], Any]:
    """Ids of a prompt, and the arena row of each token; text inside a picture's layout is any token."""
    media = {config.image_token, config.video_token, config.placed}
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
    tokens += text(BEHIND)
    return [token for token, _ in tokens], np.array([row for _, row in tokens], np.int32)


def _seen(config: ModelConfig, made: Any, rows: NDArray[np.int32]) -> SeenPrompt:
    """Positions as the family has them; which tokens see each other, or what they see of the picture."""
    n, side = len(rows), registry.family_of(config.architecture).vision
    if config.text.cross:
        return _attended(made, rows)
    at = np.flatnonzero(rows)
    positions = np.tile(np.arange(n, dtype=np.int32), (3, 1))
    if side is not None and side.positions and config.text.mrope_section is not None:
        span = MediaSpan(int(at[0]), made.tokens, "", made.grid, made.slots)
        positions = registry.loaded(side.positions)(n, [span], config.vision, [None])[0].astype(np.int32)
    upto = None
    if config.text.upto:
        upto = np.arange(n, dtype=np.int32)
        if config.text.causal:
            upto[at[0] : at[-1] + 1] = at[-1]
        else:
            upto[:] = n - 1
    return SeenPrompt(rows, positions, upto)


def _attended(made: Any, rows: NDArray[np.int32]) -> SeenPrompt:
    """Of a picture that tokens attend to: none takes its rows."""
    n, place, (taken,) = len(rows), int(np.flatnonzero(rows)[0]), made.layout
    run, held = TokenRun(place, taken.tokens), made.items[0].tokens
    span = MediaSpan(0, ENDLESS, "", made.grid, made.slots, held, (run,), taken.shown)
    positions = np.tile(np.arange(n, dtype=np.int32), (3, 1))
    return SeenPrompt(np.zeros(n, np.int32), positions, None, sight([span], [int(rows[place])], 0, n))


def compared(
    config: ModelConfig, folder: Path, seed: int, theirs: TheirModel
) -> list[tuple[Pictured, Tensor, Tensor, Tensor]]:
    """(picture, our rows, theirs, our logits of a prompt with it) of each picture."""
    pictures = pictured(config, folder, seed)
    arena = max(int(p.encoded[-1].rows[-1]) + 1 for p in pictures)
    ours = ByHand(config, blocks=max(p.blocks for p in pictures), arena=arena)
    found = []
    for one in pictures:
        rows = ours.encode(one.encoded)[torch.tensor(one.rows)]
        found.append(
            (one, rows, theirs.rows(one.theirs, config.text.cross), ours.logits(one.ids, len(one.ids), one.seen))
        )
    return found
