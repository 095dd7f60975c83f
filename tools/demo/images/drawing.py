"""Draws one image with its truth and its label for every cell of 28 pixels."""

from __future__ import annotations

import io
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from demo.images import digits, layout, palette, shapes, texture
from demo.images.scene import CELL, SHAPES, RenderedImage, Scene, Thing

PHOTO = 19
_SCALES = (1.0, 1.0, 1.0, 1.3, 1.6, 2.0)  # an image may be drawn larger and shrunk, as uploads are
_LABELS = 4  # label samples along one side of a cell


def as_array(image: Image.Image) -> NDArray[np.uint8]:
    """The bytes of an RGB image, [height, width, 3]."""
    return np.asarray(image, np.uint8)


def _ground(size: tuple[int, int], rng: Random) -> tuple[Image.Image, palette.Rgb, str | None]:
    """A background, its typical colour, and its name where it is plain."""
    kind = rng.random()
    if kind < 0.62:
        name = "white" if rng.random() < 0.4 else rng.choice(palette.COLOURS)
        look = palette.shade(name, rng)
        if name == "white" and rng.random() < 0.5:
            look = (255, 255, 255)
        return Image.new("RGB", size, look), look, name
    look = palette.hsv_to_rgb(rng.uniform(0, 360), rng.uniform(0.05, 0.45), rng.uniform(0.25, 1.0))
    if kind < 0.75:
        return Image.new("RGB", size, look), look, None
    seeds = np.random.default_rng(rng.getrandbits(48))
    if kind < 0.88:
        ramp = np.linspace(-1, 1, size[1], dtype=np.float32)[:, None, None] * rng.uniform(-28, 28)
    else:
        small = seeds.normal(0, 1, (max(2, size[1] // 9), max(2, size[0] // 9))).astype(np.float32)
        ramp = np.asarray(Image.fromarray(small).resize(size))[..., None] * rng.uniform(3, 12)
    field = np.broadcast_to(np.array(look, np.float32) + ramp, (size[1], size[0], 3))
    return Image.fromarray(np.clip(field, 0, 255).astype(np.uint8)), look, None


def _finish(image: Image.Image, size: tuple[int, int], rng: Random) -> NDArray[np.uint8]:
    """Shrinks to the final size as the image processor does, and adds small faults."""
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    if rng.random() < 0.06:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.9)))
    if rng.random() < 0.12:
        store = io.BytesIO()
        image.save(store, "JPEG", quality=rng.randint(45, 95))
        image = Image.open(store).convert("RGB")
    pixels = np.asarray(image)
    if rng.random() < 0.35:
        seeds = np.random.default_rng(rng.getrandbits(48))
        pixels = np.clip(pixels + seeds.normal(0, rng.uniform(1, 8), pixels.shape), 0, 255).astype(np.uint8)
    return pixels


def _cells(ids: Image.Image, grid: tuple[int, int], kinds: int) -> NDArray[np.int64]:
    """For every cell the id that fills most of it, 0 where less than three samples of sixteen are filled."""
    h, w = grid
    small = np.asarray(ids.resize((w * _LABELS, h * _LABELS), Image.Resampling.NEAREST))
    blocks = small.reshape(h, _LABELS, w, _LABELS).transpose(0, 2, 1, 3).reshape(h * w, -1)
    counts = (blocks[:, :, None] == np.arange(1, kinds + 1)).sum(1)
    best = counts.argmax(1)
    return np.where(counts[np.arange(len(counts)), best] >= 3, best + 1, 0).astype(np.int64)


def _draw_image(pixels: NDArray[np.uint8], scene: Scene, ids: NDArray[np.int64], what: list[int], colours: list[str],
             centres: list[tuple[float, float]]) -> RenderedImage:  # fmt: skip
    """Labels from the id of each cell: entry i-1 of the lists belongs to id i."""
    ground = palette.COLOURS.index(scene.ground) if scene.ground else -1
    hues = np.array([ground] + [palette.COLOURS.index(c) for c in colours])
    where = np.array([(np.nan, np.nan), *centres], np.float32)
    return RenderedImage(pixels, scene, np.array([0, *what])[ids], hues[ids], where[ids])


def draw_shapes(grid: tuple[int, int], count: int, rng: Random, like: Thing | None = None) -> RenderedImage:
    """`count` shapes on a background; the first has the shape or the colour of `like`, or both."""
    size = (grid[1] * CELL, grid[0] * CELL)
    scale = rng.choice(_SCALES)
    big = (round(size[0] * scale), round(size[1] * scale))
    image, look, ground = _ground(big, rng)
    kind, spots = layout.spots(size, count, rng)
    alike_shape, alike_colour = rng.random(), rng.random()
    things: list[Thing] = []
    ids = Image.new("L", big)
    last: tuple[str, palette.Rgb] | None = None
    for i, (x, y, r) in enumerate(spots):
        shape = things[-1].shape if things and alike_shape < 0.3 and rng.random() < 0.75 else rng.choice(SHAPES)
        if last is None or not (alike_colour < 0.3 and rng.random() < 0.75):
            last = palette.contrasting(rng, look, ground)
        if like is not None and i == 0:
            want = rng.randrange(3)
            shape = like.shape if want != 1 else shape
            twin = palette.shade(like.colour, rng)
            if want != 0 and like.colour != ground and palette.distance(twin, look) > 95:
                last = like.colour, twin
        colour, fill = last
        points, hole = shapes.outline(shape, rng)
        px, py, pr = x * scale, y * scale, r * scale
        filled = shapes.mask(points, hole, px, py, pr, big)
        if rng.random() < 0.15 and r > 16:
            rim = shapes.mask(points, [], px, py, pr, big)
            edge = tuple(round(c * 0.45) for c in fill) if max(fill) > 90 else (150, 150, 150)
            if hole:
                image.paste(fill, mask=filled)
            else:
                image.paste(edge, mask=rim)
                image.paste(fill, mask=shapes.mask(points, [], px, py, pr - max(1.5, pr * 0.07), big))
        else:
            image.paste(fill, mask=filled)
        ids.paste(i + 1, mask=filled)
        things.append(Thing(shape, colour, x / size[0], y / size[1], r))
    cells = _cells(ids, grid, len(things))
    scene = Scene("shapes", tuple(sorted(things, key=lambda t: t.x)), kind, ground)
    return _draw_image(_finish(image, size, rng), scene, cells, [SHAPES.index(t.shape) + 1 for t in things],
                    [t.colour for t in things], [(t.x, t.y) for t in things])  # fmt: skip


def draw_number(grid: tuple[int, int], rng: Random) -> RenderedImage:
    """A number of one to three digits."""
    size = (grid[1] * CELL, grid[0] * CELL)
    scale = rng.choice(_SCALES)
    big = (round(size[0] * scale), round(size[1] * scale))
    length = rng.choice([n for n in (1, 2, 2, 3, 3) if n < grid[1]])
    number = str(rng.randrange(10 ** (length - 1) if length > 1 else 0, 10**length))
    image, look, ground = _ground(big, rng)
    colour, fill = palette.contrasting(rng, look, ground)
    ids = Image.new("L", big)
    centres = []
    for i, (ink, (x, y)) in enumerate(digits.place(number, size, rng)):
        wide, tall = max(2, round(ink.width * scale)), max(2, round(ink.height * scale))
        ink = ink.resize((wide, tall), Image.Resampling.BILINEAR)
        corner = (round(x * scale), round(y * scale))
        image.paste(fill, corner, mask=ink)
        ids.paste(i + 1, (corner[0], corner[1], corner[0] + wide, corner[1] + tall))
        centres.append(((corner[0] + wide / 2) / big[0], (corner[1] + tall / 2) / big[1]))
    scene = Scene("number", ground=ground, number=number, number_colour=colour)
    return _draw_image(_finish(image, size, rng), scene, _cells(ids, grid, len(number)),
                    [9 + int(d) for d in number], [colour] * len(number), centres)  # fmt: skip


def draw_photo(grid: tuple[int, int], rng: Random) -> RenderedImage:
    """A photo-like texture whose largest colour is clear."""
    size = (grid[1] * CELL, grid[0] * CELL)
    while True:
        pixels = _finish(texture.draw(size, rng), size, rng)
        parts = texture.shares(pixels)
        top = sorted(parts.values(), reverse=True) + [0.0, 0.0]
        if top[0] >= 0.45 and top[0] - top[1] >= 0.15:
            break
    h, w = grid
    names = palette.name_pixels(pixels[3::7, 3::7]).reshape(h, 4, w, 4).transpose(0, 2, 1, 3).reshape(h * w, 16)
    counts = (names[:, :, None] == np.arange(len(palette.COLOURS))).sum(1)
    colour = np.where(counts.max(1) >= 9, counts.argmax(1), -1).astype(np.int64)
    nowhere = np.full((h * w, 2), np.nan, np.float32)
    return RenderedImage(pixels, Scene("photo", shares=parts), np.full(h * w, PHOTO, np.int64), colour, nowhere)
