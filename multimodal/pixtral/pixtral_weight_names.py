"""Names of the weights of Pixtral's tower in checkpoints, and the functions that its families share. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WEIGHT_NAMES = (
    (".transformer.layers.", ".blocks."),
    (".attention_norm.", ".norm1."),
    (".ffn_norm.", ".norm2."),
    (".attention.", ".self_attn."),
    (".feed_forward.", ".mlp."),
    (".projector.patch_merger.merging_layer.", ".merger."),
)
VISION_SIDE: Mapping[str, Any] = {
    "needs": "trencadis.multimodal.pixtral.processor:image_needs",
    "sizes": "trencadis.multimodal.pixtral.processor:image_sizes",
    "processor": "trencadis.multimodal.pixtral.processor:from_checkpoint",
    "tokens": {"image_token_index": "[IMG]"},
}
