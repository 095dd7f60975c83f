"""The output of a pooling engine: sums of hidden rows, or the scores of a class head. Heads are kept in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.checkpoint.pooling_description import Pooling
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import Ops, PoolTensors, PoolTensorsOut
from trencadis.core.models.linear_and_embedding import scaled

INNER = {"relu": torch.relu, "tanh": torch.tanh}
"""Activations between the two linear layers of a head."""


class Pooler:
    """Sums rows by group, then applies a class head: one linear layer, or two with an activation in between."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.classes: Tensor | None = None  # float32 [classes, hidden]
        self.class_bias: Tensor | None = None  # float32 [classes]
        self.dense: Tensor | None = None  # float32 [hidden, hidden]
        self.dense_bias: Tensor | None = None  # float32 [hidden]
        self.inner, self.cap = "", 0.0

    def __call__(self, hidden: Tensor, inputs: PoolTensors) -> PoolTensorsOut:
        """Pools rows of ``hidden``.

        A group with a non-finite value gets a non-finite result, also with a class head.
        """
        rows = self.ops.gather_rows(hidden, inputs.hidden_row)
        if self.classes is None or (self.dense is None and self.class_bias is None):
            found = self.ops.pool(rows, inputs.group, self.classes)
            return PoolTensorsOut((found / self.cap).tanh() * self.cap if self.cap else found)
        sums = self.ops.pool(rows, inputs.group, None)
        if self.dense is not None:
            sums = INNER[self.inner](functional.linear(sums, self.dense, self.dense_bias))
        return PoolTensorsOut(functional.linear(sums, self.classes, self.class_bias))

    def load(self, source: WeightSource, pooling: Pooling, width: int) -> None:
        """Loads the class head that the checkpoint stores, for rows of ``width``."""
        self.classes, self.class_bias = _linear(source, "score", (pooling.classes, width), pooling.biased)
        if pooling.inner:
            self.inner = pooling.inner
            self.dense, self.dense_bias = _linear(source, "score_dense", (width, width), pooling.biased)

    def load_label_tokens(
        self, source: WeightSource, name: str, shape: tuple[int, int], tokens: tuple[int, ...], scale: float,
        cap: float = 0.0,
    ) -> None:  # fmt: skip
        """Uses the rows ``tokens`` of the output head ``name`` [shape], times ``scale``, as the class head.

        ``cap``: as ``TextConfig.logit_cap``.
        """
        self.cap = cap
        rows = [source.shard(f"{name}.weight", shape, 0, t, t + 1) for t in tokens]
        self.classes = scaled(torch.cat(rows).float(), scale)

    def nbytes(self) -> int:
        held = (self.classes, self.class_bias, self.dense, self.dense_bias)
        return sum(t.nbytes for t in held if t is not None)


def _linear(source: WeightSource, name: str, shape: tuple[int, int], biased: bool) -> tuple[Tensor, Tensor | None]:
    bias = source.take(f"{name}.bias", shape[:1]).float() if biased else None
    return source.take(f"{name}.weight", shape).float(), bias
