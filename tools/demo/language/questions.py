"""Questions about a scene, each with its only right answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo.images.palette import COLOURS
from demo.images.scene import SHAPES, Scene, Thing, zone

COUNTS = ("None.", "One.", "Two.", "Three.", "Four.")
LEFT_WORDS, RIGHT_WORDS = ("left of", "to the left of"), ("right of", "to the right of")
ABOVE_WORDS, BELOW_WORDS = ("above", "over"), ("below", "under")
NO_NUMBER, NO_SHAPE = "I see no number.", "I see no shape."


@dataclass(frozen=True)
class Question:
    """What is asked (an intent of the phrasings and its slots), the answer, and the kind that results are listed by."""

    kind: str
    intent: str
    answer: str
    slots: dict[str, str]


def a(name: str) -> str:
    """The name with its article."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _noun(rng: Random) -> str:
    return rng.choice(("shape", "one", "object", "thing", "figure"))


def references(thing: Thing, things: tuple[Thing, ...], rng: Random) -> list[tuple[str, str]]:
    """Unambiguous ways to name one thing: pairs of (what the name tells, text)."""
    out = []
    if sum(t.shape == thing.shape for t in things) == 1:
        out.append(("shape", f"the {thing.shape}"))
    if sum(t.colour == thing.colour for t in things) == 1:
        out.append(("colour", f"the {thing.colour} {_noun(rng)}"))
    if sum(t.name == thing.name for t in things) == 1:
        out.append(("both", f"the {thing.name}"))
    return out


def _pick(scene: Scene, rng: Random, tells: tuple[str, ...] = ("shape", "colour", "both")) -> tuple[Thing, str] | None:
    """A thing that can be named, and its name."""
    named = [(t, text) for t in scene.things for tell, text in references(t, scene.things, rng) if tell in tells]
    return rng.choice(named) if named else None


def caption_text(scene: Scene) -> str:
    """The description of a picture."""
    things = scene.things
    if scene.kind == "number":
        return f"The number {scene.number} in {scene.number_colour}."
    if scene.kind == "photo":
        names = [c for c, part in scene.shares.items() if part >= 0.25][:2]
        return f"A photo, mostly {' and '.join(names or [next(iter(scene.shares))])}."
    if len(things) == 1:
        return _sentence(a(things[0].name))
    if len(things) == 2:
        if scene.layout == "side":
            return _sentence(f"{a(things[0].name)} to the left of {a(things[1].name)}")
        upper, lower = sorted(things, key=lambda t: t.y)
        return _sentence(f"{a(upper.name)} above {a(lower.name)}")
    names = [a(t.name) for t in things]
    return f"From left to right: {', '.join(names[:-1])} and {names[-1]}."


def _shape(scene: Scene, rng: Random) -> Question | None:
    if scene.kind == "photo":
        return Question("shape", "shape", NO_SHAPE, {})
    if len(scene.things) == 1 and rng.random() < 0.7:
        return Question("shape", "shape", _sentence(a(scene.things[0].shape)), {})
    found = _pick(scene, rng, ("colour",))
    return found and Question("shape", "shape_of", _sentence(a(found[0].shape)), {"ref": found[1]})


def _colour(scene: Scene, rng: Random) -> Question | None:
    if scene.kind == "photo":
        return _main(scene, rng)
    if scene.ground and rng.random() < 0.2:
        return Question("colour", "ground", f"{scene.ground.capitalize()}.", {})
    if scene.kind == "number":
        return Question("colour", "colour", f"{scene.number_colour.capitalize()}.", {"noun": "number"})
    if len(scene.things) == 1 and rng.random() < 0.6:
        return Question("colour", "colour", f"{scene.things[0].colour.capitalize()}.", {})
    found = _pick(scene, rng, ("shape",))
    return found and Question("colour", "colour_of", f"{found[0].colour.capitalize()}.", {"ref": found[1]})


def _main(scene: Scene, rng: Random) -> Question | None:
    if scene.kind != "photo":
        return None
    return Question("photo", "main_colour", f"{next(iter(scene.shares)).capitalize()}.", {})


def _count(scene: Scene, rng: Random) -> Question | None:
    if scene.kind == "photo":
        return Question("count", "count", COUNTS[0], {"noun": "shape"})
    if scene.kind == "number":
        return None
    if rng.random() < 0.5:
        return Question("count", "count", COUNTS[len(scene.things)], {})
    by_shape = rng.random() < 0.65
    present = [t.shape if by_shape else t.colour for t in scene.things]
    value = rng.choice(present) if rng.random() < 0.8 else rng.choice(SHAPES if by_shape else COLOURS)
    plural = (
        f"{value}{'es' if value == 'cross' else 's'}"
        if by_shape
        else f"{value} {rng.choice(('shapes', 'objects', 'things', 'ones'))}"
    )
    return Question("count", "count_of", COUNTS[present.count(value)], {"plural": plural})


def _where(scene: Scene, rng: Random) -> Question | None:
    named = [(t, text) for t in scene.things if zone(t.x, t.y) for _, text in references(t, scene.things, rng)]
    if scene.layout == "one":
        named += [(t, rng.choice(("the shape", "it", "the object", "the thing"))) for t, _ in named]
    if not named:
        return None
    thing, ref = rng.choice(named)
    return Question("position", "where", zone(thing.x, thing.y) or "", {"ref": ref})


def _side(scene: Scene, rng: Random) -> Question | None:
    if len(scene.things) < 2:
        return None
    across = rng.random() < 0.6
    order = sorted(scene.things, key=lambda t: t.x if across else t.y)
    places = [t.x if across else t.y for t in order]
    first = rng.random() < 0.5
    gap = places[1] - places[0] if first else places[-1] - places[-2]
    if gap < (0.15 if across else 0.2):
        return None
    words = (
        (
            ("on the left", "furthest left", "furthest to the left", "on the left side"),
            ("on the right", "furthest right", "furthest to the right", "on the right side"),
        )
        if across
        else (("at the top", "highest", "on top"), ("at the bottom", "lowest", "at the very bottom"))
    )
    answer = _sentence(a(order[0 if first else -1].name))
    return Question("position", "side", answer, {"side": rng.choice(words[0 if first else 1])})


def _relation_words(one: Thing, other: Thing, scene: Scene) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Words for how one thing lies to another, and their opposites; None if that is ambiguous."""
    dx, dy = one.x - other.x, one.y - other.y
    if scene.layout in ("side", "row") and abs(dx) > 0.13:
        return (LEFT_WORDS, RIGHT_WORDS) if dx < 0 else (RIGHT_WORDS, LEFT_WORDS)
    if scene.layout in ("stack", "free") and abs(dy) > 0.2:
        return (ABOVE_WORDS, BELOW_WORDS) if dy < 0 else (BELOW_WORDS, ABOVE_WORDS)
    return None


def _relation(scene: Scene, rng: Random) -> Question | None:
    if len(scene.things) < 2:
        return None
    one, other = rng.sample(scene.things, 2)
    words = _relation_words(one, other, scene)
    refs, others = references(one, scene.things, rng), references(other, scene.things, rng)
    if not (words and refs and others):
        return None
    ref, ref2 = rng.choice(refs)[1], rng.choice(others)[1]
    if len(scene.things) == 2 and rng.random() < 0.4:
        return Question("position", "beside", _sentence(a(one.name)), {"rel": rng.choice(words[0]), "ref": ref2})
    true = rng.random() < 0.5
    rel = rng.choice(words[0 if true else 1])
    return Question("position", "relation", "Yes." if true else "No.", {"ref": ref, "rel": rel, "ref2": ref2})


def _position(scene: Scene, rng: Random) -> Question | None:
    makers = (_where, _where, _side, _relation) if len(scene.things) > 1 else (_where,)
    return rng.choice(makers)(scene, rng)


def _exists(scene: Scene, rng: Random) -> Question | None:
    if scene.kind != "shapes":
        if rng.random() < 0.3:
            return Question("existence", "exists", "Yes." if scene.kind == "number" else "No.", {"a": "a number"})
        return Question("existence", "exists", "No.", {"a": a(f"{rng.choice(COLOURS)} {rng.choice(SHAPES)}")})
    shapes, colours = [t.shape for t in scene.things], [t.colour for t in scene.things]
    names = [t.name for t in scene.things]
    form = rng.choice(("shape", "shape", "colour", "both", "both"))
    true = rng.random() < 0.4
    if form == "shape":
        value = rng.choice(shapes) if true else rng.choice(SHAPES)
        return Question("existence", "exists", "Yes." if value in shapes else "No.", {"a": a(value)})
    if form == "colour":
        value = rng.choice(colours) if true else rng.choice(COLOURS)
        return Question("existence", "exists", "Yes." if value in colours else "No.", {"a": a(f"{value} {_noun(rng)}")})
    colour = rng.choice(colours) if rng.random() < 0.6 else rng.choice(COLOURS)
    shape = rng.choice(shapes) if rng.random() < 0.6 else rng.choice(SHAPES)
    value = rng.choice(names) if true else f"{colour} {shape}"
    return Question("existence", "exists", "Yes." if value in names else "No.", {"a": a(value)})


def _caption(scene: Scene, rng: Random) -> Question | None:
    if scene.layout == "free" and scene.kind == "shapes":
        return None
    if scene.kind == "photo":
        unclear = [part for part in scene.shares.values() if 0.18 < part < 0.32]
        return None if unclear else Question("photo", "caption", caption_text(scene), {})
    return Question("number" if scene.kind == "number" else "caption", "caption", caption_text(scene), {})


def _read(scene: Scene, rng: Random) -> Question | None:
    if scene.kind == "number":
        return Question("number", "read", f"{scene.number}.", {})
    return Question("existence", "read", NO_NUMBER, {})


Maker = Callable[[Scene, Random], "Question | None"]
# kind of scene -> makers and how often each is drawn
MAKERS: dict[str, tuple[tuple[Maker, float], ...]] = {
    "shapes": (
        (_shape, 0.8),
        (_colour, 1.3),
        (_count, 2.1),
        (_position, 2.4),
        (_exists, 2.3),
        (_caption, 1.5),
        (_read, 0.05),
    ),
    "number": ((_read, 4.0), (_colour, 0.6), (_exists, 0.15), (_caption, 0.8)),
    "photo": ((_main, 3.0), (_caption, 2.0), (_shape, 0.15), (_count, 0.15), (_exists, 0.3), (_read, 0.15)),
}


def about(scene: Scene, rng: Random) -> Question:
    """One question about a single picture."""
    makers = MAKERS[scene.kind]
    while True:
        question = rng.choices([m for m, _ in makers], [w for _, w in makers])[0](scene, rng)
        if question is not None:
            return question


def about_pair(first: Scene, second: Scene, rng: Random) -> Question:
    """One question about two pictures of one shape each."""
    one, two = first.things[0], second.things[0]
    form = rng.choice(("same_shape", "same_colour", "which", "nth", "nth_colour", "nth_shape", "both", "both"))
    place = rng.randrange(2)
    slots = {"nth": ("first", "second")[place]}
    thing = (one, two)[place]
    if form in ("same_shape", "same_colour"):
        same = one.shape == two.shape if form == "same_shape" else one.colour == two.colour
        return Question("pair", form, "Yes." if same else "No.", {})
    if form == "which" and one.name != two.name:
        ways = [a(thing.name)]
        if one.shape != two.shape:
            ways.append(a(thing.shape))
        if one.colour != two.colour:
            ways.append(a(f"{thing.colour} {_noun(rng)}"))
        return Question("pair", "which_picture", f"The {slots['nth']} picture.", {"a": rng.choice(ways)})
    if form == "nth_colour":
        return Question("pair", form, f"{thing.colour.capitalize()}.", slots)
    if form == "nth_shape":
        return Question("pair", form, _sentence(a(thing.shape)), slots)
    if form == "nth":
        return Question("pair", form, _sentence(a(thing.name)), slots)
    return Question("pair", "both", f"{_sentence(a(one.name))[:-1]} and {a(two.name)}.", {})
