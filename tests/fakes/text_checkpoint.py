"""A small Qwen2-style tokenizer (byte-level BPE, NFC, Qwen2's split) and chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "Hello, how are you? I'm fine; it's 2026 and we've 1234567 things.",
    "Das Haus steht über dem Fluß. Où est le café? ¿Qué tal, señor?",
    "日本語のテキストと中文文本。Привет мир! שלום עולם مرحبا",
    "def f(x):\n    return x * 2\n\n\n# done\r\n\tprint('x')   end",
    "system user assistant describe this image picture what is in it answer yes no",
] * 4


def write_text_checkpoint(
    path: Path,
    special: Sequence[str] = (),
    plain: Sequence[str] = (),
    texts: Iterable[str] = TEXTS,
    size: int = 700,
) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and a Qwen2.5-VL-like template into the folder ``path``.

    ``special`` and ``plain``: added tokens beside the usual ones. The vocabulary of ``size`` entries is trained on
    ``texts``.
    """
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    tok.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in [*SPECIAL, *special]])
    tok.add_tokens([AddedToken(s, normalized=False, special=False) for s in [*PLAIN, *plain]])
    tok.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
