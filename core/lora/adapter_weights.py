"""Tensors of an adapter for the single matrices of a model: fused matrices are cut into their parts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trencadis.core.checkpoint.checkpoint_source import fused_parts
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.errors import StartupError
from trencadis.core.lora.adapter_files import WEIGHTS, Adapter, AdapterTensor, read_matrix


class MatrixAdapter(NamedTuple):
    """The adapter of one matrix [out, in], which adds B A to it: A [rank, in], and B [out, rank] times the scale."""

    a: Tensor
    b: Tensor


def load_matrices(adapter: Adapter, text: TextConfig, dtype: torch.dtype = torch.float32) -> dict[str, MatrixAdapter]:
    """Reads an adapter: canonical name of each single matrix -> its A and B in ``dtype``; B includes the scale.

    Raises:
        StartupError: the file has changed or cannot be read, or a matrix has two adapters.
    """
    found: dict[str, MatrixAdapter] = {}
    path = adapter.folder / WEIGHTS
    try:
        data = np.memmap(path, np.uint8, mode="c")
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from None
    for name, module in adapter.modules.items():
        a, b = _to_torch(data, module.a), _to_torch(data, module.b) * module.scale
        outer, start = name.rpartition(".")[0], 0
        parts = fused_parts(text, f"{name}.weight") or {name.rpartition(".")[2]: module.b.rows}
        for part, rows in parts.items():
            made = MatrixAdapter(a.to(dtype), b[start : start + rows].to(dtype))
            if found.setdefault(f"{outer}.{part}", made) is not made:
                raise StartupError(f"{path} has two adapters for {outer}.{part}")
            start += rows
    return found


def _to_torch(data: np.ndarray, tensor: AdapterTensor) -> Tensor:
    """Returns a stored matrix in float32."""
    values = torch.from_numpy(read_matrix(data, tensor))
    return (values.view(torch.bfloat16) if tensor.kind == "BF16" else values).float()
