"""Every text, vision and sampling bucket of a small plan, on a real model: NaN in SINK and junk in the padding change
no real row by a bit, and a replay gives the run's bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trencadis.core import inputs as host
from trencadis.core.bucket_env import BucketsAsked
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.closure import ShapeLimits
from trencadis.core.models import registry
from trencadis.core.models.config import load_config
from trencadis.core.persistent import persistent
from trencadis.core.planner import make_plan
from trencadis.core.step import Encode, Row, Sample

BLOCK, LENGTH, SEQS = 16, 96, 4


def some_rows(bucket: Bucket, rng: np.random.Generator, vocab: int) -> list[Row]:
    """As many rows and tokens as leave room for padding in every axis where that is possible."""
    free = iter(2 + rng.permutation(80))

    def row(slot: int, context: int, count: int) -> Row:
        blocks = tuple(int(next(free)) for _ in range(-(-(context + count) // BLOCK)))
        tokens = tuple(int(t) for t in rng.integers(0, vocab, count))
        return Row(slot, slot, context, tokens, blocks, rng.integers(0, 90, (3, count)).astype(np.int32))

    first, second = bucket.dims
    if bucket.stage is Stage.CONTEXT:
        return [row(1, max((second - 1) * BLOCK - 3, 1) if second > 1 else 5, max(first - 3, 1))]
    rows = max(first - 1, 1)
    if bucket.stage is Stage.FRESH:
        return [row(i + 1, 0, max(second - 1 - i, 1)) for i in range(rows)]
    each = max(second // rows, 1)
    return [row(i + 1, (each - 1) * BLOCK + 3 + i, 1) for i in range(rows)]


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen2_5_vl")


def loaded(path: Path, hpu: Callable[..., Any]) -> tuple[Any, Any]:
    """(backend, model) with KV, arena and sampler state of a small engine."""

    config = load_config(path)
    backend = hpu(block_size=BLOCK, vocab_size=config.text.vocab, dtype=torch.float32)
    model = registry.build(config, backend)
    model.bind(persistent(config, backend, blocks=80, block_size=BLOCK, arena_rows=64, seqs=SEQS, tokens=400))
    return backend, model


def poisoned(model: Any) -> None:
    for kv in model.persistent.kv:
        for cache in kv:
            values = cache.cpu()
            values[1] = float("nan")
            cache.copy_(values)
    arena = model.persistent.arena.cpu()
    arena[1] = float("nan")
    model.persistent.arena.copy_(arena)


def junk(program: Any, rng: np.random.Generator) -> None:
    """Random legal ids and positions in every padded token."""
    x = program.inputs
    pad = (x.out_row.cpu() == 0).numpy()
    for tensor, high in ((x.tokens, 300), (x.positions, 90)):
        values = tensor.cpu().numpy().copy()
        values[..., pad] = rng.integers(0, high, values[..., pad].shape)
        tensor.copy_(torch.from_numpy(values))


def test_every_text_bucket(path: Path, hpu: Callable[..., Any]) -> None:
    backend, model = loaded(path, hpu)
    plan = make_plan(backend.policy, ShapeLimits(SEQS, 128, LENGTH, BLOCK), BucketsAsked(), model.config)
    buckets = [b for b in plan.buckets if b.stage in (Stage.FRESH, Stage.CONTEXT, Stage.DECODE)]
    assert len(buckets) >= 12
    generator = torch.Generator().manual_seed(1)
    clean = [torch.randn(tuple(c.shape), generator=generator) for kv in model.persistent.kv for c in kv]
    for values in clean:
        values[:2] = 0
    for bucket in buckets:
        results = []
        for poison in (False, True):
            rng = np.random.default_rng(3)
            for cache, values in zip((c for kv in model.persistent.kv for c in kv), clean, strict=True):
                cache.copy_(values)
            if poison:
                poisoned(model)
            inputs = host.text_inputs(some_rows(bucket, rng, 300))
            program = backend.program(bucket, model.text)
            program.fill(inputs)
            if poison:
                junk(program, rng)
            program.run()
            results.append(model.persistent.hidden.cpu()[1 : 1 + len(inputs.tokens)])
            program.capture()
            program.replay()
            assert torch.equal(model.persistent.hidden.cpu()[1 : 1 + len(inputs.tokens)], results[-1]), bucket
            assert not model.persistent.kv[0].k.cpu()[0].any(), "ZERO was written"
        assert torch.isfinite(results[0]).all() and torch.equal(*results), bucket


def test_vision_buckets(path: Path, hpu: Callable[..., Any]) -> None:
    """A picture alone in a large bucket: the sink row may hold NaN, and spare windows do not reach it."""
    backend, model = loaded(path, hpu)
    pixels = np.random.default_rng(0).integers(0, 256, (12 * 10, 1176), dtype=np.uint8)
    image = Encode("a", (1, 12, 10), 256, pixels, np.arange(2, 32, dtype=np.int32))
    for slots in (256, 576, 1216):
        found = []
        for poison in (False, True):
            if poison:
                poisoned(model)
            program = backend.program(Bucket(Stage.VISION, (slots,)), model.vision)
            inputs = model.pack([image], slots)
            if poison:
                inputs.pixels[image.slots :] = 99
            program.fill(inputs)
            program.run()
            found.append(model.persistent.arena.cpu()[2:32])
            program.capture()
            program.replay()
            assert torch.equal(model.persistent.arena.cpu()[2:32], found[-1])
        assert torch.isfinite(found[0]).all() and torch.equal(*found)


@pytest.mark.parametrize("variant", ["greedy", "full"])
def test_sampling_buckets(variant: str, path: Path, hpu: Callable[..., Any]) -> None:
    backend, model = loaded(path, hpu)
    hidden = torch.randn(tuple(model.persistent.hidden.shape), generator=torch.Generator().manual_seed(2))
    drawn = []
    for first in (0.0, float("nan")):
        hidden[0] = first
        model.persistent.hidden.copy_(hidden)
        sample = Sample(temperature=0.8 if variant == "full" else 0.0, uniform=0.3, full=variant == "full")
        inputs = host.head_inputs([(5, 1, sample), (7, 2, sample)], model.config.text.vocab)
        program = backend.program(Bucket(Stage.SAMPLE, (4,), variant), lambda t: model.head(t, variant == "full"))
        program.fill(inputs)
        ran = backend.fetch(program.run(), 2).result()
        program.capture()
        again = backend.fetch(program.replay(), 2).result()
        assert ran.token.tolist() == again.token.tolist()
        drawn.append(ran.token.tolist())
    assert drawn[0] == drawn[1]
