"""The byte-level BPE tokenizer, its special tokens and the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from demo.images.palette import COLOURS
from demo.images.scene import SHAPES
from demo.language import chat_dialogues, phrasings, questions

LEARNED = 1002
SPECIALS: tuple[str, ...] = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
ORDINARY = frozenset(SPECIALS[14:])  # added, yet not special: they stay in decoded text
VOCAB = LEARNED + len(SPECIALS)  # 1024
# Qwen2's split: one digit a token, words with their leading space
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SYSTEM = "You are a helpful assistant."
CHAT_TEMPLATE = """\
{%- set toolbox -%}
{%- if tools -%}
{{- '\\n\\n# Tools\\n\\nThese functions can be called:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nTo call one, write its name and its arguments as JSON between tags:\\n<tool_call>\\n' -}}
{{- '{"name": "the name", "arguments": {"an argument": "its value"}}\\n</tool_call>' -}}
{%- endif -%}
{%- endset -%}
{%- if not messages or messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.' + toolbox + '<|im_end|>\\n' -}}
{%- endif -%}
{%- set seen = namespace(images=0, videos=0) -%}
{%- for message in messages -%}
{%- set result = message['role'] == 'tool' -%}
{{- '<|im_start|>' + ('user' if result else message['role']) + '\\n' + ('<tool_response>\\n' if result else '') -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{%- set seen.images = seen.images + 1 -%}
{%- if add_vision_id is defined and add_vision_id -%}{{- 'Picture ' + seen.images | string + ': ' -}}{%- endif -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{%- set seen.videos = seen.videos + 1 -%}
{%- if add_vision_id is defined and add_vision_id -%}{{- 'Video ' + seen.videos | string + ': ' -}}{%- endif -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{- '\\n' if message['content'] or not loop.first else '' -}}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
{{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- ('\\n</tool_response>' if result else '') + (toolbox if loop.first and message['role'] == 'system' else '') -}}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its "
    "about than into them can only other time new some could these two may first then do any like my now over such "
    "our man me even most made after also did many before must well back through years where much your way down "
    "should because long each just state those people too good very make world still see own work men day get here "
    "old life both between being under never know same last while might us great go come since against right came "
    "take used three four five house car dog cat tree sky person"
)


# the corpus keeps these spellings although the answers have since been made more alike
_PLACES = (
    *("At the top left.", "At the top.", "At the top right.", "On the left.", "In the middle.", "On the right."),
    *("At the bottom left.", "At the bottom.", "At the bottom right."),
)


def corpus() -> Iterator[str]:
    """The sentences of the training questions and answers, in the spelling that people use, and common words."""
    rng = Random(7)
    slots = {
        "ref": "the red circle",
        "ref2": "the blue square",
        "a": "a green star",
        "plural": "circles",
        "rel": "left of",
        "side": "on the left",
        "nth": "first",
    }
    for intent in phrasings.TRAIN:
        for template in phrasings.TRAIN[intent]:
            for _ in range(6):
                text = phrasings.fill(template, slots, rng)
                yield from (text, phrasings.restyle(text, rng), text.lower(), phrasings.plain(text))
    names = [
        *COLOURS,
        *SHAPES,
        *(f"{s}s" for s in SHAPES),
        "crosses",
        *questions.LEFT_WORDS,
        *questions.RIGHT_WORDS,
        *questions.ABOVE_WORDS,
        *questions.BELOW_WORDS,
        "second",
        "colour",
        "color",
        "background",
        "photo",
    ]
    for name in names:
        yield from [f"a {name} and {name}, the {name}. {name.capitalize()}."] * 40
    for name in COLOURS:
        yield from [f"{name.capitalize()}."] * 200
    for intent in chat_dialogues.TRAIN:
        for text in chat_dialogues.TRAIN[intent]:
            yield from (text, text.lower())
    for text in (
        *chat_dialogues.ANSWERS.values(),
        *_PLACES,
        *questions.COUNTS,
        SYSTEM,
        questions.NO_NUMBER,
        questions.NO_SHAPE,
        "A photo, mostly blue and white.",
        "From left to right: a circle, an orange star and a heart.",
        "The number 4 in red.",
        "Yes.",
        "No.",
        "system",
        "user",
        "assistant",
        "The second picture.",
    ):
        yield from [text] * 30
    yield from [_COMMON] * 12


def build() -> Tokenizer:
    """Trains the tokenizer; the same bytes every time."""
    out = Tokenizer(models.BPE())
    out.normalizer = normalizers.NFC()
    out.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    out.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=LEARNED, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    out.train_from_iterator(corpus(), trainer)
    if out.get_vocab_size() != LEARNED:
        raise RuntimeError(f"the corpus gave {out.get_vocab_size()} entries, not {LEARNED}")
    out.add_tokens([AddedToken(s, special=s not in ORDINARY, normalized=False) for s in SPECIALS])
    return out


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(LEARNED + i): {"content": s, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                           "special": s not in ORDINARY}
        for i, s in enumerate(SPECIALS)
    }  # fmt: skip
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIALS[1:14]),
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
