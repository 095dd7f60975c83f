"""What quantised weights cost on one of ``ranks`` devices, matrix by matrix, by config.json alone. Pure; in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trencadis.core.checkpoint.model_config import GATED, LAYER, RMS_ONE, SANDWICH, ModelConfig, TextConfig
from trencadis.core.checkpoint.quant_config import Quantisation
from trencadis.core.checkpoint.vision_config import SharedMatrix
from trencadis.core.errors import StartupError
from trencadis.core.layout import aligned
from trencadis.core.quant.scheme import FLOATS8, Scheme, held_bytes, mlp_unit, notes_of


def weight_notes(model: ModelConfig, itemsize: int, form: str) -> list[str]:
    """What users must know of quantised weights on this device.

    Raises:
        StartupError: the device has no use for what was asked.
    """
    if model.quant is not None and model.quant.given and form != FLOATS8:
        raise StartupError("--quantization inc is for fp8 on Gaudi; here --quantization fp8, int8 or int4 works")
    return notes_of(model.quant.schemes, form, itemsize) if model.quant is not None else []


def mlp_columns(model: ModelConfig, ranks: int, width: int = 1) -> int:
    """Columns of the decoder's MLP on one device, a multiple of ``width``; a share ends at a quantised group."""
    inner = model.text.intermediate
    unit = mlp_unit(inner, model.quant.widest_group() if model.quant is not None else 1, ranks)
    return aligned(-(-inner // unit // ranks) * unit, width)


def vocabulary_share(model: ModelConfig, ranks: int, width: int = 1) -> int:
    """Rows of the head on one of ``ranks`` devices, a multiple of ``width`` where it is shared."""
    return aligned(-(-model.text.vocab // ranks), width if ranks > 1 else 1)


def mlp_matrices(t: TextConfig) -> int:
    """Matrices of hidden x intermediate values in an MLP."""
    return 3 if t.mlp == GATED else 2


def layer_norms(t: TextConfig) -> int:
    """Norms of hidden values in a layer."""
    return 4 if t.place == SANDWICH else 2


def norm_excess(model: ModelConfig, itemsize: int) -> int:
    """Bytes that norms take beyond those of the engine's type: weights of 1 and a fraction are float32."""
    t, share = model.text, model.share
    if t.norm != RMS_ONE:
        return 0
    layer = layer_norms(t) * t.hidden + (2 * t.head_dim if t.qk_norm else 0)
    return (len(share.layers) * layer + (t.hidden if t.final_norm and share.ends else 0)) * (4 - itemsize)


def decoder_values(model: ModelConfig, ranks: int, width: int = 1) -> int:
    """Values of the decoder on a stage's rank 0, exact, without a class head; row-parallel biases live there alone."""
    share = model.share
    t, columns = model.text, mlp_columns(model, ranks, width)
    heads = -(-t.heads // ranks) * t.head_dim
    qkv = heads + 2 * (-(-t.kv_heads // ranks) if t.kv_heads >= ranks else 1) * t.head_dim
    norm = t.hidden * (2 if t.norm == LAYER else 1)
    layer = t.hidden * (qkv + heads) + layer_norms(t) * norm
    layer += (qkv if t.qkv_bias else 0) + (t.hidden if t.out_bias else 0) + (2 * t.head_dim if t.qk_norm else 0)
    dense = mlp_matrices(t) * t.hidden * columns
    if t.mlp_bias:
        dense += (mlp_matrices(t) - 1) * columns + t.hidden
    with_mlp = len(share.layers) if t.experts is None else len(set(share.layers) & set(t.experts.dense))
    total = len(share.layers) * layer + with_mlp * dense
    if t.experts is not None:
        total += (len(share.layers) - with_mlp) * t.experts.values(t.hidden, ranks)
    crosses = t.hidden * t.width if t.width != t.hidden else 0
    if share.starts:
        total += t.vocab * t.width + t.learned * t.hidden + (t.types * t.hidden + norm if t.types else 0) + crosses
    if share.ends:
        total += (norm if t.final_norm else 0) + crosses
        if model.pooling is None and not (t.tied and ranks == 1 and share.starts):
            total += vocabulary_share(model, ranks, width) * t.width
    return total


def grown(model: ModelConfig, itemsize: int, ranks: int, form: str, width: int = 1) -> int:
    """Bytes that quantised weights take beyond those in the engine's type: below zero where they are smaller.

    A head that is quantised as it loads has integers of its own, even if it is tied to the embedding.
    """
    quant = model.quant
    if quant is None:
        return 0
    total = 0
    for scheme, (_, rows, columns, whole, first) in _fused(quant, _linears(model, ranks, width)):
        total += held_bytes(scheme, rows, columns, itemsize, form, whole, first) - rows * columns * itemsize
    t, share = model.text, model.share
    one = ranks == 1 and share.starts and share.ends  # else the head is not the embedding's table
    head = quant.scheme("lm_head") if t.tied and one else None
    if head is not None and quant.method == "online":
        total += t.vocab * t.width * itemsize
    elif head is not None:  # stored as the embedding's table, whatever config.json says
        total -= held_bytes(head, t.vocab, t.width, itemsize, form) - t.vocab * t.width * itemsize
    return total


def _fused(quant: Quantisation, parts: Iterable[SharedMatrix]) -> Iterator[tuple[Scheme, SharedMatrix]]:
    """The quantised ones. Those over the same input are one, as layers hold them, if all have the same scheme."""
    sets: list[list[tuple[Scheme | None, SharedMatrix]]] = []
    for part in parts:
        if part.first or not sets:
            sets.append([])
        sets[-1].append((quant.scheme(part.name), part))
    for one in sets:
        scheme, first = one[0]
        if scheme is not None and all(other == scheme for other, _ in one):
            yield scheme, first._replace(rows=sum(part.rows for _, part in one))
            continue
        yield from ((own, part) for own, part in one if own is not None)


def _linears(model: ModelConfig, ranks: int, width: int) -> Iterator[SharedMatrix]:
    """Every linear of this stage that a checkpoint may quantise."""
    share = model.share
    t, columns = model.text, mlp_columns(model, ranks, width)
    heads = -(-t.heads // ranks) * t.head_dim
    kv = (-(-t.kv_heads // ranks) if t.kv_heads >= ranks else 1) * t.head_dim
    for i in share.layers:
        at = f"layers.{i}"
        yield SharedMatrix(f"{at}.self_attn.q_proj", heads, t.hidden, t.hidden)
        yield SharedMatrix(f"{at}.self_attn.k_proj", kv, t.hidden, t.hidden, first=False)
        yield SharedMatrix(f"{at}.self_attn.v_proj", kv, t.hidden, t.hidden, first=False)
        yield SharedMatrix(f"{at}.self_attn.o_proj", t.hidden, heads, t.heads * t.head_dim)
        if t.mlp == GATED:
            yield SharedMatrix(f"{at}.mlp.gate_proj", columns, t.hidden, t.hidden)
        yield SharedMatrix(f"{at}.mlp.up_proj", columns, t.hidden, t.hidden, first=t.mlp != GATED)
        yield SharedMatrix(f"{at}.mlp.down_proj", t.hidden, columns, t.intermediate)
    if share.ends:
        yield SharedMatrix("lm_head", vocabulary_share(model, ranks, width), t.width, t.width)
    # AWQ's and GPTQ's tools take the decoder's blocks alone, and their files do not say so.
    decoder_only = model.quant is not None and model.quant.method in ("awq", "gptq", "gptq_v2")
    if model.vision is not None and model.sees and not decoder_only:
        yield from model.vision.matrices(1 if model.own_towers else ranks, width)
