"""Types of the inputs of attention for each stage, and of what is computed from them once for all layers of a launch.

Letters: R rows, T tokens of a row, B listed blocks of b tokens, h query heads, g KV heads, d head size, W windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.backends.hpu.habana_bridge import AttentionPart


class FreshAttn(NamedTuple):
    """FRESH: R rows of T tokens without earlier tokens in the cache."""

    slot: Tensor  # int64 [R x T] cache slot that stores the token; one of SINK for padding
    length: Tensor  # int32 [R] real tokens of each row
    upto: Tensor | None = None  # int32 [R x T] as in ``core.device.backend.Attn``; for padding its own position


class ContextAttn(NamedTuple):
    """CONTEXT: one row of T tokens after ``context`` stored ones."""

    slot: Tensor  # int64 [T]
    block_list: Tensor  # int32 [B] blocks of the stored tokens, in order; ZERO beyond them
    context: Tensor  # int32 [1] stored tokens
    upto: Tensor | None = None  # int32 [T] as in ``core.device.backend.Attn``; for padding its own position


class BlockDecodeAttn(NamedTuple):
    """DECODE: one token of each of R rows. VERIFY: T tokens of each, so that ``usage`` and ``rest`` are [B, T]."""

    slot: Tensor  # int64 [R x T]
    block_list: Tensor  # int32 [B] blocks of all rows, one after the other; ZERO beyond them
    group: Tensor  # int32 [B] row that the block belongs to; R beyond them
    usage: Tensor  # int32 [B] tokens of the block that the row sees, at least 1; [B, T]: that each token sees
    rest: Tensor | None = None  # int32 [B] tokens of the row from the block's first one on; for models with windows


class JoinedContext(NamedTuple):
    """A short chunk after a short context: all keys side by side."""

    slot: Tensor
    block_list: Tensor
    visible: Tensor  # bool [1, 1, T, B x b + T]


class SlicedContext(NamedTuple):
    """A long chunk, or one after a long context: slices of blocks, one after the other, then the chunk itself."""

    slot: Tensor
    block_list: Tensor  # int32 [B]
    step: int  # blocks of a slice
    visible: tuple[Tensor, ...]  # bool [1, 1, 1, tokens of the slice] each; the first token always
    weight: tuple[Tensor, ...]  # float32 [1] each, added to a slice's logarithm: 0, or lowest where it holds nothing
    own: Tensor | None = None  # bool [1, 1, T, T]: what the chunk's tokens see of each other; None: those before them


class SharedDecode(NamedTuple):
    """DECODE or VERIFY with everything that does not depend on a layer's values. ``x`` is the type of scores.

    In VERIFY, h counts the T x h queries of a row: those of a KV head together, token by token.
    """

    slot: Tensor
    block_list: Tensor
    owner: Tensor  # int32 [B] row whose query attends to the block; beyond the list: the last row
    group: Tensor  # int64 [B] as in BlockDecodeAttn
    unlisted: Tensor  # int32 [B] as ``group``, but -1 beyond the list, as the fused adjustment expects
    bias: Tensor  # x [B, 1, b], or [B, 1, T, 1, b]: 0 where the token is visible, else lowest
    mapping: Tensor  # x [R, B]: 1 where the block is the row's
    spread_query: Tensor  # [h, g, 1] of the cache's type: 1 where the head reads the KV head
    spread_weight: Tensor  # [h, 1, g] the same


class MaskedSegments(NamedTuple):
    """A packed VISION launch: ``core.device.backend.Segments``, and masks that all layers share."""

    segment: Tensor  # int32 [W]
    real: Tensor  # int32 [W]
    visible: Tensor  # bool [W, 1, 1, 64]: the window's real slots
    image: Tensor  # int32 [W x 64] image of each slot
    key: Tensor  # int32 [W x 64] the same, but -1 where the slot is not real
    solid: Tensor | None = None  # bool [W x 64] slots outside of padding windows; None: there are none


class AttentionKernels(NamedTuple):
    """The fused symbols that attention may use; None where plain operations take their place.

    They are fields of ``habana_bridge.Bridge``.
    """

    sdpa: Callable[..., Tensor] | None = None
    parts: Callable[..., AttentionPart] | None = None
    exact: bool = False
    """Scores are products of float32 where the card has no product of bfloat16 into float32."""
    decode_parts: bool = False
    """DECODE attends to each block by ``parts``, which reads keys and values once."""
    product: Callable[[Tensor, Tensor], Tensor] | None = None
    adjustment: Callable[..., Tensor] | None = None
    to_fp8: Callable[[Tensor], Tensor] | None = None
    from_fp8: Callable[[Tensor, torch.dtype], Tensor] | None = None
    sinks: Tensor | None = None
    """float32 [h]: a score of each head that counts in the softmax and has no value (``Ops.attend``)."""
