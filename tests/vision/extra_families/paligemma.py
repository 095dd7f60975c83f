"""Small PaliGemma checkpoints, and the example package as ``pip install`` leaves it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.fakes import checkpoints
from tests.vision.vision_checkpoints import IMAGE, finished

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "model_paligemma"


def installed(folder: Path) -> Path:
    """The modules of the package in ``folder``, and its entry points in a dist-info folder."""
    info = folder / "trencadis_model_paligemma-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trencadis-model-paligemma\nVersion: 0.1.0\n")
    points = (EXAMPLE / "pyproject.toml").read_text().partition('"trencadis.models"]\n')[2].partition("\n\n")[0]
    (info / "entry_points.txt").write_text("[trencadis.models]\n" + points.replace('"', "") + "\n")
    for module in EXAMPLE.glob("*.py"):
        shutil.copy(module, folder)
    return folder


def paligemma(folder: Path, *, seed: int = 0, image: int = 84, **text: Any) -> Path:
    """A checkpoint with images of ``image`` pixels."""
    from transformers import GenerationConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration

    own = dict(
        model_type="gemma", vocab_size=checkpoints.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, head_dim=16, max_position_embeddings=2048, pad_token_id=1,
        eos_token_id=checkpoints.IDS["<|im_end|>"],
    ) | text  # fmt: skip
    tower = dict(
        model_type="siglip_vision_model", hidden_size=36, intermediate_size=44, num_hidden_layers=3,
        num_attention_heads=2, image_size=image, patch_size=14, vision_use_head=False,
    )  # fmt: skip
    config = PaliGemmaConfig(
        text_config=own, vision_config=tower, image_token_index=IMAGE, projection_dim=64, hidden_size=64,
        vocab_size=checkpoints.VOCAB, architectures=["PaliGemmaForConditionalGeneration"],
    )  # fmt: skip
    processor = {
        "image_processor_type": "SiglipImageProcessor", "size": {"height": image, "width": image}, "resample": 3,
        "do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": (image // 14) ** 2,
    }  # fmt: skip
    model: Any = PaliGemmaForConditionalGeneration(config)
    model.generation_config = GenerationConfig()
    template = (EXAMPLE / "template.jinja").read_text()
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>"}
    return finished(model, folder, seed, ["<image>", "<bos>"], processor, template, **named)


def run_transformers(path: Path) -> Any:
    """transformers' processor, with Pillow."""
    from transformers import PaliGemmaProcessor, PreTrainedTokenizerFast
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    images = SiglipImageProcessorPil.from_pretrained(path)
    return PaliGemmaProcessor(images, PreTrainedTokenizerFast.from_pretrained(path))
