"""Host arrays of one launch, as ranks build them from a Step (``core/launches/host_inputs.py``); backends pad them.

Torch-free; arrays are numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.core.cross_attention_inputs import CrossAttentionInputs
from trencadis.core.step import Float32, Int32, UInt8


@dataclass(slots=True)
class StepInputs:
    """Host arrays of one text launch, unpadded; n tokens, r rows."""

    tokens: Int32  # [n]
    from_slot: Int32  # [n] 0: the id itself; s: the token last sampled in slot s
    positions: Int32  # [3, n]
    image_row: Int32  # [n] 0: the token's own embedding
    out_row: Int32  # [n] row of the persistent hidden tensor, from 1
    row_start: Int32  # [r + 1]; fill() repeats the last value for padding
    context: Int32  # [r]
    blocks: Int32  # [r, width]
    slot: Int32  # [r]
    adapter: Int32  # [r] 0: none
    table: Int32 | None = None
    """[more than r, width]: ``blocks``, then ZERO blocks.

    The next Step changes it, so launches that run later must copy it.
    """
    last: Int32 | None = None  # [r] block of each row's token, if each row has one token; None: see ``blocks``
    upto: Int32 | None = None  # [n] ``Attn.upto``; None: each token's own position
    cross_attention: CrossAttentionInputs | None = None  # None: no token attends to an image
    states: Int32 | None = None  # [2, r] ``StateSlots`` of each row; None: the rows have no recurrent state


@dataclass(slots=True)
class HeadInputs:
    """Host arrays of one SAMPLE launch over r rows."""

    hidden_row: Int32  # [r] rows of the persistent hidden tensor
    slot: Int32  # [r] 0: the sink
    temperature: Float32  # [r] 0: argmax
    top_k: Int32  # [r] 0: off
    top_p: Float32  # [r]
    min_p: Float32  # [r]
    presence: Float32  # [r]
    frequency: Float32  # [r]
    repetition: Float32  # [r]
    uniform: Float32  # [r]
    target: Int32  # [r] below 0: sample (NO_LOGPROB: without log-probabilities); else the id to score
    mask_row: Int32  # [r] row of ``masks``; 0: everything allowed
    masks: UInt8  # [m, ceil(vocabulary / 8)] little bit order, row 0 all ones
    place: Int32 | None = None  # [r] number of drafts before the row; the rows of one sequence follow each other
    ahead: Int32 | None = None  # [r, k] these drafts, then -1; None, like ``place``: no penalty depends on drafts


@dataclass(slots=True)
class VisionInputs:
    """Host arrays of one VISION launch: s slots in windows of WINDOW_SLOTS; real patches come first in each window."""

    pixels: UInt8  # [s, values of a slot]
    position: Int32  # [s, 2] patch row and column inside its image, or other data that the tower defines
    segment: Int32  # [s / WINDOW_SLOTS] image number of each window, ascending
    count: Int32  # [s / WINDOW_SLOTS] real patches of each window
    rows: Int32  # [s / cell] arena row of each cell of slots; padding goes to the sink row
    position_rows: Int32 | None = None  # [s, near] rows of the position table; None: no interpolation
    position_weights: Float32 | None = None  # [s, near] weights of these rows; 0 in padding
    padding_window: Int32 | None = None  # [s / WINDOW_SLOTS] ``Segments.padding_window``
    adapter: Int32 | None = None  # [s] ``Encode.adapter`` of each slot's image; None: no image has one
    cell_adapter: Int32 | None = None  # [s / cell] the same for each cell


@dataclass(slots=True)
class ResetInputs:
    """Host arrays of one RESET launch over r slots."""

    slot: Int32  # [r]
    counts: Int32  # [r, vocabulary]
    prompt_mask: UInt8  # [r, ceil(vocabulary / 8)]
    bias_id: Int32  # [r, MAX_BIAS] 0 where unused
    bias_value: Float32  # [r, MAX_BIAS] none 0 among those in use, which come first; 0 where unused


@dataclass(slots=True)
class PoolInputs:
    """Host arrays of one POOL launch over r rows."""

    hidden_row: Int32  # [r] rows of the persistent hidden tensor
    group: Int32  # [r] from 1: rows of one group are summed; 0: padding
