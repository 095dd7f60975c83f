"""Families whose pictures are tiles or lines of rows, as the tests compare them with transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.oracles.transformers_model import Answer
from tests.vision import forms
from tests.vision.rig import FamilyRig
from trencadis.core.checkpoint.reading import load_config
from trencadis.core.layout import RESERVED_ROWS
from trencadis.core.models.registry import image_processor
from trencadis.multimodal.processor import Prepared, TakenRows

Change = Callable[[Any, Any], tuple[Any, str, Any]]


@dataclass(frozen=True)
class Compared:
    """A family and its oracle.

    Args:
        write: (folder, form) -> the checkpoint.
        processor: (folder) -> transformers' processor, with Pillow.
        features: names of the processor's outputs that make rows.
        tokens: (transformers' processor, ours, height, width) -> placeholder tokens of a picture.
        mistakes: of a model: (place, name, value).
        altered: (key of config.json, value, what the line names).
        settings: the same of preprocessor_config.json.
    """

    write: Callable[..., Path]
    forms: dict[str, dict[str, Any]]
    processor: Callable[[Path], Any]
    features: tuple[str, ...]
    tokens: Callable[[Any, Any, int, int], int]
    mistakes: dict[str, Change] = field(default_factory=dict)
    altered: tuple[tuple[str, Any, str], ...] = ()
    settings: tuple[tuple[str, Any, str], ...] = ()
    image: str = "<image>"


def _changed(model: Any, ops: Any) -> tuple[Any, str, Any]:
    """The last two tiles of a launch get each other's pixels."""

    def pack(items: list[Any], slots: int, was: Any = model.pack) -> Any:
        *first, one, two = items
        return was([*first, replace(one, pixels=two.pixels), replace(two, pixels=one.pixels)], slots)

    return model, "pack", pack


def _llava_next(path: Path) -> Any:
    from transformers import AutoTokenizer, LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    return LlavaNextProcessor(
        LlavaNextImageProcessorPil.from_pretrained(path), AutoTokenizer.from_pretrained(path), patch_size=14,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip


COMPARED = {
    "llava_next": Compared(
        forms.llava_next,
        {"llama": {}, "mistral": {"kind": "mistral", "sliding_window": None, "seed": 2}, "qwen2": {
            "kind": "qwen2", "seed": 3, "image": 112, "num_key_value_heads": 1}},
        _llava_next,
        ("pixel_values", "image_sizes"),
        lambda theirs, ours, h, w: theirs._get_number_of_features(h, w, ours.image, ours.image) - 1,
        {
            "one layer too few": lambda model, ops: (model, "blocks", model.blocks[:-1]),
            "no newline": lambda model, ops: (model, "newline", model.newline * 0),
            "two tiles changed": _changed,
        },
        (
            ("image_grid_pinpoints", [[56, 60]], "image_grid_pinpoints"), ("image_grid_pinpoints", [], "pinpoints"),
            ("image_grid_pinpoints", [[56 * 9, 56 * 9]], "pinpoints"), ("text_config.model_type", "opt", "model_type"),
            ("image_grid_pinpoints", 7, "pinpoints"), ("vision_feature_select_strategy", "full", "strategy"),
        ),
        (
            ("image_grid_pinpoints", [[56, 56]], "pinpoints"), ("resample", 2, "resample"),
            ("image_processor_type", "CLIPImageProcessor", "image_processor_type"), ("size", {"height": 5}, "size"),
        ),
    ),
}  # fmt: skip


def prepared(path: Path, image: Image.Image) -> Prepared:
    """A picture as our processor makes it."""
    made: Prepared = image_processor(load_config(path), {}).prepare(image, "d")
    return made


def rows_of_transformers(family: Compared, path: Path, model: Any, image: Image.Image) -> torch.Tensor:
    """float32 [placeholder tokens, hidden] of one picture."""
    inputs = family.processor(path)(images=[image], text=family.image, return_tensors="pt")
    with torch.no_grad():
        found = model.get_image_features(**{name: inputs[name] for name in family.features}).pooler_output
    parts = found if isinstance(found, list | tuple) else [found]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def worst_row(rig: FamilyRig, pictures: Sequence[tuple[Prepared, torch.Tensor]], rng: Any, spare: int = 0) -> float:
    """Largest error of one launch over the tiles of pictures, each relative to its oracle's largest value."""
    tiles = [tile for one, _ in pictures for tile in one.items or (one,)]
    given = [(t.tokens, t.grid, t.slots, t.pixels) for t in tiles]
    encoded, arena = rig.encoded(given, rng, spare)
    worst, left = 0.0, list(encoded)
    for one, want in pictures:
        count = len(one.items) or 1
        mine, left = left[:count], left[count:]
        rows: list[int] = []
        for piece in one.layout or (TakenRows(0, 0, one.tokens),):
            if isinstance(piece, TakenRows) and piece.constant >= 0:
                rows += [RESERVED_ROWS + piece.constant] * piece.count
            elif isinstance(piece, TakenRows):
                rows += mine[piece.item].rows[piece.first : piece.first + piece.count].tolist()
        assert len(rows) == one.tokens == len(want)
        worst = max(worst, float((arena[rows] - want).abs().max() / want.abs().max()))
    return worst


def same_values(family: Compared, path: Path, image: Image.Image) -> None:
    """Holds a picture's pixels, normalised as the device does, to transformers' bit for bit."""
    ours = image_processor(load_config(path), {})
    theirs = family.processor(path)(images=[image], text=family.image, return_tensors="np")["pixel_values"]
    one = ours.prepare(image, "d")
    theirs = np.asarray(theirs).reshape(-1, *np.asarray(theirs).shape[-3:])
    channel = np.repeat(np.arange(3), ours.patch**2)
    assert len(theirs) == len(one.items or (one,)), image.size
    for tile, values in zip(one.items or (one,), theirs, strict=True):
        assert (ours.table[channel, tile.pixels] == ours.cut(values.transpose(1, 2, 0))).all(), image.size


def asked_of(family: Compared, path: Path, model: Any, text: str, images: list[Any], length: int) -> Any:
    """(ids, transformers' answer) of a prompt."""
    given = family.processor(path)(images=images or None, text=text, return_tensors="pt")
    given = {
        k: v for k, v in given.items() if k in ("input_ids", "attention_mask", "pixel_attention_mask", *family.features)
    }
    with torch.inference_mode():
        out = model.generate(
            **given, max_new_tokens=length, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    logits = torch.stack([row[0].float() for row in out.logits])
    best, ids = logits.topk(2).values, given["input_ids"]
    tokens = out.sequences[0, ids.shape[1] :].tolist()
    return ids[0].tolist(), Answer(tokens, (best[:, 0] - best[:, 1]).tolist(), logits)
