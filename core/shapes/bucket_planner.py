"""Plans the buckets of every stage from the device's policy, the limits and the user's options. Pure Python.

Stages have the same meaning on every device; the policy defines how densely each axis is filled.

Prunes a plan with too many buckets: first drops the buckets that are cheapest to absorb into a larger one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from trencadis.core import cross_attention_inputs
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import LORA, POOL_ROWS, WIDE_ROWS, Bucket, Stage, ahead_variant, verify_variant
from trencadis.core.checkpoint.model_config import ModelConfig, SquareImage
from trencadis.core.checkpoint.model_registry import adapted_tower
from trencadis.core.device_shape_policy import AxisRule, Policy
from trencadis.core.shapes.bucket_options import (
    AxisSettings,
    AxisSpan,
    BucketOptions,
    sizes,
    thinned,
    vision_boundaries,
)
from trencadis.core.shapes.launch_costs import Costs, costs_of, layers_values
from trencadis.core.shapes.shape_limits import ShapeLimits, cells


def pruned(buckets: Sequence[Bucket], excess: int, cost: Callable[[Bucket], float]) -> tuple[Bucket, ...]:
    """Returns ``buckets`` without up to ``excess`` of them.

    A bucket may be dropped if a larger one of its stage absorbs its needs. The price is the cost of the larger one
    divided by that of the smallest bucket whose needs it then covers; the bucket with the lowest price is dropped
    first.
    """
    kept = set(buckets)
    least = {b: cost(b) for b in kept}
    heirs = {b: _heir(b, kept, cost) for b in kept}
    for _ in range(excess):
        prices = [(cost(heir) / least[b], b) for b, heir in heirs.items() if heir is not None]
        if not prices:
            break
        dropped = min(prices)[1]
        heir = heirs.pop(dropped)
        assert heir is not None
        kept.remove(dropped)
        least[heir] = min(least[heir], least[dropped])
        for b in [b for b, other in heirs.items() if other == dropped]:
            heirs[b] = _heir(b, kept, cost)
    return tuple(sorted(kept))


def _heir(bucket: Bucket, kept: set[Bucket], cost: Callable[[Bucket], float]) -> Bucket | None:
    """Returns the cheapest other bucket that holds all needs of ``bucket``; None if there is none."""
    others = (b for b in kept if b.stage is bucket.stage and b.variant == bucket.variant and b != bucket)
    larger = [b for b in others if all(x >= y for x, y in zip(b.dims, bucket.dims, strict=True))]
    return min(larger, key=lambda b: (cost(b), b), default=None)


STEPS: Mapping[str, tuple[int, int]] = {
    "prompt_bs": (32, 1),
    "prompt_query": (128, 128),
    "prompt_ctx": (16, 2),
    "decode_bs": (32, 2),
    "decode_block": (128, 128),
}
"""Default steps of ``lin`` and ``pad``."""

PREFILL_ROWS = 16
"""Ragged launches are planned for two numbers of rows: this one and the maximum."""


@dataclass
class PlanBuilder:
    """The inputs of one plan, and notes about changes to it.

    ``windows``: True if some layers of the tower attend inside windows.
    """

    policy: Policy
    limits: ShapeLimits
    options: BucketOptions
    notes: list[str] = field(default_factory=list)
    windows: bool = True

    def axis(self, name: str, rule: AxisRule, needed: int, largest: int, what: str) -> tuple[int, ...]:
        """Returns the sizes of one axis.

        Args:
            needed: the size that one full-length row needs; a smaller MAX of the user is raised to it.
            largest: the maximum if the user gives none.
            what: the unit, for the note about a raised maximum.
        """
        said = self.options.axis(name)
        maximum = self.maximum(said, rule, needed, largest, what)
        strategy = "exp" if self.options.strategy == "file" else self.options.strategy
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

    def maximum(self, said: AxisSettings, rule: AxisRule, needed: int, largest: int, what: str) -> int:
        """Returns the end of the axis: the user's MAX, raised to what one full-length row needs."""
        if said.maximum is None:
            return largest
        if said.maximum < needed:
            self.notes.append(
                f"{said.names['maximum']}={said.maximum} is raised to {needed}: "
                f"one row of --max-model-len {self.limits.max_model_len} needs that many {what}."
            )
        return max(said.maximum, needed)

    def is_default(self, name: str) -> bool:
        """Returns True if the user set nothing for an axis."""
        return self.options.strategy == "exp" and not self.options.axis(name).names

    def thin_sizes(self, stage: Stage, first: int, column: tuple[int, ...], rule: AxisRule) -> tuple[int, ...]:
        """Returns the sizes of the second axis for one size of the first, without those that save too little."""
        if not rule.coarsest:
            return column
        cost = self.policy.cost
        return thinned(column, lambda k: cost(Bucket(stage, (first, k))), self.policy.tolerance, rule.coarsest)


def left_out(model: ModelConfig | None) -> tuple[Stage, ...]:
    """Returns the stages that an engine of ``model`` never launches, since it either generates or pools."""
    if model is None or model.pooling is None:
        return (Stage.POOL,)
    return (Stage.SAMPLE, Stage.RESET) if model.text.causal else (Stage.SAMPLE, Stage.RESET, Stage.CONTEXT)


def make_plan(
    policy: Policy, limits: ShapeLimits, asked: BucketOptions, model: ModelConfig | None = None, every: bool = False
) -> Plan:
    """Plans all stages for which the policy has rules; if ``model`` is given, its sizes determine the costs.

    A policy without rules gets a plan without buckets, which rounds every need up to the alignment.

    Args:
        every: True to also plan the stages that this model's engine never launches.
    """
    if model is not None and policy.ridge:
        policy = dataclasses.replace(policy, cost=costs_of(model, limits.block_size, policy.ridge))
    if model is not None and policy.capture_operations and Stage.PREFILL in policy.capture_limit:
        tokens = int(policy.capture_operations / (2 * layers_values(model.text)))
        limit = max(policy.capture_limit[Stage.PREFILL], tokens)
        policy = dataclasses.replace(policy, capture_limit={**policy.capture_limit, Stage.PREFILL: limit})
    if not policy.rules:
        return Plan(policy, block_size=limits.block_size)
    tower = model.vision if model is not None else None
    windows = tower is None or tower.whole < tower.depth
    builder = PlanBuilder(policy, limits, asked, list(asked.notes), windows)
    found: list[Bucket] = []
    for stage in policy.rules:
        if every or stage not in left_out(model):
            found += STAGES[stage](builder)
    whole = model is not None and not model.text.causal
    buckets = _with_image_units(_prune_to_limit(builder, set(found)), limits.units)
    if limits.adapters:
        buckets = _with_adapters(
            buckets, model is not None and any(adapted_tower(model)), without_launch_cost(policy.cost)
        )
    return Plan(policy, 1, buckets, limits.block_size, tuple(builder.notes), whole, limits.units, limits.drafts)


TEXT = (Stage.PREFILL, Stage.DECODE, Stage.FRESH, Stage.CONTEXT)

COARSE = {
    Stage.FRESH: ("prompt_bs", "prompt_query"),
    Stage.CONTEXT: ("prompt_query", "prompt_ctx"),
    Stage.DECODE: ("decode_bs", "decode_block"),
    Stage.VERIFY: ("decode_bs", "decode_block"),
}
"""Stages that are pruned if a plan has too many buckets, and the axes that a user may set to forbid it."""


def _prune_to_limit(builder: PlanBuilder, found: set[Bucket]) -> tuple[Bucket, ...]:
    """Prunes the plan to ``Policy.max_buckets`` buckets, except on axes that the user set.

    Plans of small models are larger, because a KV block has a larger share of the cost of their launches.
    """
    units = builder.limits.units
    most = builder.policy.max_buckets // (1 + (len(cross_attention_inputs.planned_unit_counts(units)) if units else 0))
    excess = len(found) - most if most else 0
    if excess <= 0:
        return tuple(sorted(found))
    free = {stage for stage, names in COARSE.items() if all(builder.is_default(name) for name in names)}
    kept = pruned([b for b in found if b.stage in free], excess, without_launch_cost(builder.policy.cost))
    return tuple(sorted([*kept, *(b for b in found if b.stage not in free)]))


def _with_image_units(buckets: tuple[Bucket, ...], units: int) -> tuple[Bucket, ...]:
    """Returns ``buckets`` and, for text stages, one variant for each number of images that a launch may attend to."""
    text = [b for b in buckets if b.stage in TEXT] if units else []
    more = (
        dataclasses.replace(b, variant=f"{cross_attention_inputs.VARIANT}{n}")
        for n in cross_attention_inputs.planned_unit_counts(units)
        for b in text
    )
    return tuple(sorted([*buckets, *more]))


ADAPTER_SHARE = 0.3
"""Buckets for launches with adapters, as a share of all others; needs between two of them are padded further."""


def _with_adapters(buckets: Sequence[Bucket], images: bool, cost: Callable[[Bucket], float]) -> tuple[Bucket, ...]:
    """Returns ``buckets`` and the variant of some for adapters, which holds all needs of text (and of ``images``)."""
    found = [b for b in buckets if b.stage in TEXT or (images and b.stage is Stage.VISION)]
    kept = pruned(found, max(len(found) - int(ADAPTER_SHARE * len(buckets)), 0), cost)
    return tuple(sorted([*buckets, *(dataclasses.replace(b, variant=LORA) for b in kept)]))


def without_launch_cost(cost: Callable[[Bucket], float]) -> Callable[[Bucket], float]:
    """Returns ``cost`` without the constant cost of a launch, so that pruning prefers little padding."""
    return dataclasses.replace(cost, launch=0.0, block=0.0, vision_launch=0.0) if isinstance(cost, Costs) else cost


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _fresh(builder: PlanBuilder) -> Iterator[Bucket]:
    """Yields FRESH(rows, tokens): one row up to a whole chunk; several rows up to ``fresh_tokens`` tokens each."""
    limits, (rows_rule, tokens_rule, shared_rule) = builder.limits, builder.policy.rules[Stage.FRESH]
    if builder.options.strategy == "file":
        yield from _listed_fresh(builder)
        return
    longest = _up(limits.chunk, tokens_rule.step)
    tokens = builder.axis("prompt_query", tokens_rule, longest, longest, "tokens")
    rows = builder.axis("prompt_bs", rows_rule, 1, min(limits.max_rows, limits.max_tokens), "rows")
    yield from (Bucket(Stage.FRESH, (1, t)) for t in tokens)
    most = limits.max_tokens
    if builder.is_default("prompt_bs"):
        most = min(most, builder.policy.merge_tokens)
    shared = tokens
    if builder.is_default("prompt_query"):
        shared = sizes("exp", AxisSpan(shared_rule.minimum, shared_rule.step, tokens[-1], shared_rule.density))
    shared = tuple(t for t in shared if t <= builder.policy.fresh_tokens)
    corners = builder.policy.corners[Stage.FRESH]
    for r, t in cells((rows, shared), corners, lambda need: limits.fresh(*need)) if shared else ():
        if r > 1 and r * t <= most:
            yield Bucket(Stage.FRESH, (r, t))


def _listed_fresh(builder: PlanBuilder) -> Iterator[Bucket]:
    """Yields the file's buckets for prompts without context, and one for the longest chunk if none holds it."""
    unit = builder.policy.rules[Stage.FRESH][1].step
    longest = _up(builder.limits.chunk, unit)
    listed = [(r, _up(t, unit)) for r, t, blocks in builder.options.listed if t > 1 and blocks == 0]
    for r, t in listed:
        if r > 1 and t > builder.policy.fresh_tokens:
            builder.notes.append(f"bucket ({r}, {t}, 0) is left out: rows share a launch up to "
                               f"{builder.policy.fresh_tokens} tokens a row.")  # fmt: skip
        else:
            yield Bucket(Stage.FRESH, (r, t))
    if not any(r == 1 and t >= longest for r, t in listed):
        yield _note_added(builder, Bucket(Stage.FRESH, (1, longest)))


def _note_added(builder: PlanBuilder, bucket: Bucket) -> Bucket:
    builder.notes.append(f"{bucket} is added to the file's buckets: the largest need is always covered.")
    return bucket


def _context(builder: PlanBuilder) -> Iterator[Bucket]:
    """Yields CONTEXT(tokens, blocks): one row after a context."""
    limits, (tokens_rule, blocks_rule) = builder.limits, builder.policy.rules[Stage.CONTEXT]
    if limits.max_model_len < 2:
        return
    most = _up(min(builder.policy.context_tokens, limits.chunk), tokens_rule.step)
    tokens_said = builder.options.axis("prompt_query")
    capped = dataclasses.replace(tokens_said, maximum=None)
    inner = PlanBuilder(builder.policy, limits, dataclasses.replace(builder.options, axes={
        **builder.options.axes, "prompt_query": capped}), builder.notes)  # fmt: skip
    tokens = inner.axis("prompt_query", tokens_rule, most, most, "tokens")
    blocks = builder.axis("prompt_ctx", blocks_rule, limits.context_blocks, limits.context_blocks, "blocks")
    if builder.options.strategy == "file":
        listed = [(_up(t, tokens_rule.step), k) for _, t, k in builder.options.listed if t > 1 and k > 0]
        for t, k in listed:
            yield Bucket(Stage.CONTEXT, (t, k))
        if not any(k >= limits.context_blocks for _, k in listed):
            largest = max((t for t, _ in listed), default=most)
            yield _note_added(builder, Bucket(Stage.CONTEXT, (largest, limits.context_blocks)))
        return
    kept = set(cells((tokens, blocks), builder.policy.corners[Stage.CONTEXT], lambda need: limits.context(*need)))
    for t in tokens:
        column = tuple(k for k in blocks if (t, k) in kept)
        if column and builder.is_default("prompt_ctx"):
            column = builder.thin_sizes(Stage.CONTEXT, t, column, blocks_rule)
        yield from (Bucket(Stage.CONTEXT, (t, k)) for k in column)


def _decode(builder: PlanBuilder) -> Iterator[Bucket]:
    """Yields DECODE(rows) on ragged devices; DECODE(rows, blocks) if the list of blocks is an axis.

    By default the blocks of R rows are R, 2 R, 4 R .. up to those of R full-length rows, or ``decode_blocks``, without
    sizes that save too little.
    """
    limits, rules = builder.limits, builder.policy.rules[Stage.DECODE]
    if builder.options.strategy == "file" and len(rules) == 2:
        yield from _listed_decode(builder)
        return
    rows = builder.axis("decode_bs", rules[0], 1, min(limits.max_rows, limits.max_tokens), "rows")
    if len(rules) == 1:
        yield from (Bucket(Stage.DECODE, (r,)) for r in rows)
        return
    most = max(limits.row_blocks, builder.policy.decode_blocks)
    if builder.is_default("decode_block"):
        for r in rows:
            span = AxisSpan(r, 1, max(min(r * limits.row_blocks, most), r), rules[1].density)
            column = builder.thin_sizes(Stage.DECODE, r, sizes("exp", span), rules[1])
            yield from (Bucket(Stage.DECODE, (r, k)) for k in column)
        return
    blocks = builder.axis(
        "decode_block", rules[1], limits.row_blocks, min(most, rows[-1] * limits.row_blocks), "blocks"
    )
    corners = builder.policy.corners[Stage.DECODE]
    lower = dict(zip(rows, (0, *rows), strict=False))
    for r, k in cells((rows, blocks), corners, lambda need: need[1] <= need[0] * limits.row_blocks):
        if k > lower[r]:
            yield Bucket(Stage.DECODE, (r, k))


def _listed_decode(builder: PlanBuilder) -> Iterator[Bucket]:
    listed = [(r, max(k, 1)) for r, t, k in builder.options.listed if t == 1]
    for dims in listed:
        yield Bucket(Stage.DECODE, dims)
    if not any(k >= builder.limits.row_blocks for _, k in listed):
        yield _note_added(builder, Bucket(Stage.DECODE, (1, builder.limits.row_blocks)))


def _verify(builder: PlanBuilder) -> Iterator[Bucket]:
    """Yields VERIFY(rows) on ragged devices, VERIFY(rows, blocks) if the list of blocks is an axis.

    The width of a row is the variant. Rows are at most those that can have as many drafts as possible in one step; as
    many as ``fused_tokens`` holds have a bucket of their own.
    """
    limits, rules = builder.limits, builder.policy.rules[Stage.VERIFY]
    if not limits.drafts:
        return
    variant = verify_variant(limits.drafts + 1)
    fused = min(builder.policy.fused_tokens // (limits.drafts + 1), limits.verified_rows)
    for r in sorted({*sizes("exp", AxisSpan(1, 1, limits.verified_rows, rules[0].density)), fused or 1}):
        if len(rules) == 1:
            yield Bucket(Stage.VERIFY, (r,), variant)
            continue
        most = max(limits.row_blocks, builder.policy.decode_blocks)
        span = AxisSpan(r, 1, max(min(r * limits.row_blocks, most), r), rules[1].density)
        column = sizes("exp", span)
        if rules[1].coarsest:
            cost = builder.policy.cost
            price = partial(_price_of_blocks, cost, r, variant)
            column = thinned(column, price, builder.policy.tolerance, rules[1].coarsest)
        yield from (Bucket(Stage.VERIFY, (r, k), variant) for k in column)


def _price_of_blocks(cost: Callable[[Bucket], float], rows: int, variant: str, blocks: int) -> float:
    """Returns the cost of a VERIFY launch of ``rows`` rows over ``blocks`` blocks."""
    return cost(Bucket(Stage.VERIFY, (rows, blocks), variant))


def _prefill(builder: PlanBuilder) -> Iterator[Bucket]:
    """Yields PREFILL(tokens, rows): a ragged launch, for two numbers of rows."""
    limits, (tokens_rule, _) = builder.limits, builder.policy.rules[Stage.PREFILL]
    most = _up(max(limits.max_tokens, limits.max_rows), tokens_rule.step)
    tokens = builder.axis("prompt_query", tokens_rule, most, most, "tokens")
    for t in tokens:
        for r in {min(PREFILL_ROWS, limits.max_rows), limits.max_rows}:
            yield Bucket(Stage.PREFILL, (t, r))


TILES = (1, 2, 3, 4, 6, 8, 12, 17)
"""Numbers of images per launch if every image has the same number of slots."""


def _vision(builder: PlanBuilder) -> Iterator[Bucket]:
    """Yields VISION(slots): the user's list, or the default one."""
    limits, asked = builder.limits, builder.options
    if not limits.image_slots:
        return
    if not asked.pad_vision:
        builder.notes.append("VLLM_MULTIMODAL_BUCKETS=None: images are not padded; every size of image is a new shape.")
        return
    listed = asked.vision or vision_boundaries(limits.launch_slots, builder.windows)
    if limits.image_tile:
        listed = _tile_slots(builder, limits.image_tile)
    own = {slots for size in limits.images for slots in image_batch_slots(*size, limits.encoder_slots)}
    least = min(_up(limits.least_slots, builder.policy.alignment[Stage.VISION][0]), limits.launch_slots)
    useful = [s for s in listed if s >= least]
    most = next((s for s in useful if s >= limits.launch_slots), 0)
    kept = [s for s in useful if not most or s <= most]
    dropped = sorted(set(listed) - set(kept))
    if dropped and asked.vision:
        names = ", ".join(map(str, dropped))
        builder.notes.append(f"VLLM_MULTIMODAL_BUCKETS: no image needs {names} slots; left out.")
    if asked.vision and limits.image_slots > max(kept, default=0):
        builder.notes.append(vision_warning(max(kept, default=0), limits.image_slots, limits.squares))
    yield from (Bucket(Stage.VISION, (s,)) for s in sorted({*kept, *own}))


def _tile_slots(builder: PlanBuilder, tile: int) -> tuple[int, ...]:
    """Returns the slots if every image has ``tile`` of them: few multiples, which can be combined for every number
    of images.
    """
    asked = builder.options.vision
    if not asked:
        return tuple(tile * n for n in TILES)
    kept = {slots // tile * tile for slots in asked} - {0}
    changed = [slots for slots in asked if slots % tile]
    if changed:
        names = ", ".join(map(str, changed))
        builder.notes.append(
            f"VLLM_MULTIMODAL_BUCKETS: every image has {tile} slots; {names} are rounded down to multiples of that."
        )
    return tuple(sorted(kept | {tile}))


def image_batch_slots(one: int, fewest: int, most: int, budget: int) -> set[int]:
    """Returns the slots of the launches that encode ``fewest`` to ``most`` images of ``one`` slots each.

    A launch holds ``budget`` slots, or one image.
    """
    full = max(budget // one, 1)
    counts = range(fewest, min(most, fewest + full) + 1)
    return {one * n for count in counts for n in (full if count >= full else 0, count % full) if n}


def vision_warning(largest: int, need: int, squares: Sequence[SquareImage]) -> str:
    """Returns the line about images that exceed the user's list."""
    fits_not = next((s for s in squares if s.slots > largest), None)
    which = ""
    if fits_not is not None:
        side, patches, slots = fits_not
        which = f"{side}x{side} pixels ({patches} patches, {slots} slots) is the smallest square that fits no bucket; "
    return (
        f"VLLM_MULTIMODAL_BUCKETS ends at {largest} slots and images may need {need}: {which}"
        "such images run at a shape that was not planned."
    )


def _sample(builder: PlanBuilder) -> Iterator[Bucket]:
    limits, rule = builder.limits, builder.policy.rules[Stage.SAMPLE][0]
    for r in sizes("exp", AxisSpan(1, rule.step, limits.sampled_rows, rule.density)):
        yield Bucket(Stage.SAMPLE, (r,), "greedy")
        yield Bucket(Stage.SAMPLE, (r,), "full")
        if builder.policy.drawn_head:
            yield Bucket(Stage.SAMPLE, (r,), "draw")
        if builder.policy.penalised_head:
            yield Bucket(Stage.SAMPLE, (r,), "penalised")
        if limits.drafts:
            yield Bucket(Stage.SAMPLE, (r,), ahead_variant(limits.drafts))
    yield from (Bucket(Stage.SAMPLE, (min(r, WIDE_ROWS),), variant) for variant in limits.wide)


def _reset(builder: PlanBuilder) -> Iterator[Bucket]:
    yield from (Bucket(Stage.RESET, (r,)) for r in _by_rows(builder, Stage.RESET))


def _pool(builder: PlanBuilder) -> Iterator[Bucket]:
    """Yields POOL(rows): one row per request, or as many as a slice for MEAN pooling has tokens."""
    rule, limits = builder.policy.rules[Stage.POOL][0], builder.limits
    most = max(min(limits.max_rows, limits.max_tokens), min(POOL_ROWS, limits.max_tokens))
    yield from (Bucket(Stage.POOL, (r,)) for r in sizes("exp", AxisSpan(1, rule.step, most, rule.density)))


def _by_rows(builder: PlanBuilder, stage: Stage) -> tuple[int, ...]:
    """Returns numbers of rows up to max_num_seqs; the user's variables do not apply to it."""
    rule = builder.policy.rules[stage][0]
    return sizes("exp", AxisSpan(1, rule.step, builder.limits.max_rows, rule.density))


STAGES: Mapping[Stage, Callable[[PlanBuilder], Iterator[Bucket]]] = {
    Stage.PREFILL: _prefill,
    Stage.DECODE: _decode,
    Stage.FRESH: _fresh,
    Stage.CONTEXT: _context,
    Stage.VISION: _vision,
    Stage.SAMPLE: _sample,
    Stage.RESET: _reset,
    Stage.POOL: _pool,
    Stage.VERIFY: _verify,
}
