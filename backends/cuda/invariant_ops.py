"""Ops of a card that give a token the same bits whatever else is in its launch (``--batch-invariant``).

cuBLAS chooses a kernel, and with it an order of summation, by the number of rows: here rows are always multiplied in
full pieces of ``policy.INVARIANT_ROWS``. Attention of text has one kernel and one tile for every launch, since one run
may decode a token alone that another run computes in a mixed launch or a chunk; its keys are visited in spans that
begin at the row's first, and joined in their order by one program or by several. The other kernels compute one row at a
time anyway. This is slower, with equal results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.backends.cpu.batch_invariant import ProbedOps
from trencadis.backends.cuda.kernels import paged_attention
from trencadis.backends.cuda.kernels.attention_tensors import ItemAttn
from trencadis.backends.cuda.kernels.experts import grouped_gemm
from trencadis.backends.cuda.kernels.experts.grouped_gemm import StackedExperts
from trencadis.backends.cuda.ops import CudaOps
from trencadis.backends.cuda.policy import INVARIANT_ROWS as ROWS
from trencadis.core.backend import Attn, ExpertWeights, LayerKV, Weight


class InvariantCudaOps(ProbedOps, CudaOps):
    """Implements ``core.backend.Ops`` for a card so that a token gets the same bits in any launch."""

    whole_layers, alike = False, True
    shift, probes = 5, (1, 7, ROWS, 2 * ROWS + 40)

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        rows = len(x)
        if rows % ROWS:
            x = torch.cat([x, x.new_zeros(-rows % ROWS, x.shape[1])])
        parts = [super(InvariantCudaOps, self).linear(part, w) for part in torch.split(x, ROWS)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows]

    def experts(self, x: Tensor, scores: Tensor, w: ExpertWeights, top: int, normalise: bool, kind: str) -> Tensor:
        assert isinstance(w, StackedExperts)
        return grouped_gemm.run(x, scores, w, top, normalise, kind, alike=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float, window: int = 0) -> Tensor:
        assert isinstance(attn, ItemAttn)
        out, partial = q.new_empty(q.shape), paged_attention.partial(attn, q, kv, alike=True)
        paged_attention.attend_text(q, kv, attn, scale, out, partial, alike=True, window=window)
        return out
