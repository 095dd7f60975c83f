"""The head of EAGLE-3: one decoder layer that reads three hidden states of the target model and the next token.

The layer's queries, keys and values are made of the token's embedding and the hidden state side by side. For a token i
of a text the hidden state is that of token i and the embedding that of token i + 1; the output predicts token i + 2.
After the first draft the head's own output stands for the hidden state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.weight_source import StackedPart, stack
from trencadis.core.device.backend import Backend, HeadTensors, HeadTensorsOut, LayerKV, TextTensors
from trencadis.core.errors import StartupError
from trencadis.core.models.attention import Attention, TextRotary
from trencadis.core.models.interface import Persistent
from trencadis.core.models.linear import Embedding, Linear, RowParallelLinear
from trencadis.core.models.mlp import GatedMLP, norm_of
from trencadis.core.quant.quantised_tensor import QTensor


class HeadWeights:
    """Tensors of a head by their stored names; ``core.checkpoint.weight_source.WeightSource``."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, name: str) -> None:
        self._held = dict(weights)
        self._dtype, self._name = dtype, name

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
        return self.raw(name, shape).to(self._dtype)

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


@dataclasses.dataclass(slots=True)
class HeadState:
    """Persistent tensors of a head, [max step tokens + 1, hidden] each; row 0 is the sink.

    ``normed``: inputs of the output matrix; ``stream``: what stands for a hidden state in the next draft.
    """

    kv: LayerKV
    normed: Tensor
    stream: Tensor


class Eagle3Head:
    """The layer, the matrix before it and the output matrix; bodies of its programs.

    In its launches ``TextTensors.image_row`` is the row of the tensor of states that a token reads.

    Args:
        vocab: ids of the target; ``c.vocab``: those of drafts.
        embedding: the target's, which a head without one of its own shares.
    """

    state: HeadState
    target: Persistent

    def __init__(
        self, c: TextConfig, backend: Backend, vocab: int, states: int, embedding: Embedding, norm_first: bool = False
    ) -> None:
        ops, comm = self.ops, self.comm = backend.ops, backend.comm
        self.config, self.vocab, self.states, self.norm_first = c, vocab, states, norm_first
        self.backend, self.embedding = backend, embedding
        self.fc, self.lm_head = Linear(ops, comm), Linear(ops, comm)
        self.attention = Attention(backend, dataclasses.replace(c, hidden=2 * c.hidden))
        self.attention.out = RowParallelLinear(
            ops, comm, c.heads * c.head_dim, c.hidden, unit=c.head_dim, bias=c.out_bias
        )
        self.input_norm, self.hidden_norm, self.post_norm, self.norm = (
            norm_of(c.norm, ops, c.hidden, c.eps) for _ in range(4)
        )
        self.mlp = GatedMLP(ops, comm, c.hidden, c.intermediate, c.mlp_bias, act=c.activation)
        self.rotary = TextRotary(c, backend.device)
        self.ids: Tensor

    def load(self, weights: Iterable[tuple[str, Tensor]], name: str) -> None:
        """Loads the head's tensors; ``name``: of its folder, for messages.

        Raises:
            StartupError: one is missing or has another shape, or a draft's id lies outside the vocabulary.
        """
        c, source = self.config, HeadWeights(weights, self.backend.dtype, name)
        self.fc.pack(source.take("fc.weight", (c.hidden, self.states * c.hidden)), None)
        self.attention.load(source, "midlayer.self_attn")
        for norm, part in (
            (self.input_norm, "midlayer.input_layernorm"), (self.hidden_norm, "midlayer.hidden_norm"),
            (self.post_norm, "midlayer.post_attention_layernorm"), (self.norm, "norm"),
        ):  # fmt: skip
            norm.load(source, part)
        self.mlp.load(source, "midlayer.mlp")
        self.lm_head.pack(source.take("lm_head.weight", (c.vocab, c.hidden)), None)
        if source.has("embed_tokens.weight"):
            self.embedding = Embedding(self.ops, self.vocab, c.hidden)
            self.embedding.table = source.take("embed_tokens.weight", (self.vocab, c.hidden))
        self.ids = self._load_ids(source, name)

    def _load_ids(self, source: HeadWeights, name: str) -> Tensor:
        """Returns int64 [draft vocabulary]: the target's id of each draft id."""
        own = torch.arange(self.config.vocab)
        if source.has("d2t"):
            own = own + source.raw("d2t", (self.config.vocab,)).long()
        elif self.config.vocab != self.vocab:
            raise StartupError(f"{name}: the head has no tensor d2t")
        low, high = int(own.min()), int(own.max())
        if low < 0 or high >= self.vocab:
            raise StartupError(f"{name}: d2t leads to id {low if low < 0 else high}, outside of {self.vocab} ids")
        return own.to(self.backend.device)

    def bind(self, state: HeadState, target: Persistent) -> None:
        """Sets the head's persistent tensors and those of the target."""
        self.state, self.target = state, target
        self.attention.bind(state.kv)

    def read(self, inputs: TextTensors) -> None:
        """Computes tokens from the target's hidden states."""
        assert self.target.taps is not None
        self._run(inputs, self.fc(self.ops.gather_rows(self.target.taps, inputs.image_row.long())))

    def draft(self, inputs: TextTensors) -> None:
        """Computes tokens from the head's own outputs."""
        self._run(inputs, self.ops.gather_rows(self.state.stream, inputs.image_row.long()))

    def _run(self, inputs: TextTensors, hidden: Tensor) -> None:
        ops, none = self.ops, torch.zeros_like(inputs.from_slot)
        p = self.target
        embedded = self.embedding(inputs.tokens, none, p.state.last, none, p.arena)
        normed = self.hidden_norm(hidden)[0]
        x = torch.cat([self.input_norm(embedded)[0], normed], 1)
        attn = ops.prepare_attn(inputs.attn, self.attention.heads, self.attention.kv)
        attended = self.attention(x, self.rotary(ops, inputs.positions), attn)
        x, residual = self.post_norm(attended, normed if self.norm_first else hidden)
        out, stream = self.norm(self.mlp(x), residual)
        ops.scatter_rows(self.state.stream, inputs.out_row, stream)
        ops.scatter_rows(self.state.normed, inputs.out_row, out)

    def head(self, inputs: HeadTensors) -> HeadTensorsOut:
        """Returns the likeliest draft of each row, as an id of the target."""
        logits = self.lm_head(self.ops.gather_rows(self.state.normed, inputs.hidden_row))
        return HeadTensorsOut(self.ids[logits.argmax(-1)].int(), None, None, None, None)

    def bodies(self) -> dict[str, Callable[[HeadTensors], HeadTensorsOut]]:
        """Returns the bodies of SAMPLE."""
        return {"greedy": self.head}
