"""The Gemma-3 family with images: the text models' decoder, SigLIP's tower, means of its patches. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trencadis.core.checkpoint.family import EVERY_PART, GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.family_configs import gemma3
from trencadis.core.json_types import JsonMapping
from trencadis.core.vision_config import WINDOW_SLOTS, SharedMatrix
from trencadis.multimodal.vit.tile_vision_config import SiglipVisionConfig
from trencadis.multimodal.vit.vision_language_config import BLOCK_NAMES, PREFIXES, SIGLIP, read_vit_fields


@dataclass(frozen=True)
class Gemma3VisionConfig(SiglipVisionConfig):
    """Configuration of Gemma-3's SigLIP tower.

    An image is one tile; a row is the normed and projected mean of a cell's patches.
    """

    @property
    def projector_weights(self) -> int:
        """Number of weights of the projector, which no checkpoint quantises."""
        return self.hidden * self.out_hidden

    def projector_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        yield from ()

    def _projector_weights(self) -> int:
        return self.projector_weights

    def other_weights(self, ranks: int) -> int:
        """Counts the position table, the last norm and the projector, which are whole on every rank."""
        return (self.side**2 + 1) * self.hidden + self.norm_weights + self.projector_weights

    def tables(self, unit: int = 1) -> int:
        """Adds the bytes of the projector's norm, which is float32."""
        return super().tables(unit) + 4 * self.hidden

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        """Includes the means, which are computed in float32."""
        leaving = slots * self.hidden * (4 * itemsize + 4)
        return max(super().activations(slots, itemsize, ranks, unit), leaving)


TEXT_DEFAULTS: JsonMapping = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""Gemma3TextConfig's values for keys that the hub's text_config omits."""

MEDIA_TOKENS = {"placed_token_id": ("boi_token", 255_999), "image_token_id": ("image_token", 262_144)}


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Gemma3Config."""
    if c is root:
        root.refuse("text_config", "it must be an object")
    c.only("model_type", ("gemma3_text",), "gemma3_text")
    text = replace(gemma3.describe(root, c.with_defaults(TEXT_DEFAULTS), tied).text, bidirectional_images=True)
    media = {key: _read_token(root, name, default, text.vocab) for key, (name, default) in MEDIA_TOKENS.items()}
    return ParsedConfig(text, _read_vision(root, root.within("vision_config"), text.hidden), media)


def _read_token(root: JsonFields, name: str, default: int, vocab: int) -> int:
    """Reads a token id, under the hub's key or the one that transformers may write."""
    found = default
    for key in (f"{name}_index", f"{name}_id"):
        if root.is_given(key):
            found = root.integer(key, 0, vocab - 1)
    if found >= vocab:
        root.refuse(f"{name}_index", "it must be in the vocabulary")
    return found


def _read_vision(root: JsonFields, c: JsonFields, width: int) -> Gemma3VisionConfig:
    fields = read_vit_fields(c, ("siglip_vision_model",), SIGLIP, width)
    tokens = root.integer("mm_tokens_per_image", default=256)
    side, across = fields["image"] // fields["patch"], math.isqrt(tokens)
    if across**2 != tokens or side % across or WINDOW_SLOTS % (side // across) ** 2:
        root.refuse("mm_tokens_per_image", f"implemented: squares of 1, 2, 4 or 8 patches a side, and there are {side}")
    return Gemma3VisionConfig(**{**fields, "merge": side // across}, projector="")


FAMILY = Family(
    name="Gemma-3",
    model_type="gemma3",
    architectures={"Gemma3ForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(
        PREFIXES,
        (
            *BLOCK_NAMES,
            ("visual.post_layernorm.", "visual.last_norm."),
            *gemma3.FAMILY.names.inner,
        ),
    ),
    make="trencadis.multimodal.gemma3.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.vit.tile_image_processor:image_needs",
        sizes="trencadis.multimodal.gemma3.processor:image_sizes",
        processor="trencadis.multimodal.gemma3.processor:from_checkpoint",
        tokens={"image_token_index": "<image_soft_token>"},
        around=("\n\n", "\n\n"),
    ),
    tied=True,
    ignored=gemma3.FAMILY.ignored | {"eoi_token_index", "eoi_token_id"},
    adapters=EVERY_PART,
)
