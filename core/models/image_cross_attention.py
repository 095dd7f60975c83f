"""Layers that attend to image rows in the arena instead of earlier tokens, and the decoder that has them.

These layers (``TextConfig.cross_attention_layers``) have no KV cache and no positions. An arena row holds keys and
values of all of them, concatenated, for this rank's heads. The outputs of such a layer are gated, and a token that
attends to no image passes it unchanged.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import RMS_ONE, ModelConfig, TextConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import Backend, TextTensors
from trencadis.core.device.launch_tensors import CrossAttentionTensors, first_rows
from trencadis.core.media_spans import RESERVED_ROWS
from trencadis.core.models.decoder import Decoder, DecoderEntry, FirstLayerInputs
from trencadis.core.models.linear_and_embedding import (
    ColumnParallelLinear,
    ColumnPart,
    Embedding,
    RowParallelLinear,
    check_heads,
    unit_span,
)
from trencadis.core.models.mlp_and_norms import GatedMLP, RMSNorm, norm_of
from trencadis.core.models.model_and_ops_api import CrossAttentionOps, Persistent


class CrossAttention:
    """Attention of token queries over image keys and values, with per-head norms of queries and keys.

    ``number``: index of this layer among the cross-attention layers, which determines its columns of an arena row.
    """

    def __init__(self, backend: Backend, c: TextConfig, number: int) -> None:
        comm, d = backend.comm, c.head_dim
        check_heads(c.heads, comm.world, "query heads")
        self.ops, self.head_dim, self.scale = backend.ops, d, c.score_scale
        self.q = ColumnParallelLinear(self.ops, comm, c.hidden, (ColumnPart("q_proj", c.heads * d, d),))
        parts = tuple(ColumnPart(name, c.kv_heads * d, d) for name in ("k_proj", "v_proj"))
        self.kv = ColumnParallelLinear(self.ops, comm, c.hidden, parts)
        self.out = RowParallelLinear(self.ops, comm, c.heads * d, c.hidden, unit=d)
        self.width = unit_span(c.kv_heads * d, d, comm.rank, comm.world).width
        self.first = 2 * number * self.width
        self.norms = tuple(RMSNorm(self.ops, d, c.eps, c.norm == RMS_ONE) for _ in "qk")

    def load(self, source: WeightSource, name: str) -> None:
        self.q.load(source, name)
        self.kv.load(source, name)
        self.out.load(source, f"{name}.o_proj")
        for norm, part in zip(self.norms, ("q_norm", "k_norm"), strict=True):
            norm.load(source, f"{name}.{part}")

    def compute_arena_rows(self, x: Tensor) -> Tensor:
        """Computes this layer's part of arena rows, [s, 2 x width], from image rows [s, hidden]."""
        k, v = torch.split(self.kv(x), self.width, dim=1)
        # With a single head the split stays a strided view, but norms need contiguous rows.
        k = self.norms[1].heads(k.contiguous().view(len(k), -1, self.head_dim)).view(len(k), -1)
        return torch.cat([k, v], dim=1)

    def __call__(self, x: Tensor, images: CrossAttentionTensors, rows: Tensor | None, arena: Tensor) -> Tensor:
        """Computes the layer, [n, hidden] -> [n, hidden].

        ``rows``: arena rows of the images, for ops that gather them.
        """
        return self.out(self._attend(x, images, rows, arena))

    def _attend(self, x: Tensor, images: CrossAttentionTensors, rows: Tensor | None, arena: Tensor) -> Tensor:
        q = self.norms[0].heads(self.q(x).view(len(x), -1, self.head_dim))
        held = arena[:, self.first : self.first + 2 * self.width]
        return cast(CrossAttentionOps, self.ops).cross_attend(q, held, rows, images, self.scale).reshape(len(x), -1)

    def nbytes(self) -> int:
        return self.q.bytes + self.kv.bytes + self.out.bytes + sum(norm.nbytes() for norm in self.norms)


class CrossAttentionLayer:
    """Cross-attention to images followed by an MLP, each preceded by a norm and scaled by tanh of a stored gate."""

    gates: Tensor  # [2]: for attention and for the MLP

    def __init__(self, backend: Backend, c: TextConfig, number: int, group: int = 1, aligned: int = 1) -> None:
        ops = backend.ops
        self.input_norm = norm_of(c.norm, ops, c.hidden, c.eps)
        self.attention = CrossAttention(backend, c, number)
        self.post_norm = norm_of(c.norm, ops, c.hidden, c.eps)
        self.mlp = GatedMLP(ops, backend.comm, c.hidden, c.intermediate, c.mlp_bias, group, c.activation, aligned)

    def load(self, source: WeightSource, name: str) -> None:
        self.input_norm.load(source, f"{name}.input_layernorm")
        self.attention.load(source, f"{name}.cross_attn")
        self.post_norm.load(source, f"{name}.post_attention_layernorm")
        self.mlp.load(source, f"{name}.mlp")
        stored = [source.take(f"{name}.cross_attn_{part}_gate", (1,)) for part in ("attn", "mlp")]
        self.gates = torch.cat([gate.tanh() for gate in stored])

    def __call__(
        self, x: Tensor, residual: Tensor | None, images: CrossAttentionTensors, rows: Tensor | None, arena: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the layer.

        Returns (output of the MLP, residual stream without it), [n, hidden] each, like a decoder layer.
        """
        sees, speaks = ((images.gate > least).to(x.dtype)[:, None] for least in (0, 1))
        normed, residual = self.input_norm(x, residual)
        added = self.attention(normed, images, rows, arena) * (self.gates[0] * sees)
        normed, residual = self.post_norm(added, residual)
        return self.mlp(normed) * (self.gates[1] * speaks), residual

    def nbytes(self) -> int:
        parts = (self.input_norm, self.attention, self.post_norm, self.mlp)
        return sum(part.nbytes() for part in parts) + self.gates.nbytes


def arena_row_numbers(units: Tensor, length: int) -> Tensor:
    """Returns int64 [u x length]: the arena rows of ``units``, int32 [u], of ``length`` rows each."""
    offsets = torch.arange(length, device=units.device, dtype=torch.int32)
    return (units[:, None] * length + (offsets + RESERVED_ROWS)).flatten().long()


class CrossAttentionDecoder(Decoder):
    """A decoder with cross-attention layers; ``length``: arena rows per image.

    Launches whose tokens attend to no image are those of a plain decoder.
    """

    def __init__(self, config: ModelConfig, backend: Backend, length: int) -> None:
        super().__init__(config, backend)
        c, self.length = config.text, length
        group = config.quant.widest_group() if config.quant is not None else 1
        aligned = config.alignment_unit(backend.policy.aligned)
        self.cross_attention_layers = [
            CrossAttentionLayer(backend, c, i, group, aligned) for i in range(len(c.cross_attention_layers))
        ]
        layers: list[Any] = [*self.layers]
        for index, layer in zip(c.cross_attention_layers, self.cross_attention_layers, strict=True):
            layers[index] = layer
        self.layers = layers
        self.embedding = Embedding(self.ops, c.vocab + c.spare, c.width)
        self.enter = DecoderEntry(backend, c, self.embedding)

    def bind(self, persistent: Persistent) -> None:
        """Sets the persistent tensors that the bodies read and write; cross-attention layers have no cache."""
        self.persistent = persistent
        cached = [
            layer for index, layer in enumerate(self.layers) if index not in self.config.text.cross_attention_layers
        ]
        for layer, kv in zip(cached, persistent.kv, strict=True):
            layer.attention.bind(kv)
        self.first = cached[0].attention  # every such model has layers with a cache
        # Embeddings read this instead of arena rows, which no token uses: the ZERO row, at the embedding's width.
        self._no_rows = persistent.arena.view(-1)[: self.config.text.width].view(1, -1)

    def text(self, inputs: TextTensors) -> None:
        """Computes a text launch like a plain decoder; without images, the cross-attention layers are skipped."""
        p, ops = self.persistent, self.ops
        x, residual, rotary, *_ = first_rows(self._start(inputs), len(inputs.out_row))
        assert self.first is not None
        attn = ops.prepare_attn(inputs.attn, self.first.heads, self.first.kv)
        rows = None
        if inputs.cross_attention is not None and cast(CrossAttentionOps, ops).gathers:
            rows = ops.region(self._rows, inputs.cross_attention.units)
        for index, layer in enumerate(self.layers):
            if index not in self.config.text.cross_attention_layers:
                x, residual = ops.layer(layer, x, residual, rotary, attn)
            elif inputs.cross_attention is not None:
                x, residual = ops.layer(layer, x, residual, inputs.cross_attention, rows, p.arena)
            ops.cut("layer")
        ops.by_rows(self.leave, (x, residual, inputs.out_row), p.hidden)

    def _rows(self, units: Tensor) -> Tensor:
        return arena_row_numbers(units, self.length)

    def _start(self, inputs: TextTensors) -> FirstLayerInputs:
        tokens = (inputs.tokens, inputs.from_slot, inputs.positions, inputs.image_row)
        return self.ops.region(self.enter, *tokens, self.persistent.state.last, self._no_rows)

    def keep(self, x: Tensor, rows: Tensor, arena: Tensor) -> None:
        """Stores image rows x [s, hidden] in ``arena[rows]`` as keys and values of the cross-attention layers."""
        self.ops.scatter_rows(
            arena,
            rows,
            torch.cat([layer.attention.compute_arena_rows(x) for layer in self.cross_attention_layers], dim=1),
        )
