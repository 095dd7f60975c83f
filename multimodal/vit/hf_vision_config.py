"""Parses the vision_config of a tower over tiles: sizes, activation and norm. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from trencadis.core.checkpoint.decoder_fields import MOST_HEADS, MOST_LAYERS, WIDEST, activation_of
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.json_types import JsonObject
from trencadis.multimodal.vit.config import CHANNELS

MAX_SIDE_PIXELS = 4096


class ViTDefaults(NamedTuple):
    """Defaults of a configuration class for keys that a file leaves out."""

    hidden: int
    heads: int
    layers: int
    intermediate: int
    image: int
    patch: int
    eps: float
    activation: str


SIGLIP = ViTDefaults(768, 12, 12, 3072, 224, 16, 1e-6, "gelu_pytorch_tanh")
"""Defaults of SiglipVisionConfig."""

BLOCK_NAMES = (
    (".encoder.layers.", ".blocks."),
    (".layer_norm1.", ".norm1."),
    (".layer_norm2.", ".norm2."),
    (".mlp.fc1.", ".mlp.up_proj."),
    (".mlp.fc2.", ".mlp.down_proj."),
)
"""(stored, canonical) parts of weight names in towers with CLIP's or SigLIP's blocks."""


def read_vit_fields(
    c: JsonFields, kinds: tuple[str, ...], defaults: ViTDefaults, out_hidden: int, merge: int = 1, exact: bool = True
) -> JsonObject:
    """Returns the fields of a ``TileVisionConfig`` with all its layers.

    ``kinds``: accepted values of its model_type; ``out_hidden``: the decoder's width; ``merge``: as in
    ``TileVisionConfig``. ``exact``: patches must fill a tile; else the remainder at its right and lower edge is
    ignored.
    """
    c.only("model_type", kinds, kinds[0])
    c.only("num_channels", (CHANNELS,), CHANNELS)
    hidden = c.integer("hidden_size", most=WIDEST, default=defaults.hidden)
    heads = c.integer("num_attention_heads", most=MOST_HEADS, default=defaults.heads)
    if hidden % (2 * heads):
        c.refuse("num_attention_heads", f"implemented: heads of an even size, and hidden_size is {hidden}")
    image, patch = read_square_side(c, "image_size", defaults.image), read_square_side(c, "patch_size", defaults.patch)
    if (exact and image % patch) or image < patch:
        c.refuse("patch_size", f"it must divide image_size, which is {image}")
    if image // patch % merge:
        c.refuse("patch_size", f"{merge} must divide the {image // patch} patches along a side of a tile")
    return dict(
        depth=c.integer("num_hidden_layers", most=MOST_LAYERS, default=defaults.layers),
        hidden=hidden,
        heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST, default=defaults.intermediate),
        out_hidden=out_hidden,
        image=image,
        patch=patch,
        merge=merge,
        eps=c.number("layer_norm_eps", 0, 1, defaults.eps, above=True),
        activation=activation_of(c, "hidden_act", defaults.activation),
    )


def read_square_side(c: JsonFields, key: str, default: int) -> int:
    """Reads a side in pixels, or a pair of equal ones."""
    given = c.values.get(key)
    if not isinstance(given, list):
        return c.integer(key, most=MAX_SIDE_PIXELS, default=default)
    first, second = c.integers(key, 1, MAX_SIDE_PIXELS, length=2)
    if first != second:
        c.refuse(key, "implemented: squares")
    return first


def read_image_token(root: JsonFields, vocab: int, tokens: int, default: int) -> int:
    """Reads the id of the placeholder token.

    ``tokens``: rows of a tile, checked if the file has them; 0: there are no tiles.
    """
    keys = [key for key in ("image_token_index", "image_token_id") if key in root.values]
    token = default
    for key in keys:
        token = root.integer(key, 0, vocab - 1)
    if not keys and vocab <= default:
        root.refuse("image_token_index", "it must be in the vocabulary")
    if tokens and root.integer("image_seq_length", default=tokens) != tokens:
        root.refuse("image_seq_length", f"it must be {tokens}, the rows of a tile")
    return token
