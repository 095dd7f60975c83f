"""Ops that give a token the same bits whatever else is in the batch (``--batch-invariant``).

A matrix product may sum a row in another order when the number of rows changes, attention when the number of queries
does, and an elementwise function may differ between the vectorised middle and the end of a thread's part. Here own
products multiply if the CPU has them, else rows are padded to a multiple of ``policy.invariant_rows``. Attention runs
over tiles of queries at fixed positions of a row, and functions that are not correctly rounded get pieces too small to
be divided among threads. This is slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.backends.cpu.attention_plan import ChunkSpan, get_plan
from trencadis.backends.cpu.ops import CpuOps, PackedWeight, stored_at
from trencadis.backends.cpu.reference_ops import ReferenceOps, apply_activation
from trencadis.backends.cpu.shape_policy import INVARIANT_ROWS as ROWS
from trencadis.core.device.backend import Attn, LayerKV, Rotary, RotatedHeads, Weight
from trencadis.core.errors import StartupError
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.vision_config import WINDOW_SLOTS

TILE = 16
"""Queries of one attention tile: positions 16 i to 16 i + 15 of a row, present or not."""

FIXED_ROWS = 64
"""Rows of each product of a weight whose bits depend on the number of rows."""

GRAIN = 32768
"""Number of elements above which torch divides an elementwise function among threads."""

LANES = 64
"""A multiple of the number of elements that a vectorised function processes at a time."""

PROBES = (ROWS, 3 * ROWS, 64, 320)
"""Row counts with which a weight is tested before it is accepted."""


class ProbedOps(ReferenceOps):
    """Mixin that rejects weights whose product of a row depends on the other rows of the batch.

    Products of ``probes`` rows, from row ``shift`` on, are compared with the same rows of a larger product.
    """

    shift: int
    probes: Sequence[int]

    def __init__(self) -> None:
        self._probed: set[tuple[int, int, torch.dtype]] = set()

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        """Packs a weight; raises StartupError if the device's library gives a row other bits in another product."""
        packed = super().pack_weight(weight, bias)
        self._probe_once(packed, weight.dtype, weight.dtype, weight.device)
        return packed

    def pack_quantised(self, q: QTensor, bias: Tensor | None = None) -> Weight:
        """Packs a quantised weight; raises StartupError as ``pack_weight`` does."""
        packed = super().pack_quantised(q, bias)
        self._probe_once(packed, q.data.dtype, q.dtype, q.data.device)
        return packed

    def _probe_once(self, packed: Weight, held: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
        key = (packed.out_features, packed.in_features, held)
        if key not in self._probed:
            self._probed.add(key)
            self._probe(packed, held, dtype, device)

    def _probe(self, packed: Weight, held: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2 * max(self.probes), packed.in_features, generator=generator).to(device, dtype)
        with torch.inference_mode():
            whole = self.linear(x, packed)
            for rows in self.probes:
                part = slice(self.shift, self.shift + rows)
                if not torch.equal(self.linear(x[part], packed), whole[part]):
                    raise StartupError(
                        f"--batch-invariant: on this device a {held} product of {packed.in_features} x "
                        f"{packed.out_features} gives other bits for {rows} rows; try another --dtype"
                    )


class InvariantOps(ProbedOps, CpuOps):
    """Implements ``core.device.backend.Ops`` for CPU tensors so that a token gets the same bits in any batch.

    Own products give each row its own sums. If oneDNN multiplies, rows are padded to a multiple of ``ROWS``; a
    weight for which that is not enough (oneDNN's products on AMX tiles) is multiplied in calls of ``FIXED_ROWS`` rows.
    """

    shift, probes = ROWS, PROBES
    every_row = True

    def __init__(self) -> None:
        super().__init__()
        self._fixed: set[tuple[int, int]] = set()

    def _probe(self, packed: Weight, held: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
        try:
            super()._probe(packed, held, dtype, device)
        except StartupError:
            if not isinstance(packed, PackedWeight) or packed.panels is not None:
                raise
            self._fixed.add((packed.out_features, packed.in_features))
            super()._probe(packed, held, dtype, device)

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        if isinstance(w, PackedWeight) and w.panels is not None:
            return super().linear(x.contiguous(), w)
        if len(x) and (w.out_features, w.in_features) in self._fixed:
            parts = [super(InvariantOps, self).linear(_filled(p, FIXED_ROWS), w) for p in _pieces(x, FIXED_ROWS)]
            return torch.cat(parts)[: len(x)]
        return super().linear(_filled(x, ROWS), w)[: len(x)]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        few = max(GRAIN // gate.shape[-1] - 1, 1)
        return torch.cat([functional.silu(part) for part in _pieces(gate, few)]).mul_(up)

    def act(self, x: Tensor, kind: str) -> Tensor:
        """Applies an activation to rows padded to whole vectors, so that no element falls into a thread's remainder
        loop.
        """
        width = x.shape[-1]
        whole = functional.pad(x, (0, -width % LANES))
        few = max(GRAIN // whole.shape[-1] - 1, 1)
        made = torch.cat([apply_activation(part, kind) for part in _pieces(whole, few)])
        return made[:, :width].contiguous()

    def rotary(self, positions: Tensor, inv_freq: Tensor, axis: Tensor) -> Rotary:
        angle = positions.float().index_select(0, axis).t() * inv_freq
        parts = [functional.pad(part, (0, 0, 0, TILE - len(part))) for part in _pieces(angle, TILE)]
        cos, sin = (torch.cat([f(part) for part in parts])[: len(angle)] for f in (torch.cos, torch.sin))
        return Rotary(torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1))

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, kv: LayerKV, attn: Attn) -> RotatedHeads:
        k = _rotate(k, rotary)
        self._store(kv, k, v, attn.slot_map)
        return RotatedHeads(_rotate(q, rotary), k, v)

    def rope_vision(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        return _rotate(q, rotary), _rotate(k, rotary)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float, window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        plan = get_plan(attn, kv.k.shape[1], grouped=False, window=window)
        out = torch.zeros(q.shape, dtype=q.dtype)
        for span in plan.spans:
            stored = stored_at(kv, span.where, q.dtype)
            _attend_row(q[span.start : span.stop], *stored, span, scale, window, out[span.start : span.stop], sinks)
        return out

    def _torch_windows(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, scale: float) -> Tensor:
        """Computes windows always masked, so that padding in another window of the launch cannot select another code
        path.
        """
        whole = torch.full((len(q) // WINDOW_SLOTS,), WINDOW_SLOTS, dtype=torch.int32) if real is None else real
        return super()._torch_windows(q, k, v, whole, scale)

    def _sdpa_windows(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Computes window by window: on AMX, whether torch's attention packs keys depends on the number of windows."""
        assert mask is not None
        alone = super()._sdpa_windows
        each = [alone(q[i : i + 1], k[i : i + 1], v[i : i + 1], mask[i : i + 1], scale) for i in range(len(q))]
        return torch.cat(each) if each else q.transpose(1, 2)


def _filled(x: Tensor, rows: int) -> Tensor:
    """Pads ``x`` with rows of zeros at the end, up to a multiple of ``rows``."""
    surplus = -len(x) % rows
    return functional.pad(x, (0, 0, 0, surplus)) if surplus else x


def _pieces(x: Tensor, rows: int) -> list[Tensor]:
    return [x[start : start + rows] for start in range(0, len(x), rows)]


def _rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Applies rotary in single products, sums and differences, which round the same wherever they are computed."""
    half = x.shape[-1] // 2
    cos, sin = rotary.cos.to(x.dtype)[:, None], rotary.sin.to(x.dtype)[:, None]
    first, second = x[..., :half], x[..., half:]
    rotated = torch.cat([second * sin[..., :half], first * sin[..., half:]], dim=-1)
    out = x * cos
    out[..., :half] -= rotated[..., :half]
    out[..., half:] += rotated[..., half:]
    return out


def _attend_row(
    q: Tensor, k: Tensor, v: Tensor, span: ChunkSpan, scale: float, window: int, out: Tensor, sinks: Tensor | None
) -> None:
    """Computes attention of one row's tokens [n, h, d], in tiles at fixed positions, over k and v, into ``out``.

    Tile i sees (i + 1) * TILE keys, stored or not, without whole tiles before the window; missing keys are zeros and
    masked. If tokens see further than their own position, every tile sees the row's end.
    """
    n, heads, d = q.shape
    groups, context, stop = k.shape[1], span.context, span.context + n
    before = max(context // TILE * TILE - window + 1, 0) // TILE * TILE if window else 0
    keys, values = (_pad_to_tiles(t, span.first - before, stop - before) for t in (k, v))
    ends = None if span.upto is None else functional.pad(span.upto, (0, TILE))
    for begin in range(context // TILE * TILE, stop, TILE):
        end, first, last = begin + TILE, max(begin, context), min(begin + TILE, stop)
        queries = q.new_zeros(TILE, heads, d)
        queries[first - begin : last - begin] = q[first - context : last - context]
        position = upto = torch.arange(begin, begin + TILE)[:, None]
        if ends is not None:
            end = before + len(keys)
            upto = position.clone()
            upto[first - begin : last - begin, 0] = ends[first - context : last - context]
        low = max(begin - window + 1, 0) // TILE * TILE if window else 0
        key = torch.arange(low, end)
        mask = key <= upto
        if window:
            mask &= key > position - window
        shared = queries.view(TILE, groups, heads // groups, d).permute(1, 2, 0, 3)
        ks, vs = (
            t[low - before : end - before].transpose(0, 1)[:, None].expand(-1, heads // groups, -1, -1)
            for t in (keys, values)
        )
        if sinks is None:
            part = functional.scaled_dot_product_attention(shared, ks, vs, attn_mask=mask[None, None], scale=scale)
        else:
            part = _attend_with_sinks(shared, ks, vs, mask, scale, sinks.view(groups, -1, 1, 1))
        part = part.permute(2, 0, 1, 3).reshape(TILE, heads, d)
        out[first - context : last - context] = part[first - begin : last - begin]


def _attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """Computes attention [g, h / g, TILE, d] with a sink for each head, [g, h / g, 1, 1]; k and v are expanded."""
    scores = (q.float() @ k.float().transpose(2, 3) * scale).masked_fill(~mask, float("-inf"))
    joined = torch.cat([scores, sinks.expand(-1, -1, TILE, -1)], dim=-1)
    return (joined.softmax(-1)[..., :-1] @ v.float()).to(q.dtype)


def _pad_to_tiles(stored: Tensor, start: int, stop: int) -> Tensor:
    """Returns the stored tokens from ``start`` on, with zeros around them: [ceil(stop / TILE) * TILE, g, d]."""
    out = stored.new_zeros(-(-stop // TILE) * TILE, *stored.shape[1:])
    out[start:stop] = stored
    return out
