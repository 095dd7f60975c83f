"""Idefics3 as a family: Llama's decoder, SigLIP over tiles, cells of up to 4 x 4 patches, one linear layer."""

from __future__ import annotations

from trencadis.core.checkpoint.fields import Fields
from trencadis.core.models.family import GENERATE, Described, Family, StoredNames, VisionSide
from trencadis.multimodal.texts import text_of
from trencadis.multimodal.tiles.config import SiglipTower
from trencadis.multimodal.tiles.fields import BLOCK_NAMES, Usual, placeholder, tile_fields

IMAGE_TOKEN = 128257
USUAL = Usual(1152, 16, 12, 3072, 224, 32, 1e-6, "gelu_pytorch_tanh")
KINDS = ("idefics3_vision", "smolvlm_vision", "idefics3", "smolvlm")
"""model_type of the tower; older files repeat the model's."""

MOST_MERGE = 8


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """Idefics3Config."""
    text = text_of(root, c, tied, ("llama",))
    merge = root.integer("scale_factor", 1, MOST_MERGE, 2)
    fields = tile_fields(root.within("vision_config"), KINDS, USUAL, text.hidden, merge, exact=False)
    vision = SiglipTower(**fields, projector="", projector_bias=False)
    return Described(text, vision, {"image_token_id": placeholder(root, text.vocab, vision.tokens, IMAGE_TOKEN)})


FAMILY = Family(
    name="Idefics3 and SmolVLM",
    model_type="idefics3",
    architectures={"Idefics3ForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(
        {
            "model.vision_model.": "visual.",
            "model.connector.modality_projection.proj.": "visual.projector.linear_1.",
            "model.text_model.": "",
            "lm_head.": "lm_head.",
        },
        (
            *BLOCK_NAMES,
            (".post_layernorm.", ".last_norm."),
        ),
    ),
    make="trencadis.multimodal.idefics3.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.idefics3.processor:image_needs",
        sizes="trencadis.multimodal.idefics3.processor:image_sizes",
        processor="trencadis.multimodal.idefics3.processor:from_checkpoint",
        tokens={"image_token_id": "<image>"},
    ),
    pooling=None,
    ignored=frozenset({"vocab_size", "pad_token_id"}),
)
