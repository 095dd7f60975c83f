"""The tensors of a launch, as passed to program bodies and ops; ``core.device.backend`` re-exports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, overload

from torch import Tensor

from trencadis.core.step_output import HeadOutput, PoolOutput


class LayerKV(NamedTuple):
    """A layer's cache: base tensors [blocks, block_size, kv_heads, head_dim]; ``Policy.flat_kv`` flattens blocks.

    With 8 bits (core/models/kv_cache_quantisation.py) k and v hold codes, and the other fields their scales and kept
    values.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None  # float16 [blocks, block_size, kv_heads]
    v_scale: Tensor | None = None
    kept: Tensor | None = None  # 16 bits [blocks, block_size, kv_heads, kept]: values of keys that have no codes
    pairs: Tensor | None = None  # int32 [kv_heads, kept]: which of a head's values those are
    static: Tensor | None = None  # float32 [2]: the scale of all keys and that of all values


class RotatedHeads(NamedTuple):
    """Result of ``Ops.rope_store``: rotated queries [n, h, d], and the keys and values [n, g, d] for ``attend``."""

    q: Tensor
    k: Tensor
    v: Tensor


def put_slots(cache: Tensor, x: Tensor, slot: Tensor) -> None:
    """Sets ``cache[slot] = x`` for x [n, g, ...] and a cache [blocks, block_size, g, ...]; ``slot``: int64 [n]."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slot, x)


def slots_at(cache: Tensor, where: slice | Tensor) -> Tensor:
    """Returns slots of a cache with blocks, [L, g, ...]; a slice is not copied."""
    flat = cache.flatten(0, 1)
    return flat[where] if isinstance(where, slice) else flat.index_select(0, where)


def first_rows(tree: Any, rows: int) -> Any:
    """Returns the tensors of nested tuples without the rows from ``rows`` on, which are padding."""
    if isinstance(tree, tuple):
        made = [first_rows(item, rows) for item in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)
    return tree if tree is None or len(tree) == rows else tree[:rows]


class Attn(NamedTuple):
    """The attention inputs of a text launch; opaque to models. Backends may subclass it."""

    row_start: Tensor  # int32 [rows + 2]; the last row owns the bucket's surplus tokens
    context: Tensor  # int32 [rows + 1]
    blocks: Tensor  # int32 [rows + 1, width]
    slot_map: Tensor  # int64 [tokens] position of each token's K and V: block * block_size + offset
    upto: Tensor | None = None  # int32 [tokens] last key that each token sees, by its place in the row; None: its own


class Segments(NamedTuple):
    """The attention inputs of a packed VISION launch."""

    segment: Tensor  # int32 [windows] image of each window, ascending
    real: Tensor  # int32 [windows] real patches of each window, first in it
    padding_window: Tensor | None = (
        # int32 [windows] 1: padding window: its slots are keys of others, and do not attend to each other; None: no
        # such
        None
    )


class ExpertBiases(NamedTuple):
    """Biases of each expert: gate_up [2 x inner], down [hidden]."""

    gate_up: Sequence[Tensor]
    down: Sequence[Tensor]


class SinksArgument(TypedDict, total=False):
    """The argument of ``Ops.attend`` that only layers with attention sinks give."""

    sinks: Tensor


class Rotary(NamedTuple):
    """Rotary factors of a launch, float32 [tokens, head_dim] each, computed once for all layers.

    ``query_scale``: factor of each token's queries, float32 [tokens]; the model applies it. None: there is none.
    ``layer_input``: [tokens, width], the tokens' embeddings for one layer (``TextConfig.layer_inputs``). ``keys``,
    ``values``: those that an earlier layer has given to a layer without its own (``TextConfig.shared_kv``).
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None
    layer_input: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None


class CrossAttentionTensors(NamedTuple):
    """The images that the tokens of a text launch attend to.

    The fields are those of ``core.cross_attention_inputs.CrossAttentionInputs``.
    """

    units: Tensor  # int32 [u]
    reach: Tensor  # int32 [n, u]
    times: Tensor  # int32 [n, u]
    gate: Tensor  # int32 [n]


class RecurrentRows(NamedTuple):
    """The rows of a text launch of a model with recurrent layers. The last row owns the padding tokens.

    A row's state is read at ``source`` and written at ``slot``: where they differ, the state at ``source`` stays as it
    is (a snapshot, or the state of a sequence that was forked). No slot is read by one row and written by another row
    of a launch, except slot 0, which padding reads and writes.
    """

    slot: Tensor  # int64 [rows + 1] slot that the row's new state is written to; 0 for padding
    begins: Tensor  # int32 [rows + 1] 1: the state counts as zero, whatever the slot at ``source`` holds, NaN too
    source: Tensor  # int64 [rows + 1] slot that the row's state is read from; 0 for padding
    count: Tensor  # type: ignore[assignment]  # int32 [rows + 1] real tokens of the row, first in it; 0 for padding


class AdapterWeights(NamedTuple):
    """A and B of all slots for one fused matrix of p parts, of which each has its own A and B.

    Args:
        a: [slots, p, rank, in].
        b: for each part [slots, rank, outputs of the part], times the scale of each adapter.
    """

    a: Tensor
    b: tuple[Tensor, ...]


class PackedAdapters(Protocol):
    """A and B of all slots of one fused matrix in a layout of the device (``core.lora.adapter_store.PackingOps``)."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        ...


class TextTensors(NamedTuple):
    """A text program's inputs: tensors in fixed order, never scalars."""

    tokens: Tensor  # int32 [m], m >= n: a backend may pad the start of a launch further than its layers
    from_slot: Tensor  # int32 [m]
    positions: Tensor  # int32 [3, m]
    image_row: Tensor  # int32 [m]
    out_row: Tensor  # int64 [n]
    attn: Attn
    cross_attention: CrossAttentionTensors | None = None  # None: no token of the launch attends to an image
    recurrent: RecurrentRows | None = None  # None: the model has no recurrent layers
    adapter: Tensor | None = None  # int32 [n] slot of each token's adapter, 0: none; None: the launch has no adapters


class VisionTensors(NamedTuple):
    """A VISION program's inputs."""

    pixels: Tensor  # uint8 [slots, values of a slot]
    position: Tensor  # int32 [slots, 2]
    rows: Tensor  # int64 [slots / cell]
    segments: Segments
    position_rows: Tensor | None = (
        None  # int32 [slots, near] rows of the table of positions; None: the model mixes none
    )
    position_weights: Tensor | None = None  # float32 [slots, near]
    adapter: Tensor | None = None  # int32 [slots] slot of the adapter of each slot's image, 0: none; None: no image's
    cell_adapter: Tensor | None = None  # int32 [slots / cell] the same for each cell


class HeadTensors(NamedTuple):
    """A SAMPLE program's inputs; see HeadInputs."""

    hidden_row: Tensor  # int64 [r]
    slot: Tensor  # int64 [r]
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    uniform: Tensor
    target: Tensor  # int64 [r]
    mask_row: Tensor  # int64 [r]
    masks: Tensor  # uint8 [m, ceil(vocabulary / 8)]
    place: Tensor | None = None  # int64 [r]
    ahead: Tensor | None = None  # int64 [r, k]


class ResetTensors(NamedTuple):
    """A RESET program's inputs; see ResetInputs."""

    slot: Tensor  # int64 [r]
    counts: Tensor
    prompt_mask: Tensor
    bias_id: Tensor  # int64 [r, MAX_BIAS]
    bias_value: Tensor


class PoolTensors(NamedTuple):
    """A POOL program's inputs; see PoolInputs."""

    hidden_row: Tensor  # int64 [r]
    group: Tensor  # int32 [r]


class SamplerState(NamedTuple):
    """Per-slot sampler state on the device; slot 0 is the sink of padded rows."""

    last: Tensor  # int32 [slots + 1] token last sampled
    counts: Tensor  # int32 [slots + 1, vocabulary] ids output so far
    prompt_mask: Tensor  # uint8 [slots + 1, ceil(vocabulary / 8)] prompt ids, little bit order
    bias_id: Tensor  # int64 [slots + 1, MAX_BIAS]
    bias_value: Tensor  # float32 [slots + 1, MAX_BIAS]


class HeadTensorsOut(NamedTuple):
    """The outputs of a SAMPLE program on the device."""

    token: Tensor  # int32 [r]
    logprob: Tensor | None  # float32 [r]; None in the greedy variant, like all below
    rank: Tensor | None  # int32 [r]
    top_id: Tensor | None  # int32 [r, MAX_LOGPROBS]
    top_logprob: Tensor | None  # float32 [r, MAX_LOGPROBS]


class PoolTensorsOut(NamedTuple):
    """The outputs of a POOL program on the device."""

    values: Tensor  # float32 [r, width], row g - 1 for group g


TensorsOut = HeadTensorsOut | PoolTensorsOut


@overload
def host_output(out: HeadTensorsOut, arrays: Sequence[Any]) -> HeadOutput: ...
@overload
def host_output(out: PoolTensorsOut, arrays: Sequence[Any]) -> PoolOutput: ...
def host_output(out: TensorsOut, arrays: Sequence[Any]) -> HeadOutput | PoolOutput:
    """Returns the host form of ``out``; ``arrays`` follow the order of its fields, None where a tensor is None."""
    return PoolOutput(*arrays) if isinstance(out, PoolTensorsOut) else HeadOutput(*arrays)
