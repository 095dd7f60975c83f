"""Nothing inside a launch allocates, waits for the device, or reads it on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracles import head_cases as cases
from trencadis.backends.cuda.kernels import (
    activation,
    gather_scatter,
    input_embeddings,
    norms,
    sample,
)
from trencadis.backends.cuda.ops import CudaOps
from trencadis.core.device.backend import ResetTensors


class Nothing(TorchDispatchMode):
    """Refuses every tensor operation but ``allowed`` ones."""

    def __init__(self, *allowed: str) -> None:
        super().__init__()
        self.allowed = allowed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert str(func).startswith(tuple(f"aten.{name}" for name in self.allowed)), f"{func} inside a launch"
        return func(*args, **(kwargs or {}))


OUTPUTS = ("empty", "new_empty", "empty_like")
"""Outputs come from torch's allocator, which neither waits nor reads."""


def head_launches(device: torch.device) -> list[Callable[[], object]]:
    rng = np.random.default_rng(0)
    raw = cases.logits(rng, 300, 2).to(device)
    x, state = cases.to(cases.head(rng, 300, 2), device), cases.to(cases.state(rng, 300, 2), device)
    room, parts = sample.scratch(2, 300, device), sample.greedy_scratch(2, 300, device)
    full, greedy = sample.outputs(2, 300, device, True), sample.outputs(2, 300, device, False)
    reset_of = ResetTensors(x.slot, *(t[1:].contiguous() for t in state[1:]))
    return [
        lambda: sample.draw_with_logprobs(raw, x, state, room, full),
        lambda: sample.pick_greedy(raw, x, state, parts, greedy),
        lambda: sample.reset_slots(reset_of, state),
    ]


def small_launches(device: torch.device) -> list[Callable[[], object]]:
    x = torch.randn(3, 64, device=device)
    out, total, half = torch.empty_like(x), torch.empty_like(x), torch.empty(3, 32, device=device)
    ints = torch.zeros(3, dtype=torch.int32, device=device)
    index = torch.arange(3, device=device)
    pixels, wide = torch.zeros(64, 64, dtype=torch.uint8, device=device), torch.empty(64, 64, device=device)
    return [
        lambda: norms.rms_norm(x, x, x[0], 1e-6, total, out),
        lambda: norms.layer_norm(x, x, x[0], x[1], 1e-5, total, out),
        lambda: activation.silu_mul(x, half),
        lambda: activation.launch(x, "gelu", False, out),
        lambda: activation.launch(x, "relu", True, half),
        lambda: input_embeddings.embed_tokens(ints, ints, ints, ints, x, x, out),
        lambda: gather_scatter.gather(x, index, out),
        lambda: gather_scatter.scatter(out, index, x),
        lambda: input_embeddings.normalise_pixels(pixels, x[0], x[1], wide),
    ]


@pytest.mark.parametrize("make", [head_launches, small_launches])
def test_launchers_call_nothing_but_kernels(make: Callable[..., Any], device: torch.device) -> None:
    for launch in make(device):
        with Nothing("alias", "select", "detach"):
            launch()


def test_ops_allocate_outputs_only(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    raw = cases.logits(rng, 100, 2).to(device)
    x, state = cases.to(cases.head(rng, 100, 2), device), cases.to(cases.state(rng, 100, 2), device)
    hidden, ops = torch.randn(3, 64, device=device), CudaOps()
    with Nothing(*OUTPUTS, "select", "detach"):
        ops.sample(raw, x, state, True)
        ops.sample(raw, x, state, False)
        ops.draw(raw, x, state)
        ops.rms_norm(hidden, hidden[0], 1e-6, hidden)
        ops.layer_norm(hidden, hidden[0], hidden[1], 1e-5, hidden)
        ops.silu_mul(hidden)
        ops.act(hidden, "gelu")
        ops.act_mul(hidden, "gelu_tanh")
        ops.gather_rows(hidden, x.slot)
    with pytest.raises(AssertionError, match="inside a launch"), Nothing(*OUTPUTS):
        raw.max().item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch watches for waits on a card only")
def test_no_wait_on_a_card(device: torch.device) -> None:
    launches = [*head_launches(device), *small_launches(device)]
    for launch in launches:
        launch()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for launch in launches:
            launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
