"""Widths of products are filled with zeros where models or ranks cut them: no product of a served size is left that
begins rows anywhere but on 64 bytes, no answer changes, and the ledger on paper has them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.test_shards import Group, ThreadComm
from tests.traffic.launch_lines import model_of
from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.reference_ops import PlainWeight, ReferenceOps
from trencadis.backends.cuda.shape_policy import ALIGNED, SERVING
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source_interface import StackedPart, stack
from trencadis.core.device.backend import BackendConfig
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.models.model_loader import load_model, make_model
from trencadis.core.step import Encode
from trencadis.multimodal.patch_packing import count_slots
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES, Qwen25VisionConfig

MODELS = {
    "3B": dataclasses.replace(
        base := model_of(2048, 36, 16, 2, 11008), text=dataclasses.replace(base.text, vocab=151_936, tied=True)
    ),
    "7B": model_of(3584, 28, 28, 4, 18944),
    "72B": model_of(8192, 80, 64, 8, 29568),
}
RANKS = {"3B": (1, 2, 4, 8), "7B": (1, 2, 4), "72B": (1, 2, 4, 8)}
"""28 query heads do not divide among 8 ranks."""


class Shapes:
    """``Source`` of tensors that have a shape and nothing else."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        assert 0 <= start < stop <= shape[dim], f"{name}: a rank without any"
        return self.take(name, (*shape[:dim], stop - start, *shape[dim + 1 :]))

    def take_stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        return stack(self, parts, inputs)

    def take_quantised(self, *args: Any, **kwargs: Any) -> None:
        return None

    def has(self, name: str) -> bool:
        return False

    def kv_scale(self, name: str, kind: str) -> float:
        return 1.0


class Noted(ReferenceOps):
    """Remembers the shape of each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> PlainWeight:
        self.shapes.append(tuple(weight.shape))
        return PlainWeight(weight, bias, *weight.shape)


def loaded(config: ModelConfig, rank: int, world: int, unit: int) -> tuple[Any, set[tuple[int, ...]]]:
    """A rank's model without values, and the shapes of its products' weights. Two layers of each kind stand for all."""
    ops = Noted()
    policy = dataclasses.replace(SERVING, aligned=unit)
    backend: Any = SimpleNamespace(
        ops=ops, comm=SimpleNamespace(rank=rank, world=world), dtype=torch.bfloat16,
        policy=dataclasses.replace(policy, host_weights=False),
        device=torch.device("cpu"), values=True,
    )  # fmt: skip
    model: Any = make_model(config, backend)
    model.load_from(Shapes())
    return model, set(ops.shapes)


def shallow(config: ModelConfig) -> ModelConfig:
    assert isinstance(config.vision, Qwen25VisionConfig)
    tower = dataclasses.replace(config.vision, depth=2, full_layers=(1,))
    return dataclasses.replace(config, text=dataclasses.replace(config.text, layers=2), vision=tower)


@pytest.mark.parametrize(("name", "world"), [(name, world) for name, worlds in RANKS.items() for world in worlds])
def test_every_product_is_a_multiple_of_64_bytes(name: str, world: int) -> None:
    """On each rank, in 16 bits; and what that takes is in the ledger on paper, to the byte."""
    config = shallow(MODELS[name])
    for rank in {0, world - 1}:
        model, shapes = loaded(config, rank, world, ALIGNED)
        odd = {shape for shape in shapes if any(2 * width % 64 for width in shape)}
        assert not odd, f"rank {rank} of {world}: {odd}"
        assert any(shape[1] == 1184 for shape in shapes), "the patch embedding"
        if rank == 0:
            t = model.enter.rotary
            tables = (t.inv_freq, t.axis, *model.tower.patch_embed.frequencies, *model.tower.patch_embed.scale_shift)
            # A tied table counts for the embedding alone on paper.
            tied = model.embedding.nbytes() if config.text.tied and world == 1 else 0
            paper = MemoryEstimator(config, 2, world, unit=ALIGNED).weights()
            assert paper == model.nbytes() - tied + sum(t.nbytes for t in tables)


def test_without_a_unit_some_are_not() -> None:
    """What the others would be: the check above can fail."""
    config = shallow(MODELS["7B"])
    odd = [{s for s in loaded(config, 0, world, 1)[1] if any(2 * n % 64 for n in s)} for world in (1, 2, 4)]
    assert odd == [{(6840, 1280), (1280, 3420), (1280, 1176)}, {(3420, 1280), (1280, 1710), (1280, 1176)},
                   {(1710, 1280), (1280, 855), (1280, 1176)}]  # fmt: skip


GRID = (1, 10, 6)


def outputs(path: Path, unit: int, world: int) -> tuple[Tensor, Tensor]:
    """([image tokens, hidden] of rank 0's arena, logits [n, vocabulary] over random hidden rows), ranks in threads."""
    config, group = load_config(path), Group(world)
    found: list[tuple[Tensor, Tensor]] = []
    pixels = np.random.default_rng(3).integers(0, 256, (60, PATCH_VALUES), dtype=np.uint8)
    rows, need = np.arange(2, 17, dtype=np.int32), count_slots(GRID)

    def run(rank: int) -> None:
        settings = BackendConfig(torch.float32, block_size=16, vocab_size=config.text.vocab, options={"threads": "1"})
        backend: Any = make_backend(settings)
        backend.comm, backend.policy = ThreadComm(group, rank, world), dataclasses.replace(backend.policy, aligned=unit)
        model: Any = load_model(config, backend)
        model.bind(allocate_persistent(config, backend, blocks=2, block_size=16, arena_rows=32, seqs=1, tokens=16))
        program = backend.program(Bucket(Stage.VISION, (need,)), model.vision)
        backend.fill(program, model.pack([Encode("d", GRID, need, pixels, rows)], need))
        program.run()
        with torch.inference_mode():
            x = torch.randn(8, config.text.hidden, generator=torch.Generator().manual_seed(4))
            y = model.lm_head(model.layers[0].mlp(x)).clone()
        if rank == 0:
            found.append((model.persistent.arena[2:17].clone(), y))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0]


@pytest.mark.parametrize("world", [1, 2])
def test_zeros_change_no_answer(vl_checkpoint: Path, world: int) -> None:
    """The tower, an MLP and the head in float32, at units that divide none of their widths."""
    plain = outputs(vl_checkpoint, 1, world)
    for unit in (ALIGNED, 56):
        for got, want in zip(outputs(vl_checkpoint, unit, world), plain, strict=True):
            error = float((got - want).abs().max() / want.abs().max())
            print(f"{world} ranks, multiples of {unit}: {error:.1e} of the largest value")
            assert error <= 1e-6
