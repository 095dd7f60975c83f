"""The start of text launches on every pipeline stage but the first."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.backend import Ops, Rotary
from trencadis.core.checkpoint.model_config import POST, TextConfig
from trencadis.core.layers.rotary_embedding import TextRotary


class StageEntry:
    """The start of a text launch on every stage but the first, instead of ``core.models.decoder.DecoderEntry``.

    The previous stage sends the residual stream as one tensor. Later stages need no token ids, so ``tokens`` holds each
    token's row of that tensor, counted from 1; padding uses row 0, which stays zero.
    """

    def __init__(self, ops: Ops, c: TextConfig, device: torch.device) -> None:
        self.ops, self.config = ops, c
        self.rotary = TextRotary(c, device)

    def __call__(
        self, tokens: Tensor, positions: Tensor, stream: Tensor
    ) -> tuple[Tensor, Tensor | None, Rotary, Rotary | None]:
        """Returns (rows of ``stream`` [n, hidden], their residual or None, rotary factors, those of layers with a
        window or None).

        Args:
            tokens: int32 [n]; ``positions``: int32 [3, n].
            stream: [tokens of the largest step + 1, hidden].
        """
        ops = self.ops
        x = ops.gather_rows(stream, tokens.long())
        residual = ops.first_residual(x) if self.config.norm_placement != POST else None
        return x, residual, self.rotary(ops, positions), self.rotary.of_windows(ops, positions)
