"""Random Qwen2.5-VL checkpoints in the hub's layout, made once and kept in ``.bench/checkpoints``.

python -m benchmarks.harness.checkpoints [half tiny three wide cycles]

half: 0.68 G parameters, the text of Qwen2.5-0.5B; tiny: for tests; three: the sizes of Qwen2.5-VL-3B in bfloat16
(7.5 GB), drawn on an NVIDIA card where there is one; wide: four layers of half under its 151,936 ids, for what depends
on the vocabulary alone; cycles: half, whose answers repeat themselves every 24 tokens, for what guesses them

Speed depends on shapes, not on values; norms and biases are random too, so that equal answers mean something.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.reporting import BENCH, ROOT

DEMO = ROOT / "assets" / "demo"
"""The bundled demo, whose tokenizer has Qwen2.5's added tokens, split and template."""

_TOKENIZER = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
SPECIALS = tuple(token["content"] for token in _TOKENIZER["added_tokens"])
"""Qwen2.5's added tokens in their order; those from ``<tool_call>`` on are not special."""
FIRST_PLAIN = SPECIALS.index("<tool_call>")
SPLIT = _TOKENIZER["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
"""Qwen2's pre-tokenizer."""
TEMPLATE = (DEMO / "chat_template.jinja").read_text(encoding="utf-8")

WORDS = tuple(
    """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city name team minute idea body back parent face others level
    office door health person art war history party result change morning reason research girl guy moment air
    teacher force education foot boy age policy music market sense nation plan college interest death
    """.split()  # noqa: SIM905 - readable
)
"""Words of prompts: one token each with the space before them."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a checkpoint; ``vocab`` is padded above ``base`` ordinary tokens and the special ones."""

    name: str
    base: int
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    section: tuple[int, int, int]
    vision: int
    vision_heads: int
    vision_inner: int
    depth: int
    full: tuple[int, ...]
    std: float = 0.02
    dtype: str = "float32"
    cycle: int = 0
    """The likeliest id after another is the next of so many neighbours, in a circle; 0: it comes of random values."""


HALF = Shape("half", 151643, 151936, 896, 24, 14, 2, 4864, (8, 12, 12), 1280, 16, 3420, 8, (3, 7))
TINY = Shape("tiny", 1000, 1024, 128, 2, 4, 2, 320, (4, 6, 6), 64, 4, 160, 2, (1,), std=0.06)
_VISION_3B = (1280, 16, 3420, 32, (7, 15, 23, 31))
THREE = Shape("three", 151643, 151936, 2048, 36, 16, 2, 11008, (16, 24, 24), *_VISION_3B, dtype="bfloat16")
SEVEN = Shape("seven", 151643, 152064, 3584, 28, 28, 4, 18944, (16, 24, 24), *_VISION_3B, dtype="bfloat16")
WIDE = replace(HALF, name="wide", layers=4, depth=1, full=(0,))
CYCLES = replace(HALF, name="cycles", cycle=24)
TINY_CYCLES = replace(TINY, name="tiny-cycles", cycle=6)
SHAPES = {s.name: s for s in (HALF, TINY, THREE, SEVEN, WIDE, CYCLES, TINY_CYCLES)}


def make_folder(target: Path, write: Callable[[Path], None]) -> Path:
    """Returns ``target``, which ``write`` fills if it is missing; a partial one never appears under its name."""
    if not target.is_dir():
        work = target.with_suffix(".part")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write(work)
        work.rename(target)
    return target


def checkpoint(name: str, root: Path | None = None) -> Path:
    """Returns the folder of checkpoint ``name``, which is made if missing."""
    shape = SHAPES[name]

    def write(work: Path) -> None:
        _write_json(work, "config.json", config(shape))
        _write_json(work, "generation_config.json", {"do_sample": False, "eos_token_id": [shape.base + 2, shape.base]})
        write_tokenizer(work, shape)
        _write_weights(work, shape)

    return make_folder((root or BENCH / "checkpoints") / name, write)


def text_bytes(s: Shape, itemsize: int) -> int:
    """Bytes of weights that a decode step reads: the text model's, in which the tied head counts as read once."""
    return itemsize * sum(math.prod(shape) for name, shape in sizes(s) if not name.startswith("visual."))


def config(s: Shape) -> dict[str, Any]:
    """config.json in the form of the hub's Qwen2.5-VL checkpoints."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": s.dtype,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "intermediate_size": s.inner,
        "vocab_size": s.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": list(s.section)},
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": not s.cycle,
        "bos_token_id": s.base,
        "eos_token_id": s.base + SPECIALS.index("<|im_end|>"),
        "vision_start_token_id": s.base + SPECIALS.index("<|vision_start|>"),
        "vision_end_token_id": s.base + SPECIALS.index("<|vision_end|>"),
        "image_token_id": s.base + SPECIALS.index("<|image_pad|>"),
        "video_token_id": s.base + SPECIALS.index("<|video_pad|>"),
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": s.depth,
            "hidden_size": s.vision,
            "num_heads": s.vision_heads,
            "intermediate_size": s.vision_inner,
            "out_hidden_size": s.hidden,
            "fullatt_block_indexes": list(s.full),
            "hidden_act": "silu",
            "in_chans": 3,
            "patch_size": 14,
            "spatial_patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
        },
    }


def sizes(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor."""
    head = s.hidden // s.heads
    yield "model.embed_tokens.weight", (s.vocab, s.hidden)
    if s.cycle:
        yield "lm_head.weight", (s.vocab, s.hidden)
    yield "model.norm.weight", (s.hidden,)
    for i in range(s.layers):
        at = f"model.layers.{i}."
        for part, out in (("q", s.heads * head), ("k", s.kv_heads * head), ("v", s.kv_heads * head)):
            yield f"{at}self_attn.{part}_proj.weight", (out, s.hidden)
            yield f"{at}self_attn.{part}_proj.bias", (out,)
        yield f"{at}self_attn.o_proj.weight", (s.hidden, s.heads * head)
        yield f"{at}mlp.gate_proj.weight", (s.inner, s.hidden)
        yield f"{at}mlp.up_proj.weight", (s.inner, s.hidden)
        yield f"{at}mlp.down_proj.weight", (s.hidden, s.inner)
        yield f"{at}input_layernorm.weight", (s.hidden,)
        yield f"{at}post_attention_layernorm.weight", (s.hidden,)
    yield "visual.patch_embed.proj.weight", (s.vision, 3, 2, 14, 14)
    for i in range(s.depth):
        at = f"visual.blocks.{i}."
        yield f"{at}norm1.weight", (s.vision,)
        yield f"{at}norm2.weight", (s.vision,)
        linears = (("attn.qkv", 3 * s.vision, s.vision), ("attn.proj", s.vision, s.vision))
        mlp = (("gate", s.vision_inner, s.vision), ("up", s.vision_inner, s.vision), ("down", s.vision, s.vision_inner))
        for part, out, into in (*linears, *((f"mlp.{p}_proj", o, n) for p, o, n in mlp)):
            yield f"{at}{part}.weight", (out, into)
            yield f"{at}{part}.bias", (out,)
    yield "visual.merger.ln_q.weight", (s.vision,)
    for part, out in ((0, 4 * s.vision), (2, s.hidden)):
        yield f"visual.merger.mlp.{part}.weight", (out, 4 * s.vision)
        yield f"visual.merger.mlp.{part}.bias", (out,)


ADDING = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""Weights without which a layer adds nothing, so that the head sees the embedding of the last id."""


def _write_weights(folder: Path, s: Shape) -> None:
    import torch
    from safetensors.torch import save_file

    large = s.dtype == "bfloat16" and torch.cuda.is_available()  # a CPU takes a minute for billions of numbers
    device = torch.device("cuda" if large else "cpu")
    generator = torch.Generator(device).manual_seed(7)
    tensors = {}
    for name, shape in sizes(s):
        values = torch.empty(shape, device=device).normal_(generator=generator)
        if name.endswith("bias"):
            values *= 0.1
        elif len(shape) == 1:
            values.mul_(0.1).add_(1)
        else:
            values *= s.std * (2 if ".q_proj." in name or ".k_proj." in name else 1)
        if s.cycle and name.endswith(ADDING):
            values.zero_()
        if name == "lm_head.weight":
            ids = torch.arange(s.vocab)
            first = ids - ids % s.cycle
            follows = first + (ids - first + 1) % (s.vocab - first).clamp(max=s.cycle)
            values[follows] = tensors["model.embed_tokens.weight"].to(values.dtype)
        tensors[name] = values.to("cpu", getattr(torch, s.dtype))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, s: Shape) -> None:
    """Writes a byte-level BPE trained on this repository's texts, padded to ``base`` entries so that every id has text;
    and the settings of images.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    made.decoder = decoders.ByteLevel()
    texts = [" ".join(("", *WORDS))] * 50 + [p.read_text() for p in sorted((ROOT / "docs").glob("*.md"))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=min(s.base, 8000), initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    raw = json.loads(made.to_str())
    for i in range(len(raw["model"]["vocab"]), s.base):
        raw["model"]["vocab"][f"Ġfiller{i}"] = i
    made = Tokenizer.from_str(json.dumps(raw))
    made.add_tokens([AddedToken(t, special=i < FIRST_PLAIN, normalized=False) for i, t in enumerate(SPECIALS)])
    made.save(str(folder / "tokenizer.json"))
    added = {
        str(s.base + i): {"content": t, "special": i < FIRST_PLAIN, "lstrip": False, "rstrip": False,
                          "normalized": False, "single_word": False}
        for i, t in enumerate(SPECIALS)
    }  # fmt: skip
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                "bos_token": None, "unk_token": None, "errors": "replace", "split_special_tokens": False,
                "add_bos_token": False, "clean_up_tokenization_spaces": False, "model_max_length": 32768,
                "added_tokens_decoder": added, "chat_template": TEMPLATE}  # fmt: skip
    _write_json(folder, "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    _write_json(folder, "vocab.json", raw["model"]["vocab"])
    merges = [m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    _write_json(folder, "preprocessor_config.json", {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    })  # fmt: skip


def _write_json(folder: Path, name: str, value: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=1 if len(value) < 100 else None))


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ["half", "tiny"]:
        print(checkpoint(wanted))
