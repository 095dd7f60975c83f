"""What a model needs on one device by formula, where nothing has been measured. Pure; bytes unless named otherwise.

``ranks`` devices share the model: query heads and MLP columns are divided, KV heads are replicated above their count,
the vocabulary is divided. Formulas state what is held at the same time; measurements replace them (core/measured.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.core.buckets import Bucket, Plan, Stage, padded_tokens
from trencadis.core.closure import ShapeLimits
from trencadis.core.graph_budget import Price
from trencadis.core.ledger import Before
from trencadis.core.models.config import ModelConfig, TextConfig, VisionConfig

SPARE_SLOTS = 8
MAX_BIAS = 300
TILE = 1024
"""Query slots of one tile of the tower's full attention."""

TOKEN_INPUTS = 40
"""Bytes of a token's inputs: id, slot, three positions, arena row (int32), hidden row and KV slot (int64)."""

BLOCK_INPUTS = 12
"""Bytes of a listed block's inputs: id, row, usage."""

SAMPLE_INPUTS = 64
"""Bytes of a SAMPLE row's inputs beside its mask."""

CODE_PER_LAYER = 160 << 10
CODE_BASE = 1 << 20
"""Code of a graph: a guess that measurements replace."""

COMPILE_SECONDS_PER_LAYER = 0.15
COMPILE_SECONDS_BASE = 0.5
"""Compiling and capturing one bucket: a guess that measurements replace."""


@dataclass(frozen=True)
class Sized:
    """One model on one of ``ranks`` devices."""

    model: ModelConfig
    itemsize: int = 2
    ranks: int = 1

    @property
    def text(self) -> TextConfig:
        """The decoder."""
        return self.model.text

    @property
    def kv_heads(self) -> int:
        """KV heads of this device."""
        return max(self.text.kv_heads // self.ranks, 1)

    def block_bytes(self, block_size: int) -> int:
        """K and V of one block over all layers."""
        return 2 * self.text.layers * block_size * self.kv_heads * self.text.head_dim * self.itemsize

    def weights(self) -> int:
        """Weights of this device (norms and biases left out: under 0.1 %)."""
        t = self.text
        heads, columns = -(-t.heads // self.ranks), -(-t.intermediate // self.ranks)
        layer = t.hidden * t.head_dim * 2 * (heads + self.kv_heads) + 3 * t.hidden * columns
        total = t.layers * layer + -(-t.vocab // self.ranks) * t.hidden * (1 if t.tied else 2)
        return (total + (self._tower(self.model.vision) if self.model.vision else 0)) * self.itemsize

    def _tower(self, v: VisionConfig) -> int:
        merged = v.hidden * v.merge**2
        block = 4 * v.hidden**2 + 3 * v.hidden * v.intermediate
        return -(-(v.depth * block + merged * (merged + v.out_hidden)) // self.ranks) + v.patch_values * v.hidden

    def io(self, bucket: Bucket) -> int:
        """A graph's own inputs and outputs."""
        stage, dims = bucket.stage, bucket.dims
        vocab = self.text.vocab
        if stage is Stage.VISION:
            return dims[0] * ((self.model.vision.patch_values if self.model.vision else 0) + 10)
        if stage is Stage.SAMPLE:
            outputs = 8 + (20 * 8 + 8 if bucket.variant == "full" else 0)
            return dims[0] * (SAMPLE_INPUTS + -(-vocab // 8) + outputs)
        if stage is Stage.RESET:
            return dims[0] * (8 + 4 * vocab + -(-vocab // 8) + MAX_BIAS * 12)
        blocks = dims[1] * BLOCK_INPUTS if stage in (Stage.CONTEXT, Stage.DECODE) and len(dims) == 2 else 0
        return padded_tokens(bucket) * TOKEN_INPUTS + blocks

    def layers(self, stage: Stage) -> int:
        """Layers that a stage's graph holds."""
        if stage is Stage.VISION:
            return self.model.vision.depth if self.model.vision else 0
        return 0 if stage in (Stage.SAMPLE, Stage.RESET) else self.text.layers

    def code(self, stage: Stage) -> int:
        """Code of one graph."""
        return CODE_BASE + CODE_PER_LAYER * self.layers(stage)

    def activations(self, bucket: Bucket, block_size: int) -> int:
        """Most bytes that one launch holds at a time: residual, normed and projected states, attention, MLP."""
        stage, size, t = bucket.stage, padded_tokens(bucket), self.text
        if stage is Stage.VISION:
            return self._vision_activations(size)
        if stage is Stage.SAMPLE:
            return size * -(-t.vocab // self.ranks) * 4 * (4 if bucket.variant == "full" else 2)
        if stage is Stage.RESET:
            return 0
        heads = -(-t.heads // self.ranks)
        states = size * (3 * t.hidden + (2 * heads + 2 * self.kv_heads) * t.head_dim) * self.itemsize
        mlp = size * (t.hidden + 2 * -(-t.intermediate // self.ranks)) * self.itemsize
        gathered = 0
        if len(bucket.dims) == 2 and stage in (Stage.CONTEXT, Stage.DECODE):
            width = bucket.dims[1] * block_size
            gathered = 2 * width * self.kv_heads * t.head_dim * self.itemsize
            gathered += width * heads * 4 * (min(size, TILE) if stage is Stage.CONTEXT else 1)
        return max(states + gathered, states // 2 + mlp)

    def _vision_activations(self, slots: int) -> int:
        v = self.model.vision
        if v is None:
            return 0
        heads, columns = -(-v.heads // self.ranks), -(-v.intermediate // self.ranks)
        states = slots * (3 * v.hidden + 3 * -(-v.hidden // self.ranks)) * self.itemsize
        scores = min(TILE, slots) * slots * heads * 4
        return max(states + scores, slots * (2 * v.hidden + 2 * columns) * self.itemsize)

    def seconds(self, bucket: Bucket) -> float:
        """Compiling and capturing one bucket."""
        return COMPILE_SECONDS_BASE + COMPILE_SECONDS_PER_LAYER * self.layers(bucket.stage)

    def price(self, bucket: Bucket) -> Price:
        """A graph by formula: its own tensors and code, and the states that a capture keeps."""
        width = self.model.vision.hidden if bucket.stage is Stage.VISION and self.model.vision else self.text.hidden
        kept = 0 if bucket.stage in (Stage.SAMPLE, Stage.RESET) else 2 * padded_tokens(bucket) * width * self.itemsize
        return Price(bucket, self.io(bucket) + self.code(bucket.stage), kept)


def before(sized: Sized, plan: Plan, limits: ShapeLimits, total: int, others: int, arena_rows: int) -> Before:
    """Everything that exists before the KV cache."""
    t = sized.text
    slots = limits.max_rows + SPARE_SLOTS + 1
    state = slots * (4 + 4 * t.vocab + -(-t.vocab // 8) + MAX_BIAS * 12)
    inputs = {stage: max(sized.io(b) for b in plan.of(stage)) for stage in Stage if plan.of(stage)}
    return Before(
        total=total,
        others=others,
        weights=sized.weights(),
        arena=arena_rows * t.hidden * sized.itemsize,
        state=state,
        hidden=(max(limits.max_tokens, limits.max_rows) + 1) * t.hidden * sized.itemsize,
        inputs=sum(inputs.values()),
        activations=max((sized.activations(b, plan.block_size) for b in plan.buckets), default=0),
    )
