"""Asks the exported checkpoint held-out questions and tabulates what it answers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from demo import config as c
from demo.export import from_hub
from demo.images.drawing import as_array
from demo.images.scene import CELL
from demo.language.held_out import CORE, KINDS, WAYS, Item, items, smart_size, textures
from demo.language.tokenizer import SYSTEM
from demo.model import DemoModel
from demo.packing import ASSISTANT, IM_END, USER, Batch, Encoder, Row, collate, image_ids, patchify, turn

BARS = {"core": 95.0, "caption": 80.0, "pair": 80.0, "number": 70.0}


def item_row(item: Item, encode: Encoder) -> Row:
    """All wordings of one question as branches of one row."""
    row = Row()
    root = row.add(-1, encode(f"<|im_start|>system\n{SYSTEM}{IM_END}"))
    prefix = row.add(root, encode(USER) + image_ids(item.grid) * len(item.images))
    for words in item.wordings:
        ids, spans = turn(encode, words, item.answer)
        row.add(prefix, ids, spans, item.kind)
    return row


@torch.inference_mode()
def hidden_states(model: DemoModel, batch: Batch) -> Tensor:
    """Final hidden states [rows, length, width]."""
    features = None if batch.patches is None else model.vision(batch.patches, batch.grid)
    return model.text(batch.ids, features, batch.positions, batch.mask)


@torch.inference_mode()
def exact(model: DemoModel, item: Item, encode: Encoder) -> list[bool]:
    """For every wording, whether greedy decoding gives the answer to the letter and then ends.

    It does so exactly when every token of the answer is the best one after the tokens before it.
    """
    batch = collate([item_row(item, encode)], item.images, item.grid)
    best = model.logits(hidden_states(model, batch).flatten(0, 1)[batch.sources]).argmax(-1)
    wrong = torch.zeros(len(batch.tags)).index_add(0, batch.groups, (best != batch.targets).float())
    return [bool(w == 0) for w in wrong]


@torch.inference_mode()
def answer(
    model: DemoModel, encode: Encoder, words: Tokenizer, images: list[Image.Image], question: str, most: int = 48
) -> str:
    """The greedy answer about uploads of equal size, resized as the image processor resizes them."""
    grid = smart_size(*images[0].size) if images else (2, 2)
    shown = [
        as_array(i.convert("RGB").resize((grid[1] * CELL, grid[0] * CELL), Image.Resampling.BICUBIC)) for i in images
    ]
    features = model.vision(torch.stack([torch.from_numpy(patchify(s)) for s in shown]), grid) if shown else None
    start = encode(f"<|im_start|>system\n{SYSTEM}{IM_END}{USER}") + image_ids(grid) * len(images)
    start += encode(question) + encode(ASSISTANT)
    out: list[int] = []
    while len(out) < most:
        row = Row()
        row.add(-1, start + out)
        batch = collate([row], [], grid)
        hidden = model.text(batch.ids, features, batch.positions, batch.mask)
        token = int(model.logits(hidden[0, len(start) + len(out) - 1]).argmax())
        if token in (c.IDS["<|im_end|>"], c.IDS["<|endoftext|>"]):
            break
        out.append(token)
    return words.decode(out)


def _texture_table(model: DemoModel, encode: Encoder, words: Tokenizer) -> list[str]:
    lines, right = [], 0
    for i, (image, parts) in enumerate(textures()):
        said = answer(model, encode, words, [image], "What is the main color of this photo?")
        good = said == f"{next(iter(parts)).capitalize()}."
        right += good
        mix = ", ".join(f"{name} {100 * part:.0f} %" for name, part in list(parts.items())[:3])
        lines.append(f"| {i + 1} | {image.width}x{image.height} | {mix} | {said} | {'yes' if good else 'no'} |")
    head = [f"Main colour of 20 photo-like textures: **{right} right** (bar: 16).", "",
            "| # | size | colours | answer | right |", "|---|---|---|---|---|"]  # fmt: skip
    return head + lines


def report(folder: Path, count: int, by_intent: bool = False) -> str:
    """The tables of results, as Markdown."""
    model, words = from_hub(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    encode = Encoder(words)
    results: dict[str, list[list[bool]]] = defaultdict(list)
    for item in items(count):
        marks = exact(model, item, encode)
        for key in (
            item.kind,
            "core" if item.kind in CORE else "",
            "all",
            f"- {item.kind}/{item.intent}" if by_intent else "",
        ):
            if key:
                results[key].append(marks)
    names = [*KINDS[:6], "core", *KINDS[6:], "all", *sorted(k for k in results if k.startswith("- "))]
    lines = [f"| kind | questions | bar | {' | '.join(WAYS)} |", "|" + "---|" * (3 + len(WAYS))]
    for name in (n for n in names if n in results):
        rows = results[name]
        parts = [100 * sum(r[i] for r in rows) / len(rows) for i in range(len(WAYS))]
        bar = f"{BARS[name]:.0f}" if name in BARS else ""
        shown = f"**{name}**" if name in ("core", "all") else name
        lines.append(f"| {shown} | {len(rows)} | {bar} | " + " | ".join(f"{p:.1f}" for p in parts) + " |")
    return "\n".join([*lines, "", *_texture_table(model, encode, words)])
