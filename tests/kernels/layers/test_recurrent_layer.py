"""Decoding layers of gated DeltaNet in seven launches equal the reference, and change the slots of their rows alone."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.test_recurrent import on_device
from tests.oracles import interpreter
from tests.random_recurrent import NAN, rows_of
from trencadis.backends.cpu.gloo_comm import SingleRank
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda.kernels.layers import fused_layer, skinny_gemm
from trencadis.backends.cuda.ops import CudaOps
from trencadis.core.checkpoint.decoder_layer_config import RecurrentConfig
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.models.decoder_layer import DecoderLayer
from trencadis.core.models.gated_delta import GatedDeltaNet
from trencadis.core.models.model_and_ops_api import RecurrentState

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
HIDDEN, INNER, SLOTS = 64, 96, 8


class Heads(NamedTuple):
    """Heads of keys and of values, and their sizes."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


class RecurrentRun:
    """A layer of seeded weights over four rows, of which one begins and one reads another slot, and two of padding."""

    def __init__(self, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.config = RecurrentConfig((0,), 4, heads.keys, heads.values, heads.key_dim, heads.value_dim)
        self.text = TextConfig(HIDDEN, 1, 4, 2, 16, INNER, 50, 1e-6, 1e4, 4096, False, qkv_bias=False)
        make = torch.Generator().manual_seed(3)

        def random(*shape: int, size: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=make) * size).to(dtype)

        r = self.config
        outputs = {"qkv": r.channels(), "gates": r.value_width + 2 * r.value_heads}
        self.weights = {name: random(count, HIDDEN, size=HIDDEN**-0.5) for name, count in outputs.items()}
        self.weights |= {
            "out": random(HIDDEN, r.value_width, size=r.value_width**-0.5),
            "gate_up": random(2 * INNER, HIDDEN, size=HIDDEN**-0.5), "down": random(HIDDEN, INNER, size=INNER**-0.5),
        }  # fmt: skip
        self.norms = [1 + random(HIDDEN, size=0.1) for _ in range(2)]
        self.conv, self.norm = random(r.channels(), r.kernel, size=0.5), 1 + random(r.value_dim, size=0.1)
        self.decay, self.shift = (
            (-torch.rand(r.value_heads, generator=make) - 0.1),
            torch.randn(r.value_heads, generator=make),
        )
        self.state = torch.randn(SLOTS, r.value_heads, r.key_dim, r.value_dim, generator=make)
        self.held = random(SLOTS, r.kernel - 1, r.channels())
        self.state[2], self.held[2] = NAN, NAN
        self.rows, self.attn = rows_of([1] * 4, [3, 2, 5, 1], [1], [3, 2, 7, 1], padding=2, padding_rows=1)
        self.x, self.residual = random(6, HIDDEN), random(6, HIDDEN)

    def layer(self, ops: Any, device: torch.device, dtype: torch.dtype) -> DecoderLayer:
        backend: Any = SimpleNamespace(ops=ops, comm=SingleRank(), device=device, values=True, dtype=dtype)
        mixer = GatedDeltaNet(backend, self.text, self.config)
        layer = DecoderLayer(backend, self.text, mixer=mixer)
        mlp: Any = layer.mlp
        parts = {"qkv": mixer.qkv, "gates": mixer.gates, "out": mixer.out, "gate_up": mlp.gate_up, "down": mlp.down}
        for name, linear in parts.items():
            linear.pack(self.weights[name].to(device, dtype), None)
        for norm, weight in zip((layer.input_norm, layer.post_norm), self.norms, strict=True):
            norm.weight = weight.to(device, dtype)
        mixer.conv, mixer.norm = self.conv.to(device, dtype), self.norm.to(device, dtype)
        mixer.decay, mixer.shift = self.decay.to(device), self.shift.to(device)
        mixer.bind(RecurrentState(self.held.to(device, dtype, copy=True), self.state.to(device, copy=True)))
        return layer

    def run(self, ops: Any, wide: bool, first: bool = False) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The stream with all that the layer adds, and the states; ``wide``: of the same values in float32, on the CPU.

        ``first``: there is no residual.
        """
        device, dtype = (torch.device("cpu"), torch.float32) if wide else (self.device, self.dtype)
        layer = self.layer(ops, device, dtype)
        rows, attn = (self.rows, self.attn) if wide else on_device(self.rows, self.attn, device, single=True)
        residual = None if first else self.residual.to(device, dtype)
        x, left = ops.layer(layer, self.x.to(device, dtype), residual, ops.prepare_recurrent(rows, attn), attn)
        held: Any = layer.attention
        stream, (conv, state) = x if left is None else x + left, held.state
        return stream.float().cpu(), (conv.float().cpu(), state.cpu())


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("dtype", "heads"), [
    (torch.float32, Heads(2, 4, 16, 32)), (torch.float32, Heads(2, 2, 32, 16)),
    (torch.bfloat16, Heads(1, 3, 32, 32)), (torch.float16, Heads(2, 2, 16, 16)),
], ids=str)  # fmt: skip
def test_a_layer_equals_the_reference(dtype: torch.dtype, heads: Heads, first: bool, device: torch.device) -> None:
    run, ops = RecurrentRun(heads, dtype, device), CudaOps()
    before = interpreter.launches()
    found, states = run.run(ops, wide=False, first=first)
    assert not INTERPRETED or interpreter.launches() - before == 7
    wanted, reference = run.run(ReferenceOps(), wide=True, first=first)
    assert off(found[:4], wanted[:4]) < TOLERANCE[dtype] and torch.isfinite(found).all()
    for mine, theirs, old in zip(states, reference, (run.held.float(), run.state), strict=True):
        assert off(mine[[1, 2, 3, 5]], theirs[[1, 2, 3, 5]]) < TOLERANCE[dtype]
        for slot in (4, 6, 7):
            assert torch.equal(mine[slot], old[slot]), "a slot of no row"


def test_states_of_other_sizes_and_several_tokens_run_op_by_op(device: torch.device) -> None:
    run, ops = RecurrentRun(Heads(2, 2, 48, 16), torch.float32, device), CudaOps()
    before = interpreter.launches()
    found, _ = run.run(ops, wide=False)
    assert not INTERPRETED or interpreter.launches() - before != 7
    assert off(found[:4], run.run(ReferenceOps(), wide=True)[0][:4]) < 2e-5
    layer = RecurrentRun(Heads(2, 4, 16, 32), torch.float32, device).layer(ops, device, torch.float32)
    rows, attn = on_device(*rows_of([2, 3]), device)
    x = torch.zeros(5, HIDDEN, device=device)
    assert not fused_layer.can_fuse(layer, x, attn, ops.prepare_recurrent(rows, attn))
    assert skinny_gemm.FEW == 16
