"""Every vision family at half a billion parameters: decoders of Qwen2.5-0.5B's size, towers as wide as the hub's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PAD, VIDEO, START, END = 1014, 1015, 1011, 1012
"""Ids of ``<|image_pad|>``, ``<|video_pad|>``, ``<|vision_start|>`` and ``<|vision_end|>`` in the demo's tokenizer."""
ADDED = 1024
"""Id of the first token that a family adds to it."""
SPECIAL: dict[str, Any] = {"bos_token_id": 1002, "eos_token_id": 1004, "pad_token_id": 1002}
TEXT: dict[str, Any] = SPECIAL | dict(
    vocab_size=32000, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, max_position_embeddings=8192, rms_norm_eps=1e-6,
)  # fmt: skip
WIDE: dict[str, Any] = SPECIAL | dict(
    vocab_size=32000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, rms_norm_eps=1e-6,
)  # fmt: skip
"""Qwen3-0.6B's."""
SMALL: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
"""What the decoder of a smoke run has instead."""
CLIP: dict[str, Any] = dict(
    model_type="clip_vision_model", hidden_size=1024, intermediate_size=4096, num_hidden_layers=9,
    num_attention_heads=16, image_size=336, patch_size=14, projection_dim=768,
)  # fmt: skip
SIGLIP: dict[str, Any] = dict(
    hidden_size=1152, intermediate_size=4304, num_hidden_layers=8, num_attention_heads=16, image_size=364, patch_size=14
)
TINY: dict[str, Any] = dict(hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=2)
"""What most towers of a smoke run have instead."""
OF_CLIP: dict[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
ALL: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
}


@dataclass(frozen=True)
class Kind:
    """A family.

    Args:
        name: of its classes in transformers, before ``Config`` and ``ForConditionalGeneration``.
        text: settings of the decoder; ``vision``: of the tower; ``root``: beside both.
        image: what preprocessor_config.json says.
        processor: transformers' image processor with Pillow, ``models.<module>.<class>``.
        given: what of its outputs the model takes.
        tokens: added to the tokenizer from ``ADDED`` on; ``mark``: an image's in a raw prompt.
        small: what ``vision`` of a smoke run has instead; ``small_text``: the same of ``text``.
        token: id of an image's token.
    """

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    root: dict[str, Any]
    image: dict[str, Any]
    processor: str
    given: tuple[str, ...] = ("pixel_values",)
    tokens: tuple[str, ...] = ()
    mark: str = "<image>"
    token: int = ADDED
    small: dict[str, Any] = field(default_factory=lambda: TINY)
    small_text: dict[str, Any] = field(default_factory=dict)


CROPS: dict[str, Any] = {
    "image_processor_type": "Phi3VImageProcessor",
    "num_crops": 4,
    "num_img_tokens": 144,
    "do_convert_rgb": True,
    **OF_CLIP,
}
"""Phi-3.5-vision's preprocessor_config.json, which is composed of transformers' parts (``composed``)."""


def _qwen(name: str, text: dict[str, Any], vision: dict[str, Any], small: dict[str, Any], **more: Any) -> Kind:
    """A family of Qwen's processor."""
    sections = text.pop("sections")
    rope = {"rope_type": "default", "mrope_section": sections, "rope_theta": 1e6, **more.pop("rope", {})}
    patch = vision["patch_size"]
    image = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2,
        "min_pixels": 4096, "max_pixels": 1_003_520, **(HALF if patch == 16 else OF_CLIP),
    }  # fmt: skip
    root = {"image_token_id": PAD, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    vision |= {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return Kind(
        name, {**text, "rope_parameters": rope}, vision, root, image,
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil", ("pixel_values", "image_grid_thw"),
        mark="<|vision_start|><|image_pad|><|vision_end|>", token=PAD, small=small, **more,
    )  # fmt: skip


def _pixtral(name: str, patch: int, longest: int, root: dict[str, Any]) -> Kind:
    tower = dict(
        model_type="pixtral", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16,
        image_size=longest, patch_size=patch, hidden_act="silu",
    )  # fmt: skip
    image = {
        "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": longest}, "resample": 3,
        "patch_size": {"height": patch, "width": patch}, **ALL, **OF_CLIP,
    }  # fmt: skip
    return Kind(
        name, TEXT | {"model_type": "mistral", "sliding_window": None}, tower,
        {"image_token_index": ADDED, "vision_feature_layer": -1, **root}, image,
        "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil", ("pixel_values", "image_sizes"),
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), "[IMG]",
    )  # fmt: skip


def _tiled_siglip(name: str, vision: dict[str, Any], scale: int) -> Kind:
    """Idefics3's kind; an image of 448 pixels becomes four tiles and the whole."""
    side = vision["image_size"]
    tokens = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokens += [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
    image = {
        "image_processor_type": f"{name}ImageProcessor", "size": {"longest_edge": 2 * side}, "resample": 1,
        "max_image_size": {"longest_edge": side}, "do_image_splitting": True, "do_pad": True, **ALL, **HALF,
    }  # fmt: skip
    module = f"{name.lower()}.image_processing_pil_{name.lower()}.{name}ImageProcessorPil"
    return Kind(
        name, TEXT | {"model_type": "llama"}, vision, {"image_token_id": ADDED, "scale_factor": scale}, image, module,
        ("pixel_values", "pixel_attention_mask"), tuple(tokens),
    )  # fmt: skip


RECURRENT: dict[str, Any] = SPECIAL | dict(
    vocab_size=32000, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
    num_key_value_heads=2, head_dim=256, max_position_embeddings=8192, rms_norm_eps=1e-6, linear_num_key_heads=16,
    linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
)  # fmt: skip
"""Qwen3.5-0.8B's."""
FEW_HEADS: dict[str, Any] = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    head_dim=32,
    layer_types=["linear_attention", "full_attention"],
)


def _interleaved(sections: list[int]) -> dict[str, Any]:
    """Rotary positions of Qwen3.5."""
    return {
        "rope_type": "default", "mrope_section": sections, "rope_theta": 1e7, "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }  # fmt: skip


OF_QWEN2: dict[str, Any] = dict(depth=8, num_heads=16, patch_size=14)
OF_QWEN3: dict[str, Any] = dict(
    depth=8, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=1024, patch_size=16,
    num_position_embeddings=2304, deepstack_visual_indexes=[1, 3, 5], hidden_act="gelu_pytorch_tanh",
)  # fmt: skip
QWEN3_TINY: dict[str, Any] = dict(hidden_size=144, intermediate_size=44, num_heads=2, out_hidden_size=64)
CROPPED: dict[str, Any] = {
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
    "do_center_crop": True,
    "resample": 3,
}
FOR_LLAVA: dict[str, Any] = {"image_token_index": ADDED, "vision_feature_layer": -2, "image_seq_length": 576}
PINPOINTS: list[list[int]] = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
KINDS: dict[str, Kind] = {
    "qwen2_5_vl": _qwen("Qwen2_5_VL", TEXT | {"sections": [8, 12, 12]}, OF_QWEN2 | dict(
        hidden_size=1280, intermediate_size=3420, out_hidden_size=896, fullatt_block_indexes=[3, 7], window_size=112,
        tokens_per_second=2, hidden_act="silu",
    ), dict(hidden_size=32, intermediate_size=44, num_heads=2, out_hidden_size=64),
        small_text={"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}}),
    "qwen2_vl": _qwen("Qwen2VL", TEXT | {"sections": [8, 12, 12]}, OF_QWEN2 | dict(
        embed_dim=1280, hidden_size=896, mlp_ratio=4, hidden_act="quick_gelu",
    ), dict(embed_dim=32, hidden_size=64, num_heads=2),
        small_text={"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}}),
    "qwen3_vl": _qwen("Qwen3VL", WIDE | {"sections": [24, 20, 20]}, dict(OF_QWEN3), QWEN3_TINY, rope={
        "mrope_interleaved": True}, small_text={"rope_parameters": {
            "rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e6, "mrope_interleaved": True}}),
    "qwen3_vl_moe": _qwen("Qwen3VLMoe", WIDE | {
        "sections": [24, 20, 20], "num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 768, "mlp_only_layers": [], "decoder_sparse_step": 1,
    }, dict(OF_QWEN3), QWEN3_TINY, rope={"mrope_interleaved": True}, small_text={
        "moe_intermediate_size": 24, "rope_parameters": {
            "rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e6, "mrope_interleaved": True}}),
    "llava": Kind(
        "Llava", TEXT | {"model_type": "llama"}, CLIP, FOR_LLAVA,
        {"image_processor_type": "CLIPImageProcessor", **CROPPED, **ALL, **OF_CLIP},
        "clip.image_processing_pil_clip.CLIPImageProcessorPil", tokens=("<image>",),
    ),
    "llava_next": Kind(
        "LlavaNext", TEXT | {"model_type": "llama"}, CLIP, FOR_LLAVA | {"image_grid_pinpoints": PINPOINTS},
        {"image_processor_type": "LlavaNextImageProcessor", "do_pad": True, "image_grid_pinpoints": PINPOINTS,
         **CROPPED, **ALL, **OF_CLIP},
        "llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil", ("pixel_values", "image_sizes"),
        ("<image>",),
    ),
    "internvl": Kind(
        "InternVL", TEXT | {"model_type": "qwen2"}, dict(
            model_type="internvl_vision", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
            num_attention_heads=16, image_size=448, patch_size=14, attention_bias=True,
        ), {"image_token_id": ADDED, "image_seq_length": 256},
        {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 448, "width": 448}, "resample": 3,
         "crop_to_patches": False, "min_patches": 1, "max_patches": 12, **ALL, **OF_CLIP},
        "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        tokens=("<IMG_CONTEXT>", "<img>", "</img>", "<video>"), mark="<IMG_CONTEXT>",
    ),
    "gemma3": Kind(
        "Gemma3", SPECIAL | dict(
            model_type="gemma3_text", vocab_size=32000, hidden_size=1152, intermediate_size=6912, num_hidden_layers=18,
            num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512,
            max_position_embeddings=8192,
        ), SIGLIP | {
            "model_type": "siglip_vision_model", "image_size": 896, "num_hidden_layers": 4, "vision_use_head": False},
        {"image_token_index": ADDED, "boi_token_index": ADDED + 1, "eoi_token_index": ADDED + 2,
         "mm_tokens_per_image": 256},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}, "resample": 2,
         "image_seq_length": 256, "do_pan_and_scan": None, **ALL, **HALF},
        "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        tokens=("<image_soft_token>", "<start_of_image>", "<end_of_image>"), mark="<start_of_image>",
        small=TINY | {"hidden_size": 144}, small_text={"sliding_window": 24},
    ),
    "idefics3": _tiled_siglip("Idefics3", SIGLIP, 2),
    "smolvlm": _tiled_siglip("SmolVLM", SIGLIP | dict(
        hidden_size=768, intermediate_size=3072, num_attention_heads=12, image_size=512, patch_size=16), 4),
    "pixtral": _pixtral("Llava", 16, 1024, {"vision_feature_select_strategy": "full"}),
    "mistral3": _pixtral("Mistral3", 14, 1540, {"spatial_merge_size": 2}),
    "mllama": Kind(  # few layers, because all four tiles of every image are computed
        "Mllama", TEXT | {"cross_attention_layers": [3, 8, 13, 18]}, dict(
            hidden_size=1280, intermediate_size=5120, num_hidden_layers=2, num_global_layers=1, attention_heads=16,
            image_size=560, patch_size=14, max_num_tiles=4, intermediate_layers_indices=[0, 1],
            vision_output_dim=3 * 1280,
        ), {"image_token_index": ADDED},
        {"image_processor_type": "MllamaImageProcessor", "size": {"height": 560, "width": 560}, "resample": 2,
         "do_pad": True, "max_image_tiles": 4, **ALL, **OF_CLIP},
        "mllama.image_processing_pil_mllama.MllamaImageProcessorPil",
        ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"), ("<|image|>",), "<|image|>",
        small=dict(hidden_size=32, intermediate_size=44, attention_heads=2, vision_output_dim=3 * 32, image_size=560),
        small_text={"cross_attention_layers": [1]},
    ),
    "qwen3_5": _qwen("Qwen3_5", RECURRENT | {"sections": [11, 11, 10]}, {
        k: v for k, v in OF_QWEN3.items() if k != "deepstack_visual_indexes"
    }, QWEN3_TINY, rope=_interleaved([11, 11, 10]), small_text=FEW_HEADS | {
        "rope_parameters": _interleaved([2, 1, 1])}),
    "glm4v": Kind(
        "Glm4v", TEXT | {"model_type": "glm4v_text", "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 6, 6]}},
        dict(
            model_type="glm4v_vision", depth=8, hidden_size=1536, intermediate_size=4864, num_heads=12, image_size=336,
            out_hidden_size=896,
        ), {name: ADDED + i for i, name in enumerate((
            "image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id", "video_start_token_id",
            "video_end_token_id"))},
        {"image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
         "size": {"shortest_edge": 12544, "longest_edge": 2_007_040}, "resample": 3, **OF_CLIP},
        "glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil", ("pixel_values", "image_grid_thw"),
        ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"), "<|image|>",
        small=dict(hidden_size=32, intermediate_size=44, num_heads=2, out_hidden_size=64),
        small_text={"rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    ),
    "gemma4": Kind(
        "Gemma4", SPECIAL | dict(
            model_type="gemma4_text", vocab_size=32000, hidden_size=1152, intermediate_size=6912, num_hidden_layers=18,
            num_attention_heads=4, num_key_value_heads=2, head_dim=256, global_head_dim=512,
            num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=512, hidden_size_per_layer_input=0,
            max_position_embeddings=8192, use_bidirectional_attention="vision",
        ), dict(
            hidden_size=1152, intermediate_size=4304, num_hidden_layers=8, num_attention_heads=16,
            num_key_value_heads=16, head_dim=72,
        ), {"image_token_id": ADDED, "boi_token_id": ADDED + 1, "eoi_token_id": ADDED + 2},
        {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 280, "resample": 3, "do_resize": True,
         "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": False, "patch_size": 16,
         "pooling_kernel_size": 3},
        "gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil", ("pixel_values", "image_position_ids"),
        ("<|image|>", "<|image>", "<image|>"), "<|image|>",
        small=TINY | {"num_key_value_heads": 2, "head_dim": 16},
        small_text={"sliding_window": 24, "global_head_dim": 32},
    ),
    "minicpmv": Kind(
        "MiniCPMV4_6", RECURRENT | {
            "model_type": "qwen3_5_text", "rope_parameters": _interleaved([11, 11, 10])},
        SIGLIP | dict(image_size=980, num_hidden_layers=12),
        {"image_token_id": PAD, "video_token_id": VIDEO, "insert_layer_id": 3},
        {"image_processor_type": "MiniCPMV4_6ImageProcessor", "scale_resolution": 448, "max_slice_nums": 9,
         "patch_size": 14, "use_image_id": True, "slice_mode": True, **HALF},
        "minicpmv4_6.image_processing_pil_minicpmv4_6.MiniCPMV4_6ImageProcessorPil", ("pixel_values", "target_sizes"),
        ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"), "<|image_pad|>", PAD,
        small=TINY | {"num_hidden_layers": 5}, small_text=FEW_HEADS | {"rope_parameters": _interleaved([2, 1, 1])},
    ),
}  # fmt: skip
