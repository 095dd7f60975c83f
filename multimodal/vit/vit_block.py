"""A layer of a vision transformer on packed slots, assembled from the parts that its ``ViTConfig`` names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import LAYER, RMS
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import AdapterRows, Backend, Ops, Rotary, Segments
from trencadis.core.models.linear_and_embedding import (
    NO_ADAPTERS,
    ColumnParallelLinear,
    ColumnPart,
    ImageAdapters,
    RowParallelLinear,
    TowerLayer,
    check_heads,
    unit_span,
)
from trencadis.core.models.mlp_and_norms import MLP, GatedMLP, PlainMLP, RMSNorm, norm_of
from trencadis.multimodal.pixel_normalisation_and_fixed_point import PixelNormalisation
from trencadis.multimodal.vit.vit_config import ViTConfig


def scale_and_shift(normalisation: PixelNormalisation, each: int) -> tuple[Tensor, Tensor]:
    """Returns (scale, shift), float32 [3 x ``each``], such that a pixel value is byte x scale + shift."""
    deviation = torch.tensor(normalisation.std, dtype=torch.float32)
    scale, shift = normalisation.rescale / deviation, -torch.tensor(normalisation.mean, dtype=torch.float32) / deviation
    return scale.repeat_interleave(each), shift.repeat_interleave(each)


class TowerInputs(NamedTuple):
    """What the first layer of a tower takes: ``x`` [s, hidden], the ``residual`` like it or None for zeros, and rotary
    factors.
    """

    x: Tensor
    residual: Tensor | None
    rotary: Rotary


def run_blocks(
    ops: Ops, blocks: Sequence[Callable[..., tuple[Tensor, Tensor]]], stream: list[Tensor | None],
    rotary: Rotary | None, segments: Segments, adapters: ImageAdapters = NO_ADAPTERS,
    after: Callable[[int, Tensor, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Runs the layers of a tower, at least one, one after another, and marks where a device may cut its graph.

    Args:
        stream: x and the residual stream before the first layer. They are taken out of the list, so that they are freed
            as soon as that layer has read them.
        after: called with the number of each layer, from 0 on, and what it has returned.

    Returns:
        What the last layer has returned: the output of its MLP, and the residual stream without it.
    """
    x, residual = stream
    stream.clear()
    for number, block in enumerate(blocks):
        x, residual = ops.layer(block, x, residual, rotary, segments, *adapters.of_layers)
        if after is not None and x is not None and residual is not None:
            after(number, x, residual)
        ops.cut("layer")
    assert x is not None and residual is not None  # there is at least one layer
    return x, residual


class ViTBlock:
    """Pre-norm attention and MLP over slots.

    Args:
        whole: attention over whole items instead of windows.
        eps: epsilon of both norms.
        act: activation of the MLP, a name of ``Ops.act``.
        unit: the MLP's columns are padded with zeros to a multiple of this; 1 unless the tower's
            ``ViTConfig.pads_to_unit``.
    """

    def __init__(self, backend: Backend, c: ViTConfig, whole: bool, eps: float, act: str, unit: int = 1) -> None:
        ops, comm, d = backend.ops, backend.comm, c.head_dim
        check_heads(c.heads, comm.world, "heads of the vision tower")
        self.ops, self.head_dim, self.config = ops, d, c
        self.attend = ops.attend_images if whole else ops.attend_windows
        kind = LAYER if c.layer_norm else RMS
        self.norm1, self.norm2 = norm_of(kind, ops, c.hidden, eps), norm_of(kind, ops, c.hidden, eps)
        fused = len(c.qkv) == 1
        modules = ("q", "k", "v") if fused else tuple(name.rpartition(".")[2] for name in c.qkv)
        parts = tuple(ColumnPart(name, c.hidden, d) for name in modules)
        first, others = c.biases
        self.qkv = ColumnParallelLinear(ops, comm, c.hidden, parts, bias=first, fused=fused)
        self.qkv_prefix = c.qkv[0] if fused else c.qkv[0].rpartition(".")[0]
        self.width = unit_span(c.hidden, d, comm.rank, comm.world).width
        self.out = RowParallelLinear(ops, comm, c.hidden, c.hidden, unit=d, bias=others)
        self.head_norms = tuple(RMSNorm(ops, d, eps) for _ in "qk") if c.qk_norm else None
        gated = len(c.mlp_in) == 2
        kind_of = GatedMLP if gated else PlainMLP
        made: MLP = kind_of(ops, comm, c.hidden, c.intermediate, bias=others, act=act, aligned=unit)
        self.mlp = made

    def load(self, source: WeightSource, name: str) -> None:
        self.norm1.load(source, f"{name}.norm1")
        self.qkv.load(source, f"{name}.{self.qkv_prefix}")
        self.out.load(source, f"{name}.{self.config.attention_out}")
        self.norm2.load(source, f"{name}.norm2")
        for norm, part in zip(self.head_norms or (), ("q_norm", "k_norm"), strict=False):
            norm.load(source, f"{name}.{self.qkv_prefix.rpartition('.')[0] or self.qkv_prefix}.{part}")
        self.mlp.load(source, f"{name}.mlp")

    def list_layers(self, name: str) -> Iterator[TowerLayer]:
        """Yields the matrices that take adapters; ``name``: canonical name of the block."""
        yield TowerLayer(f"{name}.{self.qkv_prefix}", self.qkv)
        yield TowerLayer(f"{name}.{self.config.attention_out}", self.out)
        yield from self.mlp.list_layers(f"{name}.mlp")

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: Rotary | None,
        segments: Segments,
        rows: AdapterRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Maps [s, hidden] to (MLP output, residual stream without it), [s, hidden] each.

        ``rows``: the adapters of the slots.
        """
        normed, residual = self.norm1(x, residual)
        attended = self.finish_attention(self.out(self._attend(normed, rotary, segments, rows), rows))
        normed, residual = self.norm2(attended, residual)
        return self.finish_mlp(self.mlp(normed, rows)), residual

    def finish_attention(self, out: Tensor) -> Tensor:
        """Returns the attention's output [s, hidden] as it is added to the stream; a subclass scales or norms it."""
        return out

    def finish_mlp(self, out: Tensor) -> Tensor:
        """Returns the MLP's output [s, hidden] as it is added to the stream; a subclass scales or norms it."""
        return out

    def _attend(self, x: Tensor, rotary: Rotary | None, segments: Segments, rows: AdapterRows | None = None) -> Tensor:
        """Returns the attention of ``x``, [s, heads * d].

        A function of its own, so that a graph frees q, k and v early.
        """
        s, d = x.shape[0], self.head_dim
        q, k, v = (t.view(s, -1, d) for t in torch.split(self.qkv(x, rows), self.width, dim=1))
        if self.head_norms is not None:
            q, k = self.head_norms[0].heads(q), self.head_norms[1].heads(k)
        if rotary is not None:
            q, k = self.ops.rope_vision(q, k, rotary)
        return self.attend(q, k, v, segments, d**-0.5).reshape(s, -1)

    def nbytes(self) -> int:
        norms = (self.norm1, self.norm2, *(self.head_norms or ()))
        return sum(norm.nbytes() for norm in norms) + self.qkv.bytes + self.out.bytes + self.mlp.nbytes()
