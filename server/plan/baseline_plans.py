"""Plans for comparison: powers of two on every axis, and the exponential plan of vLLM on Gaudi. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trencadis.core.buckets import SMALLEST, Bucket, Plan, Stage
from trencadis.core.shapes.shape_limits import ShapeLimits, cells

REFERENCE_VISION = (1600, 3136, 4096, 6400, 7744, 9216, 12544)


def list_powers(first: int, last: int) -> list[int]:
    """Returns ``first``, twice that and so on until ``last`` is covered."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(2 * sizes[-1])
    return sizes


def make_powers_plan(plan: Plan, limits: ShapeLimits) -> Plan:
    """Returns a plan of powers of two on every axis, with every bucket in which a need can occur, independent of the
    device.
    """
    rows = list_powers(1, limits.max_rows)
    tokens = list_powers(64, limits.chunk)
    context = list_powers(1, limits.context_blocks)
    corner = (SMALLEST, SMALLEST)
    found = [Bucket(Stage.FRESH, d) for d in cells((rows, tokens), corner, lambda n: limits.fresh(*n))]
    found += [Bucket(Stage.CONTEXT, d) for d in cells((tokens, context), corner, lambda n: limits.context(*n))]
    most = max(limits.row_blocks, plan.policy.decode_blocks)
    for r in rows:
        found += [Bucket(Stage.DECODE, (r, k)) for k in list_powers(r, min(r * limits.row_blocks, most))]
    found += [Bucket(Stage.VISION, (s,)) for s in list_powers(64, limits.launch_slots)] if limits.image_slots else []
    return Plan(plan.policy, 1, (*found, *_list_head_buckets(rows)), plan.block_size)


def _list_head_buckets(rows: list[int]) -> Iterator[Bucket]:
    for r in rows:
        yield Bucket(Stage.SAMPLE, (r,), "greedy")
        yield Bucket(Stage.SAMPLE, (r,), "full")
        yield Bucket(Stage.RESET, (r,))


def make_exponential_plan(plan: Plan, limits: ShapeLimits, kv_blocks: int) -> tuple[Plan, int]:
    """Returns the exponential plan of the Gaudi extension with prefix caching, and its number of graphs.

    Prompts are (rows, tokens, context blocks of each row). Buckets of several rows with a context count as graphs, but
    this engine never uses them. The extension has no graphs for sampling.
    """
    b, length = limits.block_size, limits.max_model_len
    rows = _make_exponential_range(1, 2, limits.max_rows, _count_steps(limits.max_rows))
    tokens = _make_prompt_lengths(b, length, _count_steps(length))
    prompts = {
        (r, t, k)
        for r in rows
        for t in tokens
        for k in _make_context_blocks((length - t) // b)
        if t <= length and r * (t + k * b) <= limits.max_tokens
    }
    blocks = _make_exponential_range(b, b, kv_blocks, _count_steps(kv_blocks))
    found = [Bucket(Stage.FRESH, (r, t)) for r, t, k in prompts if not k]
    most = plan.policy.context_tokens
    found += [Bucket(Stage.CONTEXT, (t, k)) for r, t, k in prompts if k and r == 1 and t <= most]
    found += [Bucket(Stage.DECODE, (r, k)) for r in rows for k in blocks]
    vision = [Bucket(Stage.VISION, (s,)) for s in REFERENCE_VISION] if limits.image_slots else []
    graphs = len(prompts) + len(rows) * len(blocks) + len(vision)
    return Plan(
        plan.policy, 1, (*sorted(found), *vision, *_list_head_buckets(list_powers(1, limits.max_rows))), b
    ), graphs


def _count_steps(size: int) -> int:
    return math.ceil(math.log2(size)) + 1 if size > 1 else 1


def _make_exponential_range(first: int, step: int, last: int, count: int) -> list[int]:
    """Returns ``count`` geometric values, rounded up to ``step``; a duplicate becomes the nearest free value."""
    if count == 1:
        return [last]
    grid, found = range(first, last + 1, step), set[int]()
    for i in range(count):
        value = first * (last / first) ** (i / (count - 1))
        size = math.ceil(value / step - 1e-9) * step
        if size in found:
            free = [g for g in grid if g not in found]
            if not free:
                break
            size = min(free, key=lambda g, value=value: abs(g - value))  # type: ignore[misc]
        found.add(size)
    return sorted(found)


def _make_prompt_lengths(block: int, length: int, count: int) -> list[int]:
    """Returns prompt lengths: geometric; from a context of 8192 on, the upper half is linear."""
    if length < 8192:
        return _make_exponential_range(block, block, length, count)
    geometric, start = count // 2, length / count
    found = set[int]()
    for i in range(geometric):
        value = block * (start / block) ** (i / (geometric - 1))
        size = math.ceil(value / block) * block
        if size in found:
            size = min((g for g in range(block, length + 1, block) if g not in found), key=lambda g: abs(g - value))
        found.add(size)
    for j in range(1, count - geometric + 1):
        found.add(math.ceil((start + j * (length - start) / (count - geometric)) / block) * block)
    return sorted(found)


def _make_context_blocks(most: int) -> set[int]:
    """Returns context blocks: 0 and geometric values up to ``most``."""
    if most <= 0:
        return {0}
    count = math.ceil(math.log2(most)) + 1
    return {0} | {math.ceil(most ** (i / count)) for i in range(1, count + 1)}
