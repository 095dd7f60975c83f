"""Quantised checkpoints made from 16-bit ones, each with a twin that holds the values that its codes stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trencadis.core.checkpoint.quantised_tensor_readers import pack_words

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Made:
    """Codes from 0 to 2^bits - 1 [out, in], float32 scales and int zero points [out, groups], each column's group."""

    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor

    def values(self) -> Tensor:
        """float32 [out, in]."""
        group = self.order.long()
        return (self.codes - self.zeros[:, group]).float() * self.scales[:, group]


def made(weight: Tensor, bits: int, group: int, symmetric: bool, ordered: bool, seed: int = 0) -> Made:
    """Rounds a weight [out, in]; ``ordered``: columns are dealt to groups at random."""
    columns = weight.shape[1]
    group = group or columns
    order = torch.arange(columns) // group
    if ordered:
        order = order[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    count, most = int(order.max()) + 1, (1 << bits) - 1
    scales, zeros = torch.empty(len(weight), count), torch.empty(len(weight), count, dtype=torch.int64)
    for g in range(count):
        part = weight[:, order == g].float()
        if symmetric:
            scales[:, g], zeros[:, g] = part.abs().amax(1) / (most // 2), (most + 1) // 2
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scales[:, g] = (high - low) / most
            zeros[:, g] = (-low / scales[:, g]).round().long()
    scales = scales.clamp_min(1e-6).half().float()
    codes = (weight.float() / scales[:, order] + zeros[:, order]).round().clamp(0, most).long()
    return Made(bits, codes, scales, zeros, order)


def tensors(kind: str, name: str, m: Made) -> dict[str, Tensor]:
    """The tensors of weight ``name`` in format ``kind``."""
    if kind == "awq":
        return {
            f"{name}.qweight": pack_words(m.codes.t(), 4, 1, AWQ_PLACES),
            f"{name}.qzeros": pack_words(m.zeros.t(), 4, 1, AWQ_PLACES),
            f"{name}.scales": m.scales.t().half().contiguous(),
        }  # fmt: skip
    if kind in ("gptq", "gptq_v2"):
        zeros = (m.zeros - int(kind == "gptq")) % (1 << m.bits)
        return {
            f"{name}.qweight": pack_words(m.codes.t(), m.bits, 0), f"{name}.qzeros": pack_words(zeros.t(), m.bits, 1),
            f"{name}.scales": m.scales.t().half().contiguous(), f"{name}.g_idx": m.order.int(),
        }  # fmt: skip
    middle = 1 << (m.bits - 1)
    found = {f"{name}.weight_scale": m.scales.half()}
    if not torch.equal(m.order, m.order.sort()[0]):
        found[f"{name}.weight_g_idx"] = m.order.int()
    asymmetric = bool((m.zeros != middle).any())
    if kind == "pack-quantized":
        found |= {
            f"{name}.weight_packed": pack_words(m.codes, m.bits, 1),
            f"{name}.weight_shape": torch.tensor(m.codes.shape),
        }
        return found | ({f"{name}.weight_zero_point": pack_words(m.zeros, m.bits, 0)} if asymmetric else {})
    found[f"{name}.weight"] = (m.codes - middle).to(torch.int8)
    return found | ({f"{name}.weight_zero_point": (m.zeros - middle).to(torch.int8)} if asymmetric else {})


def config(kind: str, bits: int, group: int, symmetric: bool, ordered: bool) -> dict[str, Any]:
    """``quantization_config``."""
    if kind == "awq":
        return {
            "quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["visual"],
        }  # fmt: skip
    if kind in ("gptq", "gptq_v2"):
        return {
            "quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": symmetric, "desc_act": ordered,
            "checkpoint_format": kind, "lm_head": False, "pack_dtype": "int32",
        }  # fmt: skip
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    if group:
        weights |= {"strategy": "group", "group_size": group}
    if ordered:
        weights["actorder"] = "group"
    acts = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"} if kind == "int-quantized" else None
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": acts}}
    return {
        "quant_method": "compressed-tensors", "format": kind, "config_groups": groups,
        "ignore": ["lm_head", "re:.*visual.*"], "quantization_status": "compressed",
    }  # fmt: skip


def linear(name: str, tensor: Tensor) -> bool:
    """Whether ``name`` is a weight of the decoder's linears."""
    ends = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    return tensor.ndim == 2 and ".layers." in name and name.endswith(ends)


def copied(source: Path, out: Path, stored: dict[str, Tensor], quantisation: dict[str, Any] | None) -> Path:
    """A copy of a checkpoint with other tensors and another ``quantization_config``."""
    shutil.copytree(source, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({k: v.contiguous() for k, v in stored.items()}, str(out / "model.safetensors"))
    settings = json.loads((out / "config.json").read_text())
    settings.pop("quantization_config", None)
    if quantisation is not None:
        settings["quantization_config"] = quantisation
    (out / "config.json").write_text(json.dumps(settings))
    return out


def checkpoint(
    source: Path,
    out: Path,
    kind: str,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    ordered: bool = False,
    apart: bool = True,
    chosen: Callable[[str, Tensor], bool] = linear,
) -> tuple[Path, Path]:
    """(a quantised copy of ``source``, its twin in float32), folders below ``out``.

    ``apart``: orders differ where weights are over one input, too, as in no file of GPTQ's. ``chosen``: whether the
    tensor with this name is quantised.
    """
    stored, twin = {}, {}
    for i, (name, tensor) in enumerate(load_file(str(source / "model.safetensors")).items()):
        if not chosen(name, tensor):
            stored[name] = twin[name] = tensor
            continue
        m = made(tensor, bits, group, symmetric, ordered, seed=i if apart else tensor.shape[1])
        stored |= tensors(kind, name.removesuffix(".weight"), m)
        twin[name] = m.values()
    return (
        copied(source, out / "quantised", stored, config(kind, bits, group, symmetric, ordered)),
        copied(source, out / "twin", twin, None),
    )


def fp8(
    source: Path, out: Path, kind: str, rows: int = 0, columns: int = 0,
    chosen: Callable[[str, Tensor], bool] = linear,
) -> tuple[Path, Path]:  # fmt: skip
    """As ``checkpoint``, in 8-bit floats: ``fp8`` or ``float-quantized``; one scale for ``rows`` x ``columns``."""
    stored, twin = {}, {}
    for name, tensor in load_file(str(source / "model.safetensors")).items():
        if not chosen(name, tensor):
            stored[name] = twin[name] = tensor
            continue
        height, width = rows or tensor.shape[0], columns or tensor.shape[1]
        grid = [[b.abs().max() / 448 for b in band.split(width, 1)] for band in tensor.float().split(height)]
        scale = torch.tensor(grid)
        wide = scale.repeat_interleave(height, 0)[: tensor.shape[0]]
        wide = wide.repeat_interleave(width, 1)[:, : tensor.shape[1]]
        codes = (tensor.float() / wide).to(torch.float8_e4m3fn)
        base = name.removesuffix(".weight")
        inverse = kind == "fp8" and rows > 1
        stored |= {name: codes, f"{base}.weight_scale{'_inv' if inverse else ''}": scale if rows else scale.view(1)}
        twin[name] = codes.float() * wide
    settings: dict[str, Any] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["visual"],
    }
    if kind == "fp8" and rows > 1:
        settings["weight_block_size"] = [rows, columns]
    if kind != "fp8":
        strategy = {0: "tensor", 1: "channel"}.get(rows, "block")
        weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
        if strategy == "block":
            weights["block_structure"] = [rows, columns]
        acts = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": acts}}
        settings = {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups,
                    "ignore": ["lm_head", "re:.*visual.*"]}  # fmt: skip
    return copied(source, out / "quantised", stored, settings), copied(source, out / "twin", twin, None)
