"""Attention inputs that are the same in every layer, computed once a launch; in compile mode by their own region."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trencadis.backends.hpu.attention import (
    block_decode_attention,
    prefill_attention,
    sliding_window_attention,
    vision_tower_attention,
)
from trencadis.backends.hpu.attention.attention_input_types import (
    AttentionKernels,
    BlockDecodeAttn,
    ContextAttn,
    FreshAttn,
    MaskedSegments,
)
from trencadis.core.device.backend import Attn, Segments


class DecodeForm(NamedTuple):
    """What a DECODE launch's inputs depend on besides their values.

    Args:
        groups: KV heads of each window's layers.
        dtype: of queries, keys and values as they are multiplied.
        fp32: scores are float32.
    """

    heads: int
    groups: tuple[int, ...]
    dtype: torch.dtype
    fp32: bool


class AttnPreparation:
    """Computes a launch's attention inputs for each distinct window of a model's layers.

    Its attributes are the key of its region, so it holds numbers and kernels and no tensors.

    Args:
        size: tokens of a block.
        slice_tokens: stored tokens that a CONTEXT launch holds at a time.
    """

    def __init__(
        self, form: DecodeForm, windows: tuple[int, ...], size: int, slice_tokens: int, kernels: AttentionKernels
    ) -> None:
        self.form, self.windows, self.size, self.slice_tokens = form, windows, size, slice_tokens
        self.kernels = kernels

    def needed(self, attn: Attn) -> bool:
        """Returns True if there is anything to compute: FRESH that causality alone describes has no masks."""
        if not isinstance(attn, FreshAttn):
            return isinstance(attn, (BlockDecodeAttn, ContextAttn))
        count = attn.slot.shape[0] // attn.length.shape[0]
        return attn.upto is not None or any(0 < window < count for window in self.windows)

    def compute(self, attn: Any) -> tuple[Any, ...]:
        """Returns the inputs for each window, without the tensors of ``attn`` that they hold unchanged: these would be
        outputs of a region that are its inputs.
        """
        each = zip(self.windows, self.form.groups, strict=True)
        return tuple(detach_inputs(self._compute_for(attn, window, groups)) for window, groups in each)

    def _compute_for(self, attn: Any, window: int, groups: int) -> Any:
        if isinstance(attn, BlockDecodeAttn):  # no match statement: not every Dynamo since torch 2.6 traces its classes
            form = self.form
            return block_decode_attention.prepare_decode(
                attn, form.heads, groups, self.size, form.fp32, form.dtype, window
            )
        if isinstance(attn, ContextAttn):
            if window:
                return sliding_window_attention.prepare_context(attn, window, self.size, self.kernels)
            return prefill_attention.prepare_context(attn, self.size, self.slice_tokens)
        return sliding_window_attention.prepare_fresh(attn, window, self.kernels)

    def attach(self, attn: Any, computed: tuple[Any, ...]) -> Any:
        """Returns the attention inputs of the layers: what ``compute`` returned, with the tensors of ``attn``."""
        each = tuple(attach_inputs(one, attn) for one in computed)
        return each[0] if len(each) == 1 else sliding_window_attention.PerWindow(attn.slot, self.windows, each)


UNCHANGED = ("slot", "block_list", "length", "upto")
"""Fields of prepared inputs that are tensors of the launch's inputs."""


def detach_inputs(computed: Any) -> Any:
    """Returns ``computed`` with None in place of the launch's own tensors."""
    return computed._replace(**{name: None for name in UNCHANGED if name in computed._fields})


def attach_inputs(computed: Any, attn: Any) -> Any:
    """Returns ``computed`` with the launch's own tensors in their places."""
    return computed._replace(**{name: getattr(attn, name) for name in UNCHANGED if name in computed._fields})


class SegmentPreparation:
    """Builds the masks of a VISION launch."""

    def compute(self, seg: Segments, merged: int = 1) -> MaskedSegments:
        """Returns the masks of layers with a row for ``merged`` slots, without the tensors of ``seg``."""
        few = seg if merged == 1 else seg._replace(real=seg.real // merged)
        return vision_tower_attention.prepare_segments(few)._replace(segment=None, real=None)  # type: ignore[arg-type]

    def attach(self, seg: Segments, computed: MaskedSegments) -> MaskedSegments:
        """Returns the masks with the tensors of ``seg``."""
        return computed._replace(segment=seg.segment, real=seg.real)
