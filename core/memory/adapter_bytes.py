"""Bytes of the slots of LoRA adapters on one of ``ranks`` devices, from config.json alone. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.config import EngineConfig
from trencadis.core.memory.weight_bytes import layer_matrices
from trencadis.core.vision_config import SharedMatrix

RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Ranks that slots have memory for; smaller adapters are padded with zeros."""


EXPERT = "expert"
"""Part of the names of matrices of experts, which take no adapters."""

NUMBER = 4
"""Bytes of a slot's number, which masks are made of."""


def padded_rank(rank: int) -> int:
    """Returns the rank of slots that hold adapters up to ``rank``."""
    return next(one for one in RANKS if one >= rank)


class AdapterSlotSizes(NamedTuple):
    """How many slots a device has, and the rank that each has memory for."""

    slots: int
    rank: int


def slot_sizes(config: EngineConfig) -> AdapterSlotSizes | None:
    """Returns the slots that a configuration asks for; None without ``--enable-lora``."""
    return AdapterSlotSizes(config.max_loras, padded_rank(config.max_lora_rank)) if config.enable_lora else None


def host_adapters(config: EngineConfig) -> int:
    """Returns how many adapters an engine holds in host memory; 0: it has none."""
    return max(config.max_cpu_loras or 0, config.max_loras) if config.enable_lora else 0


def adapter_bytes(model: ModelConfig, itemsize: int, ranks: int, sizes: AdapterSlotSizes, width: int = 1) -> int:
    """Returns the bytes of A, B and the number of each slot; ``width``: as in ``layer_values``."""
    values = 0
    for index in model.share.layers:
        groups = list[list[SharedMatrix]]()
        for matrix in layer_matrices(model, index, ranks, width):
            if EXPERT in matrix.name:
                continue
            if matrix.first or not groups:
                groups.append([])
            groups[-1].append(matrix)
        values += sum(len(group) * group[0].columns + sum(one.rows for one in group) for group in groups)
    return sizes.slots * (sizes.rank * values * itemsize + NUMBER)
