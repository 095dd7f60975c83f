"""Rewrites a checkpoint with its decoder's linear layers in 8 or 4 bits; everything else is copied."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.checkpoint.quant_config import TOWER
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonObject
from trencadis.core.quant.quantised_tensor import SLAB, QTensor
from trencadis.core.quant.writing.calibration import Calibrant, Calibration
from trencadis.core.quant.writing.gptq_rounding import Say, round_layer
from trencadis.core.quant.writing.quantisation_recipe import GROUPS, Recipe
from trencadis.core.quant.writing.safetensors_writer import TensorSlot, WeightFolder, copy_other_files
from trencadis.core.quant.writing.source_checkpoint import Checkpoint

FREE_DISK_BYTES = 64 << 20
"""Bytes that must stay free on the disk."""


@dataclass
class ConversionResult:
    """The result of a conversion: bytes of the tensors before and after, and the error of each rounded weight."""

    bytes_before: int = 0
    bytes_after: int = 0
    errors: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Mean over weights of the relative error: norm of the difference / norm of the weight."""
        return sum(self.errors) / max(len(self.errors), 1)


def recipe_for(checkpoint: Checkpoint, to: str, group: int = 0) -> Recipe:
    """Returns how the checkpoint's weights will be stored.

    Raises:
        StartupError: the group size does not divide the columns.
    """
    kinds = {checkpoint.tensors[stored].dtype for stored in checkpoint.linear}
    scales = next((kind for kind in (torch.bfloat16, torch.float16) if kind in kinds), torch.float32)
    recipe = Recipe(to, group, scales)
    size = recipe.scheme.group
    for stored in checkpoint.linear if size else ():
        columns = checkpoint.tensors[stored].shape[1]
        if columns % size:
            fit = [str(g) for g in GROUPS if all(checkpoint.tensors[s].shape[1] % g == 0 for s in checkpoint.linear)]
            works = f"--group {' or '.join(fit)} would" if fit else "no group does; --to int8 or fp8 works"
            raise StartupError(f"--group {size} does not divide the {columns} columns of {stored}; {works}")
    return recipe


def convert(
    checkpoint: Checkpoint, out: Path, recipe: Recipe, prompts: Sequence[Calibrant] = (), say: Say = lambda line: None,
    threads: int = 0,
) -> ConversionResult:  # fmt: skip
    """Writes folder ``out``, which must be missing or empty; after an error nothing is left there.

    Args:
        prompts: calibration prompts for error compensation (GPTQ); none: round to the nearest codes.
        say: receives a progress line for each layer.
        threads: of the CPU; 0: as many as this process may use.

    Raises:
        StartupError: ``out`` is not empty, the disk is too small, or a weight is not finite.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StartupError(f"{out} holds something already; name a folder that is not there yet")
    slots = _slots(checkpoint, recipe)
    total = sum(slot.bytes for some in slots.values() for slot in some)
    parent = out.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if total + FREE_DISK_BYTES > free:
            need = f"{total / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
            raise StartupError(f"{out} would take {need}; free some or name another disk")
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=parent))
        made.chmod(0o755)
        try:
            written = _write(checkpoint, made, slots, recipe, prompts, say, threads)
            _carry(checkpoint, made, recipe)
            made.replace(out)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise StartupError(f"{out} cannot be written: {error.strerror or error}") from None
    return written


def _slots(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, list[TensorSlot]]:
    """Returns the tensors of each file to write."""
    linear, found = checkpoint.linear, dict[str, list[TensorSlot]]()
    for file, names in checkpoint.files.items():
        found[file] = []
        for name in names:
            tensor = checkpoint.tensors[name]
            if name in linear:
                found[file] += recipe.slots(linear[name].base, (tensor.shape[0], tensor.shape[1]))
            else:
                found[file].append(TensorSlot(name, tensor.dtype, tuple(tensor.shape)))
    return found


def _write(
    checkpoint: Checkpoint,
    path: Path,
    slots: dict[str, list[TensorSlot]],
    recipe: Recipe,
    prompts: Sequence[Calibrant],
    say: Say,
    threads: int,
) -> ConversionResult:
    written = ConversionResult(sum(t.nbytes for t in checkpoint.tensors.values()))
    written.bytes_after = sum(slot.bytes for some in slots.values() for slot in some)
    linear = checkpoint.linear
    calibration = None
    if prompts:
        say(f"embedding {len(prompts)} prompts of {sum(len(p.request.tokens) for p in prompts)} tokens")
        calibration = Calibration(checkpoint.config, checkpoint, prompts, threads)
        checkpoint.forget()
    with WeightFolder(path, slots) as folder:
        for name, tensor in checkpoint.tensors.items():
            if name not in linear:
                folder.put(name, tensor)
                checkpoint.forget()
        for number in checkpoint.layers:
            say(f"layer {number + 1} of {len(checkpoint.layers)}")
            made = dict[str, QTensor]()
            for stored, q in round_layer(checkpoint, number, recipe, calibration, say):
                written.errors.append(_error(checkpoint.tensors[stored.stored], q))
                for name, tensor in recipe.tensors(stored.base, q).items():
                    folder.put(name, tensor)
                checkpoint.forget()
                if calibration is not None:
                    made[stored.module] = q
            if calibration is not None:
                calibration.advance(number, made)
                checkpoint.forget()
    return written


def _error(weight: Tensor, q: QTensor) -> float:
    """Returns the norm of the difference divided by the norm of the weight."""
    rows, columns = q.shape
    step = max(SLAB // max(columns, 1), 1)
    away = whole = 0.0
    for start in range(0, rows, step):
        part = weight[start : start + step].float()
        whole += float(part.square().sum())
        away += float(part.sub_(q.rows(start, start + step).dequantised()).square_().sum())
    return float((away / max(whole, 1e-30)) ** 0.5)


def _carry(checkpoint: Checkpoint, out: Path, recipe: Recipe) -> None:
    """Writes config.json with the scheme, and copies every other file without weights."""
    source = checkpoint.config.path
    copy_other_files(source, out, without=("config.json",))
    settings: JsonObject = json.loads((source / "config.json").read_text(encoding="utf-8"))
    settings["quantization_config"] = recipe.config(_unquantised_modules(checkpoint))
    (out / "config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _unquantised_modules(checkpoint: Checkpoint) -> list[str]:
    """Returns the linear modules that stay unquantised, in the format's ``ignore`` notation."""
    kept = ["lm_head", *(["score"] if "score.weight" in checkpoint.tensors else [])]
    kept += [f"re:.*{re.escape(end)}$" for end in sorted(checkpoint.small_matrices())]
    skipped = family_of(checkpoint.config.architecture).skipped
    kept += [f"re:{re.escape(p)}.*" for p in skipped if any(name.startswith(p) for name in checkpoint.tensors)]
    if checkpoint.config.vision is None:
        return kept
    prefixes = family_of(checkpoint.config.architecture).names.prefixes
    towers = {p.removeprefix("model.") for p, ours in prefixes.items() if ours.startswith(TOWER)}
    held = sorted(p for p in towers if any(name.removeprefix("model.").startswith(p) for name in checkpoint.tensors))
    shortest = [p for p in held if not any(p != other and p.startswith(other) for other in held)]
    return [*kept, *(f"re:.*{re.escape(p)}.*" for p in shortest)]
