"""Memory that rows of images take where ranks gather them (core/launches/encoder_data_parallel.py); bytes, by
formula. Pure.
"""

from __future__ import annotations

from trencadis.core.checkpoint.model_config import ModelConfig

NUMBER = 4
"""Bytes of the number of a row."""


def row_bytes(model: ModelConfig, itemsize: int) -> int:
    """Bytes of a row of the arena, with all its parts."""
    return model.row_parts * model.text.width * itemsize


def held_bytes(model: ModelConfig, slots: int, itemsize: int, ranks: int) -> int:
    """Bytes that a launch of ``slots`` slots holds while it gathers: a rank's own rows, and those of all.

    The latter twice: one below the other, as they arrive, and side by side.
    """
    if model.vision is None or not model.encoder_data_parallel:
        return 0
    return slots // model.vision.slot.cell * (1 + 2 * ranks) * (row_bytes(model, itemsize) + NUMBER)


def kept_bytes(model: ModelConfig, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
    """Bytes that a graph keeps of it: the rows of all ranks and their numbers, which collectives have written.

    With the tensor cache also those of a rank's own, which cross the cut before.
    """
    if model.vision is None or not model.encoder_data_parallel:
        return 0
    return slots // model.vision.slot.cell * (ranks + cached) * (row_bytes(model, itemsize) + NUMBER)
