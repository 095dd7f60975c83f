"""Writes GGUF files of a checkpoint's text model in Q8_0 or Q4_0, for llama.cpp beside this engine.

Facts of the format (version 3, little-endian): a header, typed keys and values, a description of each tensor with its
dimensions from the innermost on, then the tensors at multiples of 32 bytes. A block of 32 columns is a float16 scale d
and its codes: Q8_0 has 32 int8 of value code x d, Q4_0 32 integers from 0 to 15 of value (code - 8) x d, of which the
16 low halves of its bytes come before the 16 high ones.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

ALIGNMENT, COLUMNS = 32, 32
F32, Q4_0, Q8_0 = 0, 2, 8
"""Numbers of the types of tensors."""
UINT32, FLOAT32, STRING = 4, 6, 8
"""Numbers of the types of values."""

TABLE = "model.embed_tokens.weight"
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
"""Modules of a Qwen2 layer -> llama.cpp's names."""

Values = NDArray[np.float32]


class GgufTensor(NamedTuple):
    """One tensor of the file: its name, its type, and where it comes from."""

    name: str
    kind: int
    shape: tuple[int, ...]
    load: Callable[[], Values]

    @property
    def bytes(self) -> int:
        """Its size."""
        count = int(np.prod(self.shape))
        return 4 * count if self.kind == F32 else count // COLUMNS * (34 if self.kind == Q8_0 else 18)


def q8_0(values: Values) -> bytes:
    """Blocks of 32 neighbouring values: the largest magnitude gets code 127."""
    blocks = values.reshape(-1, COLUMNS)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    codes = np.rint(blocks / np.where(scale == 0, 1, scale)).astype(np.int8)
    return np.concatenate([scale.astype("<f2").view(np.uint8), codes.view(np.uint8)], 1).tobytes()


def q4_0(values: Values) -> bytes:
    """Blocks of 32 neighbouring values: the one of largest magnitude gets code 0, which is -8, whatever its sign."""
    blocks = values.reshape(-1, COLUMNS)
    most = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scale = most / np.float32(-8)
    codes = np.floor(blocks / np.where(scale == 0, 1, scale) + 8.5).clip(0, 15).astype(np.uint8)
    halves = codes[:, :16] | codes[:, 16:] << 4
    return np.concatenate([scale.astype("<f2").view(np.uint8), halves], 1).tobytes()


def written(checkpoint: Path, out: Path, kind: int) -> Path:
    """Writes the text model of a Qwen2 or Qwen2.5-VL checkpoint with every matrix in ``kind``; a partial file never
    appears under its name.

    The embedding is the head's table too where they are tied, in the same bits (``llama-quantize --pure``).
    """
    from safetensors import safe_open

    c: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    work = out.with_suffix(".part")
    with safe_open(checkpoint / "model.safetensors", framework="pt") as stored, work.open("wb") as file:
        tensors = list(_tensors(stored, kind))
        _header(file, _keys(c, kind), tensors)
        for tensor in tensors:
            values = tensor.load()
            file.write(values.tobytes() if tensor.kind == F32 else (q8_0 if kind == Q8_0 else q4_0)(values))
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
    work.rename(out)
    return out


def _tensors(stored: Any, kind: int) -> Iterator[GgufTensor]:
    """The text model's; one-dimensional ones stay float32."""
    for name in stored.keys():  # noqa: SIM118 - no dict
        found = _name(name)
        if found:
            shape = tuple(stored.get_slice(name).get_shape())

            def load(name: str = name) -> Values:
                return np.ascontiguousarray(stored.get_tensor(name).float().numpy())

            yield GgufTensor(found, kind if len(shape) == 2 else F32, shape, load)


def _name(stored: str) -> str:
    """llama.cpp's name of a tensor; empty: it is none of the text model."""
    whole = {TABLE: "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if stored in whole:
        return whole[stored]
    parts = stored.split(".")
    if parts[:2] != ["model", "layers"]:
        return ""
    return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:-1])]}.{parts[-1]}"


def _keys(c: dict[str, Any], kind: int) -> dict[str, int | float | str]:
    """What llama.cpp asks of Qwen2. The file has no vocabulary: prompts are ids."""
    sizes = {
        "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
        "vocab_size": "vocab_size",
    }  # fmt: skip
    return {
        "general.architecture": "qwen2", "general.name": "random", "general.alignment": ALIGNMENT,
        "general.file_type": 7 if kind == Q8_0 else 2, "general.quantization_version": 2,
        **{f"qwen2.{ours}": int(c[reference]) for ours, reference in sizes.items()},
        "qwen2.rope.freq_base": float(c["rope_theta"]),
        "qwen2.attention.layer_norm_rms_epsilon": float(c["rms_norm_eps"]), "tokenizer.ggml.model": "no_vocab",
    }  # fmt: skip


def _header(file: BinaryIO, keys: dict[str, int | float | str], tensors: list[GgufTensor]) -> None:
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)))
    for key, value in keys.items():
        kind = STRING if isinstance(value, str) else UINT32 if isinstance(value, int) else FLOAT32
        file.write(_text(key) + struct.pack("<I", kind))
        if isinstance(value, str):
            file.write(_text(value))
        else:
            file.write(struct.pack("<I" if isinstance(value, int) else "<f", value))
    at = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        file.write(_text(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.kind, at))
        at += tensor.bytes + -tensor.bytes % ALIGNMENT
    file.write(b"\0" * (-file.tell() % ALIGNMENT))


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw
