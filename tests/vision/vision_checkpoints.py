"""Small random checkpoints of vision families, written by transformers, that ``tests/fakes/checkpoints.py`` has not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.fakes import checkpoints

IMAGE = 336
"""Id of ``<image>``, behind the other tokens of the tests' tokenizer."""

TEMPLATE = """\
{%- for message in messages %}{{ message['role'].upper() + ': ' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for part in message['content'] %}{%- if part['type'] == 'image' %}{{- '<image>\\n' }}
{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- ' ' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{%- endif %}"""


def llava(
    folder: Path, *, seed: int = 0, image: int = 112, layer: int = -2, vision: Any = None, kind: str = "llama",
    **text: Any,
) -> Path:  # fmt: skip
    """A LLaVA-1.5 checkpoint with images of ``image`` pixels; ``vision`` and ``text`` override settings."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    tower = dict(
        model_type="clip_vision_model", hidden_size=32, intermediate_size=44, num_hidden_layers=4,
        num_attention_heads=2, image_size=image, patch_size=14, projection_dim=16, **(vision or {}),
    )  # fmt: skip
    settings = {"model_type": kind, **checkpoints.text_settings(**text)}
    config = LlavaConfig(
        text_config=settings, vision_config=tower, image_token_index=IMAGE, image_seq_length=(image // 14) ** 2,
        vision_feature_layer=layer, architectures=["LlavaForConditionalGeneration"],
        tie_word_embeddings=settings["tie_word_embeddings"],
    )  # fmt: skip
    processor = {
        "image_processor_type": "CLIPImageProcessor", "crop_size": {"height": image, "width": image},
        "size": {"shortest_edge": image}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
        "do_rescale": True, "do_resize": True, "resample": 3, "rescale_factor": 1 / 255,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    return finished(LlavaForConditionalGeneration(config), folder, seed, ["<image>"], processor)


def finished(
    model: Any, folder: Path, seed: int, tokens: list[str], processor: dict[str, Any], template: str = TEMPLATE,
    **named: Any,
) -> Path:  # fmt: skip
    """Writes a checkpoint: ``tokens`` are special ones from ``IMAGE`` on, ``named`` those of tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer

    checkpoints._write(model, folder, seed, torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in tokens])
    assert tokenizer.token_to_id(tokens[0]) == IMAGE
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    held = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**held, "chat_template": template, **named}))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def glm4v(folder: Path, *, seed: int = 0, name: str = "Glm4v", vision: Any = None, **text: Any) -> Path:
    """A GLM-4.1V checkpoint, by ``name`` one of GLM-4.6V-Flash or GLM-OCR; ``vision`` and ``text``: other settings."""
    import transformers

    kind, images = ("glm_ocr_text", "Glm4v") if name == "GlmOcr" else ("glm4v_text", name)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    settings = checkpoints.text_settings(rope_parameters=rope, pad_token_id=1, **text)
    tower = dict(
        model_type=kind.replace("text", "vision"), depth=3, hidden_size=32, intermediate_size=44, num_heads=2,
        image_size=70, out_hidden_size=settings["hidden_size"], **(vision or {}),
    )  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        text_config={"model_type": kind, **settings}, vision_config=tower, image_token_id=IMAGE,
        video_token_id=IMAGE + 1, image_start_token_id=IMAGE + 2, image_end_token_id=IMAGE + 3,
        video_start_token_id=IMAGE + 4, video_end_token_id=IMAGE + 5,
        tie_word_embeddings=settings["tie_word_embeddings"], architectures=[f"{name}ForConditionalGeneration"],
    )  # fmt: skip
    cell = 28 * 28
    processor = {
        "image_processor_type": f"{images}ImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 2 * 2 * cell, "longest_edge": 2 * 40 * cell}, "resample": 3,
    }  # fmt: skip
    shown = "{%- elif part['type'] == 'video' %}{{- '<|begin_of_video|><|video|><|end_of_video|>' }}{%- else %}"
    template = TEMPLATE.replace("<image>", "<|image|>").replace("{%- else %}{{- part", f"{shown}{{{{- part")
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    kinds = [f"<|{end}_of_{kind}|>" for kind in ("image", "video") for end in ("begin", "end")]
    return finished(model, folder, seed, ["<|image|>", "<|video|>", *kinds], processor, template)


def gemma4(folder: Path, *, seed: int = 0, unified: bool = False, tokens: int = 70, **text: Any) -> Path:
    """A Gemma-4 checkpoint with images of at most ``tokens`` tokens; ``unified``: of the 12B model's kind."""
    import transformers

    name = "Gemma4Unified" if unified else "Gemma4"
    own = dict(
        vocab_size=checkpoints.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
        sliding_window=24, max_position_embeddings=2048, final_logit_softcapping=4.0, hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"] * 2, rms_norm_eps=1e-6, pad_token_id=1,
        eos_token_id=checkpoints.IDS["<|im_end|>"], use_bidirectional_attention="vision",
    ) | text  # fmt: skip
    tower: dict[str, Any] = dict(
        hidden_size=64, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        head_dim=16, position_embedding_size=240, standardize=True,
    )  # fmt: skip
    if unified:
        del own["hidden_size_per_layer_input"]
        own["sliding_window"] = 72
        tower = dict(mm_embed_dim=40, mm_posemb_size=80, output_proj_dims=40)
    library: Any = transformers
    config = getattr(library, f"{name}Config")(
        text_config=own, vision_config=tower, audio_config=None, image_token_id=IMAGE, boi_token_id=IMAGE + 1,
        eoi_token_id=IMAGE + 2, architectures=[f"{name}ForConditionalGeneration"],
    )  # fmt: skip
    processor = {
        "image_processor_type": f"{name}ImageProcessor", "max_soft_tokens": tokens, "resample": 3, "do_resize": True,
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": False, "patch_size": 16,
        "pooling_kernel_size": 3,
    }  # fmt: skip
    model = getattr(library, f"{name}ForConditionalGeneration")(config)
    generator = torch.Generator().manual_seed(7)
    for key, buffer in model.named_buffers():
        if key.endswith(("layer_scalar", "std_bias", "std_scale")):
            buffer.copy_(0.7 + torch.rand(buffer.shape, generator=generator))
    template = TEMPLATE.replace("<image>", "<|image|>")
    return finished(model, folder, seed, ["<|image|>", "<|image>", "<image|>"], processor, template)


def qwen3_vl(folder: Path, *, seed: int = 0, experts: bool = False, vision: Any = None, **text: Any) -> Path:
    """A Qwen3-VL checkpoint, with ``experts`` in all layers but one; ``vision`` and ``text`` override settings."""
    import transformers

    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 5e6, "mrope_interleaved": True}
    settings = {"head_dim": 16, **checkpoints.text_settings(rope_parameters=rope, **{"num_hidden_layers": 3, **text})}
    tower = dict(
        depth=4, hidden_size=144, intermediate_size=44, num_heads=2, out_hidden_size=settings["hidden_size"],
        in_channels=3, patch_size=16, spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=36,
        deepstack_visual_indexes=[0, 2], hidden_act="gelu_pytorch_tanh",
    ) | (vision or {})  # fmt: skip
    name = "Qwen3VLMoe" if experts else "Qwen3VL"
    if experts:
        settings |= {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
        }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        text_config=settings, vision_config=tower, tie_word_embeddings=settings["tie_word_embeddings"],
        image_token_id=checkpoints.IDS["<|image_pad|>"], video_token_id=checkpoints.IDS["<|video_pad|>"],
        vision_start_token_id=checkpoints.IDS["<|vision_start|>"],
        vision_end_token_id=checkpoints.IDS["<|vision_end|>"],
        architectures=[f"{name}ForConditionalGeneration"],
    )  # fmt: skip
    checkpoints._write(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder, seed, torch.float32)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 1_003_520}, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def qwen3_5(folder: Path, *, seed: int = 0, experts: bool = False, vision: Any = None, **text: Any) -> Path:
    """A Qwen3.5 checkpoint: two recurrent layers of three, and a tower without DeepStack."""
    import transformers

    rope = {
        "rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4, "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }  # fmt: skip
    settings: dict[str, Any] = {
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **checkpoints.text_settings(rope_parameters=rope, **{"num_hidden_layers": 3, **text}),
    }  # fmt: skip
    if experts:
        settings |= {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        }  # fmt: skip
        del settings["intermediate_size"]
    tower = dict(
        depth=3, hidden_size=144, intermediate_size=44, num_heads=2, out_hidden_size=settings["hidden_size"],
        in_channels=3, patch_size=16, spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=36,
        hidden_act="gelu_pytorch_tanh",
    ) | (vision or {})  # fmt: skip
    name = "Qwen3_5Moe" if experts else "Qwen3_5"
    config = getattr(transformers, f"{name}Config")(
        text_config=settings, vision_config=tower, tie_word_embeddings=settings["tie_word_embeddings"],
        image_token_id=checkpoints.IDS["<|image_pad|>"], video_token_id=checkpoints.IDS["<|video_pad|>"],
        vision_start_token_id=checkpoints.IDS["<|vision_start|>"],
        vision_end_token_id=checkpoints.IDS["<|vision_end|>"],
        architectures=[f"{name}ForConditionalGeneration"],
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    checkpoints._write(model, folder, seed, torch.float32)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 1_003_520}, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def lfm2_vl(
    folder: Path, *, seed: int = 0, vision: Any = None, own: Any = None, images: Any = None, **text: Any
) -> Path:
    """An LFM2-VL checkpoint with tiles of 96 pixels; ``own``, ``vision``, ``images`` and ``text`` override settings."""
    import transformers

    tokens = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    tokens += [f"<|img_row_{r}_col_{c}|>" for r in range(1, 5) for c in range(1, 5)]
    settings = checkpoints.text_settings(**{
        "vocab_size": IMAGE + len(tokens) + 2, "num_hidden_layers": 4, "intermediate_size": 120,
        "layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 16,
        "pad_token_id": 1, **text,
    })  # fmt: skip
    settings["norm_eps"] = settings.pop("rms_norm_eps")
    tower = dict(
        model_type="siglip2_vision_model", hidden_size=32, intermediate_size=44, num_hidden_layers=3,
        num_attention_heads=2, num_patches=16, vision_use_head=False, **(vision or {}),
    )  # fmt: skip
    library: Any = transformers
    config = library.Lfm2VlConfig(
        text_config={"model_type": "lfm2", **settings}, vision_config=tower, image_token_id=IMAGE,
        **{"projector_hidden_size": 40, **(own or {})}, architectures=["Lfm2VlForConditionalGeneration"],
        tie_word_embeddings=settings["tie_word_embeddings"],
    )  # fmt: skip
    model = library.Lfm2VlForConditionalGeneration(config)
    processor = {
        "image_processor_type": "Lfm2VlImageProcessorFast", "downsample_factor": config.downsample_factor,
        "do_image_splitting": True, "min_tiles": 2, "max_tiles": 4, "use_thumbnail": True, "min_image_tokens": 4,
        "max_image_tokens": 9, "encoder_patch_size": 16, "tile_size": 96, "max_pixels_tolerance": 2.0, "do_pad": True,
        "do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 2, "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **(images or {}),
    }  # fmt: skip
    finished(model, folder, seed, tokens, processor)
    file = folder / "model.safetensors"
    held = load_file(file)
    louder = {"conv.conv.weight": 8.0, "conv.out_proj.weight": 3.0, "projector.linear_2.weight": 4.0}
    for name in held:
        held[name] = held[name] * next((by for end, by in louder.items() if name.endswith(end)), 1.0)
    save_file(held, file, metadata={"format": "pt"})
    return folder


def internvl(
    folder: Path, *, seed: int = 0, most: int = 12, vision: Any = None, kind: str = "qwen2", **text: Any
) -> Path:
    """An InternVL3 checkpoint with tiles of 56 pixels, at most ``most``."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    tower: dict[str, Any] = {
        "model_type": "internvl_vision", "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "attention_bias": True, **(vision or {}),
    }  # fmt: skip
    settings = {"model_type": kind, **checkpoints.text_settings(**text)}
    side = tower["image_size"] // 14
    config = InternVLConfig(
        text_config=settings, vision_config=tower, image_token_id=IMAGE, image_seq_length=side * side // 4,
        architectures=["InternVLForConditionalGeneration"], tie_word_embeddings=settings["tie_word_embeddings"],
    )  # fmt: skip
    processor = {
        "image_processor_type": "GotOcr2ImageProcessorFast", "size": dict.fromkeys(("height", "width"), 14 * side),
        "crop_to_patches": False, "min_patches": 1, "max_patches": most, "do_convert_rgb": True, "do_normalize": True,
        "do_rescale": True, "do_resize": True, "resample": 3, "rescale_factor": 1 / 255,
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    named = {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }  # fmt: skip
    model, tokens = InternVLForConditionalGeneration(config), ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"]
    template = TEMPLATE.replace("<image>", "<IMG_CONTEXT>")
    return finished(model, folder, seed, tokens, processor, template, extra_special_tokens=named, **named)


def idefics3(
    folder: Path, *, seed: int = 0, side: int = 4, merge: int = 2, longest: int = 224, split: bool = True,
    spare: int = 0, name: str = "Idefics3", **text: Any,
) -> Path:  # fmt: skip
    """An Idefics3 or SmolVLM checkpoint with tiles of ``side`` x ``side`` patches, ``merge`` x ``merge`` in a cell.

    ``spare``: pixels of a tile that no patch has.
    """
    import transformers

    tokens = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokens += [f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 7)]
    settings = {"model_type": "llama", **checkpoints.text_settings(**{"vocab_size": IMAGE + len(tokens) + 2, **text})}
    kind: Any = getattr(transformers, f"{name}Config")
    config = kind(
        text_config=settings, image_token_id=IMAGE, scale_factor=merge,
        vision_config=dict(
            hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=2, patch_size=14,
            image_size=14 * side + spare,
        ),
        architectures=[f"{name}ForConditionalGeneration"], tie_word_embeddings=settings["tie_word_embeddings"],
    )  # fmt: skip
    processor = {
        "image_processor_type": f"{name}ImageProcessor", "size": {"longest_edge": longest}, "resample": 1,
        "max_image_size": {"longest_edge": 14 * side + spare}, "do_image_splitting": split, "do_convert_rgb": True,
        "do_normalize": True, "do_rescale": True, "do_resize": True, "do_pad": True, "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return finished(model, folder, seed, tokens, processor, TEMPLATE.replace("<image>\\n", "<image>"))


def pixtral(
    folder: Path, *, seed: int = 0, name: str = "Mistral3", merge: int = 2, longest: int = 224, act: str = "silu",
    kind: str = "mistral", **text: Any,
) -> Path:  # fmt: skip
    """A Mistral 3 checkpoint, or by ``name`` "Llava" one of Pixtral-12B; images of up to ``longest`` pixels."""
    import transformers

    tower = dict(
        model_type="pixtral", hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=2,
        image_size=longest, patch_size=14, hidden_act=act,
    )  # fmt: skip
    settings = {"model_type": kind, "sliding_window": None, **checkpoints.text_settings(**text)}
    made: Any = getattr(transformers, f"{name}Config")
    own = {"spatial_merge_size": merge} if name == "Mistral3" else {"vision_feature_select_strategy": "full"}
    config = made(
        text_config=settings, vision_config=tower, image_token_index=IMAGE, vision_feature_layer=-1,
        architectures=[f"{name}ForConditionalGeneration"], tie_word_embeddings=settings["tie_word_embeddings"], **own,
    )  # fmt: skip
    processor = {
        "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": longest}, "resample": 3,
        "patch_size": {"height": 14, "width": 14}, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
        "do_resize": True, "rescale_factor": 1 / 255,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    tokens = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    return finished(model, folder, seed, tokens, processor, TEMPLATE.replace("<image>\\n", "[IMG]"))


def llava_next(
    folder: Path, *, seed: int = 0, image: int = 56, vision: Any = None, kind: str = "llama", **text: Any
) -> Path:
    """A LLaVA-NeXT checkpoint with tiles of ``image`` pixels; ``vision`` and ``text`` override settings."""
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    tower = dict(
        model_type="clip_vision_model", hidden_size=32, intermediate_size=44, num_hidden_layers=3,
        num_attention_heads=2, image_size=image, patch_size=14, projection_dim=16, **(vision or {}),
    )  # fmt: skip
    settings = {"model_type": kind, **checkpoints.text_settings(**text)}
    grids = [[image, 2 * image], [2 * image, image], [2 * image, 2 * image], [3 * image, image], [image, 3 * image]]
    config = LlavaNextConfig(
        text_config=settings, vision_config=tower, image_token_index=IMAGE, image_seq_length=(image // 14) ** 2,
        image_grid_pinpoints=grids, architectures=["LlavaNextForConditionalGeneration"],
        tie_word_embeddings=settings["tie_word_embeddings"],
    )  # fmt: skip
    processor = {
        "image_processor_type": "LlavaNextImageProcessor", "crop_size": {"height": image, "width": image},
        "size": {"shortest_edge": image}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
        "do_rescale": True, "do_resize": True, "do_pad": True, "resample": 3, "rescale_factor": 1 / 255,
        "image_grid_pinpoints": grids,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    return finished(LlavaNextForConditionalGeneration(config), folder, seed, ["<image>"], processor)


GEMMA_TOKENS = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
GEMMA_TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for part in message['content'] %}{%- if part['type'] == 'image' %}{{- '<start_of_image>' }}
{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{%- endif %}"""


def gemma3(folder: Path, *, seed: int = 0, image: int = 112, tokens: int = 4, **text: Any) -> Path:
    """A Gemma-3 checkpoint with images of ``image`` pixels and ``tokens`` tokens; newlines are merged."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GenerationConfig

    own = dict(
        vocab_size=checkpoints.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=20, sliding_window=24, max_position_embeddings=2048,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        rms_norm_eps=1e-6, pad_token_id=1, eos_token_id=checkpoints.IDS["<|im_end|>"],
    ) | text  # fmt: skip
    tower = dict(
        model_type="siglip_vision_model", hidden_size=144, intermediate_size=44, num_hidden_layers=3,
        num_attention_heads=2, image_size=image, patch_size=14, vision_use_head=False,
    )  # fmt: skip
    config = Gemma3Config(
        text_config={"model_type": "gemma3_text", **own}, vision_config=tower, mm_tokens_per_image=tokens,
        image_token_index=IMAGE, boi_token_index=IMAGE + 1, eoi_token_index=IMAGE + 2,
        architectures=["Gemma3ForConditionalGeneration"],
        tie_word_embeddings=bool(own.get("tie_word_embeddings", True)),
    )  # fmt: skip
    processor = {
        "image_processor_type": "Gemma3ImageProcessor", "size": {"height": image, "width": image}, "resample": 2,
        "do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "do_pan_and_scan": None,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": tokens,
    }  # fmt: skip
    model: Any = Gemma3ForConditionalGeneration(config)
    model.generation_config = GenerationConfig()
    finished(model, folder, seed, GEMMA_TOKENS, processor, GEMMA_TEMPLATE)
    file = folder / "tokenizer.json"
    held = json.loads(file.read_text())
    vocab = held["model"]["vocab"]
    for filler, newlines in (("Ġw300", "ĊĊ"), ("Ġw301", "ĊĊĊ")):
        vocab[newlines] = vocab.pop(filler)
    held["model"]["merges"] = [["Ċ", "Ċ"], ["ĊĊ", "Ċ"]]
    file.write_text(json.dumps(held))
    return folder
