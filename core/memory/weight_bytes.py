"""Sizes of weights and of adapters' slots on one of ``ranks`` devices, from config.json alone. Pure; in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from trencadis.core.buckets import align_up
from trencadis.core.checkpoint.decoder_layer_config import RecurrentConfig
from trencadis.core.checkpoint.family import RECURRENT
from trencadis.core.checkpoint.model_config import GATED, LAYER, RMS_ONE, SANDWICH, ModelConfig, TextConfig
from trencadis.core.checkpoint.model_registry import adapted_tower, family_of
from trencadis.core.checkpoint.quant_config import Quantisation
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.quant.quantised_weight_layout_and_bytes import (
    CODES,
    FLOATS8,
    PANELS,
    ROWS8,
    Scheme,
    block_scale_bytes,
    held_bytes,
    mlp_unit,
    notes_of,
    packs4,
)
from trencadis.core.vision_config import SharedMatrix

EXPERT_FORMS = (ROWS8, PANELS, CODES)
"""Forms (``Policy.quantised``) of devices that keep experts as codes; others dequantise them to the engine's dtype, but
for 8-bit floats on a device that multiplies these (``FLOATS8``).
"""

EXPERTS = ".experts."
"""Part of the names of experts' matrices."""


def weight_notes(model: ModelConfig, itemsize: int, form: str) -> list[str]:
    """Returns notes for users on quantised weights on this device.

    Raises:
        StartupError: the device does not support the requested quantisation.
    """
    if model.quant is not None and model.quant.given and form != FLOATS8:
        raise StartupError("--quantization inc is for fp8 on Gaudi; here --quantization fp8, int8 or int4 works")
    if model.quant is None:
        return []
    lines = notes_of(model.quant.schemes, form, itemsize)
    floats = form == FLOATS8 and all(scheme.kind == "float" for scheme in model.quant.schemes)
    if model.text.experts is not None and form and form not in EXPERT_FORMS and not floats:
        wide = f"{8 * itemsize}-bit values"
        lines.append(f"weights: experts become {wide} as they load; the CPU keeps int8 and int4, CUDA all")
    return lines


def mlp_columns(model: ModelConfig, index: int, ranks: int, width: int = 1) -> int:
    """Returns the columns of the MLP of layer ``index`` on one device, a multiple of ``width``.

    A share ends at the end of a quantised group.
    """
    return _share_of(model, model.text.of_layer(index).intermediate, ranks, width)


def shared_columns(model: ModelConfig, ranks: int, width: int = 1) -> int:
    """Returns the columns of the shared expert on one device, a multiple of ``width``; 0: there is none."""
    experts = model.text.experts
    return 0 if experts is None or not experts.shared else _share_of(model, experts.shared, ranks, width)


def _share_of(model: ModelConfig, inner: int, ranks: int, width: int) -> int:
    """Returns one device's share of ``inner`` columns; it ends at the end of a quantised group."""
    unit = mlp_unit(inner, model.quant.widest_group() if model.quant is not None else 1, ranks)
    return align_up(-(-inner // unit // ranks) * unit, width)


def vocabulary_share(model: ModelConfig, ranks: int, width: int = 1) -> int:
    """Returns the rows of the head on one of ``ranks`` devices, a multiple of ``width`` if the head is sharded."""
    return align_up(-(-model.text.vocab // ranks), width if ranks > 1 else 1)


def mlp_matrices(t: TextConfig) -> int:
    """Returns the number of hidden x intermediate matrices in an MLP."""
    return 3 if t.mlp == GATED else 2


def layer_norms(t: TextConfig) -> int:
    """Returns the number of norms of hidden size in a layer."""
    return 1 if t.mlp_layers is not None else 4 if t.norm_placement == SANDWICH else 2


def norm_excess(model: ModelConfig, itemsize: int, ranks: int = 1) -> int:
    """Returns the bytes of norms beyond those in the engine's dtype; norms of ``RMS_ONE`` are float32."""
    t, share = model.text, model.share
    final = t.hidden * (4 - itemsize) if t.norm == RMS_ONE and t.final_norm and share.ends else 0
    return sum(norm_excess_of(t, itemsize, index, ranks) for index in share.layers) + final


def norm_excess_of(t: TextConfig, itemsize: int, index: int, ranks: int = 1) -> int:
    """Returns ``norm_excess`` of one layer, with decays of a recurrent one and a router of sigmoids, which are float32
    in any case.
    """
    if t.experts is not None and t.has_experts(index) and t.experts.sigmoid is not None:
        return t.experts.float_values(t.hidden) * (4 - itemsize)
    if t.recurrent is not None and index in t.recurrent.layers:
        decays = t.recurrent.float_values(ranks) * (4 - itemsize)
        return decays + (layer_norms(t) * t.hidden * (4 - itemsize) if t.norm == RMS_ONE else 0)
    if t.norm != RMS_ONE:
        return 0
    return (layer_norms(t) * t.hidden + (2 * t.of_layer(index).head_dim if t.qk_norm else 0)) * (4 - itemsize)


def sink_bytes(t: TextConfig, ranks: int) -> int:
    """Returns the bytes of a layer's attention sinks on one device, which are float32."""
    return 4 * -(-t.heads // ranks) if t.sinks else 0


def layer_values(model: ModelConfig, index: int, ranks: int, width: int = 1) -> int:
    """Returns the exact number of values of decoder layer ``index`` on a stage's rank 0.

    Rank 0 alone holds the biases of row-parallel layers.
    """
    t, columns = model.text.of_layer(index), mlp_columns(model, index, ranks, width)
    layer = layer_norms(t) * t.hidden * (2 if t.norm == LAYER else 1) + t.layer_scale
    layer += t.layer_input_values + t.hidden if t.layer_inputs else 0
    if t.recurrent is not None and index in t.recurrent.layers:
        layer += t.recurrent.values(t.hidden, ranks)
    elif t.mixes_tokens(index):
        layer += _attention_values(t, ranks, index in t.cross_attention_layers)
    if t.experts is not None and t.has_experts(index):
        shared = t.experts.shared_values(t.hidden, shared_columns(model, ranks, width))
        layer += t.experts.values(t.hidden, ranks) + shared + t.experts.bias_values(t.hidden, ranks)
        layer += t.experts.norm_values(t.hidden)
    if not t.has_mlp(index):
        return layer
    biases = (mlp_matrices(t) - 1) * columns + t.hidden if t.mlp_bias else 0
    return layer + mlp_matrices(t) * t.hidden * columns + biases


def _attention_values(t: TextConfig, ranks: int, crosses: bool) -> int:
    """Returns the values of a layer's attention; ``crosses``: True if it attends to images."""
    heads = -(-t.heads // ranks)
    kv = (-(-t.kv_heads // ranks) if t.kv_heads >= ranks else 1) * t.head_dim
    qkv, out = heads * t.query_width + t.key_parts * kv, heads * t.head_dim
    biases = (qkv if t.qkv_bias else 0) + (t.hidden if t.out_bias else 0)
    norms = (1 if t.reads_kv else 2) * t.head_dim if t.qk_norm or crosses else 0
    norms += t.head_dim if t.v_norm and not t.reads_kv else 0
    norms += (t.heads + t.kv_heads) * t.head_dim if t.joint_qk_norm else 0
    return t.hidden * (qkv + out) + biases + norms + 2 * crosses  # its gates


def layer_bytes(model: ModelConfig, index: int, itemsize: int, ranks: int, form: str, width: int = 1) -> int:
    """Returns the bytes of that layer's weights on a device of ``form`` (``Policy.quantised``)."""
    t = model.text.of_layer(index)
    kv = -(-t.kv_heads // ranks) if t.kv_heads >= ranks else 1
    cached = index in model.text.kv_layers
    beside = norm_excess_of(t, itemsize, index, ranks) + (t.kv.fixed_bytes(kv) if t.kv is not None and cached else 0)
    beside += 0 if index in t.recurrent_layers else sink_bytes(t, ranks)
    more = _excess_of(model, itemsize, ranks, form, width, index)
    return layer_values(model, index, ranks, width) * itemsize + beside + more


def decoder_values(model: ModelConfig, ranks: int, width: int = 1) -> int:
    """Returns the exact number of values of the decoder on a stage's rank 0, without a class head."""
    t, share = model.text, model.share
    norm = t.hidden * (2 if t.norm == LAYER else 1)
    total = sum(layer_values(model, index, ranks, width) for index in share.layers)
    crosses = t.hidden * t.width if t.width != t.hidden else 0
    if share.starts:
        total += (t.vocab + t.spare) * t.width + t.learned * t.hidden + crosses
        total += t.types * t.hidden + norm if t.types else 0
        wide = t.layers * t.layer_inputs
        total += (t.layer_vocab + t.hidden) * wide + t.layer_inputs
    if share.ends:
        total += (norm if t.final_norm else 0) + crosses
        if model.pooling is None and not (t.tied and ranks == 1 and share.starts):
            total += vocabulary_share(model, ranks, width) * t.width
    return total


def largest_dequantised_bytes(model: ModelConfig, itemsize: int, ranks: int, form: str, width: int, head: bool) -> int:
    """Returns the bytes of the largest matrix dequantised for a product: the head's (``head``), or one of a layer.

    Parts with the same input count as one matrix.
    """
    quant = model.quant
    if quant is None or form != FLOATS8 or itemsize != 2:
        return 0
    found: dict[str, int] = {}
    for name, rows, columns, _, _ in _linear_matrices(model, ranks, width):
        scheme = quant.scheme(name) if EXPERTS not in name and (name == "lm_head") is head else None
        if scheme is not None and scheme.bits == 4 and packs4(rows, columns, 0) and not name.startswith("visual"):
            index, _, part = name.rpartition(".")
            joint = "qkv" if part in ("q_proj", "k_proj", "v_proj") else "up" if part == "gate_proj" else part[:2]
            found[f"{index}.{joint}"] = found.get(f"{index}.{joint}", 0) + rows * columns * itemsize
    return max(found.values(), default=0)


def quantisation_excess(model: ModelConfig, itemsize: int, ranks: int, form: str, width: int = 1) -> int:
    """Returns the bytes of quantised weights minus those in the engine's dtype: negative if they are smaller.

    A head that is quantised while it loads has its own integers, even if it is tied to the embedding.
    """
    quant = model.quant
    if quant is None:
        return 0
    total, t, share = _excess_of(model, itemsize, ranks, form, width), model.text, model.share
    one = ranks == 1 and share.starts and share.ends  # otherwise the head is not the embedding table
    head = quant.scheme("lm_head") if t.tied and one else None
    if head is not None and quant.method == "online":
        total += t.vocab * t.width * itemsize
    elif head is not None:  # stored as the embedding table, regardless of config.json
        total -= held_bytes(head, t.vocab, t.width, itemsize, form) - t.vocab * t.width * itemsize
    return total


def _excess_of(model: ModelConfig, itemsize: int, ranks: int, form: str, width: int, index: int | None = None) -> int:
    """Returns ``quantisation_excess`` of all matrices, or of one layer. Only ``EXPERT_FORMS`` keep experts as codes."""
    quant = model.quant
    if quant is None:
        return 0
    t, total, own = model.text, 0, form if form in EXPERT_FORMS else ""
    found = _linear_matrices(model, ranks, width) if index is None else layer_matrices(model, index, ranks, width)
    for scheme, (name, rows, columns, whole, first) in _fuse_matrices(quant, found):
        coded = form == FLOATS8 and scheme.kind == "float" and not (t.experts is not None and t.experts.bias)
        kept = own if EXPERTS in name and not coded else form
        total += held_bytes(scheme, rows, columns, itemsize, kept, whole, first) - rows * columns * itemsize
        total += block_scale_bytes(scheme, rows, columns, itemsize, "" if EXPERTS in name else kept)
    return total


def _fuse_matrices(quant: Quantisation, parts: Iterable[SharedMatrix]) -> Iterator[tuple[Scheme, SharedMatrix]]:
    """Yields the quantised matrices. Those with the same input and scheme count as one, as layers fuse them."""
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


def _linear_matrices(model: ModelConfig, ranks: int, width: int) -> Iterator[SharedMatrix]:
    """Yields every linear layer of this stage that a checkpoint may quantise."""
    t, share = model.text, model.share
    for index in share.layers:
        yield from layer_matrices(model, index, ranks, width)
    if share.ends:
        yield SharedMatrix("lm_head", vocabulary_share(model, ranks, width), t.width, t.width)
    # AWQ's and GPTQ's tools quantise only the decoder's blocks, without listing the rest in their files.
    decoder_only = model.quant is not None and model.quant.method in ("awq", "gptq", "gptq_v2")
    if model.vision is not None and model.encodes_images and not decoder_only:
        yield from model.vision.matrices(1 if model.encoder_data_parallel else ranks, width)


def layer_matrices(model: ModelConfig, index: int, ranks: int, width: int) -> Iterator[SharedMatrix]:
    """Yields the matrices of one layer; a router is kept in the engine's dtype."""
    t, at = model.text.of_layer(index), f"layers.{index}"
    if t.recurrent is not None and index in t.recurrent.layers:
        yield from _recurrent_matrices(f"{at}.linear_attn", t.recurrent, t.hidden, ranks)
    elif t.mixes_tokens(index):
        yield from _attention_matrices(at, t, ranks, index in t.cross_attention_layers)
    if t.experts is not None and t.has_experts(index):
        inner, gated, part = (
            t.experts.inner,
            not t.experts.plain,
            f"{at}.{'beside' if t.experts.beside else 'mlp'}{EXPERTS}",
        )
        for i in range(t.experts.count):
            yield from _mlp_matrices(f"{part}{i}", t.experts.latent or t.hidden, -(-inner // ranks), inner, gated)
        if t.experts.shared:
            columns = shared_columns(model, ranks, width)
            yield from _mlp_matrices(f"{at}.mlp{t.experts.shared_name}", t.hidden, columns, t.experts.shared, gated)
    if not t.has_mlp(index):
        return
    columns = mlp_columns(model, index, ranks, width)
    yield from _mlp_matrices(f"{at}.mlp", t.hidden, columns, t.intermediate, t.mlp == GATED)


def _attention_matrices(at: str, t: TextConfig, ranks: int, crosses: bool) -> Iterator[SharedMatrix]:
    """Yields the matrices of a layer's attention; ``crosses``: True if it attends to images."""
    heads = -(-t.heads // ranks)
    kv = (-(-t.kv_heads // ranks) if t.kv_heads >= ranks else 1) * t.head_dim
    part = f"{at}.{'cross' if crosses else 'self'}_attn"
    yield SharedMatrix(f"{part}.q_proj", heads * t.query_width, t.hidden, t.hidden)
    if t.key_parts > 0:
        yield SharedMatrix(f"{part}.k_proj", kv, t.hidden, t.hidden, first=crosses)
    if t.key_parts > 1:
        yield SharedMatrix(f"{part}.v_proj", kv, t.hidden, t.hidden, first=False)
    yield SharedMatrix(f"{part}.o_proj", t.hidden, heads * t.head_dim, t.heads * t.head_dim)


def _recurrent_matrices(part: str, r: RecurrentConfig, hidden: int, ranks: int) -> Iterator[SharedMatrix]:
    """Yields the matrices of a recurrent layer, each as its layer joins its parts."""
    if r.width:
        yield SharedMatrix(f"{part}.in_proj", 3 * r.channels(ranks), hidden, hidden)
        yield SharedMatrix(f"{part}.out_proj", hidden, r.channels(ranks), r.width)
        return
    if r.scan:
        outputs = r.channels(ranks) + (r.value_width + r.value_heads) // ranks
        yield SharedMatrix(f"{part}.in_proj", outputs, hidden, hidden)
        yield SharedMatrix(f"{part}.out_proj", hidden, r.value_width // ranks, r.value_width)
        return
    yield SharedMatrix(f"{part}.in_proj_qkv", r.channels(ranks), hidden, hidden)
    yield SharedMatrix(f"{part}.in_proj_z", r.value_width // ranks, hidden, hidden)
    for name in "ba":
        yield SharedMatrix(f"{part}.in_proj_{name}", r.value_heads // ranks, hidden, hidden, first=False)
    yield SharedMatrix(f"{part}.out_proj", hidden, r.value_width // ranks, r.value_width)


def _mlp_matrices(at: str, hidden: int, columns: int, whole: int, gated: bool) -> Iterator[SharedMatrix]:
    if gated:
        yield SharedMatrix(f"{at}.gate_proj", columns, hidden, hidden)
    yield SharedMatrix(f"{at}.up_proj", columns, hidden, hidden, first=not gated)
    yield SharedMatrix(f"{at}.down_proj", hidden, columns, whole)


RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Ranks that slots have memory for; smaller adapters are padded with zeros."""


EXPERT = "expert"
"""Part of the names of matrices of experts, which take no adapters."""

NUMBER = 4
"""Bytes of a slot's number, which masks are made of."""


def padded_rank(rank: int) -> int:
    """Returns the rank of slots that hold adapters up to ``rank``."""
    return next(one for one in RANKS if one >= rank)


class AdapterSlotSizes(NamedTuple):
    """How many slots a device has, and the rank that each has memory for.

    ``joined``: one matrix has B of all parts of a fused matrix, each in rows of its own, with zeros beside it
    (``Policy.joined_adapters``).
    """

    slots: int
    rank: int
    joined: bool = False

    @property
    def columns(self) -> int:
        """Columns of x A for a matrix that has one part."""
        return self.slots * self.rank


def slot_sizes(config: EngineConfig, joined: bool = False) -> AdapterSlotSizes | None:
    """Returns the slots that a configuration asks for; None without ``--enable-lora``."""
    if not config.enable_lora:
        return None
    return AdapterSlotSizes(config.max_loras, padded_rank(config.max_lora_rank), joined)


def host_adapters(config: EngineConfig) -> int:
    """Returns how many adapters an engine holds in host memory; 0: it has none."""
    return max(config.max_cpu_loras or 0, config.max_loras) if config.enable_lora else 0


def adapter_bytes(model: ModelConfig, itemsize: int, ranks: int, sizes: AdapterSlotSizes, width: int = 1) -> int:
    """Returns the bytes of A, B and the number of each slot; ``width``: as in ``layer_values``."""
    tower = adapted_tower_matrices(model, ranks, width)
    values, most = 0, 0
    for matrices in (*(_adapted_matrices(model, i, ranks, width) for i in model.share.layers), tower):
        groups = list[list[SharedMatrix]]()
        for matrix in matrices:
            if matrix.first or not groups:
                groups.append([])
            groups[-1].append(matrix)
        for group in groups:
            parts, outputs = len(group), sum(one.rows for one in group)
            values += parts * group[0].columns + (parts * outputs if sizes.joined else outputs)
            most = max(most, parts)
    numbers = sizes.columns * most if sizes.joined else sizes.slots
    return sizes.columns * values * itemsize + NUMBER * numbers


def _adapted_matrices(model: ModelConfig, index: int, ranks: int, width: int) -> Iterator[SharedMatrix]:
    """Yields the matrices of a decoder's layer that take adapters: none of experts or of what is beside them."""
    recurrent = RECURRENT in family_of(model.architecture).adapters
    for matrix in layer_matrices(model, index, ranks, width):
        beside = EXPERT in matrix.name or (".mlp." in matrix.name and not model.text.has_mlp(index))
        if not beside and (recurrent or ".linear_attn." not in matrix.name):
            yield matrix


def adapted_tower_matrices(model: ModelConfig, ranks: int, width: int = 1) -> tuple[SharedMatrix, ...]:
    """Returns the matrices of a rank's vision tower that take adapters; empty if this stage holds no tower."""
    shared = 1 if model.encoder_data_parallel else ranks
    return tuple(adapted_tower(model, shared, width)) if model.encodes_images else ()
