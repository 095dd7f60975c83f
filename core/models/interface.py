"""The interface of models: bodies over tensors, and the tensors that persist between launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.device.backend import (
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
from trencadis.core.device.launch_tensors import CrossAttentionTensors
from trencadis.core.step import Encode, VisionInputs


@dataclass(slots=True)
class Persistent:
    """Tensors that persist between launches. Bodies read and write them as attributes, never as inputs."""

    kv: list[LayerKV]
    hidden: Tensor  # [max step tokens + 1, hidden]; row 0 is the padding sink, rows to send start at row 1
    arena: Tensor  # [arena rows x ModelConfig.row_parts, width]; rows 0 (ZERO) and 1 (SINK) are reserved
    state: SamplerState
    stream: Tensor | None = None  # like ``hidden``: received rows, from row 1 on; None on the first stage
    taps: Tensor | None = None  # [like ``hidden``, hidden of each tapped layer]: residual streams, side by side


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
