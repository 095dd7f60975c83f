"""Mistral 3 as a family."""

from __future__ import annotations

from trencadis.core.checkpoint.fields import Fields
from trencadis.core.models.family import GENERATE, Described, Family, StoredNames, VisionSide
from trencadis.multimodal.lines.config import LineTower
from trencadis.multimodal.pixtral.fields import MERGES, USUAL, tower_fields
from trencadis.multimodal.pixtral.names import NAMES, SIDE
from trencadis.multimodal.texts import PREFIXES, text_of
from trencadis.multimodal.tiles.fields import placeholder

IMAGE_TOKEN = 10


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """Mistral3Config."""
    text = text_of(root, c, tied, ("mistral",))
    merge = root.integer("spatial_merge_size", 1, MERGES[-1], 2)
    if merge not in MERGES:
        root.refuse("spatial_merge_size", f"implemented: {', '.join(map(str, MERGES))}")
    v = root.within("vision_config")
    usual = USUAL._replace(patch=14, image=1540)
    fields = tower_fields(root, v, text.hidden, usual, biased=False)
    vision = LineTower(**fields, merge=merge, merged=True, merge_eps=text.eps)
    return Described(text, vision, {"image_token_id": placeholder(root, text.vocab, 0, IMAGE_TOKEN)})


FAMILY = Family(
    name="Mistral 3",
    model_type="mistral3",
    architectures={"Mistral3ForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, NAMES),
    make="trencadis.multimodal.pixtral.model:make",
    vision=VisionSide(**SIDE),
    pooling=None,
    tied=True,
    ignored=frozenset({"vocab_size"}),
)
