"""A decoder some of whose layers attend to pictures (``TextConfig.cross``), which lie in the arena as their keys and
values."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from trencadis.core.backend import Backend, TextTensors
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.launches.tensors import first_rows
from trencadis.core.layers.crossing import CrossLayer, arena_rows
from trencadis.core.layers.embedding import Embedding
from trencadis.core.models.decoder import Decoder, Entry
from trencadis.core.models.interface import Persistent, SeeingOps


class CrossDecoder(Decoder):
    """``length``: arena rows of a picture. Launches whose tokens see no picture are those of a plain decoder."""

    def __init__(self, config: ModelConfig, backend: Backend, length: int) -> None:
        super().__init__(config, backend)
        c, self.length = config.text, length
        group = config.quant.widest_group() if config.quant is not None else 1
        aligned = config.aligned(backend.policy.aligned)
        self.crossing = [CrossLayer(backend, c, i, group, aligned) for i in range(len(c.cross))]
        layers: list[Any] = [*self.layers]
        for place, layer in zip(c.cross, self.crossing, strict=True):
            layers[place] = layer
        self.layers = layers
        self.embedding = Embedding(self.ops, c.vocab + c.spare, c.width)
        self.enter = Entry(backend, c, self.embedding)

    def bind(self, persistent: Persistent) -> None:
        """Sets the persistent tensors that the bodies read and write; layers that see pictures have no cache."""
        self.persistent = persistent
        cached = [layer for place, layer in enumerate(self.layers) if place not in self.config.text.cross]
        for layer, kv in zip(cached, persistent.kv, strict=True):
            layer.attention.bind(kv)
        self.first = cached[0].attention
        # What embeddings read in the place of rows, which none takes: ZERO, at another width.
        self._no_rows = persistent.arena.view(-1)[: self.config.text.width].view(1, -1)

    def text(self, inputs: TextTensors) -> None:
        """As a plain decoder's; where no token sees a picture, the layers that would are left out."""
        p, ops = self.persistent, self.ops
        x, residual, rotary, *_ = first_rows(self._start(inputs), len(inputs.out_row))
        attn = ops.prepare_attn(inputs.attn, self.first.heads, self.first.kv)
        rows = None
        if inputs.seen is not None and cast(SeeingOps, ops).gathers:
            rows = ops.region(self._rows, inputs.seen.units)
        for place, layer in enumerate(self.layers):
            if place not in self.config.text.cross:
                x, residual = ops.layer(layer, x, residual, rotary, attn)
            elif inputs.seen is not None:
                x, residual = ops.layer(layer, x, residual, inputs.seen, rows, p.arena)
            ops.cut("layer")
        ops.by_rows(self.leave, (x, residual, inputs.out_row), p.hidden)

    def _rows(self, units: Tensor) -> Tensor:
        return arena_rows(units, self.length)

    def _start(self, inputs: TextTensors) -> Any:
        tokens = (inputs.tokens, inputs.from_slot, inputs.positions, inputs.image_row)
        return self.ops.region(self.enter, *tokens, self.persistent.state.last, self._no_rows)

    def keep(self, x: Tensor, rows: Tensor, arena: Tensor) -> None:
        """Stores rows [s, hidden] of pictures in ``arena[rows]``, as the layers that see them read them."""
        self.ops.scatter_rows(arena, rows, torch.cat([layer.attention.stored(x) for layer in self.crossing], dim=1))
