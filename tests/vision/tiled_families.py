"""Families whose images are tiles or lines of rows, as the tests compare them with transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.oracles.transformers_model import Answer
from tests.vision import vision_checkpoints
from tests.vision.extra_families import minicpmv, phi3_v
from tests.vision.family_harness import FamilyHarness
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_processor
from trencadis.core.media_spans import RESERVED_ROWS
from trencadis.multimodal.processor_interface import PlaceholderRun, PreparedImage

Change = Callable[[Any, Any], tuple[Any, str, Any]]


MINISTRAL = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
"""Rotary positions of a decoder whose queries grow from position 16 on."""


@dataclass(frozen=True)
class Compared:
    """A family and its oracle.

    Args:
        write: (folder, form) -> the checkpoint.
        processor: (folder) -> transformers' processor, with Pillow.
        features: names of the processor's outputs that make rows.
        tokens: (transformers' processor, ours, height, width) -> placeholder tokens of an image.
        mistakes: of a model: (place, name, value).
        altered: (key of config.json, value, what the line names).
        settings: the same of preprocessor_config.json.
        image: an image's mark in a raw prompt; ``another``: that of a second one, where it is another.
        values: (our processor, theirs, image): holds pixels to theirs; None: as ``same_values`` does.
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
    another: str = ""
    values: Callable[[Any, Any, Image.Image], None] | None = None


def _changed(model: Any, ops: Any) -> tuple[Any, str, Any]:
    """The last two tiles of a launch get each other's pixels."""

    def pack(items: list[Any], slots: int, was: Any = model.pack) -> Any:
        *first, one, two = items
        return was([*first, replace(one, pixels=two.pixels), replace(two, pixels=one.pixels)], slots)

    return model, "pack", pack


def _reversed(model: Any, ops: Any) -> tuple[Any, str, Any]:
    """The slots of each tile the other way round."""

    def pack(items: list[Any], slots: int, was: Any = model.pack) -> Any:
        return was([replace(i, pixels=i.pixels[::-1]) for i in items], slots)

    return model, "pack", pack


def _by_feature(model: Any, ops: Any) -> tuple[Any, str, Any]:
    """A cell's values feature by feature, as the checkpoint stores what merges them."""

    def merged(x: torch.Tensor, was: Any = model.projector.merger) -> Any:
        return was(x.view(len(x), 4, -1).transpose(1, 2).reshape(len(x), -1))

    return model.projector, "merger", merged


def _llava_next(path: Path) -> Any:
    from transformers import AutoTokenizer, LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    return LlavaNextProcessor(
        LlavaNextImageProcessorPil.from_pretrained(path), AutoTokenizer.from_pretrained(path), patch_size=14,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip


def _internvl(path: Path) -> Any:
    from transformers import AutoTokenizer, InternVLProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    class WithoutVideos(InternVLProcessor):  # its video processor needs torchvision
        def check_argument_for_proper_class(self, name: str, given: Any) -> Any:
            return None

    images, tokenizer = GotOcr2ImageProcessorPil.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    return WithoutVideos(images, tokenizer, None, image_seq_length=4)


def _pixtral(path: Path) -> Any:
    from transformers import AutoTokenizer
    from transformers.models.pixtral import image_processing_pil_pixtral as pil

    # The processor takes a function from the module that needs torchvision; with Pillow it is the same.
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", pil)
    made: Any = import_module("transformers.models.pixtral.processing_pixtral")
    merge = json.loads((path / "config.json").read_text()).get("spatial_merge_size", 1)
    images, tokenizer = pil.PixtralImageProcessorPil.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    return made.PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=merge)


def _tokens_of_pixtral(reference: Any, ours: Any, height: int, width: int) -> int:
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    unit, shown = ours.patch * ours.merge, np.broadcast_to(np.uint8(0), (3, height, width))
    high, wide = get_resize_output_image_size(shown, ours.image, unit, "channels_first")
    return high // unit * wide // unit


def _idefics3(name: str) -> Callable[[Path], Any]:
    def processor(path: Path) -> Any:
        import transformers
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
        from transformers.models.smolvlm import processing_smolvlm
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        images = {"Idefics3": Idefics3ImageProcessorPil, "SmolVLM": SmolVLMImageProcessorPil}[name].from_pretrained(
            path
        )
        settings = json.loads((path / "config.json").read_text())
        rows = (settings["vision_config"]["image_size"] // 14 // settings["scale_factor"]) ** 2

        class WithoutVideos(getattr(transformers, f"{name}Processor")):  # type: ignore[misc]
            def check_argument_for_proper_class(self, name: str, given: Any) -> Any:
                return None

        vars(processing_smolvlm)["num2words"] = str  # it writes the times of a video's frames
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        videos = () if name == "Idefics3" else (None,)
        return WithoutVideos(images, tokenizer, *videos, image_seq_len=rows)

    return processor


def _tiles_of_idefics3(reference: Any, ours: Any, height: int, width: int) -> int:
    """Rows of an image as its processor cuts it; nothing is resampled for that."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

    def resize(image: Any, size: Any, resample: Any = None) -> Any:
        sides = (size.height, size.width)
        if size.longest_edge:
            sides = get_resize_output_image_size(image, size.longest_edge)
        return np.broadcast_to(np.uint8(0), (3, *sides))

    images, theirs_resize = reference.image_processor, reference.image_processor.resize
    images.resize = resize
    try:
        first = resize(np.broadcast_to(np.uint8(0), (3, height, width)), images.size)
        whole = images.resize_for_vision_encoder(first, ours.image)
        return len(images.split_images(whole, {"longest_edge": ours.image})[0]) * int(reference.image_seq_len)
    finally:
        images.resize = theirs_resize


COMPARED = {
    "llava_next": Compared(
        vision_checkpoints.llava_next,
        {"llama": {}, "mistral": {"kind": "mistral", "sliding_window": None, "seed": 2}, "qwen2": {
            "kind": "qwen2", "seed": 3, "image": 112, "num_key_value_heads": 1}},
        _llava_next,
        ("pixel_values", "image_sizes"),
        lambda reference, ours, h, w: reference._get_number_of_features(h, w, ours.image, ours.image) - 1,
        {
            "one layer too few": lambda model, ops: (model, "blocks", model.blocks[:-1]),
            "no newline": lambda model, ops: (model, "constants", model.constants * 0),
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
    "internvl": Compared(
        vision_checkpoints.internvl,
        {"qwen2": {}, "qwen3, five tiles, no biases": {
            "kind": "qwen3", "seed": 2, "most": 5, "vision": {"attention_bias": False, "hidden_act": "quick_gelu"}},
         "llama": {"kind": "llama", "seed": 3, "most": 1},
         "qwen3 with experts": {
             "kind": "qwen3_moe", "seed": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 24, "norm_topk_prob": True,
         }},
        _internvl,
        ("pixel_values",),
        lambda reference, ours, h, w: reference._get_num_multimodal_tokens([(h, w)]).num_image_tokens[0] - 2,
        {
            "two tiles changed": _changed,
            "no layer scale": lambda model, ops: (model.blocks[1], "mlp_scale", model.blocks[1].mlp_scale * 0 + 1),
            "slots in another order": _reversed,
            "no class token": lambda model, ops: (
                model.patch_embed, "position_table",
                model.patch_embed.position_table * (torch.arange(17) > 0).float()[:, None]
            ),
        },
        (
            ("downsample_ratio", 0.3, "downsample_ratio"), ("vision_config.use_qk_norm", True, "use_qk_norm"),
            ("vision_config.norm_type", "rms_norm", "norm_type"), ("vision_feature_layer", -2, "vision_feature_layer"),
            ("vision_config.image_size", [56, 28], "image_size"), ("image_seq_length", 256, "image_seq_length"),
            ("vision_config.use_mean_pooling", False, "use_mean_pooling"),
        ),
        (
            ("max_patches", 1000, "max_patches"), ("size", {"height": 448, "width": 448}, "height"),
            ("resample", 2, "resample"), ("image_processor_type", "CLIPImageProcessor", "image_processor_type"),
        ),
        "<IMG_CONTEXT>",
    ),
    "idefics3": Compared(
        vision_checkpoints.idefics3,
        {"cells of 4": {}, "cells of 9": {"side": 6, "merge": 3, "longest": 168, "seed": 2},
         "cells of 16, one tile": {"side": 8, "merge": 4, "split": False, "seed": 3}},
        _idefics3("Idefics3"),
        ("pixel_values", "pixel_attention_mask"),
        lambda reference, ours, h, w: _tiles_of_idefics3(reference, ours, h, w) if ours.split else ours.rows_per_tile,
        {
            "two tiles changed": _changed,
            "slots in another order": _reversed,
            "no norm behind the layers": lambda model,
            ops: (model.projector, "norm", lambda x, residual: (x + residual, x)),
        },
        (
            ("scale_factor", 3, "patch_size"), ("vision_config.model_type", "siglip_vision_model", "model_type"),
            ("text_config.model_type", "qwen2", "model_type"), ("vision_config.hidden_act", "elu", "hidden_act"),
        ),
        (
            ("size", {"longest_edge": 10**6}, "longest_edge"), ("max_image_size", {"longest_edge": 364}, "edge"),
            ("resample", 3, "resample"), ("do_image_splitting", 1, "do_image_splitting"),
        ),
    ),
    "smolvlm": Compared(
        vision_checkpoints.idefics3,
        {"cells of 9": {"name": "SmolVLM", "side": 6, "merge": 3, "longest": 168, "spare": 5}},
        _idefics3("SmolVLM"),
        ("pixel_values", "pixel_attention_mask"),
        _tiles_of_idefics3,
    ),
    "mistral3": Compared(
        vision_checkpoints.pixtral,
        {"cells of 4": {}, "cells of 1": {"merge": 1, "act": "gelu", "longest": 420, "seed": 2},
         "ministral3": {
             "kind": "ministral3", "seed": 5, "head_dim": 16, "pad_token_id": 1, "rope_parameters": MINISTRAL,
         }},
        _pixtral,
        ("pixel_values", "image_sizes"),
        _tokens_of_pixtral,
        {
            "slots in another order": _reversed,
            "frequencies of another tower": lambda model, ops: (
                model.patch_embed, "frequencies",
                (model.patch_embed.frequencies[0], model.patch_embed.frequencies[1].flip(0))
            ),
            "one layer too few": lambda model, ops: (model, "blocks", model.blocks[:-1]),
            "cells merged by feature": _by_feature,
        },
        (
            ("spatial_merge_size", 3, "spatial_merge_size"), ("vision_feature_layer", 9, "vision_feature_layer"),
            ("vision_config.model_type", "clip_vision_model", "model_type"), ("text_config.model_type", "opt", "model"),
            ("vision_config.head_dim", 20, "head_dim"), ("image_token_index", 10**6, "image_token_index"),
        ),
        (
            ("size", {"longest_edge": 10**6}, "longest_edge"), ("resample", 2, "resample"),
            ("image_processor_type", "CLIPImageProcessor", "image_processor_type"), ("do_center_crop", True, "crop"),
        ),
        "[IMG]",
    ),
    "pixtral": Compared(
        vision_checkpoints.pixtral,
        {"plain": {"name": "Llava", "seed": 4}},
        _pixtral,
        ("pixel_values", "image_sizes"),
        _tokens_of_pixtral,
        altered=(("vision_feature_select_strategy", "default", "strategy"),),
        image="[IMG]",
    ),
    "phi3_v": Compared(
        phi3_v.phi3_v,
        {"four tiles": {}, "sixteen tiles, gqa, gelu": {
            "crops": 16, "num_key_value_heads": 1, "seed": 2, "vision": {"layer_norm_eps": 1e-5}},
         "112, one tile": {"image": 112, "crops": 1, "seed": 3}},
        phi3_v.Processor,
        ("pixel_values", "image_sizes", "numbers"),
        lambda reference, ours, h, w: reference.count(h, w),
        {
            "one layer too few": lambda model, ops: (model, "blocks", model.blocks[:-1]),
            "no separators": lambda model, ops: (model, "constants", model.constants * 0),
            "separators changed": lambda model, ops: (model, "constants", model.constants.flip(0)),
            "two tiles changed": _changed,
            "low bytes lost": lambda model, ops: (
                model.patch_embed, "scale_shift",
                (model.patch_embed.scale_shift[0] * (torch.arange(1764) < 588), model.patch_embed.scale_shift[1])
            ),
        },
        (
            ("embd_layer.hd_transform_order", "glb_sub", "hd_transform_order"),
            ("embd_layer.use_hd_transform", False, "use_hd_transform"), ("img_processor.layer_idx", -9, "layer_idx"),
            ("img_processor.type_feature", "cls_patch", "type_feature"), ("img_processor.num_img_tokens", 9, "num_img"),
            ("img_processor.image_dim_out", 64, "image_dim_out"), ("img_processor.model_name", "other", "model_name"),
            ("img_processor.patch_size", 15, "patch_size"), ("image_token_id", 10**6, "image_token_id"),
        ),
        (
            ("num_crops", 0, "num_crops"), ("num_crops", 300, "num_crops"), ("do_convert_rgb", False, "do_convert_rgb"),
            ("image_processor_type", "CLIPImageProcessor", "image_processor_type"),
            ("num_img_tokens", 144, "num_img_tokens"),
        ),
        "<|image_1|>",
        "<|image_2|>",
        phi3_v.same_values,
    ),
    "minicpmv": Compared(
        minicpmv.minicpmv,
        {"merger behind the second layer": {}, "behind the last": {"scale": 168, "insert": 2, "most": 9, "seed": 2},
         "behind the first, no slices": {"insert": 0, "settings": {"slice_mode": False, "use_image_id": False},
                                         "tie_word_embeddings": True, "seed": 3}},
        minicpmv.open_processor,
        ("pixel_values", "target_sizes"),
        minicpmv.count_tokens,
        {
            "slots in another order": _reversed,
            "one layer too few": lambda model, ops: (model.tower, "merged", []),
            "two tiles changed": _changed,
            "attention of no window": lambda model, ops: (model.tower.merger, "_attend", lambda x: x),
        },
        (
            ("downsample_mode", "4x", "downsample_mode"), ("merger_times", 2, "merger_times"),
            ("merge_kernel_size", [1, 2], "merge_kernel_size"), ("insert_layer_id", 3, "insert_layer_id"),
            ("drop_vision_last_layer", True, "drop_vision_last_layer"), ("image_token_id", 10**6, "image_token_id"),
            ("vision_config.window_kernel_size", [4, 4], "window_kernel_size"),
            ("vision_config.num_attention_heads", 3, "num_attention_heads"),
            ("text_config.model_type", "llama", "model_type"),
        ),
        (
            ("downsample_mode", "4x", "downsample_mode"), ("patch_size", 16, "patch_size"),
            ("max_slice_nums", 0, "max_slice_nums"), ("scale_resolution", 20, "scale_resolution"),
            ("resample", 2, "resample"), ("image_processor_type", "CLIPImageProcessor", "image_processor_type"),
        ),
        minicpmv.PAD,
        values=minicpmv.same_values,
    ),
}  # fmt: skip


def prepared(path: Path, image: Image.Image) -> PreparedImage:
    """An image as our processor makes it."""
    made: PreparedImage = image_processor(load_config(path), {}).prepare(image, "d")
    return made


def rows_of_transformers(family: Compared, path: Path, model: Any, image: Image.Image) -> torch.Tensor:
    """float32 [placeholder tokens, hidden] of one image."""
    inputs = family.processor(path)(images=[image], text=family.image, return_tensors="pt")
    with torch.no_grad():
        found = model.get_image_features(**{name: inputs[name] for name in family.features}).pooler_output
    parts = found if isinstance(found, list | tuple) else [found]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def worst_row(
    harness: FamilyHarness, all_images: Sequence[tuple[PreparedImage, torch.Tensor]], rng: Any, spare: int = 0
) -> float:
    """Largest error of one launch over the tiles of images, each relative to its oracle's largest value."""
    tiles = [tile for one, _ in all_images for tile in one.items or (one,)]
    given = [(t.tokens, t.grid, t.slots, t.pixels) for t in tiles]
    encoded, arena = harness.encoded(given, rng, spare)
    worst, left = 0.0, list(encoded)
    for one, want in all_images:
        count = len(one.items) or 1
        mine, left = left[:count], left[count:]
        rows: list[int] = []
        for piece in one.layout or (PlaceholderRun(0, 0, one.tokens),):
            if isinstance(piece, PlaceholderRun) and piece.constant >= 0:
                rows += [RESERVED_ROWS + piece.constant] * piece.tokens
            elif isinstance(piece, PlaceholderRun):
                rows += mine[piece.item].rows[piece.first : piece.first + piece.tokens].tolist()
        assert len(rows) == one.tokens == len(want)
        worst = max(worst, float((arena[rows] - want).abs().max() / want.abs().max()))
    return worst


def same_values(family: Compared, path: Path, image: Image.Image) -> None:
    """Holds an image's pixels, normalised as the device does, to transformers' bit for bit."""
    ours = image_processor(load_config(path), {})
    if family.values is not None:
        return family.values(ours, family.processor(path), image)
    reference = family.processor(path)(images=[image], text=family.image, return_tensors="np")["pixel_values"]
    one = ours.prepare(image, "d")
    reference = np.asarray(reference).reshape(-1, *np.asarray(reference).shape[-3:])
    channel = np.repeat(np.arange(3), ours.patch**2)
    tiles, left = one.items or (one,), iter(reference)
    # LLaVA-NeXT's tokens come from no tile that is padding alone: it is not computed. The others stand in order.
    fewer = family is COMPARED["llava_next"] and len(tiles) < len(reference)
    assert fewer or len(tiles) == len(reference), image.size
    for tile in tiles:
        mine = ours.normalised_values[channel, tile.pixels]
        assert any((mine == ours.cut_patches(values.transpose(1, 2, 0))).all() for values in left), image.size


def ask(family: Compared, path: Path, model: Any, text: str, images: list[Any], length: int) -> Any:
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
