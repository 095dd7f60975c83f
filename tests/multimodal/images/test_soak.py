"""20,000 different images: the memory of preparation, caches, wire and arena stays flat."""

from __future__ import annotations

import base64
import gc
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.traffic.media import prepare_now
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.process.heap_trimmer import trim
from trencadis.core.request import SamplingParams
from trencadis.multimodal.images.image_frontend import ImageFrontend
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaPart, MediaScope
from trencadis.multimodal.media_uuids import UuidRegistry
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.sources.media_loader import MediaLoader
from trencadis.server.prompts.multimodal_inputs import PlaceholderJoiner

TOTAL = int(os.environ.get("TRENCADIS_SOAK_IMAGES", "20000"))
EVERY = 500
SLOPE = 100.0
"""Bytes per image at most: 2 MB over 20,000."""


def source(number: int) -> bytes:
    """Small and different: 8 kinds of size and three formats, some with a name."""
    rng = np.random.default_rng(number)
    height, width = ((56, 56), (60, 84), (84, 60), (112, 56), (100, 100), (30, 120), (56, 140), (70, 70))[number % 8]
    image = Image.fromarray(rng.integers(0, 256, (height // 2, width // 2, 3), np.uint8)).resize((width, height))
    out = io.BytesIO()
    image.save(out, ("PNG", "JPEG", "WEBP")[number % 3])
    return out.getvalue()


def resident() -> tuple[int, int]:
    """Bytes of this process, and of its children, that are its own once the heap is tidied, as a server does."""
    gc.collect()
    trim()
    found = psutil.Process()
    return found.memory_full_info().uss, sum(p.memory_full_info().uss for p in found.children(recursive=True))


class Media:
    """The image side alone: data URL -> decode -> resize -> cache, uuid book, charge."""

    def __init__(self) -> None:
        self.charged = 0
        self.front = ImageFrontend(Qwen2VLImageProcessor(3136, 50176), MediaLoader(), ProcessorCache(4 << 20))
        self.front.uuids = UuidRegistry(
            1000
        )  # full before the slope is taken; its default would grow for 130,000 images

    def run(self, numbers: range) -> None:
        urls = ["data:image/png;base64," + base64.b64encode(source(n)).decode() for n in numbers]
        parts = [MediaPart(u, "p", uuid=f"n{n}" if n % 2 else None) for u, n in zip(urls, numbers, strict=True)]
        made = prepare_now(self.front, parts, MediaScope(f"s{numbers[0] % 3}", charge=self.charge))
        assert len({p.digest for p in made}) == len(made)
        assert self.front.cache.bytes <= self.front.cache.max_bytes
        assert self.front.cache.bytes == sum(p.nbytes for p in self.front.cache._images.values())

    def charge(self, pixels: int) -> None:
        self.charged += pixels

    def close(self) -> None:
        assert self.front.cache.evictions > TOTAL * 0.8
        self.front.close()


class Whole(Media):
    """The same, then the engine: placeholders, arena, prefix cache, four tokens of answer."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        # Blocks take the system's memory as they are first used, so all are in use before the slope is taken: 8 MiB
        # would last for 11,000 images.
        config = EngineConfig(
            str(path), dtype="float32", kv_cache_memory_bytes=1 << 20, max_model_len=256, max_num_seqs=8, threads=1,
            mm_processor_kwargs={"min_pixels": 3136, "max_pixels": 50176},
        )  # fmt: skip
        self.engine, model = create_engine(config), load_config(path)
        self.join, self.image = PlaceholderJoiner(model), model.image_token
        self.params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def run(self, numbers: range) -> None:
        made = prepare_now(self.front, [(source(n), "p") for n in numbers], MediaScope())
        live: dict[str, Any] = {}
        for number, image in zip(numbers, made, strict=True):
            expanded = self.join([5, 6, self.image, 7 + number % 200], [image])
            from trencadis.server.prompts.prompt_and_chat_messages import Prompt

            id = f"r{number}"
            live[id] = image.pixels
            self.engine.add(Prompt(expanded.tokens, None, expanded).make_request(id, self.params, arrival=time.time()))
        while not self.engine.idle():
            assert all(d.finish != "error" for d in self.engine.step())
            for id, index in self.engine.needs():
                assert index == 0
                self.engine.add_media(id, 0, live[id])
        self.engine.step()
        self.engine.stats()
        scheduler = self.engine.scheduler
        scheduler.check()
        assert (
            not scheduler.pixel_queue.pixels
            and not scheduler.pixel_queue._slots
            and not scheduler.pixel_queue._requested
        )
        assert scheduler.arena.used <= scheduler.arena.capacity
        assert sum(bool(e.pins) for e in scheduler.arena._entries.values()) == 0

    def close(self) -> None:
        scheduler = self.engine.scheduler
        assert scheduler.arena.evictions > TOTAL * 0.5 and scheduler.pool.evictions > TOTAL * 0.05
        self.engine.close()
        super().close()


def soak(what: Media, name: str, batch: int, total: int, state: Path) -> float:
    """Bytes per image of the last three quarters. A run that was ended goes on where the file in ``state`` says."""
    points: list[tuple[int, int, int]] = []
    begun = json.loads(state.read_text())["next"] if state.exists() else 0
    start = time.monotonic()
    for first in range(begun, total, batch):
        what.run(range(first, min(first + batch, total)))
        done = first + batch
        if done % EVERY < batch:
            points.append((done, *resident()))
            state.write_text(json.dumps({"next": done}))
    state.unlink(missing_ok=True)
    x, own, children = np.array(points[len(points) // 4 :], float).T
    slopes = [float(np.polyfit(x, y, 1)[0]) for y in (own, children, own + children)]
    print(
        f"{name}: {total - begun} images in {time.monotonic() - start:.0f} s, this process "
        f"{points[0][1] / 2**20:.1f} -> {own[0] / 2**20:.1f} -> {own[-1] / 2**20:.1f} MiB, its children "
        f"{points[0][2] / 2**20:.1f} -> {children[0] / 2**20:.1f} -> {children[-1] / 2**20:.1f} MiB, "
        f"slopes {slopes[0]:.1f} + {slopes[1]:.1f} = {slopes[2]:.1f} bytes per image"
    )
    return slopes[2]


def folder() -> Path:
    made = Path(os.environ.get("TRENCADIS_SOAK_STATE", "/tmp/trencadis-soak"))
    made.mkdir(parents=True, exist_ok=True)
    return made


@pytest.mark.long
def test_the_image_side_is_flat() -> None:
    media = Media()
    assert soak(media, "images", 20, TOTAL, folder() / "images.json") < SLOPE
    media.close()


@pytest.mark.long
def test_images_through_the_engine_are_flat(vl_checkpoint: Path) -> None:
    whole = Whole(vl_checkpoint)
    assert soak(whole, "engine", 20, TOTAL, folder() / "engine.json") < SLOPE
    whole.close()


def test_a_few_leave_nothing_behind(vl_checkpoint: Path) -> None:
    """The invariants of the soak, without its figures."""
    whole = Whole(vl_checkpoint)
    for first in range(0, 36, 12):
        whole.run(range(first, first + 12))
    assert whole.engine.stats().images_encoded == 36 and not whole.engine.life.requests
    whole.engine.close()
    whole.front.close()
