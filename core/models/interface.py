"""The interface of models: bodies over tensors, and the tensors that persist between launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from trencadis.core.backend import (
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
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.launches.launch_tensors import CrossAttentionTensors
from trencadis.core.step import Encode, VisionInputs


@dataclass(slots=True)
class Persistent:
    """Tensors that persist between launches. Bodies read and write them as attributes, never as inputs."""

    kv: list[LayerKV]
    hidden: Tensor  # [max step tokens + 1, hidden]; row 0 is the sink of padding. What a stage sends starts at row 1
    arena: Tensor  # [arena rows x ModelConfig.row_parts, width]; rows 0 (ZERO) and 1 (SINK) are reserved
    state: SamplerState
    stream: Tensor | None = None  # as ``hidden``, from row 1 on what the stage before sent; None on the first stage


class MaskingOps(Protocol):
    """What ``Ops`` have besides where the policy says ``masked_head``."""

    def mask(self, logits: Tensor, head: HeadTensors) -> Tensor:
        """Logits [r, V] in which what a row's mask forbids has the lowest value; it may write to ``logits``."""
        ...


class BestOps(Protocol):
    """What ``Ops`` have besides where the policy says ``best_head``: the best outputs of a product, and no logits."""

    def best_outputs(self, x: Tensor, w: Weight, outputs: int, scale: float) -> Tensor | None:
        """int64 [n]: a code of the best of the first ``outputs`` outputs of each row x [n, in]; None: by logits.

        The larger code is the better output. Its low 32 bits are 2^31 - 1 less the output; the high ones are the
        output's value times ``scale`` in an order of integers. Whether it is None depends on the weight alone.
        """
        ...

    def take(self, token: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """The greedy variant of ``Ops.sample`` with the ids int64 [n] that it found."""
        ...


class DrawingOps(Protocol):
    """What ``Ops`` have besides where the policy says ``drawn_head``."""

    def draw(self, logits: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """The full variant of ``Ops.sample`` without log-probabilities, ranks and best ids."""
        ...


class CrossAttentionOps(Protocol):
    """What ``Ops`` have besides where layers attend to rows of images (``TextConfig.cross_attention_layers``)."""

    gathers: bool
    """Whether ``cross_attend`` reads rows of the arena by their numbers."""

    def cross_attend(
        self, q: Tensor, held: Tensor, rows: Tensor | None, images: CrossAttentionTensors, scale: float
    ) -> Tensor:
        """Attention [n, h, d] of q [n, h, d] over images whose keys and values lie in the arena.

        Args:
            held: [arena rows, 2 x g x d] keys of one layer, then its values: columns of the arena.
            rows: int64 [units x length] of ``held``; None where this does not gather.
            images: as in ``cross_attend_rows``.
        """
        ...

    def cross_attend_rows(self, q: Tensor, k: Tensor, v: Tensor, images: CrossAttentionTensors, scale: float) -> Tensor:
        """Attention [n, h, d] of q [n, h, d] over k and v [units, length, g, d].

        A token attends to the first ``images.reach`` rows of each unit, as if each were repeated ``images.times``
        times; one that attends to none gives anything finite.
        """
        ...


class LayersInHostMemory(Protocol):
    """Layers whose weights lie in host memory; ``core.backend.Ops.layer`` prefetches them."""

    def make(self) -> None:
        """Makes the buffers that weights arrive in."""
        ...

    def loading(self, layer: Any, place: int, count: int) -> AbstractContextManager[None]:
        """Around the loading of layer ``place`` of ``count``: host memory takes what one of these packs."""
        ...


class HostLayering(Protocol):
    """What a backend has besides where its policy says ``host_weights``."""

    host_layers: LayersInHostMemory


class Model(Protocol):
    """A model: one body for each stage, which takes the stage's tensors and nothing else."""

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
        """The best id that the mask of each of r hidden rows allows; for devices whose policy says ``masked_head``."""

    def drawn_head(self, inputs: HeadTensors) -> HeadTensorsOut:
        """``head`` without log-probabilities; for devices whose policy says ``drawn_head``."""

    def pool(self, inputs: PoolTensors) -> PoolTensorsOut:
        """Sums hidden rows by group; a class head gives their scores instead."""
        ...

    def reset(self, inputs: ResetTensors) -> None:
        """Replaces the sampler state of r slots."""
        ...

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Lays images out in windows of WINDOW_SLOTS; the rest of the bucket's ``slots`` is inert padding."""
        ...

    def nbytes(self) -> int: ...


class VisionModel(Model, Protocol):
    """A model whose ``config.vision`` states a tower: what a VISION launch is made of, and its body.

    ``config.vision`` (core/checkpoint/vision_config.py) has the rest: ``slot``, values of a slot and slots of a cell;
    ``out_hidden``, the width of each part of a cell's row, and ``deep``, parts behind the first; weights and costs.
    Part p of row r is row r x (1 + deep) + p of ``persistent.arena``.
    """

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Lays items out in windows of WINDOW_SLOTS, real slots first in each, a cell's slots beside each other.

        Padding writes to the sink row; ``slots`` is a multiple of WINDOW_SLOTS that holds all items.
        """
        ...

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes s packed slots and stores the parts of [s / cell] rows in ``persistent.arena``."""
        ...
