"""The head of EAGLE-3: one decoder layer that reads three hidden states of the target model and the next token.

The layer's queries, keys and values are made of the token's embedding and a hidden state side by side. For a token i of
a text the embedding is that of token i + 1; the output predicts token i + 2. The hidden state is made of three of the
target's, by a matrix with which the target's launches end; after the first draft it is the head's own output. One
tensor holds both, so that one program of each shape reads texts and continues them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source_interface import StackedPart, stack
from trencadis.core.device.backend import (
    Attn,
    Backend,
    Comm,
    HeadTensors,
    HeadTensorsOut,
    LayerKV,
    Ops,
    Rotary,
    SamplerState,
    TextTensors,
)
from trencadis.core.device.launch_tensors import first_rows
from trencadis.core.errors import StartupError
from trencadis.core.models.attention import Attention
from trencadis.core.models.linear_and_embedding import Embedding, Linear, RowParallelLinear
from trencadis.core.models.mlp_and_norms import GatedMLP, Norm, norm_of
from trencadis.core.models.model_and_ops_api import Persistent
from trencadis.core.models.rotary_embedding import TextRotary
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.weight_files import HEAD_STATES, HEAD_TABLE


class HeadWeights:
    """Tensors of a head by their stored names; ``core.checkpoint.weight_source_interface.WeightSource``."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], backend: Backend, name: str) -> None:
        self._held = dict(weights)
        self._dtype, self._device, self._name = backend.dtype, backend.device, name

    def has(self, name: str) -> bool:
        return name in self._held

    def raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor in its stored dtype; raises StartupError if it is missing or has another shape."""
        found = self._held.get(name)
        if found is None:
            raise StartupError(f"{self._name}: the head has no tensor {name}")
        if tuple(found.shape) != shape:
            raise StartupError(f"{self._name}: {name} has shape {list(found.shape)}, not {list(shape)}")
        return found

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.raw(name, shape).to(self._dtype).to(self._device)

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        return self.take(name, shape).narrow(dim, start, stop - start)

    def take_stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        return stack(self, parts, inputs)

    def take_quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        return None

    def kv_scale(self, name: str, kind: str) -> float:
        raise StartupError(f"{self._name}: a head has no scales of keys")


FROM_TARGET = 1
"""The first row of ``HeadState.states`` that a target's launches write."""


@dataclasses.dataclass(slots=True)
class HeadState:
    """Persistent tensors of a head over a target whose steps have up to n tokens, numbered from 1 on.

    ``normed``: [n + 1, hidden], inputs of the output matrix; row 0 is the sink. ``states``: [2 n + 3, hidden]. Row 0
    stays zero: padding reads it, since padding of a Gaudi's prompts may leave NaN. From ``FROM_TARGET`` on are what the
    target's launches leave for the head, from ``own`` on the head's outputs; the first row of each is a sink.
    """

    kv: LayerKV
    normed: Tensor
    states: Tensor

    @property
    def own(self) -> int:
        """The first row of ``states`` of the head's own outputs."""
        return FROM_TARGET + len(self.normed)


class StateProjection:
    """The matrix that makes one hidden state of those of three layers, and stores it for the head."""

    def __init__(self, ops: Ops, comm: Comm) -> None:
        self.ops, self.fc = ops, Linear(ops, comm)

    def __call__(self, low: Tensor, middle: Tensor, high: Tensor, out_row: Tensor, states: Tensor) -> None:
        """Stores the projection of three tensors [n, hidden] in ``HeadState.states``."""
        self.ops.scatter_rows(states, out_row + FROM_TARGET, self.fc(torch.cat([low, middle, high], 1)))


class HeadStart(NamedTuple):
    """Inputs of the head's layer."""

    x: Tensor  # [n, 2 hidden] embedding and hidden state
    residual: Tensor  # [n, hidden] the residual stream
    rotary: Rotary


class HeadEntry:
    """The start of a launch: what the layer reads, its residual stream, and rotary factors."""

    def __init__(
        self, ops: Ops, embedding: Embedding, norms: tuple[Norm, Norm], rotary: TextRotary, first: bool
    ) -> None:
        self.ops, self.embedding, self.rotary, self.norm_first = ops, embedding, rotary, first
        self.input_norm, self.hidden_norm = norms

    def __call__(
        self, tokens: Tensor, from_slot: Tensor, positions: Tensor, source: Tensor, last: Tensor, arena: Tensor,
        states: Tensor,
    ) -> HeadStart:  # fmt: skip
        """Starts from rows of ``states``; ``source``: int32 [n], which ones."""
        none = torch.zeros_like(tokens)
        embedded = self.embedding(tokens, from_slot, last, none, arena)
        hidden = self.ops.gather_rows(states, source.long())
        normed = self.hidden_norm(hidden)[0]
        x = torch.cat([self.input_norm(embedded)[0], normed], 1)
        return HeadStart(x, normed if self.norm_first else hidden, self.rotary(self.ops, positions))


class HeadLayer:
    """Attention over [embedding, hidden state], the MLP, and the norms after each."""

    def __init__(self, backend: Backend, config: ModelConfig) -> None:
        c, ops, comm = config.text, backend.ops, backend.comm
        self.attention = Attention(backend, dataclasses.replace(c, hidden=2 * c.hidden))
        self.attention.out = RowParallelLinear(
            ops, comm, c.heads * c.head_dim, c.hidden, unit=c.head_dim, bias=c.out_bias
        )
        self.post_norm, self.norm = (norm_of(c.norm, ops, c.hidden, c.eps) for _ in range(2))
        self.mlp = GatedMLP(ops, comm, c.hidden, c.intermediate, c.mlp_bias, act=c.activation)

    def __call__(self, x: Tensor, residual: Tensor, rotary: Rotary, attn: Attn) -> tuple[Tensor, Tensor]:
        """Returns the normed output and the residual stream, [n, hidden] each; ``x``: [n, 2 hidden]."""
        y, residual = self.post_norm(self.attention(x, rotary, attn), residual)
        return self.norm(self.mlp(y), residual)


class HeadExit:
    """The end of a launch: stores the outputs of each token."""

    def __init__(self, ops: Ops, own: int) -> None:
        self.ops, self.own = ops, own

    def __call__(self, out: Tensor, stream: Tensor, out_row: Tensor, normed: Tensor, states: Tensor) -> None:
        """Stores rows [n, hidden] as ``HeadState`` says."""
        self.ops.scatter_rows(normed, out_row, out)
        self.ops.scatter_rows(states, out_row + self.own, stream)


class DraftSampling:
    """The output matrix over the vocabulary of drafts.

    ``ids``: int32 [draft vocabulary], the target's id of each of its outputs.
    """

    ids: Tensor

    def __init__(self, ops: Ops, comm: Comm) -> None:
        self.ops, self.lm_head = ops, Linear(ops, comm)

    def __call__(self, normed: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """Returns the likeliest draft of each row, as an id of the target."""
        logits = self.lm_head(self.ops.gather_rows(normed, inputs.hidden_row))
        out = self.ops.sample(logits, inputs, state, False)
        return out._replace(token=self.ids.index_select(0, out.token))


class Eagle3Head:
    """A head; the bodies of its programs.

    In its launches ``TextTensors.image_row`` is the row of ``HeadState.states`` that a token reads.

    Args:
        config: the target with the head's sizes; its vocabulary is that of drafts.
        backend: a backend for these sizes.
        vocab: ids of the target.
        embedding: the target's, which a head without one of its own shares.
        projection: the matrix with which the target's launches end.
        norm_first: the residual stream of the head begins with the normed hidden state.
    """

    state: HeadState
    target: Persistent
    leave: HeadExit

    def __init__(
        self, config: ModelConfig, backend: Backend, vocab: int, embedding: Embedding, projection: StateProjection,
        norm_first: bool = False,
    ) -> None:  # fmt: skip
        c, self.ops = config.text, backend.ops
        self.config, self.backend, self.vocab, self.projection = config, backend, vocab, projection
        first, second = (norm_of(c.norm, self.ops, c.hidden, c.eps) for _ in range(2))
        rotary = TextRotary(c, backend.device)
        self.enter = HeadEntry(self.ops, embedding, (first, second), rotary, norm_first)
        self.layer = HeadLayer(backend, config)
        self.sampling = DraftSampling(self.ops, backend.comm)

    def load(self, weights: Iterable[tuple[str, Tensor]], name: str) -> None:
        """Loads the head's tensors; ``name``: of its folder, for messages.

        Raises:
            StartupError: one is missing or has another shape, or a draft's id lies outside the vocabulary.
        """
        c, source = self.config.text, HeadWeights(weights, self.backend, name)
        self.projection.fc.pack(source.take("fc.weight", (c.hidden, HEAD_STATES * c.hidden)), None)
        self.layer.attention.load(source, "midlayer.self_attn")
        for norm, part in (
            (self.enter.input_norm, "midlayer.input_layernorm"), (self.enter.hidden_norm, "midlayer.hidden_norm"),
            (self.layer.post_norm, "midlayer.post_attention_layernorm"), (self.layer.norm, "norm"),
        ):  # fmt: skip
            norm.load(source, part)
        self.layer.mlp.load(source, "midlayer.mlp")
        self.sampling.lm_head.pack(source.take("lm_head.weight", (c.vocab, c.hidden)), None)
        if source.has(HEAD_TABLE):
            self.enter.embedding = Embedding(self.ops, self.vocab, c.hidden)
            self.enter.embedding.table = source.take(HEAD_TABLE, (self.vocab, c.hidden))
        self.sampling.ids = self._load_ids(source, name)

    def _load_ids(self, source: HeadWeights, name: str) -> Tensor:
        """Returns int32 [draft vocabulary]: the target's id of each draft id."""
        count = self.config.text.vocab
        own = torch.arange(count)
        if source.has("d2t"):
            own = own + source.raw("d2t", (count,)).long()
        elif count != self.vocab:
            raise StartupError(f"{name}: the head has no tensor d2t")
        low, high = int(own.min()), int(own.max())
        if low < 0 or high >= self.vocab:
            raise StartupError(f"{name}: d2t leads to id {low if low < 0 else high}, outside of {self.vocab} ids")
        return own.int().to(self.backend.device)

    def bind(self, state: HeadState, target: Persistent) -> None:
        """Sets the head's persistent tensors and those of the target, which gets the tensor that both share."""
        self.state, self.target, self.leave = state, target, HeadExit(self.ops, state.own)
        target.states = state.states
        self.set_kv(state.kv)

    def set_kv(self, kv: LayerKV) -> None:
        """Replaces the KV cache."""
        self.state.kv = kv
        self.layer.attention.bind(kv)

    def text(self, inputs: TextTensors) -> None:
        """Computes tokens from rows of states, and stores what predicts the tokens after them."""
        ops, p, state, rows = self.ops, self.target, self.state, len(inputs.out_row)
        start = ops.region(
            self.enter, inputs.tokens, inputs.from_slot, inputs.positions, inputs.image_row, p.state.last, p.arena,
            state.states,
        )  # fmt: skip
        x, residual, rotary = start if len(inputs.tokens) == rows else first_rows(start, rows)
        attention = self.layer.attention
        attn = ops.prepare_attn(inputs.attn, attention.heads, attention.kv)
        out, stream = ops.layer(self.layer, x, residual, rotary, attn)
        ops.cut("layer")
        ops.by_rows(self.leave, (out, stream, inputs.out_row), state.normed, state.states)

    def head(self, inputs: HeadTensors) -> HeadTensorsOut:
        """Returns the likeliest draft of each row, as an id of the target."""
        return self.ops.region(self.sampling, self.state.normed, inputs, self.target.state)
