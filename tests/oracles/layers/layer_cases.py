"""Decoder layers of seeded weights over a decoding launch: as the card's ops run them, and as the reference does."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.oracles.attention_cases import Case, Prepared, frequencies, prepared
from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.gloo_comm import SingleRank
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.device.backend import BackendConfig, LayerKV, Rotary
from trencadis.core.models.decoder_layer import DecoderLayer
from trencadis.core.models.mlp_and_norms import GatedMLP
from trencadis.core.models.moe import ExpertMLP


@dataclass(frozen=True)
class LayerCase:
    """One layer and the contexts of its rows.

    Args:
        changes: of ``TextConfig``.
        tokens: tokens of each row, if they are not one each.
        verify: most tokens of a row of VERIFY; 0: rows of several tokens are a PREFILL launch of 16.
        planned: query heads per KV head that blocks of queries are planned by, if not ``group``.
    """

    contexts: tuple[int, ...]
    hidden: int = 64
    inner: int = 96
    group: int = 2
    kv_heads: int = 2
    d: int = 16
    dtype: torch.dtype = torch.float32
    spare: int = 1
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    tokens: tuple[int, ...] = ()
    verify: int = 0
    planned: int = 0

    @property
    def attention(self) -> Case:
        rows = tuple(zip(self.contexts, self.tokens or (1,) * len(self.contexts), strict=True))
        window = self.changes.get("window", 0)
        return Case(
            rows, not self.tokens, self.group, self.kv_heads, self.d, dtype=self.dtype, window=window,
            verify=self.verify, spare=(self.spare, 16 - sum(self.tokens)), planned=self.planned,
        )  # fmt: skip

    @property
    def config(self) -> TextConfig:
        heads = self.group * self.kv_heads
        return TextConfig(
            self.hidden, 1, heads, self.kv_heads, self.d, self.inner, 50, 1e-6, 1e4, 4096, False,
            **{"qkv_bias": True, **self.changes},
        )  # fmt: skip


class LayerRun:
    """``case`` on ``device``: the launch, and the layer's weights as both sides have them."""

    def __init__(self, case: LayerCase, device: torch.device) -> None:
        self.case, self.device = case, device
        self.ready: Prepared = prepared(case.attention, device)
        generator = torch.Generator().manual_seed(7)

        def random(*shape: int, size: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * size).to(case.dtype)

        c, d = case, case.d
        outputs = (c.group * (1 + c.config.output_gate) + 2) * c.kv_heads * d
        heads = c.group * c.kv_heads * d
        self.weights = {
            "qkv": (random(outputs, c.hidden, size=c.hidden**-0.5), random(outputs, size=0.1)),
            "out": (random(c.hidden, heads, size=heads**-0.5), None),
            "gate_up": (random(2 * c.inner, c.hidden, size=c.hidden**-0.5), None),
            "down": (random(c.hidden, c.inner, size=c.inner**-0.5), None),
        }
        if c.config.out_bias:
            self.weights["out"] = self.weights["out"][0], random(c.hidden, size=0.1)
        self.sinks = torch.randn(c.group * c.kv_heads, generator=torch.Generator().manual_seed(8)) * 2
        if not c.config.qkv_bias:
            self.weights["qkv"] = self.weights["qkv"][0], None
        self.norms = {name: 1 + random(c.hidden, size=0.1) for name in ("input_norm", "post_norm")}
        self.head_norms = [1 + random(d, size=0.1) for _ in "qk"]
        n = len(self.ready.tensors.tokens)
        self.x, self.residual = random(n, c.hidden), random(n, c.hidden)

    def layer(self, ops: Any, comm: Any = None, dtype: torch.dtype | None = None) -> DecoderLayer:
        """The layer over ``ops``, in its own type or another."""
        device = torch.device("cpu") if dtype else self.device
        kept = dtype or self.case.dtype
        backend: Any = SimpleNamespace(ops=ops, comm=comm or SingleRank(), device=device, values=True, dtype=kept)
        layer = DecoderLayer(backend, self.case.config)
        attention, mlp = layer.attention, layer.mlp
        linears = {"qkv": attention.qkv, "out": attention.out}
        if isinstance(mlp, ExpertMLP):
            self._pack_experts(mlp, device, kept)
        else:
            assert isinstance(mlp, GatedMLP)
            linears |= {"gate_up": mlp.gate_up, "down": mlp.down}
        if self.case.config.sinks:
            attention.sinks = {"sinks": self.sinks.to(device)}
        for name, linear in linears.items():
            weight, bias = self.weights[name]
            linear.pack(weight.to(device, kept), None if bias is None else bias.to(device, kept))
        for name, weight in self.norms.items():
            getattr(layer, name).weight = weight.to(device, kept)
        for norm, weight in zip(attention.norms or (), self.head_norms, strict=False):
            norm.weight = weight.to(device, kept)
        return layer

    def _pack_experts(self, mlp: ExpertMLP, device: torch.device, dtype: torch.dtype) -> None:
        """Seeded experts and their router, and the shared expert if there is one."""
        make, width = torch.Generator().manual_seed(9), self.case.hidden

        def random(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=make) * shape[1] ** -0.5).to(self.case.dtype).to(device, dtype)

        mlp.router.pack(random(mlp.count, width) * 4, None)
        gate_up = [random(2 * mlp.inner, width) for _ in range(mlp.count)]
        mlp.weights = mlp.ops.pack_experts(gate_up, [random(width, mlp.inner) for _ in range(mlp.count)])
        if mlp.shared is not None:
            shared = mlp.shared.mlp
            assert isinstance(shared, GatedMLP)
            shared.gate_up.pack(random(2 * mlp.inner, width), None)
            shared.down.pack(random(width, mlp.inner), None)

    def run(self, layer: DecoderLayer, ops: Any, first: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(the stream with all that the layer adds, keys, values, attention's input) through ``ops.layer``."""
        self.ready.reset()
        layer.attention.bind(self.ready.cache)
        rotary = Rotary(self.ready.cos, self.ready.sin)
        residual = None if first else self.residual.to(self.device)
        x, left = ops.layer(layer, self.x.to(self.device), residual, rotary, self.ready.tensors.attn)
        stream = x if left is None else x + left
        return stream.clone(), self.ready.cache.k.clone(), self.ready.cache.v.clone(), x

    def expected(self, first: bool = False) -> tuple[Tensor, LayerKV]:
        """The reference in float32 on the same values."""
        ops, ready, case = ReferenceOps(), self.ready, self.case
        layer = self.layer(ops, dtype=torch.float32)
        n = len(ready.inputs.tokens)
        backend = make_backend(BackendConfig(block_size=case.attention.block, options={"threads": "1"}))
        program: Any = backend.program(Bucket(Stage.PREFILL, (n, len(case.contexts))), print)
        backend.fill(program, ready.inputs)
        kv = LayerKV(*(t.clone() for t in ready.clean[:2]))
        layer.attention.bind(kv)
        rotary = ops.rotary(program.inputs.positions, *frequencies(case.d))
        residual = None if first else self.residual[:n].float()
        x, left = layer(self.x[:n].float(), residual, rotary, program.inputs.attn)
        assert x is not None
        return x if left is None else x + left, kv
