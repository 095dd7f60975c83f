"""What an engine keeps is bounded by counts, not by how many sizes and seeds it has met."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch

from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.host_padding import empty_inputs
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import BackendConfig
from trencadis.core.graphs.graph_manager import KEPT, GraphManager
from trencadis.core.scheduling.sequence import _numbers, uniform


def test_inputs_of_launches_are_not_kept_where_sizes_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels and indices of hundreds of launches once stayed, each with its size's program."""
    backend = make_backend(BackendConfig(torch.float32, options={"threads": str(torch.get_num_threads())}))
    bodies = dict.fromkeys(("text", "vision", "greedy", "full", "reset"), lambda inputs: None)
    manager = GraphManager(backend, bodies, Plan(backend.policy, block_size=16))
    filled: list[weakref.ref[Any]] = []

    class Tensors:
        """What a launch reads."""

    def fill(program: Any, inputs: Any) -> None:
        program.inputs = Tensors()
        filled.append(weakref.ref(program.inputs))

    monkeypatch.setattr(backend, "fill", fill)
    for size in range(1, 300):
        manager.run(Bucket(Stage.VISION, (64 * size,)), empty_inputs(Stage.VISION, 8), 0)
    assert len(filled) == 299 and sum(ref() is not None for ref in filled) <= KEPT <= 8


def test_random_numbers_of_past_seeds_take_little() -> None:
    for seed in range(50):
        uniform(seed, 0, 0)
    info = _numbers.cache_info()
    assert info.maxsize is not None and info.maxsize * sys.getsizeof(_numbers(0, 0, 0)) < 1 << 18
