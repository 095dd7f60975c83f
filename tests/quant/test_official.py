"""The sizes of the official AWQ checkpoints of Qwen2.5-VL, at two layers and 8,192 tokens, on 1, 2 and 4 ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.test_shards import Group, ThreadComm
from trencadis.backends.cpu import make_backend
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.models.model_loader import load_model

SIZES = {"3B": (2048, 16, 2, 11008), "7B": (3584, 28, 4, 18944), "72B": (8192, 64, 8, 29568)}
"""Hidden size, query heads, KV heads, columns of the MLP."""

VOCAB, LAYERS = 8192, 2
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": ["visual"],
}  # fmt: skip


def config(hidden: int, heads: int, kv_heads: int, inner: int) -> dict[str, Any]:
    vision = {
        "depth": 1, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": hidden,
        "fullatt_block_indexes": [0], "hidden_act": "silu", "in_channels": 3, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2, "window_size": 112,
    }  # fmt: skip
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "torch_dtype": "float16",
        "hidden_size": hidden, "num_hidden_layers": LAYERS, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": VOCAB, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "max_position_embeddings": 128000, "use_sliding_window": False, "tie_word_embeddings": False,
        "image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8,
        "vision_config": vision, "quantization_config": AWQ,
    }  # fmt: skip


def stored(hidden: int, heads: int, kv_heads: int, inner: int) -> Iterator[tuple[str, Tensor]]:
    """Random tensors under the checkpoint's names; the tower has one block."""
    d, generator = hidden // heads, torch.Generator().manual_seed(1)

    def plain(name: str, *shape: int) -> tuple[str, Tensor]:
        return name, (torch.randn(*shape, generator=generator) * 0.02).half()

    yield plain("model.embed_tokens.weight", VOCAB, hidden)
    yield plain("lm_head.weight", VOCAB, hidden)
    yield plain("model.norm.weight", hidden)
    parts = {
        "self_attn.q_proj": (heads * d, hidden), "self_attn.k_proj": (kv_heads * d, hidden),
        "self_attn.v_proj": (kv_heads * d, hidden), "self_attn.o_proj": (hidden, heads * d),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        yield plain(f"{at}.input_layernorm.weight", hidden)
        yield plain(f"{at}.post_attention_layernorm.weight", hidden)
        for name, (rows, columns) in parts.items():
            yield from words(f"{at}.{name}", rows, columns, generator)
            if name[10:] in ("q_proj", "k_proj", "v_proj"):
                yield plain(f"{at}.{name}.bias", rows)
    yield from tower(hidden, plain)


def words(name: str, rows: int, columns: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Random codes: any word is one."""
    groups, ends = columns // 128, (-(2**31), 2**31 - 1)
    for suffix, height in (("qweight", columns), ("qzeros", groups)):
        drawn = torch.randint(*ends, (height, rows // 8), generator=generator, dtype=torch.int64)
        yield f"{name}.{suffix}", drawn.int()
    yield f"{name}.scales", (torch.rand(groups, rows, generator=generator) * 0.002 + 0.001).half()


def tower(hidden: int, plain: Any) -> Iterator[tuple[str, Tensor]]:
    yield plain("visual.patch_embed.proj.weight", 1280, 3, 2, 14, 14)
    for name, rows, columns in (
        ("blocks.0.attn.qkv", 3840, 1280), ("blocks.0.attn.proj", 1280, 1280), ("blocks.0.mlp.gate_proj", 3420, 1280),
        ("blocks.0.mlp.up_proj", 3420, 1280), ("blocks.0.mlp.down_proj", 1280, 3420), ("merger.mlp.0", 5120, 5120),
        ("merger.mlp.2", hidden, 5120),
    ):  # fmt: skip
        yield plain(f"visual.{name}.weight", rows, columns)
        yield plain(f"visual.{name}.bias", rows)
    for name in ("blocks.0.norm1", "blocks.0.norm2", "merger.ln_q"):
        yield plain(f"visual.{name}.weight", 1280)


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
def test_official_awq_sizes_load_on_every_number_of_ranks(size: str, tmp_path: Path) -> None:
    """Ranks' shares of an MLP add up to the whole's answer, and the ledger has each rank's bytes."""
    shape = SIZES[size]
    save_file({k: v.contiguous() for k, v in stored(*shape)}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(config(*shape)))
    model = load_config(tmp_path, "awq")
    x = torch.randn(3, shape[0], generator=torch.Generator().manual_seed(2)).bfloat16()
    sums: dict[int, Tensor] = {}
    for world in [w for w in (1, 2, 4) if shape[2] % w == 0 or w % shape[2] == 0]:
        total = torch.zeros(3, shape[0])
        for rank in range(world):
            backend: Any = make_backend(BackendConfig(dtype=torch.bfloat16, options={"threads": "1"}))
            backend.comm = ThreadComm(Group(1), rank, world)
            built: Any = load_model(model, backend)
            t, v = model.text, model.vision
            assert v is not None
            paper = MemoryEstimator(
                model, 2, world, quantised=backend.policy.quantised, unit=backend.policy.aligned
            ).weights()
            frequencies = 12 * (t.head_dim // 2) + v.tables(backend.policy.aligned)
            assert rank or paper == built.nbytes() + frequencies
            mlp = built.layers[1].mlp
            inner = backend.ops.silu_mul(mlp.gate_up(x))
            total += backend.ops.linear(inner, mlp.down.weights[0]).float()
            if size == "72B" and world == 2:
                assert mlp.down.weights[0].in_features == 14848, "a share ends at a group"
            del built, mlp
        sums[world] = total
    for world, total in sums.items():
        away = (total - sums[1]).norm(dim=1) / sums[1].norm(dim=1)
        print(f"{size} on {world} ranks: away by {float(away.max()):.4f} of a row's norm")
        assert away.max() <= 0.05  # each rank rounds its columns and activations to scales of its own
