"""What the runner asks of a model: bodies over tensors, and the tensors that persist between launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trencadis.core.backend import (
    HeadTensors,
    HeadTensorsOut,
    LayerKV,
    ResetTensors,
    SamplerState,
    TextTensors,
    VisionTensors,
)
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.step import Encode, VisionInputs


@dataclass(slots=True)
class Persistent:
    """Tensors that outlive a launch. Bodies read and write them as attributes, never as inputs."""

    kv: list[LayerKV]
    hidden: Tensor  # [max step tokens + 1, hidden]; row 0 takes the padding
    arena: Tensor  # [arena rows, hidden]; rows 0 (ZERO) and 1 (SINK) are reserved
    state: SamplerState


class Model(Protocol):
    """A checkpoint's bodies. Each takes the stage's tensors and nothing else."""

    config: ModelConfig

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes checkpoint tensors by their stored names, in any order; raises StartupError on a missing one."""
        ...

    def bind(self, persistent: Persistent) -> None: ...

    def text(self, inputs: TextTensors) -> None:
        """Computes the tokens and leaves their final, normed hidden states in ``hidden[out_row]``."""
        ...

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed windows into ``arena[rows]``."""
        ...

    def head(self, inputs: HeadTensors, full: bool) -> HeadTensorsOut: ...

    def reset(self, inputs: ResetTensors) -> None: ...

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Lays images out in windows of 64 slots; ``slots`` is the bucket, the rest is inert padding."""
        ...

    def nbytes(self) -> int: ...
