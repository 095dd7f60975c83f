"""Bytes of a launch, by formula: its input tensors, its cross-attention to images in addition to self-attention, its
recurrent layers, and the image rows that ranks gather (core/launches/encoder_data_parallel.py).
"""

from __future__ import annotations

from collections.abc import Callable

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage, align_up, drafts_ahead, padded_tokens
from trencadis.core.checkpoint.decoder_layer_config import CHUNK
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.cross_attention_inputs import planned_units
from trencadis.core.device_shape_policy import DecodedPieces, InputSizes, Policy
from trencadis.core.memory.weight_bytes import AdapterSlotSizes, adapted_tower_matrices
from trencadis.core.request import MAX_BIAS


def any_inputs(bucket: Bucket, sizes: InputSizes) -> int:
    """Returns the bytes of a bucket's input tensors by a general formula, for policies without their own."""
    stage, dims, vocab = bucket.stage, bucket.dims, sizes.vocab
    bits = -(-vocab // 8)
    if stage is Stage.VISION:
        mixed = 8 * sizes.slot.position_neighbours
        return dims[0] * (sizes.slot.values + 8 + mixed) + dims[0] // 8 + 8 * sizes.slot.cells(dims[0])
    if stage is Stage.SAMPLE:
        ahead = drafts_ahead(bucket)
        each = 64 + (8 + 8 * ahead if ahead else 0)
        return dims[0] * each + bits * (1 if bucket.variant == "greedy" else dims[0] + 1)
    if stage is Stage.POOL:
        return dims[0] * 12
    if stage is Stage.RESET:
        return dims[0] * (8 + 4 * vocab + bits + MAX_BIAS * 12)
    return padded_tokens(bucket) * 44 + dims[-1] * 12


def decoded_bytes(model: ModelConfig, pieces: DecodedPieces, itemsize: int, tokens: int) -> int:
    """Returns the bytes of a quantised weight that a launch of ``tokens`` tokens decodes at a time."""
    return pieces.bytes if 0 < pieces.rows <= tokens and itemsize == 2 and model.quant is not None else 0


def attending(policy: Policy, library: str) -> Callable[[Bucket, InputSizes], int]:
    """Returns a function for the bytes of a bucket's inputs plus the workspace of an attention library.

    ``library`` is a value of `--attention-backend`.
    """
    inputs, beside = policy.inputs or any_inputs, policy.attention.get(library)
    return inputs if beside is None else lambda bucket, sizes: inputs(bucket, sizes) + beside(bucket, sizes)


SCORES = 1 << 25
"""Number of scores that are held at the same time (``backends.cpu.reference_ops``)."""


def cross_attention_layer_count(model: ModelConfig, bucket: Bucket, seeing: bool = True) -> int:
    """Returns the number of cross-attention layers that run in a launch with images (``seeing``).

    Not ``seeing``: the number of those that a launch without images skips.
    """
    return len(model.text.cross_attention_layers) if bool(planned_units(bucket.variant)) is seeing else 0


def cross_attention_kept_bytes(model: ModelConfig, bucket: Bucket, itemsize: int) -> int:
    """Returns the bytes that cross-attention adds at a graph's cuts around all-reduces: gates and their factors."""
    return padded_tokens(bucket) * cross_attention_layer_count(model, bucket) * (2 * model.text.hidden + 2) * itemsize


def cross_attention_row_bytes(model: ModelConfig, bucket: Bucket) -> int:
    """Returns the bytes of the arena row numbers, which all layers of a launch share."""
    return 8 * planned_units(bucket.variant) * (model.vision.cross_attention_rows if model.vision is not None else 0)


def cross_attention_work_bytes(model: ModelConfig, bucket: Bucket, itemsize: int, heads: int, kv_heads: int) -> int:
    """Returns the bytes of gathered keys and values, with a transposed copy, and of the scores of a tile of queries.

    ``heads`` and ``kv_heads`` are those of one device.
    """
    units = planned_units(bucket.variant)
    if not units or model.vision is None:
        return 0
    keys, d = units * model.vision.cross_attention_rows, model.text.head_dim
    scores = min(max(SCORES, heads * keys), padded_tokens(bucket) * heads * keys)
    return 4 * keys * kv_heads * d * itemsize + scores * (12 + itemsize)


def recurrent_work_bytes(model: ModelConfig, bucket: Bucket, itemsize: int, ranks: int) -> int:
    """Returns the bytes of a recurrent layer: its projections, their values in float32, and the states of all rows."""
    r, size = model.text.recurrent, padded_tokens(bucket)
    if r is None:
        return 0
    rows = {Stage.CONTEXT: 1, Stage.PREFILL: bucket.dims[-1]}.get(bucket.stage, bucket.dims[0])
    values, matrices = r.value_width // ranks, r.key_dim * r.value_width // ranks
    wide = (4 if r.width else 2) * r.channels(ranks) + 2 * values
    keys, chunks = r.value_heads * r.key_dim // ranks, r.value_heads * CHUNK // ranks
    single = 4 * (6 * (keys + values) + 3 * chunks)
    return size * (wide * itemsize + single) + 16 * (rows + 1) * matrices


def kept_by_cuts(tokens: int, each: int, cuts: int, once: int = 0) -> int:
    """Returns the bytes that a graph of ``tokens`` keeps: ``each`` per token and cut, and ``once`` per token at the
    first cut.
    """
    return tokens * (each * cuts + (once if cuts else 0))


def adapter_work_bytes(
    model: ModelConfig, bucket: Bucket, adapters: AdapterSlotSizes, itemsize: int, ranks: int, unit: int
) -> int:
    """Returns the bytes of products with adapters: x A of all slots twice, x A B, and the sum; and the masks.

    Where B of all parts are joined, one product adds to the sum, and there is a mask for each number of parts.
    ``unit``: the multiple that widths are padded to.
    """
    t, tokens = model.text, padded_tokens(bucket)
    if bucket.stage is Stage.VISION:
        widest = 2 * max((one.rows for one in adapted_tower_matrices(model, ranks, unit)), default=0)
    else:
        qkv = max(-(-(form.heads + 2 * form.kv_heads) // ranks) * form.head_dim for form in t.layer_forms)
        inner = max(form.intermediate for form in t.layer_forms)
        widest = max(qkv, 2 * align_up(-(-inner // ranks), unit), t.hidden)
    if adapters.joined:
        return tokens * (itemsize * (12 * adapters.columns + widest) + 3 * adapters.columns)
    return tokens * itemsize * (6 * adapters.columns + 3 * widest + adapters.slots) + 5 * tokens * adapters.slots


NUMBER = 4
"""Bytes of a row number."""


def row_bytes(model: ModelConfig, itemsize: int) -> int:
    """Returns the bytes of an arena row with all its parts."""
    return model.row_parts * model.text.width * itemsize


def held_bytes(model: ModelConfig, slots: int, itemsize: int, ranks: int) -> int:
    """Returns the peak bytes of a launch of ``slots`` slots while it gathers: a rank's own rows, and those of all
    ranks.

    The latter count twice: in the gathered layout, and rearranged.
    """
    if model.vision is None or not model.encoder_data_parallel:
        return 0
    return model.vision.slot.cells(slots) * (1 + 2 * ranks) * (row_bytes(model, itemsize) + NUMBER)


def kept_bytes(model: ModelConfig, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
    """Returns the bytes that a graph keeps: the rows of all ranks and their numbers, which collectives have written.

    With the tensor cache also the rank's own rows, which are passed at the preceding cut.
    """
    if model.vision is None or not model.encoder_data_parallel:
        return 0
    return model.vision.slot.cells(slots) * (ranks + cached) * (row_bytes(model, itemsize) + NUMBER)


def costliest_buckets(plan: Plan, activations: Callable[[Bucket], int]) -> list[Bucket]:
    """Returns the buckets with the most bytes of ``activations``, which a start profiles: of each stage one of every
    variant that ties, as the formula may not tell variants apart that a device does.
    """
    found: list[Bucket] = []
    for buckets in map(plan.of, Stage):
        most = max(map(activations, buckets), default=0)
        found += {b.variant: b for b in sorted(buckets) if activations(b) == most}.values()
    return found
