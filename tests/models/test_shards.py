"""Ranks in threads of one process: the sharded layers add up to the whole model (4 query heads over 2 and 4 ranks)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trencadis.backends.cpu import make_backend
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig, LayerKV, SamplerState
from trencadis.core.errors import StartupError
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.models.model_and_ops_api import Persistent
from trencadis.core.models.model_loader import load_model
from trencadis.core.step import Encode
from trencadis.multimodal.patch_packing import count_slots
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES

GRID = (1, 10, 6)


class Group:
    """Collectives between threads."""

    def __init__(self, world: int) -> None:
        self.parts: list[Tensor | None] = [None] * world
        self.barrier = threading.Barrier(world, timeout=60)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.parts[rank] = x.clone()
        self.barrier.wait()
        got = [p.clone() for p in self.parts if p is not None]
        self.barrier.wait()
        return got


class ThreadComm:
    def __init__(self, group: Group, rank: int, world: int) -> None:
        self.group, self.rank, self.world = group, rank, world

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.group.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.group.exchange(self.rank, x), dim=-1)


def logits(path: Path, rank: int, world: int, group: Group, **options: str) -> Tensor:
    """Logits [n, V] of a prompt (with an image where the model takes one), as one rank computes them."""
    config = load_config(path)
    c = config.text
    settings = BackendConfig(block_size=16, vocab_size=c.vocab, options={"threads": "1", **options})
    backend: Any = make_backend(settings)
    backend.comm = ThreadComm(group, rank, world)
    model: Any = load_model(config, backend)
    heads = max(c.kv_heads // world, 1)
    kv = [
        LayerKV(torch.zeros(16, 16, heads, c.head_dim), torch.zeros(16, 16, heads, c.head_dim)) for _ in range(c.layers)
    ]
    state = SamplerState(
        torch.zeros(3, dtype=torch.int32), torch.zeros(3, c.vocab, dtype=torch.int32),
        torch.zeros(3, -(-c.vocab // 8), dtype=torch.uint8), torch.zeros(3, 300, dtype=torch.int64),
        torch.zeros(3, 300),
    )  # fmt: skip
    hidden, arena = torch.zeros(64, c.hidden), torch.zeros(64, c.hidden)
    model.bind(Persistent(kv, hidden, arena, state))

    def run(bucket: Bucket, body: Any, inputs: Any) -> None:
        program = backend.program(bucket, body)
        backend.fill(program, inputs)
        program.run()

    rng = np.random.default_rng(5)
    pixels = rng.integers(0, 256, (60, PATCH_VALUES), dtype=np.uint8)
    rows = np.arange(2, 17, dtype=np.int32)
    need = count_slots(GRID)
    n = 40
    image_row = np.zeros(n, np.int32)
    if config.vision is not None:
        image_row[4:19] = rows
        run(Bucket(Stage.VISION, (need,)), model.vision, model.pack([Encode("d", GRID, need, pixels, rows)], need))
    inputs = StepInputs(
        tokens=rng.integers(0, 300, n).astype(np.int32), from_slot=np.zeros(n, np.int32),
        positions=np.stack([np.arange(n)] * 3).astype(np.int32), image_row=image_row,
        out_row=np.arange(1, n + 1, dtype=np.int32), row_start=np.array([0, n], np.int32),
        context=np.zeros(1, np.int32), blocks=np.array([[2, 3, 4]], np.int32), slot=np.ones(1, np.int32),
        adapter=np.zeros(1, np.int32),
    )  # fmt: skip
    run(Bucket(Stage.PREFILL, (n, 1)), model.text, inputs)
    with torch.inference_mode():
        return model.lm_head(hidden[1 : n + 1]).clone()


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen2_5_vl", 2, {}),
    ("qwen2_5_vl", 2, {"intermediate_size": 90, "tie_word_embeddings": True}),
    ("qwen2", 4, {}),
    ("llama", 4, {"num_key_value_heads": 1}),
]


def test_a_size_that_does_not_divide_the_heads_is_named(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(StartupError, match="does not divide the 4 query heads; use one of 1, 2, 4"):
        logits(checkpoint("qwen2"), 0, 3, Group(1))
    with pytest.raises(StartupError, match="heads of the vision tower; use one of 1, 2"):
        logits(checkpoint("qwen2_5_vl"), 0, 4, Group(1))


@pytest.mark.parametrize(("kind", "world", "changes"), CASES)
def test_ranks_add_up(kind: str, world: int, changes: dict[str, Any], checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(kind, **changes)
    whole = logits(path, 0, 1, Group(1))
    group = Group(world)
    got: dict[int, Tensor] = {}
    threads = [
        threading.Thread(target=lambda r=r: got.__setitem__(r, logits(path, r, world, group))) for r in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert set(got) == set(range(world))
    for part in got.values():
        assert (part - whole).abs().max() <= 1e-4 * whole.abs().max()
