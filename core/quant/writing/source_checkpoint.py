"""The source checkpoint of ``quantize``: its mapped tensors, and which of them are linear layers of the decoder."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.core.checkpoint.checkpoint_weight_source import canonical, fused_parts, one_by_one
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.family import StoredNames
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.checkpoint.weight_file_reader import FLOATS, read_file
from trencadis.core.errors import StartupError
from trencadis.core.weight_files import files_of

LINEAR = re.compile(
    r"(layers\.(\d+)\.(?:(?:self_attn|mlp|mlp\.shared_expert|mlp\.experts\.\d+)\.\w+_proj"
    r"|linear_attn\.(?:in_proj_qkvz?|in_proj_z|out_proj)))\.weight"
)
"""Canonical names of the decoder's linear layers that are quantised."""
EXPERTS = ".experts."
"""Part of the names of experts' matrices, canonical and stored."""
SMALL = re.compile(r"layers\.\d+\.(?:mlp\.gate|mlp\.shared_expert_gate|linear_attn\.in_proj_(?:a|b|ba))\.weight")
"""Canonical names of matrices that stay unquantised: scores of experts, and decays of recurrent states. They have a row
for each expert or head, and an error of theirs selects other experts, or is multiplied with every later token.
"""


class StoredWeight(NamedTuple):
    """A linear weight: its stored name, and the canonical name of its module."""

    stored: str
    module: str

    @property
    def base(self) -> str:
        """The stored name without ``.weight``."""
        return self.stored.removesuffix(".weight")


@dataclass
class Checkpoint:
    """A 16-bit checkpoint: its mapped tensors, and which of them are weights of the decoder's linear layers.

    Experts stored as one tensor are listed separately, under the names used in the hub's files.
    """

    config: ModelConfig
    maps: list[mmap.mmap] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    layers: dict[int, list[StoredWeight]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())

    def forget(self) -> None:
        """Releases the pages read so far; they are read again when needed."""
        for data in self.maps:
            data.madvise(mmap.MADV_DONTNEED)

    @property
    def linear(self) -> dict[str, StoredWeight]:
        """The decoder's linear weights by stored name."""
        return {linear.stored: linear for linears in self.layers.values() for linear in linears}

    def small_matrices(self) -> set[str]:
        """Returns the suffixes of the stored names of the layers' matrices that stay unquantised."""
        names, found = family_of(self.config.architecture).names, set[str]()
        for stored in self.tensors:
            if SMALL.fullmatch(canonical(stored, names) or ""):
                found.add(".".join(stored.removesuffix(".weight").split(".")[-2:]))
        return found


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the checkpoint in folder ``path``.

    Raises:
        StartupError: it is not supported, is already quantised, or lacks weights.
    """
    config = load_config(path)
    if config.quant is not None:
        raise StartupError(f"{path} holds {config.quant.label} weights already; quantize takes 16- or 32-bit ones")
    if config.text.layer_inputs or config.text.shared_kv:
        raise StartupError(
            f"{path}: quantize knows no layers that read keys of earlier ones, nor embeddings for each layer; "
            "--quantization int8, int4 or fp8 works as the weights load"
        )
    held = config.text.recurrent
    if held is not None and (held.width or held.scan):
        raise StartupError(
            f"{path}: quantize knows no recurrent layers but gated DeltaNet; --quantization int8, int4 or fp8 works as "
            "the weights load"
        )
    names, made = family_of(config.architecture).names, Checkpoint(config)
    for file in files_of(path):
        for whole, tensors in read_file(file, made.maps):
            for stored, tensor in _split_experts(whole, tensors, config, names):
                made.tensors[stored] = tensor
                made.files.setdefault(file.name, []).append(stored)
                linear = _find_linear(stored, tensor, config, names)
                if linear is not None:
                    made.layers.setdefault(int(linear.module.split(".")[1]), []).append(linear)
    made.layers = dict(sorted(made.layers.items()))
    _whole(made)
    return made


def _split_experts(
    stored: str, tensor: Tensor, config: ModelConfig, names: StoredNames
) -> Iterable[tuple[str, Tensor]]:
    """Splits a layer's experts [experts, out, in] into one matrix each; returns other tensors unchanged."""
    if tensor.ndim != 3 or names.transposed or config.text.experts is None:
        return [(stored, tensor)]
    found = list[tuple[str, Tensor]]()
    for one, held in one_by_one(stored, tensor):
        parts: Mapping[str, int] = fused_parts(config.text, one) or {}
        outer = one.removesuffix(".weight").rpartition(".")[0]
        if parts and sum(parts.values()) == len(held):
            pieces = torch.split(held, list(parts.values()))
            found += [(f"{outer}.{part}.weight", piece) for part, piece in zip(parts, pieces, strict=True)]
        else:
            found.append((one, held))
    return [(_as_on_the_hub(name, names) if EXPERTS in name else name, held) for name, held in found]


def _as_on_the_hub(name: str, names: StoredNames) -> str:
    for theirs, ours in names.inner:
        name = name.replace(ours, theirs)
    return name


def _find_linear(stored: str, tensor: Tensor, config: ModelConfig, names: StoredNames) -> StoredWeight | None:
    """Returns the decoder's linear layer that a tensor belongs to; None: it belongs to none."""
    found = LINEAR.fullmatch(canonical(stored, names) or "")
    if found is None:
        return None
    if EXPERTS not in stored and not stored.endswith(f"{found[1].removeprefix(f'layers.{found[2]}.')}.weight"):
        raise StartupError(
            f"{config.path} holds {config.architecture}, whose layers have names of their own; quantize takes those "
            "whose matrices are called q_proj to down_proj"
        )
    if tensor.ndim != 2 or tensor.dtype not in FLOATS:
        raise StartupError(f"{config.path}: {stored} holds {tensor.dtype}{list(tensor.shape)}, no matrix of 16 bits")
    return StoredWeight(stored, found[1])


def _whole(made: Checkpoint) -> None:
    """Raises StartupError unless every layer has all its linear weights."""
    text = made.config.text
    experts = text.experts
    for number in range(max(text.layers, len(made.layers))):
        wanted = 4 - text.of_layer(number).keys_as_values + 3 * text.has_mlp(number)
        if text.recurrent is not None and number in text.recurrent.layers:
            wanted -= 2 if text.recurrent.interleaved else 1
        if experts is not None and text.has_experts(number):
            wanted += 3 * (experts.count + (experts.shared > 0))
        held = len(made.layers.get(number, ()))
        if number >= text.layers or held != wanted:
            raise StartupError(
                f"{made.config.path} has {held} linear weights in layer {number} of its decoder, not "
                f"{wanted if number < text.layers else 0}"
            )
