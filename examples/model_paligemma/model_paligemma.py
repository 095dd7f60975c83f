"""PaliGemma as a family: Gemma's decoder, whose prompts see themselves as a whole, and SigLIP's tower. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trencadis.core.checkpoint.decoder_config_parsers import gated_decoder, heads_of
from trencadis.core.checkpoint.family import GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import RMS_ONE
from trencadis.core.media_spans import MediaSpan
from trencadis.multimodal.placeholders import expand_placeholders
from trencadis.multimodal.processor_interface import PreparedImage
from trencadis.multimodal.vit.tile_vision_config import SiglipVisionConfig
from trencadis.multimodal.vit.vision_language_config import (
    BLOCK_NAMES,
    DECODER_PREFIXES,
    SIGLIP,
    read_image_token,
    read_vit_fields,
)

GEMMA = {
    "vocab_size": 257152, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
    "num_attention_heads": 8, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
}  # fmt: skip
IMAGE_TOKEN = 256000


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """PaliGemmaConfig."""
    c.only("model_type", ("gemma",), "gemma")
    if c.is_given("use_bidirectional_attention"):
        c.only("use_bidirectional_attention", (True,))
    held = c.with_defaults(GEMMA)
    heads, bias = heads_of(held, default=256), c.boolean("attention_bias", False)
    text = gated_decoder(
        held, heads, tied, positions=8192, act=("hidden_act", "gelu_pytorch_tanh"), qkv_bias=bias, out_bias=bias,
        norm=RMS_ONE, embedding_scale=heads.hidden**0.5, causal=False,
    )  # fmt: skip
    root.only("projection_dim", (text.hidden,), 2048)
    v = root.within("vision_config")
    vision = SiglipVisionConfig(**read_vit_fields(v, ("siglip_vision_model",), SIGLIP, text.hidden), projector="")
    c.only("num_image_tokens", (vision.rows_per_tile,), vision.rows_per_tile)
    return ParsedConfig(text, vision, {"image_token_id": read_image_token(root, text.vocab, 0, IMAGE_TOKEN)})


def expand(
    tokens: Sequence[int], image_token: int, media: Sequence[PreparedImage], places: Sequence[int],
    video_token: int = -1,
    encode: Callable[[str], list[int]] | None = None,
) -> tuple[list[int], list[MediaSpan]]:  # fmt: skip
    """A prompt is its images, the token that begins a text, the text, the end of a line."""
    assert encode is not None
    begin, end = encode("<bos>"), encode("\n")
    first = len(begin) if list(tokens[:1]) == begin else 0  # the tokenizer's own, before the images
    text = places[-1] + 1
    behind = list(tokens[text:])
    behind = [*([] if behind[:1] == begin else begin), *behind, *([] if behind[-1:] == end else end)]
    whole = [*tokens[first:text], *behind]
    return expand_placeholders(whole, image_token, media, [place - first for place in places])


FAMILY = Family(
    name="PaliGemma",
    model_type="paligemma",
    architectures={"PaliGemmaForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(
        {
            "model.vision_tower.vision_model.": "visual.",
            "vision_tower.vision_model.": "visual.",
            "model.vision_tower.": "visual.",
            "vision_tower.": "visual.",
            "model.multi_modal_projector.linear.": "visual.projector.linear_1.",
            "multi_modal_projector.linear.": "visual.projector.linear_1.",
            **DECODER_PREFIXES,
        },
        (*BLOCK_NAMES, ("visual.post_layernorm.", "visual.last_norm.")),
    ),
    make="paligemma_tower:make",
    vision=VisionSide(
        needs="trencadis.multimodal.vit.tile_image_processor:image_needs",
        sizes="paligemma_processor:image_sizes",
        processor="paligemma_processor:from_checkpoint",
        tokens={"image_token_index": "<image>"},
        expand="model_paligemma:expand",
    ),
    pooling=None,
    tied=True,
    ignored=frozenset({"hidden_size", "ignore_index", "projection_dim", "vocab_size", "num_image_tokens"}),
)
