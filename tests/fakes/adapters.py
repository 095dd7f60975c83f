"""Random LoRA adapters in PEFT's layout, for the matrices of a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

LANGUAGE = r".*layers\.\d+\.(self_attn|mlp)\.\w+_proj"
"""The matrices of a decoder that ``target_modules: all-linear`` gives."""

TOWER = r"(?!.*(embed|patch)).*(visual|vision|projector|connector).*"
"""The matrices of a vision tower and of the layers after it."""

QWEN_TOWER = r".*visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.\w+_proj)|merger\.mlp\.[02])"
"""All layers of the tower of Qwen2.5-VL and its merger; peft takes no pattern that matches the modules around them."""


def matrices(checkpoint: Path, pattern: str = LANGUAGE) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and shape [out, in] of each matrix of a checkpoint whose module matches; of towers only for ``TOWER``."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                shape = opened.get_slice(name).get_shape()
                module = name.removesuffix(".weight")
                tower = ("visual" in module or "vision" in module) and pattern == LANGUAGE
                if name.endswith(".weight") and len(shape) == 2 and re.fullmatch(pattern, module) and not tower:
                    yield module, (shape[0], shape[1])


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 8,
    alpha: float = 16,
    seed: int = 0,
    size: float = 0.2,
    dtype: torch.dtype = torch.float32,
    ranks: Mapping[str, int] | None = None,
    **settings: Any,
) -> Path:
    """Writes an adapter; ``ranks``: ranks of single modules, as ``settings`` may say by a pattern.

    ``size``: the deviation of a weight that B A adds to, at alpha = rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in shapes.items():
        r = (ranks or {}).get(module, rank)
        a = torch.randn((r, inputs), generator=generator) / inputs**0.5
        b = torch.randn((outputs, r), generator=generator) * size
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": sorted({module.rpartition(".")[2] for module in shapes}), "lora_dropout": 0.0, **settings,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapter_of(checkpoint: Path, folder: Path, pattern: str = LANGUAGE, **more: Any) -> Path:
    """Writes an adapter of all matrices of a checkpoint that match ``pattern``."""
    return write_adapter(folder, dict(matrices(checkpoint, pattern)), **more)


def load_base(checkpoint: Path) -> Any:
    """Returns transformers' model of a checkpoint in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    sees = hasattr(AutoConfig.from_pretrained(checkpoint), "vision_config")
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return kind.from_pretrained(checkpoint, dtype=torch.float32).eval()


def train_with_peft(model: Any, folder: Path, targets: str, *, seed: int = 0, **settings: Any) -> Any:
    """Has peft make and write a random adapter of a model of transformers; returns the adapted model."""
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False, **settings)
    adapted: Any = peft.get_peft_model(model, config)
    adapted.save_pretrained(folder)
    return adapted.eval()
