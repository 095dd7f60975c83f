"""The items of ``trencadis check-accuracy``: drawn images, a question each, and what makes an answer right.

An image has shapes, numbers and words at known places.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from trencadis.server.text.checkpoint_tokenizer import Tokenizer

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30), "green": (40, 160, 60), "blue": (40, 70, 220), "yellow": (245, 220, 40),
    "purple": (140, 40, 170), "orange": (245, 140, 20), "black": (15, 15, 15),
}  # fmt: skip
"""Names of the colours that shapes have, far from each other and from the ground."""

SHAPES = ("circle", "square", "triangle", "star")
GROUND = (238, 238, 238)


class Box(NamedTuple):
    """A box in pixels; right and bottom are exclusive."""

    left: int
    top: int
    right: int
    bottom: int

    def overlap(self, other: Sequence[float]) -> float:
        """Returns the share of the common area in the area of both boxes together."""
        width = min(self.right, other[2]) - max(self.left, other[0])
        height = min(self.bottom, other[3]) - max(self.top, other[1])
        if width <= 0 or height <= 0:
            return 0.0
        own = (self.right - self.left) * (self.bottom - self.top)
        both = own + (other[2] - other[0]) * (other[3] - other[1]) - width * height
        return width * height / both

    def holds(self, x: float, y: float) -> bool:
        """Returns True if a point lies inside."""
        return self.left <= x < self.right and self.top <= y < self.bottom


@dataclass(frozen=True)
class DrawnShape:
    """A shape that fills a square box."""

    shape: str
    colour: str
    box: Box


@dataclass(frozen=True)
class Scene:
    """An image: its size in pixels, shapes, and a text in its middle."""

    width: int
    height: int
    shapes: tuple[DrawnShape, ...] = ()
    text: str = ""

    def draw(self) -> Image.Image:
        """Returns the image in RGB."""
        image = Image.new("RGB", (self.width, self.height), GROUND)
        pen = ImageDraw.Draw(image)
        for one in self.shapes:
            _draw_shape(pen, one)
        if self.text:
            _draw_text(pen, self)
        return image


def _draw_shape(pen: ImageDraw.ImageDraw, one: DrawnShape) -> None:
    left, top, right, bottom = one.box
    colour, (middle_x, middle_y) = COLOURS[one.colour], ((left + right) / 2, (top + bottom) / 2)
    if one.shape == "circle":
        pen.ellipse((left, top, right - 1, bottom - 1), fill=colour)
    elif one.shape == "square":
        pen.rectangle((left, top, right - 1, bottom - 1), fill=colour)
    elif one.shape == "triangle":
        pen.polygon(((middle_x, top), (right - 1, bottom - 1), (left, bottom - 1)), fill=colour)
    else:
        outer = (right - left) / 2
        points = []
        for i in range(10):
            radius, angle = outer * (0.42 if i % 2 else 1.0), math.pi * (i / 5 - 0.5)
            points.append((middle_x + radius * math.cos(angle), middle_y + radius * math.sin(angle)))
        pen.polygon(points, fill=colour)


def _draw_text(pen: ImageDraw.ImageDraw, scene: Scene) -> None:
    """Draws the text in black, as large as three quarters of the image allow."""
    size = scene.height * 0.6
    font = ImageFont.load_default(size)
    left, _, right, _ = pen.textbbox((0, 0), scene.text, font=font)
    if right - left > 0.75 * scene.width:
        font = ImageFont.load_default(size * 0.75 * scene.width / (right - left))
    pen.text((scene.width / 2, scene.height / 2), scene.text, fill=COLOURS["black"], font=font, anchor="mm")


def place_box(width: int, height: int, column: int, row: int, share: float) -> Box:
    """Returns the box of a shape in a cell of a grid of 3 x 3; ``share``: its side in the shorter side of a cell."""
    cell_width, cell_height = width / 3, height / 3
    side = int(min(cell_width, cell_height) * share)
    left, top = int(cell_width * (column + 0.5) - side / 2), int(cell_height * (row + 0.5) - side / 2)
    return Box(left, top, left + side, top + side)


WORDS = {
    "en": ("apple", "river", "window", "garden", "silver", "bridge"),
    "de": ("Straße", "Brücke", "Garten", "Fenster", "Löffel", "grün"),
    "fr": ("forêt", "maison", "château", "rivière", "lumière", "pain"),
    "es": ("niño", "mañana", "ventana", "puente", "jardín", "luz"),
}
"""Words that are drawn, by language; their letters exist in Pillow's own font."""

NUMBERS = ("zero", "one", "two", "three", "four")
PLACES = {
    (0, 0): ("top", "left"), (1, 0): ("top",), (2, 0): ("top", "right"), (0, 1): ("left",),
    (1, 1): ("middle", "center"), (2, 1): ("right",),
    (0, 2): ("bottom", "left"), (1, 2): ("bottom",), (2, 2): ("bottom", "right"),
}  # fmt: skip
"""(column, row) of a grid of 3 x 3 -> the words of the place; of the middle one word is enough."""

SIDES = ("top", "left", "right", "bottom")
SYNONYMS = {"upper": "top", "lower": "bottom", "centre": "center", "grey": "gray"}
FEW_TOKENS = 3.0

CLOSE = 0.5
"""Least overlap of a box with the true one."""


@dataclass(frozen=True)
class AccuracyItem:
    """A question about images, with known truth.

    Args:
        size: width of the images in pixels.
        accepts: returns True if an answer is right.
    """

    name: str
    kind: str
    size: int
    scenes: tuple[Scene, ...]
    question: str
    accepts: Callable[[str], bool]


def split_words(answer: str) -> list[str]:
    """Returns the words of an answer in lower case, with one name for each thing."""
    return [SYNONYMS.get(word, word) for word in re.findall(r"\w+", answer.lower())]


def find_numbers(answer: str) -> list[float]:
    """Returns the numbers in an answer, in order; those before the first bracket do not count if there is one."""
    _, bracket, inside = answer.partition("[")
    return [float(one) for one in re.findall(r"-?\d+(?:\.\d+)?", inside if bracket else answer)]


class ItemMaker:
    """Makes the items of one seed, kind by kind.

    Args:
        languages: of the words that are drawn, keys of ``WORDS``.
    """

    def __init__(self, seed: int, sizes: Sequence[int], languages: Sequence[str]) -> None:
        self._seed, self._sizes, self._languages = seed, sizes, languages
        self._makers: dict[str, Callable[[Random, int], tuple[tuple[Scene, ...], str, Callable[[str], bool]]]] = {
            "number": self._make_number,
            "word": self._make_word,
            "count": self._make_count,
            "colour": self._make_colour,
            "place": self._make_place,
            "box": self._make_box,
            "point": self._make_point,
            "compare": self._make_compare,
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of items, in order."""
        return tuple(self._makers)

    def make(self, kinds: Sequence[str], count: int) -> list[AccuracyItem]:
        """Returns ``count`` items, spread evenly over kinds and sizes; an item depends on its name and the seed."""
        found = []
        for i in range(count):
            kind, size = kinds[i % len(kinds)], self._sizes[i // len(kinds) % len(self._sizes)]
            name = f"{kind}-{size}-{i // (len(kinds) * len(self._sizes))}"
            scenes, question, accepts = self._makers[kind](Random(f"{self._seed} {name}"), size)
            found.append(AccuracyItem(name, kind, size, scenes, question, accepts))
        return found

    def _make_number(self, rng: Random, size: int) -> tuple[tuple[Scene, ...], str, Callable[[str], bool]]:
        truth = str(rng.randrange(1, 1000))
        scene = Scene(size, _height(size), text=truth)
        return (scene,), "What number is this?", lambda answer: re.findall(r"\d+", answer) == [truth]

    def _make_word(self, rng: Random, size: int) -> tuple[tuple[Scene, ...], str, Callable[[str], bool]]:
        truth = rng.choice(WORDS[rng.choice(self._languages)])
        question = "Which word is written in the image? Answer with the word alone."
        return (Scene(size, _height(size), text=truth),), question, lambda answer: truth.lower() in split_words(answer)

    def _make_count(self, rng: Random, size: int) -> tuple[tuple[Scene, ...], str, Callable[[str], bool]]:
        truth, shape = rng.randrange(1, 5), rng.choice(SHAPES)
        cells = rng.sample(sorted(PLACES), truth)
        drawn = tuple(self._shape(rng, size, cell, shape) for cell in cells)
        words = (str(truth), NUMBERS[truth])
        question = f"How many {shape}s are there?"
        return (Scene(size, _height(size), drawn),), question, lambda answer: _names_one(answer, words, NUMBERS)

    def _make_colour(self, rng: Random, size: int) -> tuple[tuple[Scene, ...], str, Callable[[str], bool]]:
        first, second = rng.sample(SHAPES, 2)
        drawn = self._two_shapes(rng, size, first, second)
        truth = drawn[0].colour
        scene = Scene(size, _height(size), drawn)
        question = f"What color is the {first}?"
        return (scene,), question, lambda answer: _names_one(answer, (truth,), tuple(COLOURS))

    def _make_place(self, rng: Random, size: int) -> tuple[tuple[Scene, ...], str, Callable[[str], bool]]:
        cell, shape = rng.choice(sorted(PLACES)), rng.choice(SHAPES)
        truth = PLACES[cell]
        scene = Scene(size, _height(size), (self._shape(rng, size, cell, shape),))
        return (scene,), f"Where is the {shape}?", lambda answer: _names_place(answer, truth)

    def _make_box(self, rng: Random, size: int) -> tuple[tuple[Scene, ...], str, Callable[[str], bool]]:
        scene, one = self._one_of_two(rng, size)
        question = (
            f"Give the bounding box of the {one.colour} {one.shape} in this image of {scene.width} x {scene.height} "
            'pixels as JSON: {"bbox_2d": [left, top, right, bottom]}'
        )

        def accepts(answer: str) -> bool:
            numbers = find_numbers(answer)[:4]
            return len(numbers) == 4 and any(one.box.overlap(box) >= CLOSE for box in _scalings(numbers, scene))

        return (scene,), question, accepts

    def _make_point(self, rng: Random, size: int) -> tuple[tuple[Scene, ...], str, Callable[[str], bool]]:
        scene, one = self._one_of_two(rng, size)
        question = (
            f"Point to the {one.colour} {one.shape} in this image of {scene.width} x {scene.height} pixels. "
            'Answer with JSON: {"point_2d": [x, y]}'
        )

        def accepts(answer: str) -> bool:
            numbers = find_numbers(answer)[:2]
            return len(numbers) == 2 and any(one.box.holds(x, y) for x, y in _scalings(numbers, scene))

        return (scene,), question, accepts

    def _make_compare(self, rng: Random, size: int) -> tuple[tuple[Scene, ...], str, Callable[[str], bool]]:
        first, second = rng.sample(SHAPES, 2)
        same = rng.random() < 0.5
        pair = (first, first if same else second)
        scenes = tuple(
            Scene(size, _height(size), (self._shape(rng, size, (1, 1), shape, 1.6),)) for shape in pair
        )  # fmt: skip
        truth = ("yes",) if same else ("no",)
        question = "Do both pictures show the same shape?"
        return scenes, question, lambda answer: _names_one(answer, truth, ("yes", "no"))

    def _shape(
        self, rng: Random, size: int, cell: tuple[int, int], shape: str, share: float = 0.85, colour: str = ""
    ) -> DrawnShape:
        box = place_box(size, _height(size), *cell, share)
        return DrawnShape(shape, colour or rng.choice(sorted(COLOURS)), box)

    def _two_shapes(self, rng: Random, size: int, first: str, second: str) -> tuple[DrawnShape, DrawnShape]:
        cells, colours = rng.sample(sorted(PLACES), 2), rng.sample(sorted(COLOURS), 2)
        return (
            self._shape(rng, size, cells[0], first, colour=colours[0]),
            self._shape(rng, size, cells[1], second, colour=colours[1]),
        )

    def _one_of_two(self, rng: Random, size: int) -> tuple[Scene, DrawnShape]:
        drawn = self._two_shapes(rng, size, rng.choice(SHAPES), rng.choice(SHAPES))
        return Scene(size, _height(size), drawn), drawn[0]


def _height(size: int) -> int:
    return size * 3 // 4


def _names_one(answer: str, right: Sequence[str], others: Sequence[str]) -> bool:
    """Returns True if an answer holds one of ``right`` and nothing else of ``others``."""
    words = set(split_words(answer))
    return bool(words & set(right)) and not words & (set(others) - set(right))


def _names_place(answer: str, truth: Sequence[str]) -> bool:
    words = set(split_words(answer))
    if truth[0] == "middle":
        return bool(words & set(truth)) and not words & set(SIDES)
    return words & set(SIDES) == set(truth)


def _scalings(numbers: Sequence[float], scene: Scene) -> list[list[float]]:
    """Returns coordinates in pixels, taken as pixels, as thousandths and as shares of the image."""
    sides = [(scene.width, scene.height)[i % 2] for i in range(len(numbers))]
    return [[n * side / whole for n, side in zip(numbers, sides, strict=True)] for whole in (1000, 1)] + [list(numbers)]


def find_languages(tokenizer: Tokenizer) -> list[str]:
    """Returns the languages of ``WORDS`` whose words take at most ``FEW_TOKENS`` tokens on average."""
    counts = {name: sum(len(tokenizer.encode(f" {word}")) for word in words) for name, words in WORDS.items()}
    return [name for name, words in WORDS.items() if counts[name] <= FEW_TOKENS * len(words)]
