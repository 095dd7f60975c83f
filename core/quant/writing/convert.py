"""Writes a checkpoint again with its decoder's linear layers in 8 or 4 bits; everything else is carried over."""

from __future__ import annotations

import json
import mmap
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.quant_config import TOWER
from trencadis.core.checkpoint.reading import load_config
from trencadis.core.errors import StartupError
from trencadis.core.models.collected import canonical
from trencadis.core.models.loader import FLOATS, read_file
from trencadis.core.models.registry import family_of
from trencadis.core.models.weight_files import files_of
from trencadis.core.quant.online import quantised
from trencadis.core.quant.tensor import SLAB, QTensor
from trencadis.core.quant.writing.calibration import Calibrant, Calibration
from trencadis.core.quant.writing.files import INDEX, Folder, Slot
from trencadis.core.quant.writing.gptq import LayerInputs, compensated
from trencadis.core.quant.writing.recipe import GROUPS, Recipe

LINEAR = re.compile(r"(layers\.(\d+)\.(?:self_attn|mlp)\.\w+_proj)\.weight")
"""A linear layer of the decoder, by its canonical name."""
OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
"""Files that hold weights in some form, which are not carried over."""
ROOM = 64 << 20
"""Bytes of a disk that stay free."""

Say = Callable[[str], None]


class StoredWeight(NamedTuple):
    """A linear weight: its stored name, and the module's name as layers have it."""

    stored: str
    module: str

    @property
    def base(self) -> str:
        """The stored name without ``.weight``."""
        return self.stored.removesuffix(".weight")


@dataclass
class Checkpoint:
    """A 16-bit checkpoint: its tensors, mapped, and which of them are weights of the decoder's linear layers."""

    config: ModelConfig
    maps: list[mmap.mmap] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    layers: dict[int, list[StoredWeight]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())

    def forget(self) -> None:
        """Releases the pages read so far; they are read again where they are needed again."""
        for data in self.maps:
            data.madvise(mmap.MADV_DONTNEED)

    @property
    def linear(self) -> dict[str, StoredWeight]:
        """By stored name."""
        return {place.stored: place for places in self.layers.values() for place in places}


@dataclass
class Written:
    """What became of a checkpoint: bytes of its tensors before and after, and the error of each rounded weight."""

    before: int = 0
    after: int = 0
    errors: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        """The mean over weights of the difference's norm over the weight's."""
        return sum(self.errors) / max(len(self.errors), 1)


def opened(path: Path) -> Checkpoint:
    """The checkpoint in folder ``path``.

    Raises:
        StartupError: it cannot be served, is quantised already, or lacks weights.
    """
    config = load_config(path)
    if config.quant is not None:
        raise StartupError(f"{path} holds {config.quant.label} weights already; quantize takes 16- or 32-bit ones")
    names, made = family_of(config.architecture).names, Checkpoint(config)
    for file in files_of(path):
        for stored, tensor in read_file(file, made.maps):
            made.tensors[stored] = tensor
            made.files.setdefault(file.name, []).append(stored)
            found = LINEAR.fullmatch(canonical(stored, names) or "")
            if found is None:
                continue
            if not stored.endswith(f"{found[1].removeprefix(f'layers.{found[2]}.')}.weight"):
                raise StartupError(
                    f"{path} holds {config.architecture}, whose layers have names of their own; quantize takes those "
                    "whose matrices are called q_proj to down_proj"
                )
            if tensor.ndim != 2 or tensor.dtype not in FLOATS:
                raise StartupError(f"{path}: {stored} holds {tensor.dtype}{list(tensor.shape)}, no matrix of 16 bits")
            made.layers.setdefault(int(found[2]), []).append(StoredWeight(stored, found[1]))
    made.layers = dict(sorted(made.layers.items()))
    missing = [i for i in range(config.text.layers) if len(made.layers.get(i, ())) != 7]
    if missing or len(made.layers) != config.text.layers:
        wrong = missing[0] if missing else config.text.layers
        raise StartupError(
            f"{path} has {len(made.layers.get(wrong, ()))} linear weights in layer {wrong} of its decoder, not 7"
        )
    return made


def recipe_for(checkpoint: Checkpoint, to: str, group: int = 0) -> Recipe:
    """How its weights are stored.

    Raises:
        StartupError: a group that does not divide the columns.
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
    checkpoint: Checkpoint, out: Path, recipe: Recipe, prompts: Sequence[Calibrant] = (), say: Say = lambda line: None
) -> Written:
    """Writes folder ``out``, which must not be there or be empty; what goes wrong leaves nothing behind.

    Args:
        prompts: what columns are compensated over; none: the nearest codes.
        say: told of each layer.

    Raises:
        StartupError: ``out`` holds something, the disk is too small, or a weight is not finite.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StartupError(f"{out} holds something already; name a folder that is not there yet")
    slots = _slots(checkpoint, recipe)
    total = sum(slot.bytes for some in slots.values() for slot in some)
    parent = out.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if total + ROOM > free:
            need = f"{total / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
            raise StartupError(f"{out} would take {need}; free some or name another disk")
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=parent))
        made.chmod(0o755)
        try:
            written = _write(checkpoint, made, slots, recipe, prompts, say)
            _carry(checkpoint, made, recipe)
            made.replace(out)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise StartupError(f"{out} cannot be written: {error.strerror or error}") from None
    return written


def _slots(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, list[Slot]]:
    """The tensors of each file that is written."""
    linear, found = checkpoint.linear, dict[str, list[Slot]]()
    for file, names in checkpoint.files.items():
        found[file] = []
        for name in names:
            tensor = checkpoint.tensors[name]
            if name in linear:
                found[file] += recipe.slots(linear[name].base, (tensor.shape[0], tensor.shape[1]))
            else:
                found[file].append(Slot(name, tensor.dtype, tuple(tensor.shape)))
    return found


def _write(
    checkpoint: Checkpoint,
    path: Path,
    slots: dict[str, list[Slot]],
    recipe: Recipe,
    prompts: Sequence[Calibrant],
    say: Say,
) -> Written:
    written = Written(sum(t.nbytes for t in checkpoint.tensors.values()))
    written.after = sum(slot.bytes for some in slots.values() for slot in some)
    linear = checkpoint.linear
    calibration = None
    if prompts:
        say(f"embedding {len(prompts)} prompts of {sum(len(p.request.tokens) for p in prompts)} tokens")
        calibration = Calibration(checkpoint.config, checkpoint, prompts)
        checkpoint.forget()
    with Folder(path, slots) as folder:
        for name, tensor in checkpoint.tensors.items():
            if name not in linear:
                folder.put(name, tensor)
                checkpoint.forget()
        for number, places in checkpoint.layers.items():
            say(f"layer {number + 1} of {len(checkpoint.layers)}")
            made = dict[str, QTensor]()
            for place, q in _rounded(checkpoint, places, recipe, calibration, number):
                written.errors.append(_error(checkpoint.tensors[place.stored], q))
                for name, tensor in recipe.tensors(place.base, q).items():
                    folder.put(name, tensor)
                checkpoint.forget()
                if calibration is not None:
                    made[place.module] = q
            if calibration is not None:
                calibration.advance(number, made)
                checkpoint.forget()
    return written


def _rounded(
    checkpoint: Checkpoint, places: list[StoredWeight], recipe: Recipe, calibration: Calibration | None, number: int
) -> Iterator[tuple[StoredWeight, QTensor]]:
    """The weights of layer ``number``, those over one input after one another."""
    label = checkpoint.config.name
    weights = {place: (checkpoint.tensors[place.stored], f"{label}: {place.stored}") for place in places}
    if calibration is None:
        for place, (weight, what) in weights.items():
            yield place, quantised(weight, recipe.scheme, weight.dtype, what, recipe.search)
        return
    grams = calibration.grams(number)
    shared: dict[int, list[StoredWeight]] = {}
    for place in places:
        shared.setdefault(id(grams[place.module]), []).append(place)
    for some in shared.values():
        inputs = LayerInputs.of(grams[some[0].module])
        for place in some:
            weight, what = weights[place]
            yield place, compensated(weight, inputs, recipe.scheme, calibration.backend.dtype, recipe.search, what)


def _error(weight: Tensor, q: QTensor) -> float:
    """Norm of the difference over the norm of the weight."""
    rows, columns = q.shape
    step = max(SLAB // max(columns, 1), 1)
    away = whole = 0.0
    for start in range(0, rows, step):
        part = weight[start : start + step].float()
        whole += float(part.square().sum())
        away += float(part.sub_(q.rows(start, start + step).dequantised()).square_().sum())
    return float((away / max(whole, 1e-30)) ** 0.5)


def _carry(checkpoint: Checkpoint, out: Path, recipe: Recipe) -> None:
    """config.json with the scheme, and every other file that holds no weights."""
    source = checkpoint.config.path
    for entry in sorted(source.iterdir()):
        if entry.name.startswith(".") or entry.name in ("config.json", INDEX) or _holds_weights(entry):
            continue
        if entry.is_dir():
            ignore = shutil.ignore_patterns(".*", *(f"*{end}" for end in OTHERS), "*.index.json")
            shutil.copytree(entry, out / entry.name, ignore=ignore)
        elif entry.is_file():
            shutil.copyfile(entry, out / entry.name)
    settings: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    settings["quantization_config"] = recipe.config(_kept(checkpoint))
    (out / "config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _holds_weights(entry: Path) -> bool:
    return entry.name.endswith((*OTHERS, *(f"{end}.index.json" for end in OTHERS)))


def _kept(checkpoint: Checkpoint) -> list[str]:
    """Linear modules that stay as they are, as the format's ``ignore`` names them."""
    kept = ["lm_head", *(["score"] if "score.weight" in checkpoint.tensors else [])]
    if checkpoint.config.vision is None:
        return kept
    prefixes = family_of(checkpoint.config.architecture).names.prefixes
    towers = {p.removeprefix("model.") for p, ours in prefixes.items() if ours.startswith(TOWER)}
    held = sorted(p for p in towers if any(name.removeprefix("model.").startswith(p) for name in checkpoint.tensors))
    shortest = [p for p in held if not any(p != other and p.startswith(other) for other in held)]
    return [*kept, *(f"re:.*{re.escape(p)}.*" for p in shortest)]
