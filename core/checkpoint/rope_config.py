"""Rotary settings of a checkpoint: base, scaling of the frequencies, and the position axis of each frequency."""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.core.checkpoint.fields import Fields

TYPES = ("default", "linear", "llama3")
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
class RopeConfig:
    """The rotary settings of a decoder beside its head size."""

    theta: float
    scaling: LinearScaling | RopeScaling | None = None
    section: tuple[int, int, int] | None = None


def rope_of(text: Fields, max_positions: int, head_dim: int, axes: bool, base: float) -> RopeConfig:
    """The rotary settings of a text model, from ``rope_scaling`` (the hub's) or ``rope_parameters`` (transformers 5's).

    If both are given, the first counts, as in transformers.

    Args:
        axes: whether the model has positions on three axes.
        base: the default of ``rope_theta``.
    """
    rope = text.within("rope_scaling" if text.values.get("rope_scaling") else "rope_parameters")
    _refuse_partial(text)
    _refuse_partial(rope)
    for key, value in rope.values.items():
        if isinstance(value, dict):
            rope.refuse(key, "implemented: the same rotary settings in all layers")
    theta = (rope if "rope_theta" in rope.values else text).number("rope_theta", 0, LARGEST_BASE, base, above=True)
    key = "rope_type" if "rope_type" in rope.values else "type"
    rope.only(key, (*TYPES, "mrope") if axes else TYPES, "default")
    kind = rope.values.get(key, "default")
    scaling: LinearScaling | RopeScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(rope.number("factor", 0, LARGEST_FACTOR, above=True))
    elif kind == "llama3":
        scaling = _llama3(text, rope, max_positions)
    return RopeConfig(theta, scaling, _section(rope, head_dim) if axes else None)


def _llama3(text: Fields, rope: Fields, max_positions: int) -> RopeScaling:
    name = "original_max_position_embeddings"
    original = text.integer(name) if name in text.values else rope.integer(name, default=max_positions)
    low = rope.number("low_freq_factor", 0, LARGEST_FACTOR, above=True)
    high = rope.number("high_freq_factor", 0, LARGEST_FACTOR, above=True)
    if high <= low:
        rope.refuse("high_freq_factor", f"it must be above low_freq_factor, which is {low:g}")
    return RopeScaling(rope.number("factor", 0, LARGEST_FACTOR, above=True), low, high, original)


def _section(rope: Fields, head_dim: int) -> tuple[int, int, int]:
    """Number of frequencies of each axis; by default those of the published models, whose head size is 128."""
    key = "mrope_section"
    time, height, width = rope.integers(key, length=3) if key in rope.values else (16, 24, 24)
    if time + height + width != head_dim // 2:
        rope.refuse(key, f"it must sum to {head_dim // 2}, half of hidden_size / num_attention_heads")
    return time, height, width


def _refuse_partial(fields: Fields) -> None:
    if fields.given("partial_rotary_factor"):
        fields.only("partial_rotary_factor", (1, 1.0))
