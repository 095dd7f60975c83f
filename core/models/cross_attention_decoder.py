"""Decoder with layers that attend to image rows in the arena (``core/models/image_cross_attention.py``)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.device.backend import Backend, TextTensors
from trencadis.core.device.launch_tensors import first_rows
from trencadis.core.media_spans import RESERVED_ROWS
from trencadis.core.models.decoder import Decoder, DecoderEntry, FirstLayerInputs
from trencadis.core.models.image_cross_attention import CrossAttentionLayer
from trencadis.core.models.interface import CrossAttentionOps, Persistent
from trencadis.core.models.linear_and_embedding import (
    Embedding,
)


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
