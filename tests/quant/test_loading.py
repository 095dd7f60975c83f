"""Quantised checkpoints load: the reference and the CPU answer as their twins do, on one rank and on several."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_shards import Group, logits
from tests.quant import checkpoints as quantised

Files = Callable[[str], tuple[Path, Path]]

KINDS: dict[str, Callable[[Path, Path], tuple[Path, Path]]] = {
    "pack-quantized": lambda a, b: quantised.checkpoint(a, b, "pack-quantized", 4, 32, False),
    "pack-quantized by activation": lambda a, b: quantised.checkpoint(a, b, "pack-quantized", 4, 32, True, True),
    "int-quantized": lambda a, b: quantised.checkpoint(a, b, "int-quantized", 8, 0),
    "float-quantized": lambda a, b: quantised.fp8(a, b, "float-quantized", 1),
    "fp8 in blocks": lambda a, b: quantised.fp8(a, b, "fp8", 32, 32),
    "fp8": lambda a, b: quantised.fp8(a, b, "fp8"),
    "awq": lambda a, b: quantised.checkpoint(a, b, "awq", 4, 32, False),
    "gptq": lambda a, b: quantised.checkpoint(a, b, "gptq", 4, 32, True),
    "gptq of 8 bits by activation": lambda a, b: quantised.checkpoint(a, b, "gptq", 8, 32, True, True),
    "gptq_v2": lambda a, b: quantised.checkpoint(a, b, "gptq_v2", 4, 32, False),
}


@pytest.fixture(scope="module")
def files(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Files:
    """``files(kind)``: (the quantised checkpoint, its twin), made once."""
    known: dict[str, tuple[Path, Path]] = {}

    def make(kind: str) -> tuple[Path, Path]:
        if kind not in known:
            source = checkpoint("qwen2_5_vl", intermediate_size=160)
            known[kind] = KINDS[kind](source, tmp_path_factory.mktemp("quantised"))
        return known[kind]

    return make


def on(path: Path, world: int, **options: Any) -> Tensor:
    """Logits as each of ``world`` ranks has them, which must be alike."""
    group, got, failed = Group(world), dict[int, Tensor](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            got[rank] = logits(path, rank, world, group, **options)
        except BaseException as error:
            failed.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failed:
        raise failed[0]
    assert all(torch.equal(part, got[0]) for part in got.values())
    return got[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_answers_as_the_twin(kind: str, files: Files) -> None:
    path, twin = files(kind)
    want = on(twin, 1, ops="reference")
    for world in (1, 2):
        got = on(path, world, ops="reference")
        assert (got - want).abs().max() <= 1e-4 * want.abs().max(), f"{world} ranks"


@pytest.mark.parametrize("kind", ["pack-quantized", "int-quantized", "gptq of 8 bits by activation", "fp8 in blocks"])
def test_the_cpu_answers_as_the_twin_within_8_bits(kind: str, files: Files) -> None:
    path, twin = files(kind)
    want = on(twin, 1)
    for world in (1, 2):
        got = on(path, world)
        away = (got - want).norm(dim=1) / want.norm(dim=1)
        assert away.max() <= (1e-4 if kind.startswith("fp8") else 0.06), f"{world} ranks: {away.max():.4f}"
        assert kind.startswith("fp8") or away.max() > 1e-5, "integers were multiplied"


@pytest.mark.parametrize("world", [2, 4])
def test_four_ranks_of_a_text_model(world: int, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """4 KV heads and an MLP of 9 groups: two or four ranks get shares that end at a group, the last one padded."""
    source = checkpoint("qwen2", num_key_value_heads=4, intermediate_size=288)
    path, twin = quantised.checkpoint(source, tmp_path, "awq", 4, 32, False)
    want = on(twin, 1, ops="reference")
    got = on(path, world, ops="reference")
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
