"""8-bit KV cache codes in torch: x = code x scale; kept values of keys are stored unquantised."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.device.backend import LayerKV, slots_at
from trencadis.core.device.launch_tensors import put_slots
from trencadis.core.kv_cache_format import CHECKPOINT_TOPS, FP8, INT8, LEAST_SCALES, TOPS, KVFormat

MOST = 65504.0
"""Largest float16."""


def codes_of(cache: Tensor) -> str:
    """Returns ``int8`` or ``fp8`` from the dtype of the codes; fp8 is stored as uint8 if a device lacks the dtype."""
    return INT8 if cache.dtype == torch.int8 else FP8


def kept_type(dtype: torch.dtype) -> torch.dtype:
    """Returns the 16-bit dtype of kept values for an engine of ``dtype``."""
    return dtype if dtype.itemsize == 2 else torch.float16


def scale_for_codes(x: Tensor, name: str, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns (float32 [..., d] in units of the scale, within the codes' range; float16 [...] scales).

    Args:
        x: [..., d].
        static: float32 [], a fixed scale for all values.
    """
    wide = x.float()
    if static is None:
        scale = (wide.abs().amax(-1) / TOPS[name]).clamp(LEAST_SCALES[name], MOST).half()
    else:
        scale = static.half().expand(x.shape[:-1])
    return (wide / scale.float()[..., None]).clamp(-TOPS[name], TOPS[name]), scale


def encode(units: Tensor, cache: Tensor) -> Tensor:
    """Rounds ``units`` to the nearest codes, in the dtype of ``cache``."""
    if cache.dtype == torch.int8:
        return units.round().to(torch.int8)
    return units.to(torch.float8_e4m3fn).view(cache.dtype)


def values(codes: Tensor) -> Tensor:
    """Converts codes to float32 values (without scales)."""
    return codes.float() if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn).float()


def split(k: Tensor, kv: LayerKV) -> tuple[Tensor, Tensor | None]:
    """Returns keys [n, g, d] with kept values set to zero, and the kept values [n, g, kept] or None."""
    if kv.kept is None or kv.pairs is None:
        return k, None
    kept_at = kv.pairs.long().expand(k.shape[0], -1, -1)
    limit = torch.finfo(kv.kept.dtype).max
    return k.scatter(2, kept_at, 0.0), k.gather(2, kept_at).clamp(-limit, limit).to(kv.kept.dtype)


def store(k: Tensor, v: Tensor, kv: LayerKV, slot: Tensor) -> None:
    """Stores k and v [n, g, d] at slots int64 [n] of a cache with flat blocks or not."""
    assert kv.k_scale is not None and kv.v_scale is not None
    rest, kept = split(k, kv)
    if kept is not None and kv.kept is not None:
        put_slots(kv.kept, kept, slot)
    statics = (None, None) if kv.static is None else kv.static.unbind()
    for x, codes, scales, static in zip((rest, v), kv[:2], (kv.k_scale, kv.v_scale), statics, strict=True):
        units, scale = scale_for_codes(x, codes_of(codes), static)
        put_slots(codes, encode(units, codes), slot)
        put_slots(scales, scale, slot)


def read_slots(kv: LayerKV, where: slice | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns keys and values [L, g, d] of ``dtype`` at slots ``where`` of a cache with blocks."""
    assert kv.k_scale is not None and kv.v_scale is not None
    found = []
    for codes, scales in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
        wide = values(slots_at(codes, where)).mul_(slots_at(scales, where).float()[..., None])
        found.append(wide.to(dtype))
    if kv.kept is not None and kv.pairs is not None:
        kept = slots_at(kv.kept, where).to(dtype)
        found[0].scatter_(2, kv.pairs.long().expand(kept.shape[0], -1, -1), kept)
    return found[0], found[1]


def pairs_of(bias: Tensor, kept: int) -> Tensor:
    """Returns int32 [g, kept]: the values of each KV head that stay in 16 bits, selected by the bias [g, d] of its
    keys.

    A rotary pair is values i and i + d / 2. Rotation preserves a pair's length, so pairs are ranked by length.
    """
    half = bias.shape[1] // 2
    length = bias.float()[:, :half].square() + bias.float()[:, half:].square()
    first = length.topk(kept // 2, dim=1).indices.sort(1).values
    return torch.cat([first, first + half], 1).int()


def static_of(form: KVFormat, k_scale: float, v_scale: float) -> Tensor:
    """Returns float32 [2]: scales of keys and values from a checkpoint's, whose codes may have a larger range."""
    return torch.tensor([k_scale, v_scale]) * (CHECKPOINT_TOPS[form.name] / TOPS[form.name])
