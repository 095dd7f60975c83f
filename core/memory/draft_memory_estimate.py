"""Memory and launches of a draft model or head beside its target, on a device with planned shapes.

It reads each of the target's text launches, at the same size or a larger one, and has SAMPLE launches of its own. Its
keys lie in the target's blocks. Pure; sizes in bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import LORA, Bucket, Stage, drafting_bucket, is_drafting, padded_tokens, target_bucket
from trencadis.core.host_memory import gib
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.media_spans import RESERVED_ROWS
from trencadis.core.memory.graph_selection import GraphPrice
from trencadis.core.memory.memory_division import MemoryInUse, MemorySplit
from trencadis.core.memory.memory_estimator import MemoryEstimator, estimate_memory_in_use, state_slots
from trencadis.core.shapes.bucket_planner import pruned, without_launch_cost
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.spec.draft_checkpoint import Drafter, EagleConfig, sizes_of
from trencadis.core.weight_files import HEAD_STATES

SHARE = 0.5
"""Text launches of the draft model, as a share of the target's: it is small, so that more padding costs less than more
programs at the start.
"""

READ = (Stage.PREFILL, Stage.DECODE, Stage.FRESH, Stage.CONTEXT, Stage.VERIFY)
"""Stages whose launches a draft model repeats."""

DRAWN = ("greedy", "full")
"""Variants of SAMPLE by which a draft model proposes; a head takes its likeliest ids, by the first."""

KEPT = 3
"""Rows of a head for each token of a step: those of ``HeadState``, which has one more that padding reads."""


def with_drafting_buckets(plan: Plan, drafter: Drafter) -> Plan:
    """Returns ``plan`` with the launches of what drafts; some of its text buckets hold the needs of several.

    What drafts has no adapters: it reads a launch with adapters as one without.
    """
    variants = DRAWN[:1] if isinstance(drafter, EagleConfig) else DRAWN
    text = [b for b in plan.buckets if b.stage in READ and b.variant != LORA]
    read = pruned(text, len(text) - int(SHARE * len(text)), without_launch_cost(plan.policy.cost))
    drawn = (b for b in plan.buckets if b.stage is Stage.SAMPLE and b.variant in variants)
    own = map(drafting_bucket, (*read, *drawn))
    return dataclasses.replace(plan, buckets=tuple(sorted([*plan.buckets, *own])))


def _restrict(plan: Plan, buckets: Iterable[Bucket]) -> Plan:
    return dataclasses.replace(plan, buckets=tuple(buckets))


@dataclass(frozen=True)
class HeadEstimator(MemoryEstimator):
    """Computes the sizes of a head of EAGLE-3; ``model``: ``EagleConfig.sizes``."""

    head: EagleConfig | None = None

    def weights(self) -> int:
        """Returns the exact bytes of weights, frequencies, and the ids of drafts.

        Beside a decoder of one layer a head has the projection, a norm, and queries, keys and values of twice the
        width; the embedding has the target's vocabulary, or is the target's.
        """
        assert self.head is not None
        t = self.text
        qkv = (t.heads + 2 * t.kv_heads) * t.head_dim
        more = (HEAD_STATES * t.hidden + 1 + qkv) * t.hidden
        table = (self.head.vocab if self.head.own_table else 0) - t.vocab
        return super().weights() + (more + table * t.hidden) * self.itemsize + 4 * t.vocab

    def activations(self, bucket: Bucket, block_size: int) -> int:
        found = super().activations(bucket, block_size)
        if bucket.stage is Stage.SAMPLE:
            return found
        return found + HEAD_STATES * padded_tokens(bucket) * self.text.hidden * self.itemsize  # x, and its parts


@dataclass(frozen=True)
class DraftingEstimator(MemoryEstimator):
    """Also computes the sizes of launches of what drafts, and of its keys, which every block holds.

    ``weights`` are those of the target alone. Its text launches keep the states that a head reads until they end.
    """

    draft: MemoryEstimator | None = None

    @property
    def drafting(self) -> MemoryEstimator:
        """The sizes of the draft model or head."""
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
        return super().activations(bucket, block_size) + self._state_bytes(bucket)

    def kept_bytes(self, bucket: Bucket) -> int:
        return super().kept_bytes(bucket) + (self._state_bytes(bucket) if self.graphs.cached else 0)

    def _state_bytes(self, bucket: Bucket) -> int:
        """Returns the bytes of the hidden states that a launch of the target gives to a head."""
        if not isinstance(self.draft, HeadEstimator) or bucket.stage not in READ:
            return 0
        return HEAD_STATES * padded_tokens(bucket) * self.text.hidden * self.itemsize

    def seconds(self, bucket: Bucket) -> float:
        return self.drafting.seconds(target_bucket(bucket)) if is_drafting(bucket) else super().seconds(bucket)

    def price(self, bucket: Bucket, rule: str = "sum") -> GraphPrice:
        if not is_drafting(bucket):
            return super().price(bucket, rule)
        return dataclasses.replace(self.drafting.price(target_bucket(bucket), rule), bucket=bucket)


def draft_plan(plan: Plan) -> Plan:
    """Returns the launches of the draft model alone, as those of a model without a target."""
    return _restrict(plan, (target_bucket(b) for b in plan.buckets if is_drafting(b)))


def drafting_estimator(target: MemoryEstimator, drafter: Drafter) -> MemoryEstimator:
    """Returns the estimator of what drafts on the device of ``target``."""
    own = {f.name: getattr(target, f.name) for f in dataclasses.fields(MemoryEstimator)}
    own |= {"model": sizes_of(drafter), "adapters": None}
    if isinstance(drafter, EagleConfig):
        return HeadEstimator(**{**own, "unit": 1, "quantised": ""}, head=drafter)
    return MemoryEstimator(**own)


def with_draft_sizes(target: MemoryEstimator, drafter: Drafter) -> DraftingEstimator:
    """Returns ``target`` with the sizes of what drafts."""
    own = {f.name: getattr(target, f.name) for f in dataclasses.fields(MemoryEstimator)}
    return DraftingEstimator(**own, draft=drafting_estimator(target, drafter))


def with_draft_memory(
    taken: MemoryInUse, estimator: MemoryEstimator, plan: Plan, limits: ShapeLimits
) -> MemoryInUse:  # fmt: skip
    """Returns the bytes in use with the weights and fixed tensors of what drafts, if anything does.

    A draft model reads the last tokens of the target's sampler state. Inputs and activations are those of ``estimator``
    already.
    """
    if not isinstance(estimator, DraftingEstimator):
        return taken
    model = estimator.drafting.model
    if isinstance(estimator.drafting, HeadEstimator):
        rows = KEPT * (max(limits.max_tokens, limits.max_rows) + 1) + 1
        hidden = taken.hidden + rows * model.text.hidden * estimator.itemsize
        return dataclasses.replace(taken, draft_weights=estimator.drafting.weights(), hidden=hidden)
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


def describe_missing(target: MemoryEstimator, drafter: Drafter, limits: ShapeLimits, missing: int) -> str:
    """Returns what says that a draft model or head does not fit beside a model that would fit alone.

    ``missing``: bytes that the start lacks with it.
    """
    draft = drafting_estimator(target, drafter)
    keys = (limits.row_blocks + RESERVED_BLOCKS) * draft.block_bytes(limits.block_size)
    kind = "head" if isinstance(drafter, EagleConfig) else "draft model"
    return (
        f"the {kind} {drafter.path.name} does not fit beside {target.model.name}: its weights need "
        f"{gib(draft.weights())}, its keys of one request {gib(keys)}; {gib(missing)} are missing"
    )
