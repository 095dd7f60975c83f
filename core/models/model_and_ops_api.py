"""The interface of models: bodies over tensors, and the tensors that persist between launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import (
    AdapterRows,
    HeadTensors,
    HeadTensorsOut,
    LayerKV,
    PoolTensors,
    PoolTensorsOut,
    ResetTensors,
    SamplerState,
    TextTensors,
    VisionTensors,
    Weight,
)
from trencadis.core.device.launch_tensors import Attn, CrossAttentionTensors, RecurrentRows
from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.step import Encode


class RecurrentState(NamedTuple):
    """The states that one recurrent layer keeps, by slot; slot 0 is the sink of padding."""

    conv: Tensor  # [slots, kernel - 1, channels] of the model's dtype: the last inputs of the convolution
    state: Tensor | None  # float32 [slots, value heads, key_dim, value_dim]; None: there is a convolution alone


@dataclass(slots=True)
class Persistent:
    """Tensors that persist between launches. Bodies read and write them as attributes, never as inputs."""

    kv: list[LayerKV]
    hidden: Tensor  # [max step tokens + 1, hidden]; row 0 is the padding sink, rows to send start at row 1
    arena: Tensor  # [arena rows x ModelConfig.row_parts, width]; rows 0 (ZERO) and 1 (SINK) are reserved
    state: SamplerState
    stream: Tensor | None = None  # like ``hidden``: received rows, from row 1 on; None on the first stage
    recurrent: list[RecurrentState] = field(default_factory=list)  # of each recurrent layer of the stage
    states: Tensor | None = None  # where ``Decoder.keep_states`` stores rows like those of ``hidden``


class StatefulLayer(Protocol):
    """A layer in the place of attention that keeps a state for each sequence (``TextConfig.recurrent``)."""

    def load(self, source: WeightSource, name: str) -> None:
        """Takes this rank's weights from ``source``; ``name``: ``layers.N.linear_attn``."""
        ...

    def bind(self, state: RecurrentState) -> None:
        """Sets the tensors with the states of all sequences."""
        ...

    def __call__(self, x: Tensor, rows: RecurrentRows, attn: Attn, adapters: AdapterRows | None = None) -> Tensor:
        """Computes [n, hidden] -> [n, hidden], summed over ranks, and updates the states of the rows.

        ``adapters`` is None: models with recurrent layers have none.
        """
        ...

    def nbytes(self) -> int: ...


class MaskingOps(Protocol):
    """Additional method of ``Ops`` if the policy sets ``masked_head``."""

    def mask(self, logits: Tensor, head: HeadTensors) -> Tensor:
        """Returns logits [r, V] in which ids that a row's mask forbids have the lowest value.

        May overwrite ``logits``.
        """
        ...


class BestOps(Protocol):
    """Additional methods of ``Ops`` if the policy sets ``best_head``: compute the argmax without storing logits."""

    def best_outputs(self, x: Tensor, w: Weight, outputs: int, scale: float) -> Tensor | None:
        """Returns int64 [n]: a code for the best of the first ``outputs`` outputs of each row x [n, in]; None: use
        logits.

        A larger code is a better output. Its low 32 bits are 2^31 - 1 minus the output's index; the high ones are the
        output's value times ``scale``, mapped to integers in the same order. Whether the result is None depends only on
        the weight.
        """
        ...

    def take(self, token: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """Runs the greedy variant of ``Ops.sample`` with the given ids int64 [n]."""
        ...


class DrawingOps(Protocol):
    """Additional method of ``Ops`` if the policy sets ``drawn_head``."""

    def draw(self, logits: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """Runs the full variant of ``Ops.sample`` without log-probabilities, ranks and top ids."""
        ...


class GroupingOps(Protocol):
    """Additional method of ``Ops`` for devices that run several layers as one."""

    def group_layers(self, layers: Sequence[Any], attn: Any) -> Sequence[Any]:
        """Returns what runs in place of ``layers``: layers, or groups of neighbours that are called as a layer is."""
        ...


class PenalisingOps(Protocol):
    """Additional method of ``Ops`` if the policy sets ``penalised_head``."""

    def take_penalised(self, logits: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """Runs ``Ops.sample`` for rows of temperature 0: the best id after penalties, bias and mask, and nothing
        else.
        """
        ...


class CrossAttentionOps(Protocol):
    """Additional methods of ``Ops`` for layers that attend to image rows (``TextConfig.cross_attention_layers``)."""

    gathers: bool
    """True if ``cross_attend`` needs the arena row numbers (``rows``)."""

    def cross_attend(
        self, q: Tensor, held: Tensor, rows: Tensor | None, images: CrossAttentionTensors, scale: float
    ) -> Tensor:
        """Computes attention [n, h, d] of q [n, h, d] over images whose keys and values are in the arena.

        Args:
            held: [arena rows, 2 x g x d], the columns of the arena with the keys and then the values of one layer.
            rows: int64 [units x length], rows of ``held``; None if not ``gathers``.
            images: as in ``cross_attend_rows``.
        """
        ...

    def cross_attend_rows(self, q: Tensor, k: Tensor, v: Tensor, images: CrossAttentionTensors, scale: float) -> Tensor:
        """Computes attention [n, h, d] of q [n, h, d] over k and v [units, length, g, d].

        A token attends to the first ``images.reach`` rows of each unit, as if each were repeated ``images.times``
        times. The result of a token that attends to no row may be any finite value.
        """
        ...


class DeltaNetWeights(NamedTuple):
    """Weights of a layer of gated DeltaNet besides its projections, for the H value heads of this rank."""

    conv: Tensor  # [channels, taps], of queries, keys and values
    decay: Tensor  # float32 [H], below 0
    shift: Tensor  # float32 [H]
    norm: Tensor  # [Dv]
    eps: float
    key_heads: int


class FusedDeltaOps(Protocol):
    """Additional method of ``Ops`` on devices that may compute gated DeltaNet between its projections in one call."""

    def delta_net(
        self, x: Tensor, gates: Tensor, w: DeltaNetWeights, held: RecurrentState, rows: RecurrentRows, attn: Attn
    ) -> Tensor | None:
        """Computes convolution, delta rule and gated norm, and updates the states of the rows.

        Args:
            x: [n, channels], queries, keys and values side by side.
            gates: [n, H * Dv + 2 H]: the gates of the norm, then for each head beta and what its decay is made of.

        Returns:
            [n, H * Dv]; None, and no state is changed, if the layer must call one op after the other.
        """
        ...


class RecurrentOps(Protocol):
    """Additional methods of ``Ops`` for layers with a recurrent state (gated DeltaNet, Mamba-2, short convolutions).

    n tokens; row r has the tokens from ``attn.row_start[r]`` on, ``rows.count[r]`` of them. Values of other tokens are
    padding and may be NaN: they change neither the results of real tokens nor a slot other than 0. The results of
    padding are finite.
    """

    def prepare_recurrent(self, rows: RecurrentRows, attn: Attn) -> RecurrentRows:
        """Computes once a launch what all recurrent layers share, from the launch's own inputs."""
        ...

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: RecurrentRows, attn: Attn,
        activation: str,
    ) -> Tensor:  # fmt: skip
        """Computes a depthwise causal convolution along the tokens of each row, in float32 and rounded once.

        Args:
            x: [n, C].
            weight: [C, K], whose last column multiplies the token itself.
            bias: [C] or None.
            state: [slots, K - 1, C] of x's dtype: the last K - 1 inputs of each slot, oldest first. Read at
                ``rows.source``, written at ``rows.slot``.
            activation: "silu", or "" for none.

        Returns:
            [n, C].
        """
        ...

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: RecurrentRows, attn: Attn
    ) -> Tensor:
        """Computes the gated delta rule (arXiv 2412.06464) in float32 along the tokens of each row.

        For each token, with S the state [Dk, Dv] of a head: S = exp(g) S; S = S + k (beta (v - S^T k))^T; the result is
        S^T q. q and k are divided by the root of their sum of squares plus 1e-6, and q by the root of Dk. Rows are
        computed in chunks of 64 tokens from their first on, a chunk of one token by the formula itself: a row that is
        cut at multiples of 64 gives the same bits in several launches.

        Args:
            q: [n, Hk, Dk]; head i of q and k serves Hv / Hk heads of v from i * Hv / Hk on.
            k: [n, Hk, Dk].
            v: [n, Hv, Dv].
            g: float32 [n, Hv], at most 0.
            beta: float32 [n, Hv], between 0 and 1.
            state: float32 [slots, Hv, Dk, Dv]. Read at ``rows.source``, written at ``rows.slot``.

        Returns:
            [n, Hv, Dv] of v's dtype.
        """
        ...

    def state_space(
        self, c: Tensor, b: Tensor, x: Tensor, g: Tensor, step: Tensor, state: Tensor, rows: RecurrentRows, attn: Attn
    ) -> Tensor:
        """Computes the state space of Mamba-2 (arXiv 2405.21060) in float32 along the tokens of each row.

        For each token, with S the state [Dk, Dv] of a head: S = exp(g) S + b (step x)^T; the result is S^T c. Chunks,
        rows and their bits are those of ``delta_rule``.

        Args:
            c: [n, Hk, Dk]; head i of b and c serves Hv / Hk heads of x from i * Hv / Hk on.
            b: [n, Hk, Dk].
            x: [n, Hv, Dv].
            g: float32 [n, Hv], at most 0.
            step: float32 [n, Hv], at least 0.
            state: float32 [slots, Hv, Dk, Dv]. Read at ``rows.source``, written at ``rows.slot``.

        Returns:
            [n, Hv, Dv] of x's dtype.
        """
        ...

    def gated_norm(self, y: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
        """Returns the RMS norm of each head of y [n, Hv, Dv], rounded to its dtype, times silu of the gate: [n, Hv Dv].

        Args:
            weight: [Dv].
            gate: [n, Hv Dv], which may be a slice of wider rows; the product is computed in float32.
        """
        ...


class LayersInHostMemory(Protocol):
    """Layers whose weights are in host memory; ``core.device.backend.Ops.layer`` prefetches them."""

    def make(self) -> None:
        """Allocates the device buffers that weights are copied to."""
        ...

    def loading(self, layer: Any, place: int, count: int) -> AbstractContextManager[None]:
        """Returns a context for loading layer ``place`` of ``count``: weights packed in it may go to host memory."""
        ...


class HostLayering(Protocol):
    """Additional attribute of a backend whose policy sets ``host_weights``."""

    host_layers: LayersInHostMemory


class Model(Protocol):
    """A model: one body for each stage, which takes only the stage's tensors."""

    config: ModelConfig

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads checkpoint tensors by their stored names, in any order; raises StartupError if one is missing."""
        ...

    def bind(self, persistent: Persistent) -> None:
        """Sets the persistent tensors that the bodies read and write."""
        ...

    def text(self, inputs: TextTensors) -> None:
        """Computes n tokens and stores their normed hidden states [n, hidden] in ``persistent.hidden[out_row]``."""
        ...

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes s packed slots and stores the parts of [s / cell] rows in ``persistent.arena``."""
        ...

    def head(self, inputs: HeadTensors, full: bool) -> HeadTensorsOut:
        """Samples from r hidden rows; ``full`` adds masks, penalties, filters and logprobs."""
        ...

    def masked_head(self, inputs: HeadTensors) -> HeadTensorsOut:
        """Returns the best id that the mask of each of r hidden rows allows.

        For devices whose policy sets ``masked_head``.
        """

    def penalised_head(self, inputs: HeadTensors) -> HeadTensorsOut:
        """Runs ``head`` for rows of temperature 0, without log-probabilities; for devices whose policy sets
        ``penalised_head``.
        """
        raise NotImplementedError("this model has no head for penalised rows of temperature 0")

    def drawn_head(self, inputs: HeadTensors) -> HeadTensorsOut:
        """Runs ``head`` without log-probabilities; for devices whose policy sets ``drawn_head``."""

    def score_top(self, count: int, inputs: HeadTensors) -> HeadTensorsOut:
        """Returns the log-probabilities of the targets of r hidden rows and of the ``count`` top ids.

        It samples nothing.
        """
        ...

    def pool(self, inputs: PoolTensors) -> PoolTensorsOut:
        """Sums hidden rows by group; with a class head, returns their scores instead."""
        ...

    def reset(self, inputs: ResetTensors) -> None:
        """Replaces the sampler state of r rows."""
        ...

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Arranges images in windows of WINDOW_SLOTS; the rest of the bucket's ``slots`` is padding."""
        ...

    def nbytes(self) -> int: ...


class VisionModel(Model, Protocol):
    """A model with a vision tower (``config.vision``): builds the inputs of VISION launches, and runs them.

    ``config.vision`` (core/vision_config.py) has the rest: ``slot``, the values of a slot and the slots of a
    cell; ``out_hidden``, the width of each part of a cell's row; ``deepstack``, the number of parts after the first;
    weights and costs. Part p of row r is row r x (1 + deepstack) + p of ``persistent.arena``.
    """

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Arranges items in windows of WINDOW_SLOTS, real slots first in each window, the slots of a cell adjacent.

        Padding writes to the sink row; ``slots`` is a multiple of WINDOW_SLOTS that holds all items.
        """
        ...

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes s packed slots and stores the parts of [s / cell] rows in ``persistent.arena``."""
        ...
