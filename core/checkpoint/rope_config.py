"""Rotary settings of a checkpoint: base, frequency scaling, rotated part of a head, and position axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trencadis.core.checkpoint.json_fields import JsonFields

TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
LONG = ("longrope", "su", "yarn")
"""Names under which Phi-3's files have listed LongRoPE."""

Sections = tuple[int, int, int]
HALVES: Sections = (16, 24, 24)
"""Default number of frequencies of each position axis."""

LARGEST_BASE = 1e12
LARGEST_FACTOR = 1e6


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency is divided by ``factor``."""

    factor: float


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling (Llama 3.1 report, section on long context; factors as in its config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071, section 3): slow frequencies are divided by ``factor``, fast ones stay as they are.

    Args:
        fast, slow: number of rotations within ``original_max_position`` above which a frequency stays as it is, and
        below which it is divided.
        whole: True if the indices of the frequencies at these bounds are rounded outwards to whole numbers.
        magnitude: what cos and sin are multiplied by.
    """

    factor: float
    original_max_position: int
    fast: float
    slow: float
    whole: bool
    magnitude: float


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (arXiv 2402.13753): each frequency is divided by a factor of its own.

    Args:
        short, long: the factors of requests up to ``original_max_position`` tokens, and of longer ones.
        magnitude: what cos and sin are multiplied by.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    magnitude: float


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the ``rotated`` fastest frequencies of a head stay, divided by ``factor``; the others become 0."""

    rotated: int
    factor: float


Scaling = LinearScaling | RopeScaling | YarnScaling | LongScaling | ProportionalScaling
"""The ways in which frequencies differ from theta ** (-2i / head_dim)."""


@dataclass(frozen=True)
class RopeConfig:
    """The rotary settings of a decoder, apart from its head size.

    ``reach``: number of positions that they support; ``magnitude``: factor of whole queries and keys; ``rotary_dim``:
    rotated values of a head, 0: all.
    """

    theta: float
    scaling: Scaling | None = None
    section: tuple[int, int, int] | None = None
    reach: int = 0
    magnitude: float = 1.0
    rotary_dim: int = 0


def rope_of(
    text: JsonFields,
    max_positions: int,
    head_dim: int,
    axes: bool,
    base: float,
    sections: Sections = HALVES,
    rotated: float = 0.0,
) -> RopeConfig:
    """Reads a text model's rotary settings from ``rope_scaling`` (the hub's) or ``rope_parameters`` (transformers 5's).

    If both are given, the first is used, as in transformers.

    Args:
        axes: True if the model has positions on three axes.
        base: the default of ``rope_theta``.
        sections: the default of ``mrope_section``.
        rotated: the default of ``partial_rotary_factor``; 0: whole heads are rotated, and other values are refused.
    """
    rope = text.within("rope_scaling" if text.values.get("rope_scaling") else "rope_parameters")
    if rotated:
        rotary_dim = _rotary_dim(text, rope, head_dim, rotated)
    else:
        rotary_dim = head_dim
        _refuse_partial(text)
        _refuse_partial(rope)
    for key, value in rope.values.items():
        if isinstance(value, dict):
            rope.refuse(key, "implemented: the same rotary settings in all layers")
    theta = (rope if "rope_theta" in rope.values else text).number("rope_theta", 0, LARGEST_BASE, base, above=True)
    key = "rope_type" if "rope_type" in rope.values else "type"
    rope.only(key, (*TYPES, "mrope") if axes else TYPES, "default")
    kind = rope.values.get(key, "default")
    scaling: Scaling | None = None
    reach, magnitude = max_positions, 1.0
    if kind == "linear":
        scaling = LinearScaling(rope.number("factor", 0, LARGEST_FACTOR, above=True))
    elif kind == "dynamic":
        # It has no effect up to max_position_embeddings, and no request is longer.
        rope.number("factor", 1, LARGEST_FACTOR)
    elif kind == "llama3":
        scaling = _llama3(text, rope, max_positions)
    elif kind == "yarn":
        scaling = _yarn(text, rope, max_positions)
        reach, magnitude = max(max_positions, int(scaling.original_max_position * scaling.factor)), scaling.magnitude
    section = _section(rope, rotary_dim, sections) if axes else None
    return RopeConfig(theta, scaling, section, reach, magnitude, rotary_dim if rotary_dim < head_dim else 0)


def partial_rope_of(text: JsonFields, max_positions: int, head_dim: int, base: float, trained: int) -> RopeConfig:
    """Reads rotary settings of a model with partly rotated heads, plain or with LongRoPE, like transformers' Phi-3.

    Args:
        trained: default of ``original_max_position_embeddings``, which is read from the decoder's keys only.
    """
    rope = text.within("rope_scaling" if text.values.get("rope_scaling") else "rope_parameters")
    rotary_dim = _rotary_dim(text, rope, head_dim, 1.0)
    theta = (rope if "rope_theta" in rope.values else text).number("rope_theta", 0, LARGEST_BASE, base, above=True)
    key = "rope_type" if "rope_type" in rope.values else "type"
    rope.only(key, ("default", *LONG), "default")
    original = text.integer("original_max_position_embeddings", least=2, default=trained)
    rope.is_given("original_max_position_embeddings")
    scaling = None
    if rope.values.get(key, "default") != "default":
        scaling = _long(rope, rotary_dim // 2, original, max_positions)
    return RopeConfig(theta, scaling, None, max_positions, 1.0, rotary_dim if rotary_dim < head_dim else 0)


def _rotary_dim(text: JsonFields, rope: JsonFields, head_dim: int, default: float) -> int:
    """Returns the rotated values of a head; ``default``: that of ``partial_rotary_factor``."""
    key = "partial_rotary_factor"
    part = rope if key in rope.values else text
    text.is_given(key)
    share = part.number(key, 0, 1, default, above=True) if part.is_given(key) else default
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        part.refuse(key, f"it must leave an even part of a head, whose size is {head_dim}")
    return rotary_dim


def _long(rope: JsonFields, count: int, original: int, max_positions: int) -> LongScaling:
    short, long = (rope.numbers(key, count, 0, LARGEST_FACTOR) for key in ("short_factor", "long_factor"))
    factor = (
        rope.number("factor", 0, LARGEST_FACTOR, above=True) if rope.is_given("factor") else max_positions / original
    )
    if rope.is_given("attention_factor"):
        magnitude = rope.number("attention_factor", 0, LARGEST_FACTOR, above=True)
    else:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongScaling(short, long, original, magnitude)


def _yarn(text: JsonFields, rope: JsonFields, max_positions: int) -> YarnScaling:
    factor = rope.number("factor", 1, LARGEST_FACTOR)
    fast, slow = (rope.number(k, 0, LARGEST_FACTOR) or d if rope.is_given(k) else d for k, d in BETAS.items())
    if fast < slow:
        rope.refuse("beta_fast", f"it must be at least beta_slow, which is {slow:g}")
    own, all_dim = (rope.number(k, 0, LARGEST_FACTOR, 0.0) if rope.is_given(k) else 0.0 for k in MAGNITUDES)
    if rope.is_given("attention_factor"):
        magnitude = rope.number("attention_factor", 0, LARGEST_FACTOR, above=True)
    elif own and all_dim:
        magnitude = _magnitude(factor, own) / _magnitude(factor, all_dim)
    else:
        magnitude = _magnitude(factor, 1.0)
    whole = rope.boolean("truncate", True)
    return YarnScaling(factor, _original(text, rope, max_positions), fast, slow, whole, magnitude)


BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
MAGNITUDES = ("mscale", "mscale_all_dim")


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _original(text: JsonFields, rope: JsonFields, max_positions: int) -> int:
    """Returns the context length of the training.

    The decoder's key is preferred to the rope table's, as in transformers.
    """
    name = "original_max_position_embeddings"
    return text.integer(name) if name in text.values else rope.integer(name, default=max_positions)


def _llama3(text: JsonFields, rope: JsonFields, max_positions: int) -> RopeScaling:
    original = _original(text, rope, max_positions)
    low = rope.number("low_freq_factor", 0, LARGEST_FACTOR, above=True)
    high = rope.number("high_freq_factor", 0, LARGEST_FACTOR, above=True)
    if high <= low:
        rope.refuse("high_freq_factor", f"it must be above low_freq_factor, which is {low:g}")
    return RopeScaling(rope.number("factor", 0, LARGEST_FACTOR, above=True), low, high, original)


def _section(rope: JsonFields, head_dim: int, default: Sections) -> Sections:
    """Returns the number of frequencies of each axis.

    The default is that of the published models with head size 128.
    """
    key = "mrope_section"
    time, height, width = rope.integers(key, length=3) if key in rope.values else default
    if time + height + width != head_dim // 2:
        rope.refuse(key, f"it must sum to {head_dim // 2}, half of the rotated values of a head")
    return time, height, width


def _refuse_partial(fields: JsonFields) -> None:
    if fields.is_given("partial_rotary_factor"):
        fields.only("partial_rotary_factor", (1, 1.0))
