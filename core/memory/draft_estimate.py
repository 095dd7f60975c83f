"""Memory and launches of a draft model beside its target, on a device with planned shapes.

The draft model reads each of the target's text launches, at the same size or a larger one, and has SAMPLE launches of
its own. Its keys lie in the target's blocks. Pure; sizes in bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from trencadis.core.bucket_plan import Plan
from trencadis.core.buckets import LORA, Bucket, Stage, drafting_bucket, is_drafting, target_bucket
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.memory.estimate import MemoryEstimator, estimate_memory_in_use, state_slots
from trencadis.core.memory.graph_selection import GraphPrice
from trencadis.core.memory.ledger import MemoryInUse, MemorySplit
from trencadis.core.shapes.bucket_planner import pruned, without_launch_cost
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.shared_constants import RESERVED_ROWS

SHARE = 0.5
"""Text launches of the draft model, as a share of the target's: it is small, so that more padding costs less than more
programs at the start.
"""

READ = (Stage.PREFILL, Stage.DECODE, Stage.FRESH, Stage.CONTEXT, Stage.VERIFY)
"""Stages whose launches a draft model repeats."""

DRAWN = ("greedy", "full")
"""Variants of SAMPLE by which a draft model proposes."""


def with_drafting_buckets(plan: Plan) -> Plan:
    """Returns ``plan`` with the launches of a draft model; some of its text buckets hold the needs of several.

    A draft model has no adapters: it reads a launch with adapters as one without.
    """
    text = [b for b in plan.buckets if b.stage in READ and b.variant != LORA]
    read = pruned(text, len(text) - int(SHARE * len(text)), without_launch_cost(plan.policy.cost))
    drawn = (b for b in plan.buckets if b.stage is Stage.SAMPLE and b.variant in DRAWN)
    own = map(drafting_bucket, (*read, *drawn))
    return dataclasses.replace(plan, buckets=tuple(sorted([*plan.buckets, *own])))


def _restrict(plan: Plan, buckets: Iterable[Bucket]) -> Plan:
    return dataclasses.replace(plan, buckets=tuple(buckets))


@dataclass(frozen=True)
class DraftingEstimator(MemoryEstimator):
    """Also computes the sizes of launches of a draft model, and of its keys, which every block holds.

    ``weights`` are those of the target alone.
    """

    draft: MemoryEstimator | None = None

    @property
    def drafting(self) -> MemoryEstimator:
        """The sizes of the draft model."""
        assert self.draft is not None
        return self.draft

    def block_bytes(self, block_size: int) -> int:
        """Returns the bytes of a block of both models."""
        return super().block_bytes(block_size) + self.drafting.block_bytes(block_size)

    def all_inputs(self, plan: Plan) -> int:
        """Returns the bytes of the inputs of all programs; those of the draft model share none with the target's."""
        own = super().all_inputs(_restrict(plan, (b for b in plan.buckets if not is_drafting(b))))
        return own + self.drafting.all_inputs(draft_plan(plan))

    def activations(self, bucket: Bucket, block_size: int) -> int:
        if is_drafting(bucket):
            return self.drafting.activations(target_bucket(bucket), block_size)
        return super().activations(bucket, block_size)

    def seconds(self, bucket: Bucket) -> float:
        return self.drafting.seconds(target_bucket(bucket)) if is_drafting(bucket) else super().seconds(bucket)

    def price(self, bucket: Bucket, rule: str = "sum") -> GraphPrice:
        if not is_drafting(bucket):
            return super().price(bucket, rule)
        return dataclasses.replace(self.drafting.price(target_bucket(bucket), rule), bucket=bucket)


def draft_plan(plan: Plan) -> Plan:
    """Returns the launches of the draft model alone, as those of a model without a target."""
    return _restrict(plan, (target_bucket(b) for b in plan.buckets if is_drafting(b)))


def with_draft_sizes(target: MemoryEstimator, draft: ModelConfig) -> DraftingEstimator:
    """Returns ``target`` with the sizes of a draft model."""
    own = {f.name: getattr(target, f.name) for f in dataclasses.fields(MemoryEstimator)}
    return DraftingEstimator(**own, draft=dataclasses.replace(target, model=draft, adapters=None))


def with_draft_memory(
    taken: MemoryInUse, estimator: MemoryEstimator, plan: Plan, limits: ShapeLimits
) -> MemoryInUse:  # fmt: skip
    """Returns the bytes in use with the weights and fixed tensors of a draft model, if there is one.

    It reads the last tokens of the target's sampler state. Inputs and activations are those of ``estimator`` already.
    """
    if not isinstance(estimator, DraftingEstimator):
        return taken
    model = estimator.drafting.model
    few = dataclasses.replace(limits, max_rows=0, max_tokens=max(limits.max_tokens, limits.max_rows))
    draft = estimate_memory_in_use(estimator.drafting, _restrict(plan, ()), few, 0, 0, RESERVED_ROWS)
    return dataclasses.replace(
        taken,
        draft_weights=draft.weights,
        arena=taken.arena + draft.arena,
        state=taken.state + draft.state - 4 * state_slots(model, 0),
        hidden=taken.hidden + draft.hidden,
    )


def with_draft_keys(split: MemorySplit, estimator: MemoryEstimator, block_size: int) -> MemorySplit:
    """Returns ``split`` with the part of its KV cache that holds the keys of a draft model, if there is one."""
    if not isinstance(estimator, DraftingEstimator):
        return split
    count = split.kv // estimator.block_bytes(block_size)
    return dataclasses.replace(split, draft=count * estimator.drafting.block_bytes(block_size))
