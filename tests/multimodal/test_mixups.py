"""No mix-ups: near-identical images, offsets, salts and options through the real keys, caches, arena and pool.

Each request of a pair goes the way of a real one: content digest, options, processor cache, placeholders, positions,
arena rows, block keys. What is found must be what was put there for exactly the same thing; *the same thing* is
written down beside it in full (bytes, shape, resulting options, salt, everything before it in the prompt).
"""

import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trencadis.core.errors import BadRequest, Conflict
from trencadis.core.kv.block_pool import BlockHashChain, BlockPool
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.encoder_cache import EncoderCache
from trencadis.core.scheduling.sequence import Sequence
from trencadis.multimodal.images.image_frontend import cache_key, content_digest, processed_digest
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaOptions
from trencadis.multimodal.media_uuids import UuidRegistry
from trencadis.multimodal.patch_packing import count_slots, count_tokens, patch_grid
from trencadis.multimodal.placeholders import expand_placeholders
from trencadis.multimodal.processor_interface import PreparedImage
from trencadis.multimodal.qwen2_vl.mrope import mrope_positions
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor

SERVERS = (Qwen2VLImageProcessor(3136, 50176), Qwen2VLImageProcessor(3136, 50176, alignment="resize"))
OPTIONS = [
    *(MediaOptions(max_pixels=p) for p in (12544, 12545, 25088, 50176)),
    *(MediaOptions(min_pixels=p) for p in (3136, 3137, 12544)),
    *(MediaOptions(resized_height=h, resized_width=w) for h, w in ((112, 224), (224, 112), (112, 112))),
    MediaOptions(), MediaOptions(detail="low"), MediaOptions(min_pixels=3136, max_pixels=12544),
]  # fmt: skip
SALTS = ("", "a", "b", "ab", "a b", "1")
IMAGE, BLOCK = 9, 4
PARAMS = SamplingParams()
SIZES = ((4, 6), (6, 4), (8, 3), (3, 8), (12, 2))
"""Height and width of images with equally many bytes."""


@dataclass(frozen=True)
class Shown:
    """An image as a request brings it; equal ones are the same image under the same processing."""

    data: bytes
    size: tuple[int, int] | None  # None: a file
    processor: Qwen2VLImageProcessor

    def digest(self) -> str:
        kind = "file"
        data = self.data
        if self.size is not None:
            image = Image.frombytes("RGB", self.size[::-1], data)
            data, kind = image.tobytes(), f"{image.width}x{image.height}"
        return processed_digest(content_digest(data, kind), self.processor)

    def prepared(self, digest: str) -> PreparedImage:
        height, width = self.processor.target_size(*(self.size or (5, 5)))
        grid = patch_grid(height, width)
        marker = np.zeros((1, 1176), np.uint8)
        return PreparedImage(digest, marker, grid, count_tokens(grid), count_slots(grid), (height, width))


def shown(rng: random.Random, base: bytes) -> Shown:
    data = bytearray(base)
    if rng.random() < 0.5:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    options = rng.choice(OPTIONS)
    size = rng.choice((None, *SIZES))
    return Shown(bytes(data), size, rng.choice(SERVERS).with_options(options))


@dataclass(frozen=True)
class ResponseForm:
    """A request: salt, images, and the words before, between and after them."""

    salt: str
    images: tuple[Shown, ...]
    words: tuple[tuple[int, ...], ...]


def request_format(rng: random.Random, base: bytes) -> ResponseForm:
    count = rng.choice((1, 1, 1, 2))
    words = tuple(tuple(rng.choice((1, 2)) for _ in range(rng.choice((0, 1, 2, 3, 4, 8)))) for _ in range(count + 1))
    return ResponseForm(rng.choice(SALTS), tuple(shown(rng, base) for _ in range(count)), words)


def nearly(rng: random.Random, first: ResponseForm, base: bytes) -> ResponseForm:
    """The same request but for one thing, or for nothing."""
    change = rng.randrange(6)
    salt, images, words = first.salt, list(first.images), [list(w) for w in first.words]
    if change == 0:
        salt = rng.choice(SALTS)
    elif change == 1:
        images[rng.randrange(len(images))] = shown(rng, base)
    elif change == 2:
        place = words[rng.randrange(len(words))]
        place.insert(rng.randint(0, len(place)), rng.choice((1, 2)))
    elif change == 3:
        images.reverse()
    elif change == 4 and words[0]:
        words[-1].append(words[0].pop())  # as many tokens, another offset
    return ResponseForm(salt, tuple(images), tuple(map(tuple, words)))


async def ready(image: PreparedImage) -> PreparedImage:
    return image


def at_once(work: Coroutine[Any, Any, PreparedImage]) -> PreparedImage:
    """The result of a coroutine that waits for nobody."""
    try:
        work.send(None)
    except StopIteration as done:
        found: PreparedImage = done.value
        return found
    raise AssertionError("it waits")


class Caches:
    """The three caches and, beside each, what every entry truly holds."""

    def __init__(self) -> None:
        self.images, self.kept = ProcessorCache(150 * 1800), dict[int, Any]()
        self.arena, self.rows = EncoderCache(900), dict[tuple[int, ...], object]()
        self.pool, self.blocks = BlockPool(400), dict[int, object]()
        self.found = [0, 0, 0]
        self.number = 0

    def check(self, request: ResponseForm) -> None:
        self.number += 1
        prepared = [self._image(p, request.salt) for p in request.images]
        tokens: list[int] = []
        places = []
        for words, _ in zip(request.words, (*prepared, None), strict=True):
            tokens += words
            places.append(len(tokens))
            tokens.append(IMAGE)
        tokens.pop()
        expanded, spans = expand_placeholders(tokens, IMAGE, prepared, places[:-1])
        where, delta = mrope_positions(len(expanded), spans, 2)
        made = Request("r", expanded, PARAMS, spans, where.astype("<i4").tobytes(), delta, request.salt)
        chain = BlockHashChain(made, BLOCK)
        chain.extend(expanded, len(expanded))
        sequence = Sequence(self.number, made, 0, 0, expanded, 1, frozenset(), (), chain)
        for span, image in zip(spans, request.images, strict=True):
            self._rows(sequence, sequence.key_of(span), span.length, (request.salt, image))
        self._blocks(request, made, chain, where)
        assert self.images.bytes <= self.images.max_bytes

    def _image(self, image: Shown, salt: str) -> PreparedImage:
        digest = image.digest()
        made = at_once(self.images.load(cache_key(salt, digest), lambda: ready(image.prepared(digest))))
        truth = (salt, image)
        known = self.kept.setdefault(id(made.pixels), (truth, made))
        assert known[0] == truth, "another image came out of the processor cache"
        self.found[0] += known[1] is made and len(self.kept) > 0
        if len(self.kept) > 4 * len(self.images) + 100:
            alive = {id(p.pixels) for p in self.images._images.values()}
            self.kept = {k: v for k, v in self.kept.items() if k in alive}
        return made

    def _rows(self, choice: Sequence, key: str, count: int, truth: object) -> None:
        rows = self.arena.pin(key, choice.key)
        if rows is None:
            rows = self.arena.put(key, count, choice.key)
            assert rows is not None
            # An evicted image's rows are whoever's they are now.
            for row in rows.tolist():
                self.rows[row] = truth
        else:
            self.found[1] += 1
        assert len(rows) == count and all(self.rows[r] == truth for r in rows.tolist()), "another image's rows"
        self.arena.unpin(key, choice.key)

    def _blocks(self, request: ResponseForm, made: Request, chain: BlockHashChain, where: np.ndarray) -> None:
        held = []
        for number, key in enumerate(chain.keys):
            end = (number + 1) * BLOCK
            seen = [(s.offset, p) for s, p in zip(made.spans, request.images, strict=True) if s.offset < end]
            truth = (request.salt, tuple(made.tokens[:end]), tuple(seen), where[:, :end].tobytes())
            block = self.pool.find(key)
            if block is not None:
                assert self.blocks[block] == truth, "a block of another prompt"
                self.found[2] += 1
                self.pool.share([block])
            else:
                taken = self.pool.take(1)
                assert taken is not None
                (block,) = taken
                self.blocks[block] = truth
                self.pool.publish(block, key)
            held.append(block)
        self.pool.drop(held)


def fuzz(pairs: int, seed: int) -> Caches:
    rng, caches, found_again = random.Random(seed), Caches(), 0
    bases = [rng.randbytes(72) for _ in range(4)]
    for _ in range(pairs):
        base = rng.choice(bases)
        first = request_format(rng, base)
        second = nearly(rng, first, base)
        caches.check(first)
        before = caches.found[1]
        caches.check(second)
        found_again += second == first and caches.found[1] >= before + len(first.images)
    assert caches.images.evictions and caches.arena.evictions and caches.pool.evictions, "the caches never filled"
    assert all(caches.found) and found_again, "nothing was ever found, so nothing was tested"
    return caches


def test_eight_hundred_pairs_do_not_mix():
    fuzz(800, 1)


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_thousand_pairs_do_not_mix(part: int):
    start = time.monotonic()
    hits = np.zeros(3, int)
    for seed in range(10):
        hits += fuzz(5000, 100 + 10 * part + seed).found
    seconds = time.monotonic() - start
    print(f"50000 pairs, hits in images, arena, blocks: {hits.tolist()}, 0 mix-ups, {seconds:.0f} s")


def test_names_of_images_do_not_mix():
    """uuids of tenants and salts that resemble each other, bounded: a name finds its own content or nothing."""
    rng, registry = random.Random(3), UuidRegistry(60)
    truth: dict[tuple[str, str, str], str] = {}
    texts = ("", "a", "b", "ab", "1:a", "a1:", "\u00e4", "0")
    conflicts = 0
    for _ in range(5000):
        name = (rng.choice(texts), rng.choice(texts), rng.choice(texts[1:]))
        content = content_digest(rng.choice((b"x", b"y")), "file")
        found = registry.find(*name)
        assert found is None or found == truth[name]
        try:
            registry.remember(*name, content)
            truth[name] = content
        except Conflict:
            conflicts += 1
            assert truth[name] != content
        assert len(registry) <= 60
    assert conflicts > 100


def test_options_that_give_other_pixels_have_other_digests():
    """Every pair of options and alignments: equal digests only where sizes are equal for all images tried."""
    rng = random.Random(5)
    sizes = [(rng.randint(20, 400), rng.randint(20, 400)) for _ in range(60)]
    made: dict[str, list[object]] = {}
    for server in SERVERS:
        for options in OPTIONS:
            processor = server.with_options(options)
            results: list[object] = []
            for size in sizes:
                try:
                    results.append(processor.target_size(*size))
                except BadRequest:
                    results.append(None)
            assert made.setdefault(processed_digest("c", processor), results) == results
    assert len(made) > 15
