"""A layer of a vision transformer on packed slots, put together from the parts that its ``ViTConfig`` names."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.backend import Backend, Rotary, Segments
from trencadis.core.checkpoint.model_config import LAYER, RMS
from trencadis.core.layers.linear import ColumnPart, Columns, Rows, check_heads, unit_span
from trencadis.core.layers.mlp import MLP, GatedMLP, PlainMLP
from trencadis.core.layers.norm import norm_of
from trencadis.core.layers.source import Source
from trencadis.multimodal.colours import Colours
from trencadis.multimodal.vit import ViTConfig


def spread(colours: Colours, each: int) -> tuple[Tensor, Tensor]:
    """(scale, shift), float32 [3 x ``each``]: a value is byte x scale + shift; channels have ``each`` values."""
    deviation = torch.tensor(colours.std, dtype=torch.float32)
    scale, shift = colours.rescale / deviation, -torch.tensor(colours.mean, dtype=torch.float32) / deviation
    return scale.repeat_interleave(each), shift.repeat_interleave(each)


class ViTBlock:
    """Pre-norm attention and MLP over slots.

    Args:
        whole: attention over whole items instead of windows.
        eps: of both norms.
        act: of the MLP, by ``Ops.act``'s name.
        unit: zeros fill the MLP's columns to a multiple of it; its tower's configuration says so (``filled``).
    """

    def __init__(self, backend: Backend, c: ViTConfig, whole: bool, eps: float, act: str, unit: int = 1) -> None:
        ops, comm, d = backend.ops, backend.comm, c.head_dim
        check_heads(c.heads, comm.world, "heads of the vision tower")
        self.ops, self.head_dim, self.names = ops, d, c
        self.attend = ops.attend_images if whole else ops.attend_windows
        kind = LAYER if c.layer_norm else RMS
        self.norm1, self.norm2 = norm_of(kind, ops, c.hidden, eps), norm_of(kind, ops, c.hidden, eps)
        fused = len(c.qkv) == 1
        modules = ("q", "k", "v") if fused else tuple(name.rpartition(".")[2] for name in c.qkv)
        parts = tuple(ColumnPart(name, c.hidden, d) for name in modules)
        first, others = c.biases
        self.qkv = Columns(ops, comm, c.hidden, parts, bias=first, fused=fused)
        self.qkv_at = c.qkv[0] if fused else c.qkv[0].rpartition(".")[0]
        self.width = unit_span(c.hidden, d, comm.rank, comm.world).width
        self.out = Rows(ops, comm, c.hidden, c.hidden, unit=d, bias=others)
        gated = len(c.columns) == 2
        kind_of = GatedMLP if gated else PlainMLP
        made: MLP = kind_of(ops, comm, c.hidden, c.intermediate, bias=others, act=act, aligned=unit)
        self.mlp = made

    def load(self, source: Source, name: str) -> None:
        self.norm1.load(source, f"{name}.norm1")
        self.qkv.load(source, f"{name}.{self.qkv_at}")
        self.out.load(source, f"{name}.{self.names.out}")
        self.norm2.load(source, f"{name}.norm2")
        self.mlp.load(source, f"{name}.mlp")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotary: Rotary | None, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """[s, hidden] to (MLP output, residual stream without it), [s, hidden] each."""
        normed, residual = self.norm1(x, residual)
        normed, residual = self.norm2(self.out(self._attended(normed, rotary, segments)), residual)
        return self.mlp(normed), residual

    def _attended(self, x: Tensor, rotary: Rotary | None, segments: Segments) -> Tensor:
        """Attention of ``x``: [s, heads * d]. A function of its own, so that a graph keeps q, k and v no longer."""
        s, d = x.shape[0], self.head_dim
        q, k, v = (t.view(s, -1, d) for t in torch.split(self.qkv(x), self.width, dim=1))
        if rotary is not None:
            q, k = self.ops.rope_vision(q, k, rotary)
        return self.attend(q, k, v, segments, d**-0.5).reshape(s, -1)

    def nbytes(self) -> int:
        return self.norm1.nbytes() + self.qkv.bytes + self.out.bytes + self.norm2.nbytes() + self.mlp.nbytes()
