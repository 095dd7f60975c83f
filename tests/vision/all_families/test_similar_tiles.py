"""Images and tiles that are nearly equal, through each family's processor: no name of anything means two things.

A name is an item's digest, by which rows are found, or a block's key, by which keys and values are found. What each
stands for is kept beside it in full: an item's pixels and shape; a block's tokens, and each one's item and row; and
where tokens attend to all images of a prompt, those and their places.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.vision.all_families.family_list import WRITERS
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_processor
from trencadis.core.kv.block_pool import BlockHashChain
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Request, SamplingParams
from trencadis.multimodal.images.image_frontend import content_digest, processed_digest
from trencadis.multimodal.placeholders import expand_placeholders
from trencadis.multimodal.processor_interface import PreparedImage

IMAGE, WORD, BLOCK, KEPT = 2, 5, 16, 4000
PARAMS = SamplingParams()
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def nearly(pixels: Pixels, rng: random.Random, side: int) -> Pixels:
    """The image but for one bit, for the order of two squares, or as many bytes in another shape; or itself."""
    height, width, _ = pixels.shape
    made, how = pixels.copy(), rng.randrange(6)
    if how <= 1:
        made[rng.randrange(height), rng.randrange(width), rng.randrange(3)] ^= 1 << rng.randrange(8)
    elif how == 2 and width >= 2 * side:
        made[:, :side], made[:, side : 2 * side] = pixels[:, side : 2 * side], pixels[:, :side]
    elif how == 3:
        made = pixels.reshape(width, height, 3)
    elif how == 4:
        made = pixels[:, ::-1] if rng.random() < 0.5 else pixels[::-1]
    return np.ascontiguousarray(made)


class Names:
    """What each name stands for."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.items: dict[str, tuple[bytes, object]] = {}
        self.numbers: dict[tuple[bytes, object], int] = {}
        self.blocks: dict[bytes, bytes] = {}
        self.found = [0, 0]

    def check(self, shown: Sequence[Pixels]) -> None:
        """One prompt of images."""
        images = [self._prepared(pixels) for pixels in shown]
        for one in images:
            for item in one.items or (one,):
                truth = item.pixels.tobytes(), item.grid
                assert self.items.setdefault(item.digest, truth) == truth, "two items have one digest"
                self.found[0] += len(self.items) > 1
                self.numbers.setdefault(truth, len(self.numbers))
        tokens = [WORD] * 3 + [IMAGE, WORD] * len(images) + [WORD] * BLOCK
        places = [3 + 2 * i for i in range(len(images))]
        expanded, spans = expand_placeholders(tokens, IMAGE, images, places, encode=lambda text: [WORD + len(text)])
        self._blocks(expanded, spans)

    def _prepared(self, pixels: Pixels) -> PreparedImage:
        image = Image.fromarray(pixels)
        content = content_digest(image.tobytes(), f"{image.width}x{image.height}")
        made: PreparedImage = self.processor.prepare(image, processed_digest(content, self.processor))
        return made

    def _blocks(self, tokens: list[int], spans: list[MediaSpan]) -> None:
        chain = BlockHashChain(Request("r", tokens, PARAMS, spans), BLOCK)
        chain.extend(tokens, len(tokens))
        taken = np.full((len(tokens), 3), -1, np.int64)  # a token; its item and row, or constant row
        taken[:, 0] = tokens
        whole = b""
        for span in spans:
            item = self.numbers[self.items[span.digest]]
            if span.cross_attention_rows:
                whole += np.array([item, span.runs[0].offset, span.cross_attention_rows]).tobytes()
            for run in span.list_runs():
                rows = (
                    np.full(run.length, -2 - run.constant) if run.constant >= 0 else run.first + np.arange(run.length)
                )
                here = slice(run.offset, run.offset + run.length)
                taken[here, 1], taken[here, 2] = -1 if run.constant >= 0 else item, rows
        for i, key in enumerate(chain.keys):
            truth = taken[: (i + 1) * BLOCK].tobytes() + whole
            self.found[1] += key in self.blocks
            assert self.blocks.setdefault(key, truth) == truth, "a block of another prompt"


def pairs(processor: Any, count: int, seed: int) -> tuple[int, int]:
    """Digests and blocks that were found again over ``count`` pairs."""
    rng, drawn, names, found = random.Random(seed), np.random.default_rng(seed), Names(processor), np.zeros(2, int)
    side = getattr(processor, "image", 0) if getattr(processor, "slots", 0) else 28
    for _ in range(count):
        if len(names.items) > KEPT:
            found += names.found
            names = Names(processor)
        height, width = side * rng.choice((1, 1, 2)), side * rng.choice((1, 2, 3))
        first = drawn.integers(0, 256, (height, width, 3), dtype=np.uint8)
        second = nearly(first, rng, side)
        names.check([first])
        names.check([second])
        if rng.random() < 0.1:
            names.check([first, second])
            names.check([second, first])
    return tuple((found + names.found).tolist())


@pytest.mark.parametrize("family", ["internvl", "phi3_v", "pixtral", "mllama"])
def test_some_pairs_do_not_mix(family: str, folders: Any) -> None:
    found = pairs(image_processor(load_config(folders(family)), {}), 40, 1)
    assert min(found) > 10


@pytest.mark.long
@pytest.mark.parametrize("family", WRITERS)
def test_ten_thousand_pairs_do_not_mix(family: str, folders: Any) -> None:
    items, blocks = pairs(image_processor(load_config(folders(family)), {}), 10_000, 2)
    print(f"\n{family}: 10,000 pairs, names found again: {items} of items, {blocks} of blocks, 0 mix-ups")
    # A small image fills few blocks; where tokens attend to all images, equal ones alone share a block.
    assert items > 10_000 and blocks > 2_000


def test_a_digest_without_all_pixels_would_be_found(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = image_processor(load_config(folders("internvl")), {})
    prepare = Names._prepared

    def short(self: Names, pixels: Pixels) -> PreparedImage:
        made = prepare(self, pixels)
        items = tuple(replace(one, digest=str(one.pixels[:8].tobytes())) for one in made.items)
        return replace(made, items=items)

    monkeypatch.setattr(Names, "_prepared", short)
    with pytest.raises(AssertionError, match="one digest"):
        pairs(processor, 100, 1)
