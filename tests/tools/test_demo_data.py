"""The images, questions and tokenizer of the demo checkpoint, and the files that ship."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from demo import config, packing, sampling  # noqa: E402
from demo.images import drawing, layout, palette  # noqa: E402
from demo.images.scene import CELL, MAX_CELLS, SHAPES, RenderedImage, Scene, Thing, zone  # noqa: E402
from demo.language import chat_dialogues, held_out, phrasings, questions, tokenizer  # noqa: E402

ASSETS = ROOT / "assets" / "demo"


def _images(count: int, seed: int) -> list[RenderedImage]:
    rng = Random(seed)
    out = []
    for _ in range(count):
        grid = sampling.sample_grid(rng, MAX_CELLS)
        out.append(drawing.draw_shapes(grid, rng.randint(1, layout.most_shapes(grid)), rng))
    return out


def test_pixels_show_the_colour_that_the_scene_names() -> None:
    wrong = seen = 0
    for image in _images(60, 1):
        h, w, _ = image.pixels.shape
        for thing in image.scene.things:
            if thing.shape == "ring":
                continue
            x, y = round(thing.x * w), round(thing.y * h)
            patch = image.pixels[y - 2 : y + 3, x - 2 : x + 3].reshape(-1, 3)
            name = palette.name_pixels(np.median(patch, 0).astype(np.uint8)[None])[0]
            wrong += palette.COLOURS[name] != thing.colour
            seen += 1
    assert seen > 80
    assert wrong <= 0.04 * seen  # noise and JPEG may carry a colour across a border


def test_things_stay_inside_and_apart() -> None:
    for image in _images(60, 2):
        h, w, _ = image.pixels.shape
        things = image.scene.things
        for i, t in enumerate(things):
            assert t.x * w - t.radius >= 0 and t.x * w + t.radius <= w
            assert t.y * h - t.radius >= 0 and t.y * h + t.radius <= h
            for u in things[:i]:
                assert np.hypot((t.x - u.x) * w, (t.y - u.y) * h) > t.radius + u.radius


def test_cell_labels_agree_with_the_things() -> None:
    for image in _images(30, 3):
        shown = {SHAPES.index(t.shape) + 1 for t in image.scene.things}
        assert shown >= set(image.what.tolist()) - {0}
        assert len(image.what) == image.pixels.shape[0] * image.pixels.shape[1] // CELL**2


def _named(text: str, scene: Scene) -> list[Thing]:
    """Things that a reference such as "the red circle" or "the red one" fits."""
    words = text.split()
    colours = [c for c in palette.COLOURS if c in words]
    shapes = [s for s in SHAPES if s in words]
    return [t for t in scene.things if (not colours or t.colour in colours) and (not shapes or t.shape in shapes)]


def _truth(q: questions.Question, scene: Scene) -> str | None:
    """The answer worked out again from the scene; None where this check does not reach."""
    s = q.slots
    if q.intent == "count":
        return questions.COUNTS[len(scene.things)]
    if q.intent == "count_of":
        word = s["plural"].split()[0]
        return questions.COUNTS[
            sum(t.colour == word or s["plural"] in (f"{t.shape}s", f"{t.shape}es") for t in scene.things)
        ]
    if q.intent == "exists":
        return "Yes." if _named(s["a"], scene) else "No."
    if q.intent in ("colour_of", "shape_of", "where"):
        things = _named(s["ref"], scene)
        assert len(things) == 1, "a reference must fit one thing"
        t = things[0]
        return {"colour_of": f"{t.colour.capitalize()}.", "shape_of": f"A {t.shape}.", "where": zone(t.x, t.y)}[
            q.intent
        ]
    if q.intent == "relation":
        one, other = _named(s["ref"], scene), _named(s["ref2"], scene)
        assert len(one) == len(other) == 1
        dx, dy = one[0].x - other[0].x, one[0].y - other[0].y
        rel = s["rel"]
        true = (
            dx < 0
            if "left" in rel
            else dx > 0
            if "right" in rel
            else dy < 0
            if rel in questions.ABOVE_WORDS
            else dy > 0
        )
        return "Yes." if true else "No."
    if q.intent == "side":
        key = (lambda t: t.x) if any(w in s["side"] for w in ("left", "right")) else (lambda t: t.y)
        first = any(w in s["side"] for w in ("left", "highest", "top"))
        t = (min if first else max)(scene.things, key=key)
        return f"{questions.a(t.name).capitalize()}."
    return None


def test_answers_are_true() -> None:
    rng = Random(4)
    checked: set[str] = set()
    for image in _images(120, 5):
        for _ in range(12):
            q = questions.about(image.scene, rng)
            truth = _truth(q, image.scene)
            if truth is not None:
                checked.add(q.intent)
                assert q.answer == truth, (q, image.scene)
    assert checked == {"count", "count_of", "exists", "colour_of", "shape_of", "where", "relation", "side"}


def test_captions_name_every_thing_in_order() -> None:
    for image in _images(60, 6):
        scene = image.scene
        if scene.layout == "free":
            continue
        text = questions.caption_text(scene).lower()
        order = sorted(scene.things, key=lambda t: t.y) if scene.layout == "stack" else scene.things
        at = 0
        for thing in order:
            at = text.index(thing.name, at) + 1


def _bare(text: str) -> str:
    return phrasings.plain(text).strip()


@pytest.mark.parametrize("module", [phrasings, chat_dialogues])
def test_no_held_out_wording_is_trained(module: ModuleType) -> None:
    trained, unseen = module.TRAIN, module.HELD_OUT
    assert trained.keys() == unseen.keys()
    known = {_bare(t) for intent in trained for t in module.ways(intent)}
    for ways in unseen.values():
        assert not {_bare(t) for t in ways} & known


def test_held_out_items_are_reproducible_and_cover_every_kind() -> None:
    one, two = held_out.items(60), held_out.items(60)
    assert [i.wordings for i in one] == [i.wordings for i in two]
    assert {i.kind for i in one} == set(held_out.KINDS)


def test_tokenizer_round_trip_and_single_digits() -> None:
    words = tokenizer.build()
    assert words.get_vocab_size() == config.model_config()["text_config"]["vocab_size"]
    for text in (
        "What color is the circle?",
        "472.",
        "Größe: naïve 東京 🙂\n\nline",
        "<|im_start|>user\nHi<|im_end|>\n",
    ):
        assert words.decode(words.encode(text).ids, skip_special_tokens=False) == text
    assert len(words.encode("472").ids) == 3
    assert words.encode("<|image_pad|>").ids == [config.IDS["<|image_pad|>"]]
    assert words.to_str() == tokenizer.build().to_str(), "the same bytes every time"


def test_a_branch_sees_its_ancestors_only() -> None:
    row = packing.Row()
    root = row.add(-1, [1, 2])
    left = row.add(root, [3, 4])
    row.add(root, [5, 6])
    row.add(left, [7])
    mask = packing.collate([row], [], (2, 2)).mask[0, 0, 0] == 0
    assert mask[4, :5].tolist() == [True, True, False, False, True]
    assert mask[6, :7].tolist() == [True, True, True, True, False, False, True]
    assert packing.collate([row], [], (2, 2)).positions[0, 0, :7].tolist() == [0, 1, 2, 3, 2, 3, 4]


def test_image_positions_step_by_the_longer_side() -> None:
    row = packing.Row()
    row.add(-1, [1, *packing.image_ids((2, 3)), 9])
    positions = packing.collate([row], [], (2, 3)).positions[:, 0, :10].tolist()
    assert positions[0] == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert positions[1] == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert positions[2] == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]


def test_checkpoint_files() -> None:
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
             "chat_template.jinja", "preprocessor_config.json"}  # fmt: skip
    files = {f.name: f for f in ASSETS.iterdir()}
    assert names <= files.keys()
    assert sum(f.stat().st_size for f in files.values()) < 16_000_000
    read = json.loads(files["config.json"].read_text())
    assert read == config.model_config()
    text, vision = read["text_config"], read["vision_config"]
    widths = [
        text["hidden_size"],
        text["intermediate_size"],
        text["vocab_size"],
        vision["hidden_size"],
        vision["intermediate_size"],
    ]
    assert all(w % 8 == 0 for w in widths)
    with files["model.safetensors"].open("rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    assert {v["dtype"] for k, v in header.items() if k != "__metadata__"} == {"BF16"}
    assert header["model.embed_tokens.weight"]["shape"] == [text["vocab_size"], text["hidden_size"]]
    assert (files["tokenizer.json"]).read_text() == _saved_tokenizer()


def _saved_tokenizer() -> str:
    return tokenizer.build().to_str(pretty=True)
