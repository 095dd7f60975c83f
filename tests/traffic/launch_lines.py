"""The launch lines that closure is tested on."""

from __future__ import annotations

from pathlib import Path

from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.bucket_lookup import Plan
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.shapes.bucket_options import BucketOptions, read_bucket_options
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import FACTOR
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import Qwen25VisionConfig as VisionConfig
from trencadis.multimodal.qwen2_vl.smart_resize import square_sizes

GUIDE = ShapeLimits(
    max_rows=128,
    max_tokens=32768,
    max_model_len=32768,
    block_size=128,
    image_slots=65536,
    squares=tuple(square_sizes(65536, FACTOR)),
)

LIN = {
    "VLLM_BUCKETING_STRATEGY": "lin",
    "VLLM_PROMPT_BS_BUCKET_MAX": "8",
    "VLLM_PROMPT_SEQ_BUCKET_STEP": "256",
    "VLLM_PROMPT_SEQ_BUCKET_MAX": "2048",
    "VLLM_PROMPT_CTX_BUCKET_STEP": "8",
    "VLLM_DECODE_BS_BUCKET_STEP": "16",
    "VLLM_DECODE_BLOCK_BUCKET_STEP": "64",
    "VLLM_DECODE_BLOCK_BUCKET_MAX": "512",
}

LINES: dict[str, tuple[ShapeLimits, dict[str, str]]] = {
    "guide": (GUIDE, {}),
    "guide, seven vision buckets": (GUIDE, {"VLLM_MULTIMODAL_BUCKETS": "1600, 3136,4096, 6400,7744,9216,12544"}),
    "2048, one request": (ShapeLimits(1, 2048, 2048, 128), {}),
    "2048": (ShapeLimits(256, 2048, 2048, 128, 12544), {}),
    "3072": (ShapeLimits(64, 1024, 3072, 128), {}),
    "4096": (ShapeLimits(64, 8192, 4096, 128, 16384), {}),
    "6144, 512 requests": (ShapeLimits(512, 8192, 6144, 128), {}),
    "40960": (ShapeLimits(100, 4096, 40960, 128), {}),
    "131072": (ShapeLimits(32, 16384, 131072, 128), {}),
    "4096, linear": (ShapeLimits(48, 4096, 4096, 128, 4096), LIN),
    "3000, padding": (
        ShapeLimits(60, 2000, 3000, 64), {"VLLM_BUCKETING_STRATEGY": "pad", "VLLM_PROMPT_QUERY_BUCKET_PAD_MAX": "512"},
    ),
    "32768, linear": (ShapeLimits(128, 32768, 32768, 128), {
        "VLLM_EXPONENTIAL_BUCKETING": "false", "VLLM_PROMPT_BS_BUCKET_MIN": "2", "VLLM_PROMPT_QUERY_BUCKET_STEP": "512",
        "VLLM_DECODE_BLOCK_BUCKET_STEP": "512", "VLLM_PROMPT_CTX_BUCKET_STEP": "64",
    }),
}  # fmt: skip


MODELS = ((), (2048, 36, 16, 2, 11008), (3584, 28, 28, 4, 18944), (5120, 64, 40, 8, 27648), (8192, 80, 64, 8, 29568))
"""Qwen2.5-VL 3B, 7B, 32B, 72B: hidden, layers, heads, KV heads, MLP columns; (): the policy's own polynomial."""


def model_of(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vision: bool = True
) -> ModelConfig:
    """A Qwen2.5-VL of these sizes, no files behind it."""
    text = TextConfig(
        hidden, layers, heads, kv_heads, 128, intermediate, 152064, 1e-6, 1e6, 128000, False, True, (16, 24, 24)
    )
    columns = 3456 if hidden >= 5120 else 3420
    tower = VisionConfig(32, 1280, 16, columns, hidden, (7, 15, 23, 31)) if vision else None
    return ModelConfig(Path("model"), "Qwen2_5_VLForConditionalGeneration", text, tower, "bfloat16", (151645,))


def plan_of(name: str) -> tuple[Plan, ShapeLimits]:
    """The plan of one launch line."""
    limits, environ = LINES[name]
    requested = read_bucket_options(environ) if environ else BucketOptions()
    return make_plan(SERVING, limits, requested), limits
