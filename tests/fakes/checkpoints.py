"""Small random checkpoints in the hub's layout: weights, tokenizer, preprocessor, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>",
]  # fmt: skip
PLAIN = ("<tool_call>", "</tool_call>")
BASE = 320
"""Ids below are ordinary; the specials follow."""

VOCAB = 344
IDS = {name: BASE + i for i, name in enumerate(SPECIALS)}
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for part in message['content'] %}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' or 'video' in part or 'video_url' in part %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def randomise(model: Any, seed: int) -> None:
    """Every parameter random, norms and biases too, so that dropping any of them shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            values = torch.randn(p.shape, generator=generator)
            if name.endswith("bias"):
                p.copy_(values * 0.2)
            elif p.ndim == 1:
                p.copy_(1 + 0.2 * values)
            else:
                p.copy_(values * (0.16 if "q_proj" in name or "k_proj" in name else 0.08))


def text_settings(**changes: Any) -> dict[str, Any]:
    """A decoder of 2 layers, 64 wide."""
    base: dict[str, Any] = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=False,
        bos_token_id=IDS["<|endoftext|>"], eos_token_id=IDS["<|im_end|>"], pad_token_id=None,
    )  # fmt: skip
    return {**base, **changes}


def qwen2_5_vl(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **text: Any) -> Path:
    """A vision-language checkpoint; ``text`` overrides the decoder's settings."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    settings = text_settings(rope_parameters=rope, **text)
    vision = dict(
        depth=3, hidden_size=32, intermediate_size=44, num_heads=2, out_hidden_size=settings["hidden_size"],
        fullatt_block_indexes=[1], in_channels=3, patch_size=14, spatial_merge_size=2, temporal_patch_size=2,
        window_size=112, tokens_per_second=2, hidden_act="silu",
    )  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=settings, vision_config=vision, tie_word_embeddings=settings["tie_word_embeddings"],
        image_token_id=IDS["<|image_pad|>"], video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"], vision_end_token_id=IDS["<|vision_end|>"],
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )  # fmt: skip
    return _write(Qwen2_5_VLForConditionalGeneration(config), folder, seed, dtype)


def qwen2_vl(folder: Path, *, seed: int = 0, act: str = "quick_gelu", **text: Any) -> Path:
    """A Qwen2-VL checkpoint; ``act``: of the tower's MLPs, ``text`` overrides the decoder's settings."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    settings = text_settings(rope_parameters=rope, **text)
    vision = dict(
        depth=3, embed_dim=32, hidden_size=settings["hidden_size"], num_heads=2, mlp_ratio=2, in_channels=3,
        patch_size=14, spatial_merge_size=2, temporal_patch_size=2, hidden_act=act,
    )  # fmt: skip
    config = Qwen2VLConfig(
        text_config=settings, vision_config=vision, tie_word_embeddings=settings["tie_word_embeddings"],
        image_token_id=IDS["<|image_pad|>"], video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"], vision_end_token_id=IDS["<|vision_end|>"],
        architectures=["Qwen2VLForConditionalGeneration"],
    )  # fmt: skip
    return _write(Qwen2VLForConditionalGeneration(config), folder, seed, torch.float32)


def qwen2(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **text: Any) -> Path:
    """A Qwen2 text checkpoint."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _write(Qwen2ForCausalLM(Qwen2Config(**text_settings(**text))), folder, seed, dtype)


def llama(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **text: Any) -> Path:
    """A Llama text checkpoint with Llama-3 frequency scaling."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    return _write(LlamaForCausalLM(LlamaConfig(**text_settings(rope_parameters=rope, **text))), folder, seed, dtype)


def classifier(folder: Path, *, seed: int = 0, family: str = "Qwen2", labels: int = 3, **text: Any) -> Path:
    """A Qwen2 or Llama checkpoint with a class head."""
    import transformers

    config = getattr(transformers, f"{family}Config")(num_labels=labels, **text_settings(**text))
    return _write(getattr(transformers, f"{family}ForSequenceClassification")(config), folder, seed, torch.float32)


def bare(folder: Path, *, seed: int = 0, family: str = "Qwen2", **text: Any) -> Path:
    """A Qwen2 or Llama decoder without a head, whose names have no prefix."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**text_settings(**text))
    return _write(getattr(transformers, f"{family}Model")(config), folder, seed, torch.float32)


def _write(model: Any, folder: Path, seed: int, dtype: torch.dtype) -> Path:
    from transformers import GenerationConfig

    randomise(model, seed)
    eos = [IDS["<|im_end|>"], IDS["<|endoftext|>"]]
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos[1], do_sample=False)
    model.to(dtype).eval().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE of bytes and fillers, the specials, the image processor's settings and the chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"Ġw{i}": i for i in range(len(vocab), BASE)}
    t = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    t.decoder = decoders.ByteLevel()
    t.add_tokens([AddedToken(s, special=s not in PLAIN, normalized=False) for s in SPECIALS])
    t.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "bos_token": None, "unk_token": None, "add_bos_token": False, "model_max_length": 2048,
        "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 3136, "max_pixels": 1003520, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
