"""The plan of an engine: every stage's buckets from policy, limits and what the user asked for. Pure Python.

Stages mean the same on every device; how densely an axis is filled is the policy's data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from trencadis.core.buckets import AxisRule, Bucket, Plan, Policy, Stage, vision_boundaries
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.layout import FACTOR, PATCH, WINDOW_PATCHES, WINDOW_SLOTS
from trencadis.core.shapes.axes import AxisSpan, sizes, thinned
from trencadis.core.shapes.closure import ShapeLimits, cells
from trencadis.core.shapes.costs import Costs, costs_of
from trencadis.core.shapes.options import AxisAsked, BucketOptions
from trencadis.core.shapes.pruning import pruned

STEPS: Mapping[str, tuple[int, int]] = {
    "prompt_bs": (32, 1),
    "prompt_query": (128, 128),
    "prompt_ctx": (16, 2),
    "decode_bs": (32, 2),
    "decode_block": (128, 128),
}
"""Default steps of ``lin`` and ``pad``."""

PREFILL_ROWS = 16
"""Ragged launches come in two widths: this many rows, and all."""


@dataclass
class PlanBuilder:
    """One plan in the making."""

    policy: Policy
    limits: ShapeLimits
    asked: BucketOptions
    notes: list[str] = field(default_factory=list)

    def axis(self, name: str, rule: AxisRule, needed: int, largest: int, what: str) -> tuple[int, ...]:
        """Sizes of one axis.

        Args:
            needed: what one full-length row needs; a smaller MAX of the user is raised to it.
            largest: the maximum where the user gives none.
            what: the unit, for the line about a raised maximum.
        """
        said = self.asked.axis(name)
        maximum = self.maximum(said, rule, needed, largest, what)
        strategy = "exp" if self.asked.strategy == "file" else self.asked.strategy
        step = rule.step if strategy == "exp" else STEPS[name][0 if strategy == "lin" else 1]
        least = max(said.minimum if said.minimum is not None else rule.minimum, 1)
        return sizes(
            strategy,
            AxisSpan(
                minimum=min(least, maximum),
                step=said.step or step,
                maximum=maximum,
                density=rule.density,
                pad_max=said.pad_max or 0,
                pad_percent=25 if said.pad_percent is None else said.pad_percent,
            ),
        )

    def maximum(self, said: AxisAsked, rule: AxisRule, needed: int, largest: int, what: str) -> int:
        """The axis' end: the user's MAX, raised to what one full-length row needs."""
        if said.maximum is None:
            return largest
        if said.maximum < needed:
            self.notes.append(
                f"{said.names['maximum']}={said.maximum} is raised to {needed}: "
                f"one row of --max-model-len {self.limits.max_model_len} needs that many {what}."
            )
        return max(said.maximum, needed)

    def untouched(self, name: str) -> bool:
        """Whether the user left an axis to the default generator."""
        return self.asked.strategy == "exp" and not self.asked.axis(name).names

    def thinned(self, stage: Stage, first: int, column: tuple[int, ...], rule: AxisRule) -> tuple[int, ...]:
        """A second axis without the sizes that save too little, for one size of the first."""
        if not rule.coarsest:
            return column
        cost = self.policy.cost
        return thinned(column, lambda k: cost(Bucket(stage, (first, k))), self.policy.tolerance, rule.coarsest)


def make_plan(policy: Policy, limits: ShapeLimits, asked: BucketOptions, model: ModelConfig | None = None) -> Plan:
    """Every stage that the policy has rules for, planned; the cost polynomial is the model's where one is given.

    A policy without rules gets a plan without lists, which rounds every need by alignment.
    """
    if model is not None and policy.ridge:
        policy = dataclasses.replace(policy, cost=costs_of(model, limits.block_size, policy.ridge))
    if not policy.rules:
        return Plan(policy, block_size=limits.block_size)
    draft = PlanBuilder(policy, limits, asked, list(asked.notes))
    found: list[Bucket] = []
    for stage in policy.rules:
        found += STAGES[stage](draft)
    return Plan(policy, 1, _bounded(draft, set(found)), limits.block_size, tuple(draft.notes))


COARSE = {
    Stage.FRESH: ("prompt_bs", "prompt_query"),
    Stage.CONTEXT: ("prompt_query", "prompt_ctx"),
    Stage.DECODE: ("decode_bs", "decode_block"),
}
"""Stages that lose buckets where a plan has too many, and the user's axes that forbid it."""


def _bounded(draft: PlanBuilder, found: set[Bucket]) -> tuple[Bucket, ...]:
    """At most ``Policy.most`` buckets, as far as the user left the axes alone.

    Small models come with more sizes: a KV block weighs more in the cost of their launches.
    """
    most = draft.policy.most
    excess = len(found) - most if most else 0
    if excess <= 0:
        return tuple(sorted(found))
    free = {stage for stage, names in COARSE.items() if all(draft.untouched(name) for name in names)}
    kept = pruned([b for b in found if b.stage in free], excess, _work(draft.policy.cost))
    return tuple(sorted([*kept, *(b for b in found if b.stage not in free)]))


def _work(cost: Callable[[Bucket], float]) -> Callable[[Bucket], float]:
    """``cost`` without what a launch costs by itself: a plan that is kept small should pad little."""
    return dataclasses.replace(cost, launch=0.0, block=0.0, vision_launch=0.0) if isinstance(cost, Costs) else cost


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _fresh(draft: PlanBuilder) -> Iterator[Bucket]:
    """FRESH(rows, tokens): one row up to a whole chunk; several rows up to ``fresh_tokens`` tokens each."""
    limits, (rows_rule, tokens_rule, shared_rule) = draft.limits, draft.policy.rules[Stage.FRESH]
    if draft.asked.strategy == "file":
        yield from _listed_fresh(draft)
        return
    longest = _up(limits.chunk, tokens_rule.step)
    tokens = draft.axis("prompt_query", tokens_rule, longest, longest, "tokens")
    rows = draft.axis("prompt_bs", rows_rule, 1, min(limits.max_rows, limits.max_tokens), "rows")
    yield from (Bucket(Stage.FRESH, (1, t)) for t in tokens)
    most = limits.max_tokens
    if draft.untouched("prompt_bs"):
        most = min(most, draft.policy.merge_tokens)
    shared = tokens
    if draft.untouched("prompt_query"):
        shared = sizes("exp", AxisSpan(shared_rule.minimum, shared_rule.step, tokens[-1], shared_rule.density))
    shared = tuple(t for t in shared if t <= draft.policy.fresh_tokens)
    corners = draft.policy.corners[Stage.FRESH]
    for r, t in cells((rows, shared), corners, lambda need: limits.fresh(*need)) if shared else ():
        if r > 1 and r * t <= most:
            yield Bucket(Stage.FRESH, (r, t))


def _listed_fresh(draft: PlanBuilder) -> Iterator[Bucket]:
    """The file's prompts without context; the longest chunk is always covered."""
    unit = draft.policy.rules[Stage.FRESH][1].step
    longest = _up(draft.limits.chunk, unit)
    listed = [(r, _up(t, unit)) for r, t, blocks in draft.asked.listed if t > 1 and blocks == 0]
    for r, t in listed:
        if r > 1 and t > draft.policy.fresh_tokens:
            draft.notes.append(f"bucket ({r}, {t}, 0) is left out: rows share a launch up to "
                               f"{draft.policy.fresh_tokens} tokens a row.")  # fmt: skip
        else:
            yield Bucket(Stage.FRESH, (r, t))
    if not any(r == 1 and t >= longest for r, t in listed):
        yield _added(draft, Bucket(Stage.FRESH, (1, longest)))


def _added(draft: PlanBuilder, bucket: Bucket) -> Bucket:
    draft.notes.append(f"{bucket} is added to the file's buckets: the largest need is always covered.")
    return bucket


def _context(draft: PlanBuilder) -> Iterator[Bucket]:
    """CONTEXT(tokens, blocks): one row after a context."""
    limits, (tokens_rule, blocks_rule) = draft.limits, draft.policy.rules[Stage.CONTEXT]
    if limits.max_model_len < 2:
        return
    most = _up(min(draft.policy.context_tokens, limits.chunk), tokens_rule.step)
    tokens_said = draft.asked.axis("prompt_query")
    capped = dataclasses.replace(tokens_said, maximum=None)
    inner = PlanBuilder(draft.policy, limits, dataclasses.replace(draft.asked, axes={
        **draft.asked.axes, "prompt_query": capped}), draft.notes)  # fmt: skip
    tokens = inner.axis("prompt_query", tokens_rule, most, most, "tokens")
    blocks = draft.axis("prompt_ctx", blocks_rule, limits.context_blocks, limits.context_blocks, "blocks")
    if draft.asked.strategy == "file":
        listed = [(_up(t, tokens_rule.step), k) for _, t, k in draft.asked.listed if t > 1 and k > 0]
        for t, k in listed:
            yield Bucket(Stage.CONTEXT, (t, k))
        if not any(k >= limits.context_blocks for _, k in listed):
            largest = max((t for t, _ in listed), default=most)
            yield _added(draft, Bucket(Stage.CONTEXT, (largest, limits.context_blocks)))
        return
    kept = set(cells((tokens, blocks), draft.policy.corners[Stage.CONTEXT], lambda need: limits.context(*need)))
    for t in tokens:
        column = tuple(k for k in blocks if (t, k) in kept)
        if column and draft.untouched("prompt_ctx"):
            column = draft.thinned(Stage.CONTEXT, t, column, blocks_rule)
        yield from (Bucket(Stage.CONTEXT, (t, k)) for k in column)


def _decode(draft: PlanBuilder) -> Iterator[Bucket]:
    """DECODE(rows) of ragged devices; DECODE(rows, blocks) where the list of blocks is an axis.

    By default the blocks of R rows are R, 2 R, 4 R .. up to what R full rows list, or ``decode_blocks``, less those
    that save too little.
    """
    limits, rules = draft.limits, draft.policy.rules[Stage.DECODE]
    if draft.asked.strategy == "file" and len(rules) == 2:
        yield from _listed_decode(draft)
        return
    rows = draft.axis("decode_bs", rules[0], 1, min(limits.max_rows, limits.max_tokens), "rows")
    if len(rules) == 1:
        yield from (Bucket(Stage.DECODE, (r,)) for r in rows)
        return
    most = max(limits.row_blocks, draft.policy.decode_blocks)
    if draft.untouched("decode_block"):
        for r in rows:
            span = AxisSpan(r, 1, max(min(r * limits.row_blocks, most), r), rules[1].density)
            column = draft.thinned(Stage.DECODE, r, sizes("exp", span), rules[1])
            yield from (Bucket(Stage.DECODE, (r, k)) for k in column)
        return
    blocks = draft.axis("decode_block", rules[1], limits.row_blocks, min(most, rows[-1] * limits.row_blocks), "blocks")
    corners = draft.policy.corners[Stage.DECODE]
    lower = dict(zip(rows, (0, *rows), strict=False))
    for r, k in cells((rows, blocks), corners, lambda need: need[1] <= need[0] * limits.row_blocks):
        if k > lower[r]:
            yield Bucket(Stage.DECODE, (r, k))


def _listed_decode(draft: PlanBuilder) -> Iterator[Bucket]:
    listed = [(r, max(k, 1)) for r, t, k in draft.asked.listed if t == 1]
    for dims in listed:
        yield Bucket(Stage.DECODE, dims)
    if not any(k >= draft.limits.row_blocks for _, k in listed):
        yield _added(draft, Bucket(Stage.DECODE, (1, draft.limits.row_blocks)))


def _prefill(draft: PlanBuilder) -> Iterator[Bucket]:
    """PREFILL(tokens, rows): one ragged row of tokens, in two widths."""
    limits, (tokens_rule, _) = draft.limits, draft.policy.rules[Stage.PREFILL]
    most = _up(max(limits.max_tokens, limits.max_rows), tokens_rule.step)
    tokens = draft.axis("prompt_query", tokens_rule, most, most, "tokens")
    for t in tokens:
        for r in {min(PREFILL_ROWS, limits.max_rows), limits.max_rows}:
            yield Bucket(Stage.PREFILL, (t, r))


def _vision(draft: PlanBuilder) -> Iterator[Bucket]:
    """VISION(slots): the user's list, or the default one."""
    limits, asked = draft.limits, draft.asked
    if not limits.image_slots:
        return
    if not asked.pad_vision:
        draft.notes.append("VLLM_MULTIMODAL_BUCKETS=None: images are not padded; every size of image is a new shape.")
        return
    listed = asked.vision or vision_boundaries(limits.launch_slots)
    least = min(_up(limits.least_slots, draft.policy.alignment[Stage.VISION][0]), limits.launch_slots)
    useful = [s for s in listed if s >= least]
    most = next((s for s in useful if s >= limits.launch_slots), 0)
    kept = [s for s in useful if not most or s <= most]
    dropped = sorted(set(listed) - set(kept))
    if dropped and asked.vision:
        names = ", ".join(map(str, dropped))
        draft.notes.append(f"VLLM_MULTIMODAL_BUCKETS: no image needs {names} slots; left out.")
    if asked.vision and limits.image_slots > max(kept, default=0):
        draft.notes.append(vision_warning(max(kept, default=0), limits.image_slots, limits.image_step))
    yield from (Bucket(Stage.VISION, (s,)) for s in kept)


def vision_warning(largest: int, need: int, step: int = FACTOR) -> str:
    """The line about images above the user's list; a side that is a ``step`` over a window owns the whole window."""
    window = WINDOW_PATCHES * PATCH
    windows = largest // WINDOW_SLOTS + 1
    side = next(n for n in range(windows) if (n + 1) ** 2 >= windows) * window + step
    patches, slots = (side // PATCH) ** 2, WINDOW_SLOTS * (-(-side // window)) ** 2
    return (
        f"VLLM_MULTIMODAL_BUCKETS ends at {largest} slots and images may need {need}: {side}x{side} pixels "
        f"({patches} patches, {slots} slots) is the smallest square that fits no bucket; "
        "such images run at a shape that was not planned."
    )


def _sample(draft: PlanBuilder) -> Iterator[Bucket]:
    for r in _by_rows(draft, Stage.SAMPLE):
        yield Bucket(Stage.SAMPLE, (r,), "greedy")
        yield Bucket(Stage.SAMPLE, (r,), "full")


def _reset(draft: PlanBuilder) -> Iterator[Bucket]:
    yield from (Bucket(Stage.RESET, (r,)) for r in _by_rows(draft, Stage.RESET))


def _by_rows(draft: PlanBuilder, stage: Stage) -> tuple[int, ...]:
    """Sizes up to max_num_seqs: the user's variables bound launches of text only."""
    rule = draft.policy.rules[stage][0]
    return sizes("exp", AxisSpan(1, rule.step, draft.limits.max_rows, rule.density))


STAGES: Mapping[Stage, Callable[[PlanBuilder], Iterator[Bucket]]] = {
    Stage.PREFILL: _prefill,
    Stage.DECODE: _decode,
    Stage.FRESH: _fresh,
    Stage.CONTEXT: _context,
    Stage.VISION: _vision,
    Stage.SAMPLE: _sample,
    Stage.RESET: _reset,
}
