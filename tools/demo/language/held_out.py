"""Questions that training never sees: other images, and other words for the same question."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from PIL import Image

from demo import sampling
from demo.images import drawing, texture
from demo.images.scene import CELL, MAX_CELLS, RenderedImage
from demo.language import chat_dialogues, phrasings, questions
from demo.language.questions import Question

KINDS: tuple[str, ...] = (
    "shape",
    "colour",
    "count",
    "position",
    "existence",
    "text",
    "caption",
    "pair",
    "number",
    "photo",
)
CORE = KINDS[:6]
WAYS: tuple[str, ...] = ("trained", "unseen", "unseen, lower case", "unseen, no marks", "unseen, both")
_PORTIONS = {
    "shape": 11,
    "colour": 12,
    "count": 13,
    "position": 14,
    "existence": 12,
    "text": 8,
    "caption": 9,
    "pair": 8,
    "number": 8,
    "photo": 5,
}


@dataclass(frozen=True)
class Item:
    """One question in several wordings."""

    kind: str
    intent: str
    grid: tuple[int, int]
    images: list[RenderedImage]
    wordings: list[str]  # in the order of WAYS
    answer: str


def _wordings(trained: str, unseen: str) -> list[str]:
    bare = unseen.rstrip("?.!").replace(",", "")
    return [trained, unseen, unseen.lower(), bare, phrasings.plain(unseen)]


def _item(grid: tuple[int, int], images: list[RenderedImage], question: Question, rng: Random) -> Item:
    trained = phrasings.fill(rng.choice(phrasings.ways(question.intent)), question.slots, rng)
    unseen = phrasings.fill(rng.choice(phrasings.HELD_OUT[question.intent]), question.slots, rng)
    return Item(question.kind, question.intent, grid, images, _wordings(trained, unseen), question.answer)


def _talk(rng: Random) -> Item:
    intent = rng.choice(tuple(chat_dialogues.ANSWERS))
    wordings = _wordings(rng.choice(chat_dialogues.ways(intent)), rng.choice(chat_dialogues.HELD_OUT[intent]))
    return Item("text", intent, (2, 2), [], wordings, chat_dialogues.ANSWERS[intent])


def items(count: int, seed: str = "held out") -> list[Item]:
    """Questions of every kind in fixed portions, drawn with seeds that training never uses."""
    rng = Random(seed)
    total = sum(_PORTIONS.values())
    left = {k: round(count * p / total) for k, p in _PORTIONS.items()}
    out: list[Item] = []
    while any(left.values()):
        if left["text"]:
            left["text"] -= 1
            out.append(_talk(rng))
        two = left["pair"] > 0 and rng.random() < 0.3
        grid = sampling.sample_grid(rng, MAX_CELLS // 2 if two else MAX_CELLS)
        if two:
            shown = sampling.pair(grid, rng)
            question = questions.about_pair(shown[0].scene, shown[1].scene, rng)
        else:
            shown = [sampling.make_image(grid, rng, sampling.Mix())]
            question = questions.about(shown[0].scene, rng)
        if left[question.kind]:
            left[question.kind] -= 1
            out.append(_item(grid, shown, question, rng))
    return out


def smart_size(width: int, height: int) -> tuple[int, int]:
    """Cells down and across that the image processor gives to an image of any size."""
    h, w = max(1, round(height / CELL)), max(1, round(width / CELL))
    if h * w > MAX_CELLS:
        shrink = (height * width / (MAX_CELLS * CELL * CELL)) ** 0.5
        h, w = max(1, int(height / shrink / CELL)), max(1, int(width / shrink / CELL))
    elif h * w < 4:
        grow = (4 * CELL * CELL / (height * width)) ** 0.5
        h, w = -int(-height * grow // CELL), -int(-width * grow // CELL)
    return h, w


def textures(count: int = 20, seed: str = "textures") -> list[tuple[Image.Image, dict[str, float]]]:
    """Photo-like uploads of camera-like sizes, with the share of every colour."""
    rng = Random(seed)
    out: list[tuple[Image.Image, dict[str, float]]] = []
    while len(out) < count:
        size = rng.choice(((640, 480), (448, 448), (480, 640), (800, 450), (320, 240)))
        image = texture.draw(size, rng)
        parts = texture.shares(drawing.as_array(image))
        top = [*parts.values(), 0.0, 0.0]
        if top[0] >= 0.45 and top[0] - top[1] >= 0.15:
            out.append((image, parts))
    return out
