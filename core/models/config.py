"""A checkpoint's config.json as frozen values, from the hub's layout and from transformers 5's. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trencadis.core.errors import StartupError

VISION_MODEL = "Qwen2_5_VLForConditionalGeneration"
TEXT_MODELS = ("Qwen2ForCausalLM", "LlamaForCausalLM")
ARCHITECTURES = (VISION_MODEL, *TEXT_MODELS)


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling (Llama 3.1 report, section on long context; factors as in its config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class TextConfig:
    """The decoder."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    mrope_section: tuple[int, int, int] | None = None
    rope_scaling: RopeScaling | None = None


@dataclass(frozen=True)
class VisionConfig:
    """The Qwen2.5-VL tower."""

    depth: int
    hidden: int
    heads: int
    intermediate: int
    out_hidden: int
    full_layers: tuple[int, ...]
    patch: int = 14
    merge: int = 2
    temporal: int = 2
    window: int = 112
    channels: int = 3
    tokens_per_second: float = 2.0

    @property
    def patch_values(self) -> int:
        """Values of one patch: channels x temporal x patch x patch."""
        return self.channels * self.temporal * self.patch * self.patch


@dataclass(frozen=True)
class ModelConfig:
    """What the engine needs to know of a checkpoint. ``dtype`` is the stored one."""

    path: Path
    architecture: str
    text: TextConfig
    vision: VisionConfig | None
    dtype: str
    eos: tuple[int, ...]
    image_token: int = -1
    video_token: int = -1
    vision_start: int = -1
    vision_end: int = -1

    @property
    def name(self) -> str:
        """The folder's name, for messages."""
        return self.path.name


def load_config(path: Path) -> ModelConfig:
    """Reads ``path``/config.json (and generation_config.json for the EOS ids).

    Raises:
        StartupError: unreadable, an architecture that is not supported, or a quantised checkpoint; the line says what
            the checkpoint holds and what works.
    """
    raw = read_json(path / "config.json")
    if raw is None:
        gguf = next(path.glob("*.gguf"), None) if path.is_dir() else None
        held = f"a GGUF file ({gguf.name})" if gguf else "no config.json"
        raise StartupError(f"{path} holds {held}; supported: safetensors checkpoints of {', '.join(ARCHITECTURES)}")
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise StartupError(f"{path} holds {architecture}; supported: {', '.join(ARCHITECTURES)}")
    quantised = raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "quantised")
        raise StartupError(f"{path} holds {method} weights; supported: bfloat16, float16 and float32 safetensors")
    try:
        return _parse(path, architecture, raw)
    except (KeyError, TypeError, ValueError) as error:
        raise StartupError(f"{path}/config.json lacks or garbles {error}") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in ``path``, or None where there is no such file or it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _parse(path: Path, architecture: str, raw: dict[str, Any]) -> ModelConfig:
    text = {**raw, **(raw.get("text_config") or {})}
    tied = bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    generation = read_json(path / "generation_config.json") or {}
    eos = generation.get("eos_token_id", text.get("eos_token_id"))
    return ModelConfig(
        path=path,
        architecture=architecture,
        text=_text(text, tied, architecture),
        vision=_vision(raw["vision_config"], text) if architecture == VISION_MODEL else None,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype") or "float32").removeprefix("torch."),
        eos=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
        image_token=int(raw.get("image_token_id", -1)),
        video_token=int(raw.get("video_token_id", -1)),
        vision_start=int(raw.get("vision_start_token_id", -1)),
        vision_end=int(raw.get("vision_end_token_id", -1)),
    )


def _text(c: dict[str, Any], tied: bool, architecture: str) -> TextConfig:
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    elif kind not in ("default", "mrope"):
        raise StartupError(f"config.json asks for rope type {kind!r}; supported: default, mrope, llama3")
    if c.get("use_sliding_window"):
        raise StartupError("config.json asks for sliding-window attention; supported: full attention")
    heads = int(c["num_attention_heads"])
    section = rope.get("mrope_section")
    return TextConfig(
        hidden=int(c["hidden_size"]),
        layers=int(c["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(c.get("num_key_value_heads") or heads),
        head_dim=int(c.get("head_dim") or c["hidden_size"] // heads),
        intermediate=int(c["intermediate_size"]),
        vocab=int(c["vocab_size"]),
        eps=float(c["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", c.get("rope_theta", 10000.0))),
        max_positions=int(c.get("max_position_embeddings", 32768)),
        tied=tied,
        qkv_bias=bool(c.get("attention_bias", False)) if architecture == "LlamaForCausalLM" else True,
        mrope_section=(int(section[0]), int(section[1]), int(section[2])) if section else None,
        rope_scaling=scaling,
    )


def _vision(c: dict[str, Any], text: dict[str, Any]) -> VisionConfig:
    return VisionConfig(
        depth=int(c["depth"]),
        hidden=int(c["hidden_size"]),
        heads=int(c["num_heads"]),
        intermediate=int(c["intermediate_size"]),
        out_hidden=int(c.get("out_hidden_size", text["hidden_size"])),
        full_layers=tuple(int(i) for i in c["fullatt_block_indexes"]),
        patch=int(c.get("patch_size", c.get("spatial_patch_size", 14))),
        merge=int(c.get("spatial_merge_size", 2)),
        temporal=int(c.get("temporal_patch_size", 2)),
        window=int(c.get("window_size", 112)),
        channels=int(c.get("in_channels", c.get("in_chans", 3))),
        tokens_per_second=float(c.get("tokens_per_second", 2.0)),
    )
