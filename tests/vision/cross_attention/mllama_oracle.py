"""Llama-3.2-Vision as the tests compare it: small checkpoints, transformers' processor, rows and answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.fakes import checkpoints
from tests.oracles.transformers_model import Answer
from tests.vision.vision_checkpoints import IMAGE, finished

START = "<|endoftext|>"
TEMPLATE = """\
{{- '<|endoftext|>' }}{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for part in message['content'] %}{%- if part['type'] == 'image' %}{{- '<|image|>' }}
{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "four tiles": {},
    "three tiles of 64 patches, llama3": {
        "seed": 1, "image": 112, "tiles": 3, "taken": [0, 2], "cross": [1, 2, 5], "num_hidden_layers": 6,
        "rope_parameters": LLAMA3,
    },
    "one head of keys, a layer taken": {
        "seed": 2, "taken": [1], "cross": [4], "num_key_value_heads": 1, "vision": {"num_global_layers": 1},
    },
}  # fmt: skip

FIRST = next(iter(FORMS))
BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=1024, max_num_seqs=4, kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256
)
"""Arguments of ``LLM``."""


def write(
    folder: Path, *, seed: int = 0, image: int = 56, tiles: int = 4, taken: Any = (1, 2), cross: Any = (1, 3),
    vision: Any = None, **text: Any,
) -> Path:  # fmt: skip
    """A checkpoint with tiles of ``image`` pixels; the image's mark stands behind the vocabulary, as published."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration
    from transformers.models.mllama.image_processing_pil_mllama import get_all_supported_aspect_ratios

    tower = dict(
        hidden_size=32, intermediate_size=44, num_hidden_layers=4, num_global_layers=2, attention_heads=2,
        image_size=image, patch_size=14, max_num_tiles=tiles, intermediate_layers_indices=[*taken],
        supported_aspect_ratios=[[*r] for r in get_all_supported_aspect_ratios(tiles)],
        vision_output_dim=32 * (1 + len(taken)),
    ) | (vision or {})  # fmt: skip
    own = {"vocab_size": IMAGE, "num_hidden_layers": 5, "cross_attention_layers": [*cross], **text}
    config = MllamaConfig(
        text_config=checkpoints.text_settings(**own), vision_config=tower, image_token_index=IMAGE,
        architectures=["MllamaForConditionalGeneration"],
    )  # fmt: skip
    processor = {
        "image_processor_type": "MllamaImageProcessor", "size": {"height": image, "width": image}, "resample": 2,
        "do_resize": True, "do_pad": True, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
        "rescale_factor": 1 / 255, "max_image_tiles": tiles,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    model: Any = MllamaForConditionalGeneration(config)
    return finished(model, folder, seed, ["<|image|>"], processor, TEMPLATE, bos_token=START)


class MllamaOracle:
    """A checkpoint in transformers, float32."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer, MllamaForConditionalGeneration, MllamaProcessor
        from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

        images, tokenizer = MllamaImageProcessorPil.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        self.processor = MllamaProcessor(images, tokenizer)
        self.model = MllamaForConditionalGeneration.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.tokenizer = tokenizer
        self.config = json.loads((path / "config.json").read_text())

    def keys_and_values(self, image: Any) -> torch.Tensor:
        """float32 [rows of an image, keys and values of each layer that attends to images, one behind the other]."""
        made = self.processor.image_processor(images=[[image]], return_tensors="pt")
        with torch.inference_mode():
            inner = self.model.model
            states = inner.vision_model(
                pixel_values=made["pixel_values"], aspect_ratio_ids=made["aspect_ratio_ids"],
                aspect_ratio_mask=made["aspect_ratio_mask"],
            ).last_hidden_state  # fmt: skip
            states = inner.multi_modal_projector(states)
            states = states.reshape(-1, states.shape[-1])
            parts = []
            for place in self.config["text_config"]["cross_attention_layers"]:
                layer = inner.language_model.layers[place].cross_attn
                k = layer.k_norm(layer.k_proj(states).view(len(states), -1, layer.head_dim))
                parts += [k.reshape(len(states), -1), layer.v_proj(states)]
        return torch.cat(parts, dim=1)

    def text(self, messages: Any) -> str:
        made: Any = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return str(made)

    def answer(self, text: str, images: list[Any], length: int) -> tuple[list[int], Answer]:
        """(ids, greedy tokens) of a prompt; no forced end."""
        given = self.processor(images=images or None, text=text, return_tensors="pt", add_special_tokens=False)
        given.pop("num_tiles", None)
        with torch.inference_mode():
            out = self.model.generate(
                **given, max_new_tokens=length, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
        logits = torch.stack([row[0].float() for row in out.logits])
        best, ids = logits.topk(2).values, given["input_ids"]
        tokens = out.sequences[0, ids.shape[1] :].tolist()
        return ids[0].tolist(), Answer(tokens, (best[:, 0] - best[:, 1]).tolist(), logits)
