"""Small random checkpoints of the text families, three of each: head counts, tied heads, biases, stored names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.fakes.checkpoints import IDS, VOCAB, randomise, text_settings, write_tokenizer

EOS = IDS["<|im_end|>"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
GPT2: dict[str, Any] = dict(
    vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=EOS, eos_token_id=EOS
)
OPT: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64,
    max_position_embeddings=512, bos_token_id=EOS, eos_token_id=EOS, pad_token_id=1,
)  # fmt: skip
FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {
        "plain": text_settings(head_dim=16),
        "tied, one KV head, wide heads": text_settings(head_dim=32, num_key_value_heads=1, tie_word_embeddings=True),
        "biases, yarn": text_settings(head_dim=16, attention_bias=True, num_key_value_heads=4, rope_parameters=YARN),
    },
    "mistral": {
        "no window": text_settings(sliding_window=None),
        "window of the longest request, wide heads": text_settings(sliding_window=512, head_dim=32),
        "tied, linear": text_settings(
            sliding_window=None, tie_word_embeddings=True, num_key_value_heads=1,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
    },
    "opt": {
        "125m": OPT,
        "350m": OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=32),
        "without biases": OPT | dict(enable_bias=False, activation_function="gelu", tie_word_embeddings=False),
    },
    "gpt2": {
        "tied": GPT2,
        "bare names, own inner size": GPT2 | dict(n_inner=80, activation_function="gelu", n_head=2),
        "untied, unscaled": GPT2 | dict(tie_word_embeddings=False, scale_attn_weights=False, layer_norm_epsilon=1e-3),
    },
}  # fmt: skip
CLASSES = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "opt": ("OPTConfig", "OPTForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
}
CASES = [(family, form) for family, forms in FORMS.items() for form in forms]


def family_checkpoint(folder: Path, *, family: str, form: str, **changes: Any) -> Path:
    """A checkpoint of one form; ``changes`` are further settings."""
    import transformers

    config, model = (getattr(transformers, name) for name in CLASSES[family])
    made = model(config(**FORMS[family][form], **changes))
    randomise(made, 0)
    _louder(made)
    made.generation_config = transformers.GenerationConfig(eos_token_id=EOS, do_sample=False)
    made.to(torch.float32).eval().save_pretrained(folder)
    write_tokenizer(folder)
    if "bare names" in form:
        rename(folder, {"transformer.": ""})
    return folder


def _louder(model: Any) -> None:
    """Fused and stacked projections are random as those of the others are; positions count as much as words."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "wpe" in name or "embed_positions" in name:
                p.mul_(2)


def rename(folder: Path, prefixes: dict[str, str], ends: tuple[tuple[str, str], ...] = ()) -> None:
    """Stores the weights under other names, as older conversions have them."""
    file = folder / "model.safetensors"
    held = load_file(file)
    for theirs, ours in prefixes.items():
        held = {ours + n.removeprefix(theirs) if n.startswith(theirs) else n: t for n, t in held.items()}
    for theirs, ours in ends:
        held = {n.removesuffix(theirs) + ours if n.endswith(theirs) else n: t for n, t in held.items()}
    save_file({n: t.contiguous() for n, t in held.items()}, file, metadata={"format": "pt"})


def set_keys(folder: Path, **values: Any) -> None:
    """Changes keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
