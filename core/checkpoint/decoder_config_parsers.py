"""Parsers of config.json keys that several families share: sizes, heads, activations, attention. Torch-free."""

from __future__ import annotations

from typing import Any, NamedTuple

from trencadis.core.checkpoint.decoder_layer_config import ExpertsConfig
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.rope_config import HALVES, Sections, partial_rope_of, rope_of

MOST_LAYERS = 1024
WIDEST = 2**22
"""Upper limit of hidden size, intermediate size and vocabulary."""

MOST_HEADS = 2**14
MOST_EXPERTS = 4096

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu", "relu2": "relu2", "quick_gelu": "quick_gelu",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
"""transformers' activation names -> those of ``Ops.act``."""


class Heads(NamedTuple):
    """Hidden size, number of query heads, number of KV heads, and head size."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


def heads_of(c: JsonFields, whole: bool = False, absent: bool = False, default: int = 0) -> Heads:
    """Reads the head counts and sizes of a decoder.

    Args:
        whole: head_dim * heads must equal the hidden size.
        absent: ``num_key_value_heads`` may be left out; it is then ``num_attention_heads``.
        default: the default of ``head_dim``; 0: hidden_size / num_attention_heads.
    """
    hidden = c.integer("hidden_size", most=WIDEST)
    heads = c.integer("num_attention_heads", most=MOST_HEADS)
    if hidden % heads and not default and not c.is_given("head_dim"):
        c.refuse("num_attention_heads", f"it must divide hidden_size, which is {hidden}")
    kv_heads = heads
    # A null means one KV head for each query head.
    if c.is_given("num_key_value_heads") or ("num_key_value_heads" not in c.values and not absent):
        kv_heads = c.integer("num_key_value_heads", most=MOST_HEADS)
    if heads % kv_heads:
        c.refuse("num_key_value_heads", f"it must divide num_attention_heads, which is {heads}")
    head_dim = c.integer("head_dim", most=WIDEST) if c.is_given("head_dim") else default or hidden // heads
    if head_dim % 2 or (whole and head_dim * heads != hidden):
        rule = "an even size" if head_dim % 2 else f"{hidden // heads}, hidden_size / num_attention_heads"
        c.refuse("head_dim" if c.is_given("head_dim") else "num_attention_heads", f"implemented: heads of {rule}")
    return Heads(hidden, heads, kv_heads, head_dim)


def activation_of(c: JsonFields, key: str, default: str) -> str:
    """Returns the activation under ``key``, by its name in ``Ops.act``."""
    c.only(key, tuple(ACTIVATIONS), default)
    return ACTIVATIONS[c.values.get(key, default)]


FULL, SLIDING = "full_attention", "sliding_attention"


def experts_of(
    c: JsonFields, key: str, top: int, *, inner: int, normalise: bool, dense: tuple[int, ...] = ()
) -> ExpertsConfig:
    """Reads the experts of a decoder: ``key`` names their number, ``top`` is the default of ``num_experts_per_tok``."""
    count = c.integer(key, most=MOST_EXPERTS)
    taken = c.integer("num_experts_per_tok", default=top)
    if taken > count:
        c.refuse("num_experts_per_tok", f"it must be at most {key}, which is {count}")
    return ExpertsConfig(count, taken, inner, normalise, dense)


def full_attention(c: JsonFields) -> None:
    """Raises StartupError for a model whose attention is not causal and full in every layer."""
    if c.is_given("use_sliding_window") and c.boolean("use_sliding_window"):
        c.refuse("use_sliding_window", "implemented: full attention (false)")
    _causal(c)
    layer_types(c, (FULL,))


def rotary_tables(c: JsonFields) -> tuple[JsonFields, JsonFields]:
    """Returns the tables in ``rope_parameters`` of (layers with a sliding window, layers with full attention).

    Raises:
        StartupError: there is another table, or that of the windows is scaled.
    """
    nested = c.within("rope_parameters")
    for key, value in nested.values.items():
        if key not in (FULL, SLIDING) or not isinstance(value, dict | None):
            nested.refuse(key, f"implemented: one object for {FULL}, one for {SLIDING}")
    sliding, full = nested.within(SLIDING), nested.within(FULL)
    sliding.only("rope_type", ("default",), "default")
    return sliding, full


def layer_types(c: JsonFields, implemented: tuple[str, ...] = (FULL, SLIDING)) -> list[str] | None:
    """Returns the attention type of each layer; None: the file does not list them."""
    types: list[str] | None = c.values.get("layer_types") if c.is_given("layer_types") else None
    if types is None:
        return None
    if not isinstance(types, list) or any(one not in implemented for one in types):
        rule = " or ".join(implemented)
        c.refuse("layer_types", f"implemented: {rule} in every layer")
    if len(types) != c.values.get("num_hidden_layers"):
        c.refuse("num_hidden_layers", f"it must be the length of layer_types, which is {len(types)}")
    return types


class Windows(NamedTuple):
    """The fields ``window`` and ``full_layers`` of ``TextConfig``."""

    window: int = 0
    full_layers: tuple[int, ...] = ()


def windows_of(c: JsonFields, window: int, types: list[str]) -> Windows:
    """Returns the sliding window and the full-attention layers; ``window`` 0: no layer has a window."""
    full = tuple(i for i, kind in enumerate(types) if kind == FULL)
    if window == 0 and len(full) < len(types):
        c.refuse("layer_types", f"{SLIDING} needs a sliding_window")
    return Windows() if len(full) == len(types) else Windows(window, full)


def some_windows(c: JsonFields) -> Windows:
    """Reads the sliding windows of the layers from ``max_window_layers`` on, or of those that ``layer_types`` lists.

    Without ``use_sliding_window`` the window is ignored, as in transformers.
    """
    _causal(c)
    asked = c.is_given("use_sliding_window") and c.boolean("use_sliding_window")
    none = "sliding_window" in c.values and not c.is_given("sliding_window")
    window = c.integer("sliding_window", default=4096) if asked and not none else 0
    layers = c.integer("num_hidden_layers", most=MOST_LAYERS)
    first = c.integer("max_window_layers", 0, default=28)
    types = layer_types(c) or [SLIDING if window and i >= first else FULL for i in range(layers)]
    if SLIDING in types and not asked:
        c.refuse("use_sliding_window", f"it must be true, as layer_types has {SLIDING}")
    return windows_of(c, window, types)


def _causal(c: JsonFields) -> None:
    if c.is_given("is_causal") and not c.boolean("is_causal"):
        c.refuse("is_causal", "implemented: causal attention (true)")


def gated_decoder(
    c: JsonFields, heads: Heads, tied: bool, *, positions: int, theta: float = 1e4, axes: bool = False,
    trained: int = 0,
    sections: Sections = HALVES,
    rotated: float = 0.0,
    act: tuple[str, str] = ("hidden_act", "silu"), **parts: Any,
) -> TextConfig:  # fmt: skip
    """Reads a decoder with RMS norms, rotary heads and gated MLPs from the keys that most decoders share.

    Args:
        positions: default of ``max_position_embeddings``.
        theta: default of ``rope_theta``.
        axes: True if positions have three axes.
        sections: default of ``mrope_section``.
        rotated: default of ``partial_rotary_factor`` without LongRoPE; 0: whole heads are rotated.
        act: key of the activation, and its default.
        trained: default of ``original_max_position_embeddings`` if heads may be partly rotated; 0: they may not.
        parts: further fields of TextConfig.
    """
    most = c.integer("max_position_embeddings", default=positions)
    if trained:
        rope = partial_rope_of(c, most, heads.head_dim, theta, trained)
    else:
        rope = rope_of(c, most, heads.head_dim, axes=axes, base=theta, sections=sections, rotated=rotated)
    # Scores are products of queries and keys, and the rotary table scales each of the two.
    scale = heads.head_dim**-0.5 * rope.magnitude**2 if rope.magnitude != 1 else 0.0
    return TextConfig(
        **heads._asdict(),
        layers=c.integer("num_hidden_layers", most=MOST_LAYERS),
        intermediate=c.integer("intermediate_size", most=WIDEST),
        vocab=c.integer("vocab_size", most=WIDEST),
        eps=c.number("rms_norm_eps", 0, 1, above=True),
        rope_theta=rope.theta,
        max_positions=rope.reach,
        tied=tied,
        mrope_section=rope.section,
        rope_scaling=rope.scaling,
        activation=activation_of(c, *act),
        scale=scale,
        rotary_dim=rope.rotary_dim,
        **parts,
    )
