"""The cost of a launch: the polynomial that chooses buckets, and the work by which plans are compared. Pure.

One token costs 2 operations per weight of a decoder layer's projections; one attended pair of query and key costs 4
operations per query value (two products). The same holds for a patch slot of the vision tower.
"""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.core.buckets import Bucket, Stage, padded_tokens, verified_width
from trencadis.core.checkpoint.model_config import GATED, ModelConfig, TextConfig
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.vision_config import WINDOW_SLOTS


@dataclass(frozen=True)
class Costs:
    """Cost of a bucket in units of one decoder token's linear operations.

    Args:
        launch: the constant cost of a launch, which reads all weights once, regardless of its tokens.
        pair: one attended pair of query and key, all layers.
        block: reading one KV block, all layers.
        slot: the linear operations and window attention of one vision slot.
        slot_pair: one attended pair of slots, all layers of full attention.
        vision_launch: the same as ``launch``, for the tower.
        head: one row of SAMPLE or POOL.
        block_size: tokens of a KV block.
    """

    launch: float = 128.0
    pair: float = 3.1e-5
    block: float = 0.1
    slot: float = 0.1
    slot_pair: float = 2e-6
    vision_launch: float = 12.0
    head: float = 0.1
    block_size: int = 128

    def __call__(self, bucket: Bucket) -> float:
        """Returns the cost of one launch of ``bucket``."""
        return sum(self.terms(bucket))

    def terms(self, bucket: Bucket) -> tuple[float, ...]:
        """Returns the summands of the cost, the constant one first; their number depends on stage and axes only."""
        stage, dims = bucket.stage, bucket.dims
        if stage is Stage.FRESH:
            rows, tokens = dims
            return self.launch, rows * tokens, self.pair * rows * tokens * (tokens + 1) / 2
        if stage is Stage.CONTEXT:
            tokens, blocks = dims
            pairs = tokens * (blocks * self.block_size + tokens)
            return self.launch, tokens, self.pair * pairs, self.block * blocks
        if stage is Stage.DECODE and len(dims) == 2:
            rows, blocks = dims
            return self.launch, rows, (self.pair * self.block_size + self.block) * blocks
        if stage is Stage.VERIFY:
            tokens, blocks = padded_tokens(bucket), dims[1] if len(dims) == 2 else 0
            pairs = verified_width(bucket) * self.block_size * blocks
            return self.launch, tokens, self.pair * pairs, self.block * blocks
        if stage is Stage.VISION:
            return self.vision_launch, self.slot * dims[0], self.slot_pair * dims[0] ** 2
        if stage in (Stage.SAMPLE, Stage.RESET, Stage.POOL):
            return self.launch * self.head, self.head * dims[0]
        return self.launch, dims[0]


def layers_values(t: TextConfig, active: bool = True) -> int:
    """Returns the number of projection weights in all decoder layers, without norms and biases (under 0.1 %).

    ``active``: count only those applied to one token, i.e. only the experts that it is routed to.
    """
    matrices = 3 if t.mlp == GATED else 2
    attending = (i for i in range(t.layers) if t.mixes_tokens(i) and i not in t.recurrent_layers)
    attention = sum(t.of_layer(i).attention_values for i in attending)
    if t.recurrent is not None:
        attention += len(t.recurrent.layers) * t.recurrent.values(t.hidden)
    dense = sum(t.of_layer(i).intermediate for i in range(t.layers) if t.has_mlp(i))
    total = attention + matrices * t.hidden * dense + t.layers * t.layer_input_values
    if t.experts is not None:
        own = t.experts.values(t.hidden, only=t.experts.top if active else 0)
        total += t.expert_layers * (own + t.experts.shared_values(t.hidden))
    return total


def model_values(model: ModelConfig) -> int:
    """Returns the projection weights that are applied to one token, which are the unit of ``Costs``."""
    own_values = family_of(model.architecture).values
    return layers_values(model.text) if own_values is None else own_values(model)


def costs_of(model: ModelConfig, block_size: int, ridge: float, itemsize: int = 2) -> Costs:
    """Returns the cost polynomial of a model on a device that computes ``ridge`` operations while it reads one byte.

    Reading all weights takes as long as computing ``ridge`` x itemsize / 2 tokens; KV blocks are scaled in the same
    way.
    """
    t = model.text
    values, own_values = model_values(model), family_of(model.architecture).values
    # A launch of many tokens reads every expert; one of few tokens reads fewer, but how many is unknown when planning.
    read = values if own_values is not None else layers_values(t, active=False)
    launch = ridge * itemsize / 2 * read / values
    caching = [t.of_layer(layer) for layer in t.kv_layers]
    stored = sum(own.kv_heads * own.head_dim for own in caching)
    block = 2 * block_size * stored * itemsize * ridge / (2 * values)
    pair = 2 * sum(own.heads * own.head_dim for own in caching) / values
    own = {"pair": pair, "head": t.width * t.vocab / values}
    if model.vision is not None:
        v = model.vision
        own["slot"] = (v.slot_weights() + 2 * v.hidden * WINDOW_SLOTS * (v.depth - v.whole)) / values
        own["slot_pair"] = 2 * v.hidden * v.whole / values
        own["vision_launch"] = launch * v.slot_weights() / values
    return Costs(launch=launch, block=block, block_size=block_size, **own)


def work_of(model: ModelConfig, block_size: int) -> Costs:
    """Returns only the operations (linear and attention, padding included), by which plans are compared."""
    return costs_of(model, block_size, ridge=0.0)


def count_operations(model: ModelConfig, bucket: Bucket, block_size: int) -> float:
    """Returns the operations of one launch of ``bucket`` on all ranks, linear and attention, padding included."""
    return 2 * model_values(model) * work_of(model, block_size)(bucket)
