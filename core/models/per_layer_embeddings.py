"""Embeddings of each token for each layer (``TextConfig.layer_inputs``): their table, and what layers do with them."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource, take_values
from trencadis.core.device.backend import Backend
from trencadis.core.models.linear_and_embedding import Linear
from trencadis.core.models.mlp_and_norms import RMSNorm


class LayerInputEmbedding:
    """Makes the embeddings of all layers at the start of a launch.

    Each is the mean, scaled by the root of 2, of a row of a table and of a normed projection of the token's input.
    Every rank has all of it, in the engine's dtype even where it is stored quantised.
    """

    def __init__(self, backend: Backend, c: TextConfig) -> None:
        self.ops, self.config, self.device = backend.ops, c, backend.device
        self.projection = Linear(backend.ops, backend.comm)
        self.norm = RMSNorm(backend.ops, c.layer_inputs, c.eps)
        self.table: Tensor  # [layer_vocab, layers * layer_inputs]
        # Rounded to the dtype of the embeddings, as in the original 16-bit models.
        self.scale = float(torch.tensor(c.layer_inputs**0.5, dtype=backend.dtype))

    def load(self, source: WeightSource) -> None:
        c = self.config
        wide = c.layers * c.layer_inputs
        self.table = source.take("embed_tokens_per_layer.weight", (c.layer_vocab, wide))
        self.projection.pack(take_values(source, "per_layer_model_projection", (wide, c.hidden), self.device), None)
        self.norm.load(source, "per_layer_projection_norm")

    def __call__(
        self, x: Tensor, tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns [n, layer_inputs] for each layer, of the backend's dtype.

        ``x``: the scaled inputs of the first layer, [n, hidden]; the others are fields of ``TextTensors``.
        """
        c, n = self.config, len(x)
        ids = torch.where(from_slot > 0, last.index_select(0, from_slot.clamp_min(0)), tokens)
        ids = torch.where(image_row > 0, c.layer_pad, ids).clamp(0, c.layer_vocab - 1)
        own = self.ops.gather_rows(self.table, ids.long()) * self.scale
        projected = (self.projection(x) * c.hidden**-0.5).view(n * c.layers, c.layer_inputs)
        joined = (self.norm(projected)[0].view(n, -1) + own) * 2.0**-0.5
        return tuple(part.contiguous() for part in joined.view(n, c.layers, -1).unbind(1))

    def nbytes(self) -> int:
        return self.table.nbytes + self.projection.bytes + self.norm.nbytes()


class LayerInput:
    """Adds to the residual stream what a layer makes of its own embeddings: they are weighted by a gate, projected and
    normed.
    """

    def __init__(self, backend: Backend, c: TextConfig) -> None:
        self.ops, self.config, self.device = backend.ops, c, backend.device
        self.gate, self.projection = Linear(backend.ops, backend.comm), Linear(backend.ops, backend.comm)
        self.norm = RMSNorm(backend.ops, c.hidden, c.eps)

    def load(self, source: WeightSource, name: str) -> None:
        c = self.config
        gate, projection = (c.layer_inputs, c.hidden), (c.hidden, c.layer_inputs)
        self.gate.pack(take_values(source, f"{name}.per_layer_input_gate", gate, self.device), None)
        self.projection.pack(take_values(source, f"{name}.per_layer_projection", projection, self.device), None)
        self.norm.load(source, f"{name}.post_per_layer_input_norm")

    def __call__(self, stream: Tensor, own: Tensor) -> Tensor:
        """Returns the stream [n, hidden] with what it makes of ``own`` [n, layer_inputs]."""
        weighted = self.ops.act(self.gate(stream), self.config.activation) * own
        return stream + self.norm(self.projection(weighted))[0]

    def nbytes(self) -> int:
        return self.gate.bytes + self.projection.bytes + self.norm.nbytes()
