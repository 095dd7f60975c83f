"""Where a pipeline stage takes over from the one before: the start of its text launches."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.backend import Ops, Rotary
from trencadis.core.checkpoint.model_config import POST, TextConfig
from trencadis.core.layers.rotary_embedding import TextRotary


class StageEntry:
    """The start of a text launch on every stage but the first, in place of ``core.models.decoder.DecoderEntry``.

    The stage before sends the residual stream as one tensor. A later one needs no ids, so that ``tokens`` say which of
    its rows each token is, from 1; padding takes row 0, which stays zero.
    """

    def __init__(self, ops: Ops, c: TextConfig, device: torch.device) -> None:
        self.ops, self.config = ops, c
        self.rotary = TextRotary(c, device)

    def __call__(
        self, tokens: Tensor, positions: Tensor, stream: Tensor
    ) -> tuple[Tensor, Tensor | None, Rotary, Rotary | None]:
        """([n, hidden] of ``stream``, what it is added to, rotary factors, those of layers with a window or None).

        Args:
            tokens: int32 [n]; ``positions``: int32 [3, n].
            stream: [tokens of the largest step + 1, hidden].
        """
        ops = self.ops
        x = ops.gather_rows(stream, tokens.long())
        residual = ops.first_residual(x) if self.config.norm_placement != POST else None
        return x, residual, self.rotary(ops, positions), self.rotary.of_windows(ops, positions)
