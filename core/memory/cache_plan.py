"""Plans how many KV blocks and arena rows the CPU has, and how many slots of recurrent state. Pure; sizes in bytes.

The KV cache has the requested size, or the minimum of 4 GiB, 40 % of the memory left after the weights, and what
max_num_seqs requests of max_model_len tokens can use. Devices with graphs divide their memory with
core/memory/memory_division.py.

A sequence needs a slot of fixed size in every recurrent layer. If ``--max-num-seqs`` is given, each of that many
sequences gets one; else as many as fit into a share of the memory that is left for them and the KV cache. Snapshots
have a budget of their own (``--state-snapshot-memory``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig, reserved_rows
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.host_memory import gib
from trencadis.core.kv_cache_format import RESERVED_BLOCKS, head_bytes
from trencadis.core.memory.draft_memory_estimate import HeadEstimator
from trencadis.core.memory.memory_division import DeviceTooSmall, MemorySplit
from trencadis.core.memory.memory_estimator import arena_width
from trencadis.core.memory.weight_bytes import quantisation_excess
from trencadis.core.shapes.launch_costs import layers_values
from trencadis.core.spec.draft_checkpoint import Drafter, EagleConfig, sizes_of

SHARE = 0.5
"""Share of the memory left for states and KV cache that the states of sequences take at most, unless told otherwise."""

MOST_SNAPSHOTS = 4096


@dataclass(frozen=True)
class StatePlan:
    """The slots of recurrent state. ``sequences``: one for each running sequence, and one that waits for its fetch."""

    sequences: int = 0
    snapshots: int = 0
    slot_bytes: int = 0

    @property
    def slots(self) -> int:
        """Slots of the tensors, with the sink of padding; 0: the model has no recurrent layers."""
        return 1 + self.sequences + self.snapshots if self.sequences else 0

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    def notes(self, rows: int) -> list[str]:
        """Returns lines for users; ``rows``: ``--max-num-seqs``."""
        if not self.sequences:
            return []
        kept = f"{self.snapshots} snapshots" if self.snapshots else "no snapshots, so that no prefixes are shared,"
        line = f"recurrent state: {self.sequences - 1} sequences and {kept} of {gib(self.slot_bytes)} each"
        if self.sequences <= rows:
            line += f"; --max-num-seqs {rows} would need {gib((rows + 2) * self.slot_bytes)}"
        return [line]


NO_STATES = StatePlan()


def plan_states(config: EngineConfig, model: ModelConfig, slot: int, rows: int, left: int, cache: int) -> StatePlan:
    """Plans the pool of recurrent state.

    Args:
        slot: bytes of a slot over all recurrent layers of the device; 0: it has none of them.
        rows: most sequences that may run at a time.
        left: bytes left for states and KV cache.
        cache: bytes of the KV cache, of which the snapshots have a share.

    Raises:
        StartupError: the states of ``--max-num-seqs`` sequences do not fit.
        DeviceTooSmall: the state of a single one does not.
    """
    if model.text.recurrent is None:
        return NO_STATES
    if not slot:  # a pipeline stage without such layers: the others decide
        caches = config.state_snapshot_memory and config.enable_prefix_caching and config.enable_chunked_prefill
        return StatePlan(rows + 1, MOST_SNAPSHOTS if caches else 0)
    count = min(rows + 1, int(SHARE * left) // slot - 1) if config.max_num_seqs is None else rows + 1
    fits = left // slot - 1
    if left <= 0:  # what is in use without any state does not fit, which the KV cache's check says
        return StatePlan(2, 0, slot)
    if count < 2 or count > fits:
        need, many = gib((max(count, 2) + 1) * slot), max(count - 1, 1)
        line = f"{model.name}: the recurrent state of {many} sequences needs {need} and {gib(left)} are left"
        if fits < 2:
            raise DeviceTooSmall(f"{line}; not one fits")
        raise StartupError(f"{line}; {fits - 1} fit (--max-num-seqs {fits - 1})")
    return StatePlan(count, _count_snapshots(config, slot, min(cache, left - (count + 1) * slot)), slot)


def _count_snapshots(config: EngineConfig, slot: int, cache: int) -> int:
    """Returns the number of snapshots that ``--state-snapshot-memory`` holds."""
    asked = config.state_snapshot_memory
    if not config.enable_prefix_caching or not config.enable_chunked_prefill:
        return 0
    budget = int(asked) if asked > 1 else int(asked * cache)
    if budget > cache:
        raise StartupError(f"--state-snapshot-memory {int(asked)}: {gib(max(cache, 0))} are left for the KV cache")
    return min(budget // slot, MOST_SNAPSHOTS)


KV_CAP = 4 << 30
KV_SHARE = 0.4
ARENA_ROWS = 8192
"""Minimum number of arena rows: a small model's rows cost little, and many small images should stay cached."""

LEAST_UNITS, MOST_UNITS = 4, 16
"""Limits of the default number of images in the arena if images stay as long as their requests."""


@dataclass(frozen=True)
class CachePlan:
    """Sizes of KV cache and arena, derived from memory and never written back into a config."""

    num_blocks: int
    block_size: int
    max_model_len: int
    arena_rows: int
    kv_bytes: int
    arena_bytes: int
    weights_bytes: int
    notes: tuple[str, ...] = ()
    host_blocks: int = 0
    host_states: int = 0
    states: StatePlan = NO_STATES

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def concurrency(self) -> float:
        """Number of maximum-length requests that the KV cache holds at the same time."""
        return self.kv_tokens / self.max_model_len


@dataclass(frozen=True)
class CacheOptions:
    """The user's settings; None: not set."""

    block_size: int
    max_num_seqs: int
    max_model_len: int | None = None
    kv_bytes: int | None = None
    num_blocks: int | None = None
    arena_images: int | None = None


def block_bytes(text: TextConfig, block_size: int, itemsize: int, ranks: int = 1) -> int:
    """Returns the bytes of K and V of one block over all layers of all ranks, which may share a KV head."""
    each = (text.of_layer(index) for index in text.kv_layers)
    return block_size * sum(
        t.kv_heads * max(ranks // t.kv_heads, 1) * head_bytes(t.kv, t.head_dim, itemsize) for t in each
    )


def weights_bytes(config: ModelConfig, itemsize: int, ranks: int = 1, quantised: str = "") -> int:
    """Returns the weights of all ``ranks`` of all stages by formula, from config.json alone.

    Norms and biases (0.1 %) are not counted.
    """
    t = config.text
    total = layers_values(t, active=False) + (t.vocab * (1 if t.tied else 2)) * t.width + t.learned * t.hidden
    if config.vision is not None:
        total += config.vision.count_weights() * (ranks if config.encoder_data_parallel else 1)
    total += _held_twice(t, ranks, config.share.stages)
    return total * itemsize + ranks * quantisation_excess(replace(config, part=None), itemsize, ranks, quantised)


def _held_twice(text: TextConfig, ranks: int, stages: int = 1) -> int:
    """Returns the number of values that ranks hold in addition to the model's: embedding copies and a tied head's
    shares.
    """
    if ranks == 1 and stages == 1:
        return 0
    table = text.vocab * text.width
    return (ranks - 1) * table + (table if text.tied else 0)


def _longest(config: ModelConfig, asked: CacheOptions) -> int:
    """Returns the model's longest row; raises StartupError if a longer one is requested."""
    longest = config.text.max_positions
    if asked.max_model_len is not None and asked.max_model_len > longest:
        raise StartupError(
            f"--max-model-len {asked.max_model_len} is more than {config.name} supports; the largest is {longest}"
        )
    return longest


def plan_cpu(
    config: ModelConfig,
    asked: CacheOptions,
    itemsize: int,
    available: int,
    image_tokens: int,
    ranks: int = 1,
    quantised: str = "",
    engine: EngineConfig | None = None,
    draft: Drafter | None = None,
) -> CachePlan:
    """Plans the caches of an engine on the CPU; ``engine`` has the options for recurrent state.

    ``available`` is the memory before weights are loaded. The ``ranks`` share one machine, so byte counts are sums over
    all ranks. ``quantised``: ``Policy.quantised``. ``draft``: what drafts, whose keys every block holds too.

    Raises:
        StartupError: there is not enough memory, or the model length exceeds the model or the KV cache; the message
            names a value that fits.
    """
    text, longest = config.text, _longest(config, asked)
    weights = weights_bytes(config, itemsize, ranks, quantised)
    per_block = block_bytes(text, asked.block_size, itemsize, ranks)
    if draft is not None:
        per_block += block_bytes(sizes_of(draft).text, asked.block_size, itemsize)
        weights += _draft_bytes(draft, itemsize, quantised, available - weights)
    left = available - weights
    _check_weights(weights, available, per_block)
    states = _plan_states(config, asked, itemsize, left, engine)
    left -= states.bytes
    wanted = asked.max_model_len or longest
    usable = asked.max_num_seqs * -(-wanted // asked.block_size)
    budget = asked.kv_bytes if asked.kv_bytes is not None else min(KV_CAP, int(KV_SHARE * left))
    most = budget // per_block if asked.kv_bytes is not None else min(budget // per_block, usable)
    blocks = most if asked.num_blocks is None else asked.num_blocks
    fits, notes = blocks * asked.block_size, list[str]()
    if fits < wanted:
        if asked.max_model_len is not None or fits < 1:
            need = -(-wanted // asked.block_size) * per_block
            raise StartupError(
                f"--max-model-len {wanted} needs {gib(need)} of KV cache and {gib(blocks * per_block)} are planned; "
                f"the largest that fits is {max(fits, 0)} (or --kv-cache-memory-bytes {need})"
            )
        notes.append(f"max_model_len lowered from {wanted} to {fits}: that is what the KV cache holds")
        wanted = fits
    if asked.kv_bytes is not None and asked.kv_bytes > left:
        raise StartupError(f"--kv-cache-memory-bytes asks for {gib(asked.kv_bytes)}; {gib(left)} are free")
    rows, row_bytes = arena_rows(config, asked, image_tokens, wanted), _row_bytes(config, ranks) * itemsize
    _check_units(config, rows, image_tokens, row_bytes, left - blocks * per_block)
    return CachePlan(
        num_blocks=blocks,
        block_size=asked.block_size,
        max_model_len=wanted,
        arena_rows=rows,
        kv_bytes=(blocks + RESERVED_BLOCKS) * per_block,
        arena_bytes=rows * row_bytes,
        weights_bytes=weights,
        notes=(*notes, *states.notes(asked.max_num_seqs)),
        states=states,
    )


def _check_weights(weights: int, available: int, block: int) -> None:
    """Raises StartupError if no KV block fits beside the weights."""
    if available - weights < block:
        raise StartupError(
            f"not enough memory: the weights need {gib(weights)} and {gib(available)} are free; "
            "a smaller model, --dtype bfloat16 or --quantization int8 would fit"
        )


def _plan_states(
    config: ModelConfig, asked: CacheOptions, itemsize: int, left: int, engine: EngineConfig | None
) -> StatePlan:
    """Plans the recurrent state of all layers and ranks; ``left``: bytes beside the weights."""
    held = config.text.recurrent
    slot = 0 if held is None else len(held.layers) * held.slot_bytes(itemsize)
    cache = asked.kv_bytes if asked.kv_bytes is not None else min(KV_CAP, int(KV_SHARE * left))
    return plan_states(engine or EngineConfig(), config, slot, asked.max_num_seqs, left, cache)


def _draft_bytes(draft: Drafter, itemsize: int, quantised: str, left: int) -> int:
    """Returns the bytes of the weights of what drafts; raises StartupError if they are more than ``left``."""
    if isinstance(draft, EagleConfig):
        kind, need = "head", HeadEstimator(draft.sizes, itemsize, head=draft).weights()
    else:
        kind, need = "draft model", weights_bytes(draft, itemsize, 1, quantised)
    if need > left:
        raise StartupError(
            f"the {kind} {draft.path.name} does not fit: its weights need {gib(need)} and {gib(max(left, 0))} are "
            f"left; {gib(need - max(left, 0))} are missing"
        )
    return need


def arena_rows(config: ModelConfig, asked: CacheOptions, image_tokens: int, model_len: int) -> int:
    """Returns the number of arena rows for the largest images, including the reserved ones."""
    if config.vision is None:
        return reserved_rows(config)
    if config.text.cross_attention_layers:
        return arena_units(config, asked.arena_images, asked.max_num_seqs) * image_tokens + reserved_rows(config)
    image_tokens = min(image_tokens, model_len)
    if asked.arena_images is not None:
        if asked.arena_images < 2:
            raise StartupError("--encoder-cache-images must be at least 2")
        return asked.arena_images * image_tokens + reserved_rows(config)
    return max(4 * image_tokens, ARENA_ROWS) + reserved_rows(config)


def arena_units(config: ModelConfig, asked: int | None, rows: int) -> int:
    """Returns the number of images in the arena for cross-attention; 0: there is none. ``rows``: concurrent requests.

    Such an image stays as long as its request, so there should be one for each request.
    """
    if not config.text.cross_attention_layers:
        return 0
    if asked is not None and asked < 1:
        raise StartupError("--encoder-cache-images must be at least 1")
    return asked or max(LEAST_UNITS, min(rows, MOST_UNITS))


def _row_bytes(config: ModelConfig, ranks: int) -> int:
    """Returns the number of values of an arena row.

    With cross-attention, those of all ranks, which hold different heads.
    """
    return config.row_parts * arena_width(config, ranks) * (ranks if config.text.cross_attention_layers else 1)


def _check_units(config: ModelConfig, rows: int, unit: int, row_bytes: int, left: int) -> None:
    """Raises StartupError if images for cross-attention, ``unit`` rows each, do not fit into ``left`` bytes."""
    need = rows * row_bytes
    if not config.text.cross_attention_layers or need <= left:
        return
    line = f"{rows // unit} images (--encoder-cache-images) need {gib(need)} and {gib(max(left, 0))} are left"
    fits = left // (unit * row_bytes)
    if fits > 0:
        raise StartupError(f"{line}; {fits} fit")
    raise StartupError(f"{line}; not one fits, {gib(unit * row_bytes - left)} are missing")


def requested_kv_bytes(config: EngineConfig, block_bytes: int) -> int | None:
    """Returns the bytes of KV cache that the user requests, in blocks or in bytes; None: as much as fits."""
    if config.num_gpu_blocks_override is not None:
        return (config.num_gpu_blocks_override + RESERVED_BLOCKS) * block_bytes
    return config.kv_cache_memory_bytes


def kv_flag(config: EngineConfig) -> str:
    """Returns the flag that ``requested_kv_bytes`` follows, with its value."""
    if config.num_gpu_blocks_override is not None:
        return f"--num-gpu-blocks-override {config.num_gpu_blocks_override}"
    return f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"


def check_requested_kv(flag: str, asked: int, memory_split: MemorySplit) -> None:
    """Raises StartupError if more is requested than is left."""
    available = memory_split.usable - memory_split.graphs
    if asked > available:
        raise StartupError(f"{flag} is {asked} bytes, more than the {available} that are left for it.")
