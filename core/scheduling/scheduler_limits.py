"""Limits of a step and of a request. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.core.buckets import ENCODER_SLOTS


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of a step and of a request; in tokens unless named otherwise.

    ``slot_values``: uint8 values of a slot of the vision tower, by which flat pixels are reshaped; 0: pixels arrive in
    shape.
    """

    max_tokens: int = 2048
    max_rows: int = 128
    max_model_len: int = 32768
    block_size: int = 16
    encoder_slots: int = ENCODER_SLOTS
    vocab: int = 0
    eos: tuple[int, ...] = ()
    chunked: bool = True
    caching: bool = True
    by_priority: bool = False
    fair: bool = False
    aging: float = 30.0
    seed: int = 0
    pooling: bool = False
    slot_values: int = 0
    long_from: int = 0  # longer requests use another rotary table; 0: there is one
    stages: int = 1  # pipeline stages: that many steps are in flight, without common rows
    whole: bool = False  # an encoder: a prompt is one row of one step, and its tokens attend to each other
    bidirectional_images: bool = False  # tokens of an image attend to each other: no chunk ends inside one
    adapters: int = 0  # slots of LoRA adapters
    drafts_adapters: bool = True  # sequences with adapters are drafted, too
    chunk: int = 0  # tests: at most this many tokens of one sequence in a step
