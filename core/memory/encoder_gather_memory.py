"""Memory of image rows that ranks gather (core/launches/encoder_data_parallel.py); bytes, by formula. Pure."""

from __future__ import annotations

from trencadis.core.checkpoint.model_config import ModelConfig

NUMBER = 4
"""Bytes of a row number."""


def row_bytes(model: ModelConfig, itemsize: int) -> int:
    """Returns the bytes of an arena row with all its parts."""
    return model.row_parts * model.text.width * itemsize


def held_bytes(model: ModelConfig, slots: int, itemsize: int, ranks: int) -> int:
    """Returns the peak bytes of a launch of ``slots`` slots while it gathers: a rank's own rows, and those of all
    ranks.

    The latter count twice: in the gathered layout, and rearranged.
    """
    if model.vision is None or not model.encoder_data_parallel:
        return 0
    return slots // model.vision.slot.cell * (1 + 2 * ranks) * (row_bytes(model, itemsize) + NUMBER)


def kept_bytes(model: ModelConfig, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
    """Returns the bytes that a graph keeps: the rows of all ranks and their numbers, which collectives have written.

    With the tensor cache also the rank's own rows, which are passed at the preceding cut.
    """
    if model.vision is None or not model.encoder_data_parallel:
        return 0
    return slots // model.vision.slot.cell * (ranks + cached) * (row_bytes(model, itemsize) + NUMBER)
