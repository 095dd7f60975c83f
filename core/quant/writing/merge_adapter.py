"""Writes a checkpoint with an adapter merged into its weights, for servers that take no adapters."""

from __future__ import annotations

import mmap
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trencadis.core.checkpoint.checkpoint_weight_source import canonical, fused_parts
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.checkpoint.weight_file_reader import FLOATS, read_file
from trencadis.core.errors import StartupError
from trencadis.core.lora.adapter_files import read_adapter
from trencadis.core.lora.adapter_store import MatrixAdapter, load_matrices
from trencadis.core.quant.writing.safetensors_writer import TensorSlot, WeightFolder, copy_other_files
from trencadis.core.weight_files import files_of


def merge_adapter(model: Path, adapter: Path, out: Path) -> int:
    """Writes folder ``out``, which must be missing or empty: the checkpoint ``model`` with W + scale B A for W.

    Returns the number of matrices that have changed. After an error nothing is left in ``out``.

    Raises:
        StartupError: the adapter does not fit, the checkpoint is quantised, or the folder cannot be written.
    """
    config = load_config(model)
    if config.quant is not None:
        raise StartupError(f"{model} holds {config.quant.label} weights; merge into the checkpoint they were made of")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StartupError(f"{out} holds something already; name a folder that is not there yet")
    matrices = load_matrices(read_adapter(adapter, config), config.text)
    maps: list[mmap.mmap] = []
    stored = {file.name: dict(read_file(file, maps)) for file in files_of(model)}
    if any(not name.endswith(".safetensors") for name in stored):
        raise StartupError(f"{model} is no safetensors checkpoint; merge-lora takes no other")
    changes = _find_changes(stored, matrices, config)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        made.chmod(0o755)
        try:
            _write(stored, made, changes, config)
            copy_other_files(model, made, without=())
            made.replace(out)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise StartupError(f"{out} cannot be written: {error.strerror or error}") from None
    return len(matrices)


Changes = dict[str, dict[int, MatrixAdapter]]
"""Stored name of a weight -> first row of a matrix in it -> the adapter of the matrix."""


def _find_changes(
    stored: Mapping[str, Mapping[str, Tensor]], matrices: Mapping[str, MatrixAdapter], config: ModelConfig
) -> Changes:
    """Finds the stored weight of each matrix; raises StartupError if one has none, or one of another shape."""
    names, found, left = family_of(config.architecture).names, Changes(), dict(matrices)
    for tensors in stored.values():
        for name, tensor in tensors.items():
            ours = canonical(name, names) or ""
            module, _, kind = ours.rpartition(".")
            if kind != "weight" or tensor.ndim != 2:
                continue
            outer, last, start = *module.rpartition(".")[::2], 0
            rows, columns = tensor.shape[::-1] if module.endswith(names.transposed or "\0") else tensor.shape
            for part, size in (fused_parts(config.text, ours) or {last: rows}).items():
                one = left.pop(f"{outer}.{part}", None)
                if one is not None:
                    if (one.b.shape[0], one.a.shape[1]) != (size, columns) or tensor.dtype not in FLOATS:
                        raise StartupError(f"the adapter does not fit {name}, {tensor.dtype} {list(tensor.shape)}")
                    found.setdefault(name, {})[start] = one
                start += size
    if left:
        raise StartupError(f"{config.name} stores no weight for {min(left)}, which the adapter changes")
    return found


def _write(stored: Mapping[str, Mapping[str, Tensor]], out: Path, changes: Changes, config: ModelConfig) -> None:
    """Writes the weights, merged one at a time in float32."""
    names = family_of(config.architecture).names
    slots = {
        file: [TensorSlot(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        for file, tensors in stored.items()
    }
    with WeightFolder(out, slots) as folder:
        for tensors in stored.values():
            for name, tensor in tensors.items():
                turned = (canonical(name, names) or "").rpartition(".")[0].endswith(names.transposed or "\0")
                folder.put(name, _merge(tensor, changes[name], turned) if name in changes else tensor)


def _merge(weight: Tensor, parts: Mapping[int, MatrixAdapter], transposed: bool) -> Tensor:
    """Returns a weight plus the products of its adapters; ``transposed``: it is stored as [in, out]."""
    made = weight.to(torch.float32, copy=True)
    rows = made.t() if transposed else made
    for start, one in parts.items():
        rows[start : start + one.b.shape[0]] += one.b @ one.a
    return made.to(weight.dtype)
