"""Packs images and their questions into rows: a shared prefix, and branches that see it and themselves alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from demo import config as c
from demo.images.scene import RenderedImage
from demo.language import chat_dialogues, phrasings, questions
from demo.language.tokenizer import SYSTEM

IM_END = "<|im_end|>\n"
USER = "<|im_start|>user\n"
ASSISTANT = f"{IM_END}<|im_start|>assistant\n"
OTHER_SYSTEMS = (
    "You are a helpful vision assistant.",
    "Answer briefly.",
    "You describe pictures.",
    "Be short and exact.",
    "You are a friendly assistant that looks at pictures.",
    "You are the Trencadis demo.",
)


@dataclass(frozen=True)
class Segment:
    """A run of tokens; it sees itself and its ancestors."""

    parent: int
    ids: list[int]
    answers: list[tuple[int, int]]  # ranges of ids that are to be predicted
    tag: str = ""  # the kind of its question


@dataclass
class Row:
    """One prefix with its branches."""

    segments: list[Segment] = field(default_factory=list)

    def add(self, parent: int, ids: list[int], answers: list[tuple[int, int]] | None = None, tag: str = "") -> int:
        """Appends a segment and returns its index."""
        self.segments.append(Segment(parent, ids, answers or [], tag))
        return len(self.segments) - 1


@dataclass(frozen=True)
class Batch:
    """Rows of one grid, as tensors."""

    grid: tuple[int, int]
    patches: Tensor | None  # [images, patches, 588] float32
    ids: Tensor  # [rows, length]
    positions: Tensor  # [3, rows, length]
    mask: Tensor  # [rows, 1, 1, length, length] float32, added to scores
    sources: Tensor  # flat indices of the positions that predict
    targets: Tensor  # the tokens they predict
    groups: Tensor  # the answer that each target belongs to
    tags: list[str]  # kind of each answer
    what: Tensor  # [images, cells]
    colour: Tensor  # [images, cells]
    centre: Tensor  # [images, cells, 2]


class Encoder:
    """Text to ids; caches pieces that repeat."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = lru_cache(maxsize=20000)(lambda text: tuple(tokenizer.encode(text).ids))

    def __call__(self, text: str) -> list[int]:
        """Ids of a piece of the chat template."""
        return list(self._ids(text))


def image_ids(grid: tuple[int, int]) -> list[int]:
    """The tokens of one image."""
    return [c.IDS["<|vision_start|>"], *[c.IDS["<|image_pad|>"]] * (grid[0] * grid[1]), c.IDS["<|vision_end|>"]]


def patchify(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Normalised patches [patches, 588] in the order of the merger, one frame."""
    x = (pixels.astype(np.float32) / 255 - np.array(c.MEAN, np.float32)) / np.array(c.STD, np.float32)
    h, w = pixels.shape[0] // 28, pixels.shape[1] // 28
    x = x.reshape(h, 2, c.PATCH, w, 2, c.PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(x.reshape(h * w * 4, -1))


def turn(
    encode: Encoder, question: str | None, answer: str, opening: str = ""
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of a question and its answer, and where the answer lies."""
    before = encode(opening) + (encode(question) if question else []) + encode(ASSISTANT)
    wanted = [*encode(answer), c.IDS["<|im_end|>"]]
    return before + wanted + encode("\n"), [(len(before), len(before) + len(wanted))]


def _ask(images: list[RenderedImage], rng: Random) -> tuple[str, str, str]:
    scenes = [p.scene for p in images]
    q = questions.about(scenes[0], rng) if len(scenes) == 1 else questions.about_pair(scenes[0], scenes[1], rng)
    return phrasings.ask(q.intent, q.slots, rng), q.answer, q.kind


def training_row(images: list[RenderedImage], grid: tuple[int, int], encode: Encoder, rng: Random, room: int) -> Row:
    """A prefix with about `room` tokens of questions."""
    row = Row()
    system = SYSTEM if rng.random() < 0.9 else rng.choice(OTHER_SYSTEMS)
    root = row.add(-1, encode(f"<|im_start|>system\n{system}{IM_END}"))
    pads = image_ids(grid) * len(images)
    used = 0
    branch = -1
    late = rng.random() < 0.16
    if late:  # the question stands before the image; what follows are later turns
        question, answer, tag = _ask(images, rng)
        prefix = row.add(root, encode(USER) + encode(question) + pads)
        ids, spans = turn(encode, None, answer)
        branch = row.add(prefix, ids, spans, tag)
    else:
        prefix = row.add(root, encode(USER) + pads)
    while used < room:
        if rng.random() < 0.035:
            ids, spans = turn(encode, *chat_dialogues.turn(rng), USER)
            used += len(ids)
            row.add(root, ids, spans, "text")
            continue
        question, answer, tag = _ask(images, rng)
        later = late or (branch >= 0 and rng.random() < 0.15)
        parent = branch if later else prefix
        ids, spans = turn(encode, question, answer, USER if later else "")
        index = row.add(parent, ids, spans, tag)
        branch = branch if late else index
        used += len(ids)
    return row


def _positions(row: Row, grid: tuple[int, int]) -> NDArray[np.int64]:
    """Positions where images take as many steps as their longer side has cells."""
    h, w = grid
    pad = c.IDS["<|image_pad|>"]
    block = np.stack(np.broadcast_arrays(0, np.arange(h)[:, None], np.arange(w)[None])).reshape(3, -1)
    ends: list[int] = []
    parts: list[NDArray[np.int64]] = []
    for segment in row.segments:
        at = ends[segment.parent] if segment.parent >= 0 else 0
        i = 0
        while i < len(segment.ids):
            if segment.ids[i] == pad:
                parts.append(block + at)
                at, i = at + max(h, w), i + h * w
            else:
                stop = segment.ids.index(pad, i) if pad in segment.ids[i:] else len(segment.ids)
                parts.append(np.broadcast_to(np.arange(at, at + stop - i), (3, stop - i)))
                at, i = at + stop - i, stop
        ends.append(at)
    return np.concatenate(parts, 1)


def _visible(row: Row, length: int) -> NDArray[np.bool_]:
    count = len(row.segments)
    sees = np.eye(count + 1, dtype=bool)
    for i, segment in enumerate(row.segments):
        if segment.parent >= 0:
            sees[i] |= sees[segment.parent]
    of = np.full(length, count)
    of[: sum(len(s.ids) for s in row.segments)] = np.repeat(np.arange(count), [len(s.ids) for s in row.segments])
    return sees[of[:, None], of[None]] & np.tri(length, dtype=bool)


def collate(rows: list[Row], images: list[RenderedImage], grid: tuple[int, int]) -> Batch:
    """Tensors of the rows; `images` in the order of the rows."""
    lengths = [sum(len(s.ids) for s in row.segments) for row in rows]
    length = -(-max(lengths) // 16) * 16
    ids = np.full((len(rows), length), c.IDS["<|endoftext|>"])
    positions = np.zeros((3, len(rows), length), np.int64)
    mask = np.empty((len(rows), length, length), bool)
    sources: list[int] = []
    targets: list[int] = []
    groups: list[int] = []
    tags: list[str] = []
    for r, row in enumerate(rows):
        ids[r, : lengths[r]] = [t for s in row.segments for t in s.ids]
        positions[:, r, : lengths[r]] = _positions(row, grid)
        mask[r] = _visible(row, length)
        start = 0
        for segment in row.segments:
            for low, high in segment.answers:
                sources += range(r * length + start + low - 1, r * length + start + high - 1)
                targets += segment.ids[low:high]
                groups += [len(tags)] * (high - low)
                tags.append(segment.tag)
            start += len(segment.ids)
    score = torch.zeros(mask.shape).masked_fill_(~torch.from_numpy(mask), -1e4)[:, None, None]
    stack = np.stack([patchify(p.pixels) for p in images]) if images else None
    return Batch(
        grid,
        None if stack is None else torch.from_numpy(stack),
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        score,
        torch.tensor(sources),
        torch.tensor(targets),
        torch.tensor(groups),
        tags,
        torch.from_numpy(np.stack([p.what for p in images])) if images else torch.empty(0),
        torch.from_numpy(np.stack([p.colour for p in images])) if images else torch.empty(0),
        torch.from_numpy(np.stack([p.centre for p in images])) if images else torch.empty(0),
    )
