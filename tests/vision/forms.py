"""Small random checkpoints of vision families, written by transformers, that ``tests/fakes/checkpoints.py`` has not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.fakes import checkpoints

IMAGE = 336
"""Id of ``<image>``, behind the other tokens of the tests' tokenizer."""

TEMPLATE = """\
{%- for message in messages %}{{ message['role'].upper() + ': ' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for part in message['content'] %}{%- if part['type'] == 'image' %}{{- '<image>\\n' }}
{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- ' ' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{%- endif %}"""


def llava(folder: Path, *, seed: int = 0, image: int = 112, layer: int = -2, vision: Any = None, **text: Any) -> Path:
    """A LLaVA-1.5 checkpoint with pictures of ``image`` pixels; ``vision`` and ``text`` override settings."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    tower = dict(
        model_type="clip_vision_model", hidden_size=32, intermediate_size=44, num_hidden_layers=4,
        num_attention_heads=2, image_size=image, patch_size=14, projection_dim=16, **(vision or {}),
    )  # fmt: skip
    settings = {"model_type": "llama", **checkpoints.text_settings(**text)}
    config = LlavaConfig(
        text_config=settings, vision_config=tower, image_token_index=IMAGE, image_seq_length=(image // 14) ** 2,
        vision_feature_layer=layer, architectures=["LlavaForConditionalGeneration"],
        tie_word_embeddings=settings["tie_word_embeddings"],
    )  # fmt: skip
    checkpoints._write(LlavaForConditionalGeneration(config), folder, seed, torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<image>", special=True, normalized=False)])
    assert tokenizer.token_to_id("<image>") == IMAGE
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    held = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**held, "chat_template": TEMPLATE}))
    processor = {
        "image_processor_type": "CLIPImageProcessor", "crop_size": {"height": image, "width": image},
        "size": {"shortest_edge": image}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
        "do_rescale": True, "do_resize": True, "resample": 3, "rescale_factor": 1 / 255,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


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
