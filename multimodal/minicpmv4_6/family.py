"""The MiniCPM-V 4.6 family: Qwen3.5's decoder, and a SigLIP tower that merges windows of four patches between two
layers. Torch-free.
"""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_config_parsers import MOST_HEADS, MOST_LAYERS, WIDEST, activation_of
from trencadis.core.checkpoint.family import GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.family_configs import qwen3_5
from trencadis.core.family_configs.qwen3_5 import IGNORED, SKIPPED, read_decoder
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.minicpmv4_6.config import MiniCPMVisionConfig
from trencadis.multimodal.vit.tile_vision_config import CHANNELS
from trencadis.multimodal.vit.vision_language_config import BLOCK_NAMES, DECODER_PREFIXES, read_square_side


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' MiniCPMV4_6Config. Only the root's key decides if the head is tied."""
    if c is root:
        root.refuse("text_config", "it must be an object")
    c.only("model_type", ("qwen3_5_text",), "qwen3_5_text")
    text = read_decoder(c, root.boolean("tie_word_embeddings", False))
    root.only("downsample_mode", ("16x",), "16x")
    root.only("drop_vision_last_layer", (False,), False)
    root.only("merger_times", (1,), 1)
    _check_pair(root, "merge_kernel_size")
    token = root.integer("image_token_id", 0, text.vocab - 1)
    return ParsedConfig(text, _read_tower(root, root.within("vision_config"), text.hidden), {"image_token_id": token})


def _check_pair(c: JsonFields, key: str) -> None:
    """Refuses kernels other than 2 x 2."""
    if c.is_given(key) and c.integers(key, 1, WIDEST, length=2) != (2, 2):
        c.refuse(key, "implemented: [2, 2]")


def _read_tower(root: JsonFields, c: JsonFields, width: int) -> MiniCPMVisionConfig:
    """Reads transformers' MiniCPMV4_6VisionConfig, whose ``insert_layer_id`` is that of the root."""
    c.only("model_type", ("minicpmv4_6_vision",), "minicpmv4_6_vision")
    c.only("num_channels", (CHANNELS,), CHANNELS)
    _check_pair(c, "window_kernel_size")
    c.is_given("insert_layer_id")
    hidden = c.integer("hidden_size", most=WIDEST, default=768)
    heads = c.integer("num_attention_heads", 1, MOST_HEADS, 12)
    if hidden % heads or hidden // heads % 2:
        c.refuse("num_attention_heads", f"implemented: heads of an even size, and hidden_size is {hidden}")
    image, patch = read_square_side(c, "image_size", 224), read_square_side(c, "patch_size", 16)
    if image < patch:
        c.refuse("patch_size", f"it must be at most image_size, which is {image}")
    depth = c.integer("num_hidden_layers", 1, MOST_LAYERS, 12)
    return MiniCPMVisionConfig(
        depth=depth, hidden=hidden, heads=heads, intermediate=c.integer("intermediate_size", most=WIDEST, default=3072),
        out_hidden=width, patch=patch, side=image // patch, eps=c.number("layer_norm_eps", 0, 1, 1e-6, above=True),
        activation=activation_of(c, "hidden_act", "gelu_pytorch_tanh"),
        merged_from=1 + root.integer("insert_layer_id", 0, depth - 1, 6),
    )  # fmt: skip


PREFIXES: JsonMapping = {
    "model.vision_tower.": "visual.",
    "vision_tower.": "visual.",
    "model.merger.": "visual.projector.",
    "merger.": "visual.projector.",
    **DECODER_PREFIXES,
}
FAMILY = Family(
    name="MiniCPM-V 4.6",
    model_type="minicpmv4_6",
    architectures={"MiniCPMV4_6ForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, BLOCK_NAMES),
    make="trencadis.multimodal.minicpmv4_6.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.minicpmv4_6.processor:image_needs",
        sizes="trencadis.multimodal.minicpmv4_6.processor:image_sizes",
        processor="trencadis.multimodal.minicpmv4_6.processor:from_checkpoint",
        tokens={"image_token_id": "<|image_pad|>"},
        expand="trencadis.multimodal.minicpmv4_6.processor:expand_numbered",
    ),
    ignored=IGNORED | {"image_size", "video_token_id", "patch_size"},
    skipped=SKIPPED,
    adapters=qwen3_5.FAMILY.adapters,
)
