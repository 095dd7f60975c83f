"""Shared by the parsers of Qwen2-VL and Qwen2.5-VL: keys of vision_config, and prefixes of weights. Torch-free.

Media tokens of Qwen2-VL and Qwen2.5-VL: keys of config.json, their defaults, and names in the tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from trencadis.core.checkpoint.decoder_config_parsers import MOST_HEADS, WIDEST, full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.family import ParsedConfig
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.rope_config import LARGEST_BASE
from trencadis.core.vision_config import VisionConfig
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import CHANNELS, MERGE, PATCH, TEMPORAL

TOKEN_NAMES = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
DEFAULT_IDS = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
}  # fmt: skip


def read_media_tokens(root: JsonFields, vocab: int, defaults: Mapping[str, int] = DEFAULT_IDS) -> dict[str, int]:
    """Returns ids by key; -1 if a key is missing and the default is beyond the vocabulary."""
    media = {key: _read_token(root, key, default, vocab) for key, default in defaults.items()}
    if media["image_token_id"] == media["video_token_id"]:
        root.refuse("image_token_id", "it must differ from video_token_id")
    return media


def _read_token(root: JsonFields, key: str, default: int, vocab: int) -> int:
    if key in root.values:
        return root.integer(key, 0, vocab - 1)
    return default if default < vocab else -1


PREFIXES = {
    "model.visual.": "visual.",
    "visual.": "visual.",
    "model.language_model.": "",
    "model.": "",
    "lm_head.": "lm_head.",
}
"""Prefixes of weight names as transformers 5 and the hub's files have them."""


class TowerWidths(NamedTuple):
    """Widths of a tower's hidden rows and of its output rows, and its number of heads."""

    hidden: int
    heads: int
    out_hidden: int


def read_config(
    root: JsonFields, c: JsonFields, tied: bool, tower: Callable[[JsonFields, int], VisionConfig]
) -> ParsedConfig:
    """Reads a configuration, flat as on the hub or nested; ``tower``: reads vision_config, given the text's width."""
    full_attention(c)
    heads = heads_of(c, whole=True)
    text = gated_decoder(c, heads, tied, positions=32768, theta=1e6, axes=True, qkv_bias=True)
    vision = tower(root.within("vision_config"), text.hidden)
    return ParsedConfig(text, vision, read_media_tokens(root, text.vocab))


def read_widths(c: JsonFields, hidden_key: str, out_key: str, text_hidden: int) -> TowerWidths:
    """Reads the widths from the family's keys; refuses those that the tower or the decoder does not support."""
    hidden, heads = c.integer(hidden_key, most=WIDEST), c.integer("num_heads", most=MOST_HEADS)
    if hidden % (4 * heads):
        c.refuse("num_heads", f"implemented: heads whose size is a multiple of 4, and {hidden_key} is {hidden}")
    out_hidden = c.integer(out_key, most=WIDEST, default=text_hidden)
    if out_hidden != text_hidden:
        c.refuse(out_key, f"it must be the text model's hidden_size, which is {text_hidden}")
    return TowerWidths(hidden, heads, out_hidden)


def check_patch_sizes(c: JsonFields) -> None:
    """Refuses other sizes of a patch or a merge cell than those that packing and processor are written for."""
    c.only("patch_size", (PATCH,), PATCH)
    c.only("temporal_patch_size", (TEMPORAL,), TEMPORAL)
    c.only("spatial_merge_size", (MERGE,), MERGE)
    c.only("in_channels", (CHANNELS,), CHANNELS)


def check_aliases(c: JsonFields, depth: int, heads: int, hidden: int) -> None:
    """Checks that keys which transformers reads as aliases have the values of the main keys."""
    for alias, value in (("num_attention_heads", heads), ("num_hidden_layers", depth), ("head_dim", hidden // heads)):
        if c.is_given(alias):
            c.only(alias, (value,))


def read_rope_theta(c: JsonFields) -> float:
    """Reads the base of the tower's rotary frequencies."""
    rope = c.within("rope_scaling" if c.values.get("rope_scaling") else "rope_parameters")
    for key in ("rope_type", "type"):
        if key in rope.values:
            rope.only(key, ("axial", "default"))
    place = rope if "rope_theta" in rope.values else c
    return place.number("rope_theta", 0, LARGEST_BASE, 10000.0, above=True)
