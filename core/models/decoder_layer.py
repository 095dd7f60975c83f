"""A layer of the decoder: attention or a recurrent layer, an MLP or experts, and the norms around them; or one part.

Per-layer embeddings (``TextConfig.layer_inputs``): a table of each token for each layer, and what layers do with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import GATED, OUT, POST, SANDWICH, TextConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource, take_values
from trencadis.core.device.backend import AdapterRows, Attn, Backend, Rotary
from trencadis.core.models.attention import Attention
from trencadis.core.models.linear_and_embedding import Linear, scaled
from trencadis.core.models.mlp_and_norms import MLP, GatedMLP, PlainMLP, RMSNorm, norm_of
from trencadis.core.models.model_and_ops_api import StatefulLayer
from trencadis.core.models.moe import ExpertMLP, ExpertsBeside


def make_mlp(backend: Backend, c: TextConfig, index: int, group: int = 1, aligned: int = 1) -> MLP | ExpertMLP:
    """Returns the MLP or the experts of layer ``index``; ``c``: ``TextConfig.of_layer`` of it."""
    ops, comm = backend.ops, backend.comm
    if c.experts is not None and not c.has_mlp(index):
        return ExpertMLP(ops, comm, c.hidden, c.experts, c.activation, backend.device, group, aligned)
    kind = GatedMLP if c.mlp == GATED else PlainMLP
    return kind(ops, comm, c.hidden, c.intermediate, c.mlp_bias, group, c.activation, aligned)


class DecoderLayer:
    """A decoder layer: attention, or the recurrent layer ``mixer`` in its place, and an MLP or experts.

    Norms are applied before them, before and after them, after them, or after the residual sums.
    """

    def __init__(
        self,
        backend: Backend,
        c: TextConfig,
        group: int = 1,
        index: int = 0,
        aligned: int = 1,
        mixer: StatefulLayer | None = None,
    ) -> None:
        ops, full, c = backend.ops, c, c.of_layer(index)
        self.width = c.hidden
        self.input_norm = norm_of(c.norm, ops, c.hidden, c.eps)
        self.recurrent = mixer is not None
        """True if it keeps a state for each sequence, which ``attention.bind`` then takes."""
        own = mixer or Attention(backend, c, c.window_of(index), c.score_scale_of(index))
        self.attention = cast(Attention, own)  # a recurrent layer takes ``RecurrentRows`` as its rotary factors
        self.post_norm = norm_of(c.norm, ops, c.hidden, c.eps)
        self.mlp = make_mlp(backend, c, index, group, aligned)
        self.beside: ExpertsBeside | None = None
        if c.experts is not None and c.experts.beside:
            self.beside = ExpertsBeside(backend, c, c.experts, group, aligned)
        self.norms_after_sum, self.scale = c.norm_placement == POST, c.residual_scale
        self.norms_after_parts = c.norm_placement == OUT
        several = 2 if c.norm_placement == SANDWICH else 0
        self.out_norms = [norm_of(c.norm, ops, c.hidden, c.eps) for _ in range(several)]
        self.shapes_outputs = self.scale != 1 or several > 0
        self.local = c.uses_second_rotary(index)
        self.causal = c.causal_full_layers and not c.window_of(index)
        self.gives_kv = index in full.kv_givers
        self.sums_stream = c.layer_scale or c.layer_inputs > 0
        self.layer_input = LayerInput(backend, c) if c.layer_inputs else None
        self.scales_stream = c.layer_scale
        self.stream_scale: Tensor | None = None  # [1] of the backend's dtype

    def load(self, source: WeightSource, name: str) -> None:
        self.input_norm.load(source, f"{name}.input_layernorm")
        self.attention.load(source, f"{name}.{'linear' if self.recurrent else 'self'}_attn")
        self.post_norm.load(source, f"{name}.post_attention_layernorm")
        self.mlp.load(source, f"{name}.mlp")
        if self.beside is not None:
            self.beside.load(source, f"{name}.beside")
        for norm, part in zip(self.out_norms, ("attention", "mlp"), strict=False):
            norm.load(source, f"{name}.{part}_out_layernorm")
        if self.layer_input is not None:
            self.layer_input.load(source, name)
        if self.scales_stream:
            self.stream_scale = source.take(f"{name}.layer_scalar", (1,))

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotary: Rotary, attn: Attn, rows: AdapterRows | None = None
    ) -> tuple[Tensor | None, ...]:
        """Returns (MLP output, residual stream without it), [n, hidden] each in the backend's dtype, like the inputs.

        Without norms before attention, or with ``TextConfig.sums_stream``, returns (the stream, None). A layer whose
        keys and values others read returns them, too.

        Args:
            rotary: the rotary factors; for a recurrent layer ``RecurrentRows`` in their place.
            rows: the adapters of the tokens.
        """
        if self.norms_after_parts:
            x = x + self.input_norm(scaled(self.attention(x, rotary, attn, rows), self.scale))[0]
            return x + self.post_norm(scaled(self.mlp(x, rows), self.scale))[0], None
        if self.norms_after_sum:
            return self._forward_post_norm(x, rotary, attn, rows), None
        normed, residual = self.input_norm(x, residual)
        given: list[Tensor] = []
        # The outputs of attention and of the norm share a name, so that the former's memory is free for the MLP.
        if self.gives_kv:
            normed, *given = self.attention.share(normed, rotary, attn, rows)
        else:
            normed = self.attention(normed, rotary, attn, rows)
        if self.shapes_outputs:
            normed = self._out(0, normed)
        normed, residual = self.post_norm(normed, residual)
        out = self.mlp(normed, rows)
        if self.beside is not None:
            out = self.beside(out, residual)
        if self.shapes_outputs:
            out = self._out(1, out)
        if self.sums_stream:
            return self._sum(residual + out, rotary), None, *given
        return out, residual, *given

    def _sum(self, stream: Tensor, rotary: Rotary) -> Tensor:
        """Returns the stream after the layer's own embeddings and its scale."""
        if self.layer_input is not None:
            assert rotary.layer_input is not None
            stream = self.layer_input(stream, rotary.layer_input)
        return stream if self.stream_scale is None else stream * self.stream_scale

    def _forward_post_norm(self, x: Tensor, rotary: Rotary, attn: Attn, rows: AdapterRows | None) -> Tensor:
        """Returns the stream after a layer whose norms follow the residual sums."""
        x = self.input_norm(scaled(self.attention(x, rotary, attn, rows), self.scale), x)[0]
        return self.post_norm(scaled(self.mlp(x, rows), self.scale), x)[0]

    def _out(self, part: int, x: Tensor) -> Tensor:
        """Scales and norms the output of attention (0) or the MLP (1) for the residual stream."""
        x = scaled(x, self.scale)
        return self.out_norms[part](x)[0] if self.out_norms else x

    def nbytes(self) -> int:
        own = 0 if self.stream_scale is None else self.stream_scale.nbytes
        beside = (part for part in (self.beside, self.layer_input) if part is not None)
        parts = (self.input_norm, self.attention, self.post_norm, self.mlp, *self.out_norms, *beside)
        return own + sum(part.nbytes() for part in parts)


class SinglePartLayer:
    """A decoder layer with one norm and one part behind it: attention, a recurrent layer, an MLP or experts.

    Models whose ``TextConfig`` names ``mlp_layers`` have such layers alone.
    """

    local = causal = False

    def __init__(
        self,
        backend: Backend,
        c: TextConfig,
        group: int = 1,
        index: int = 0,
        aligned: int = 1,
        mixer: StatefulLayer | None = None,
    ) -> None:
        c = c.of_layer(index)
        self.width = c.hidden
        self.norm = norm_of(c.norm, backend.ops, c.hidden, c.eps)
        self.recurrent = mixer is not None
        self.attention: Attention | None = None
        self.mlp: MLP | ExpertMLP | None = None
        if c.mixes_tokens(index):
            own = mixer or Attention(backend, c, c.window_of(index), c.score_scale_of(index))
            self.attention = cast(Attention, own)  # as in ``DecoderLayer``
        else:
            self.mlp = make_mlp(backend, c, index, group, aligned)

    def load(self, source: WeightSource, name: str) -> None:
        self.norm.load(source, f"{name}.input_layernorm")
        if self.attention is not None:
            self.attention.load(source, f"{name}.{'linear' if self.recurrent else 'self'}_attn")
        if self.mlp is not None:
            self.mlp.load(source, f"{name}.mlp")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotary: Rotary, attn: Attn, rows: AdapterRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns (output of the part, residual stream without it), as ``DecoderLayer`` does."""
        normed, residual = self.norm(x, residual)
        if self.attention is not None:
            return self.attention(normed, rotary, attn, rows), residual
        assert self.mlp is not None
        return self.mlp(normed, rows), residual

    def nbytes(self) -> int:
        parts = (self.norm, self.attention, self.mlp)
        return sum(part.nbytes() for part in parts if part is not None)


class TimedPart(NamedTuple):
    """A part of a layer from which the time of all layers is estimated.

    Args:
        run: [n, width] -> [n, hidden].
        bytes: those of its weights.
    """

    run: Callable[[Tensor], Tensor]
    width: int
    bytes: int


def choose_timed_part(layers: Sequence[DecoderLayer | SinglePartLayer]) -> TimedPart:
    """Returns the first MLP of some layers, or the output projection of the first one where none has an MLP."""
    for layer in layers:
        if layer.mlp is not None:
            return TimedPart(layer.mlp, layer.width, layer.mlp.nbytes())
    mixer = layers[0].attention
    assert mixer is not None, "a layer has an MLP or mixes tokens"
    return TimedPart(mixer.out, mixer.out.span().width, mixer.out.bytes)


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
