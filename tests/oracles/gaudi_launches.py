"""Text launches of the Gaudi backend: ragged rows, one attention layer, and what the reference makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.traffic.ragged_rows import ragged_inputs
from trencadis.backends.cpu import make_backend
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import BackendConfig, LayerKV
from trencadis.core.launch_inputs import StepInputs

BLOCK, BLOCKS, GROUPS, HEAD = 4, 60, 2, 16
WIDTH = 10 * HEAD
"""q (6 heads), k and v (2 each) of a token, side by side."""

LAUNCHES = {
    "fresh": (Stage.FRESH, (4, 16), [(0, 13), (0, 1), (0, 16)]),
    "fresh_one": (Stage.FRESH, (1, 8), [(0, 5)]),
    "context": (Stage.CONTEXT, (8, 8), [(21, 6)]),
    "context_full": (Stage.CONTEXT, (8, 4), [(16, 8)]),
    "decode": (Stage.DECODE, (8, 64), [(9, 1), (0, 1), (150, 1), (3, 1), (8, 1)]),
    "decode_exact": (Stage.DECODE, (2, 8), [(15, 1), (14, 1)]),
}


def step_inputs(lengths: list[tuple[int, int]], rng: np.random.Generator) -> StepInputs:
    """Rows of (context, tokens), their blocks in random order."""
    return ragged_inputs(lengths, BLOCK, rng)


def random_cache(sink: float) -> list[torch.Tensor]:
    """Keys and values of all blocks; block 0 is zero, block 1 holds ``sink``."""
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(BLOCKS, BLOCK, GROUPS, HEAD, generator=generator) for _ in range(2)]
    for t in made:
        t[0], t[1] = 0, sink
    return made


class AttentionLayer:
    """Rotary, store, attend: a body whose activations are looked up by token id, so that padding has some too."""

    def __init__(
        self, backend: Any, sink: float, dtype: torch.dtype = torch.float32, windows: tuple[int, ...] = (0,)
    ) -> None:
        self.ops, device, self.windows = backend.ops, backend.device, windows
        generator = torch.Generator().manual_seed(7)
        self.table = torch.randn(50, WIDTH, generator=generator).to(device, dtype)
        flat = backend.policy.flat_kv
        self.kv = LayerKV(*((t.flatten(0, 1) if flat else t).to(device, dtype) for t in random_cache(sink)))
        self.outs = [torch.zeros(200, 6 * HEAD, dtype=dtype).to(device) for _ in windows]
        self.out = self.outs[0]
        self.frequency, self.axis = torch.linspace(1, 0.01, HEAD // 2).to(device), (torch.arange(8) % 3).to(device)

    def __call__(self, x: Any) -> None:
        n = x.out_row.shape[0]
        q, k, v = torch.split(self.table.index_select(0, x.tokens[:n]), [6 * HEAD, 2 * HEAD, 2 * HEAD], dim=1)
        rotary = self.ops.rotary(x.positions[:, :n], self.frequency, self.axis)
        attn = self.ops.prepare_attn(x.attn, 6, self.kv)
        q, k, v = self.ops.rope_store(
            q.reshape(n, -1, HEAD), k.reshape(n, -1, HEAD), v.reshape(n, -1, HEAD), rotary, self.kv, attn
        )
        for window, into in zip(self.windows, self.outs, strict=True):
            out = self.ops.attend(q, k, v, self.kv, attn, HEAD**-0.5, window)
            self.ops.scatter_rows(into, x.out_row, out.reshape(n, -1))
            self.ops.cut("layer")


def reference(inputs: StepInputs) -> tuple[torch.Tensor, LayerKV]:
    """The layer's output per token, and its cache, by the reference operations on the CPU."""
    outs, kv = references(inputs, (0,))
    return outs[0], kv


def references(inputs: StepInputs, windows: tuple[int, ...]) -> tuple[list[torch.Tensor], LayerKV]:
    """As ``reference``, for each window."""
    upto, options = inputs.upto is not None, {"ops": "reference", "threads": "1"}
    backend = make_backend(BackendConfig(block_size=BLOCK, upto=upto, options=options))
    layer = AttentionLayer(backend, 0.0, windows=windows)
    n, r = len(inputs.tokens), len(inputs.context)
    program = backend.program(Bucket(Stage.PREFILL, (n, r)), layer)
    backend.fill(program, inputs)
    program.run()
    return [out[1 : n + 1] for out in layer.outs], layer.kv
