"""Prefix cache hits of a sequence: blocks on the device, and blocks copied back from host memory. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from trencadis.core.engine_stats import EngineStats
from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import NOTHING_FOUND, Filled, PrefixFound, Sequence, SequenceStatus

ON_HOST = 0
"""Stands for a block whose content is in host memory; block 0 is never allocated."""


def cached_blocks(seq: Sequence, limits: SchedulerLimits, pool: BlockPool) -> list[int]:
    """Returns the cached blocks of the start of ``seq``, ON_HOST for those in host memory.

    At least one token is left to compute.
    """
    if not limits.caching or not seq.reads_prefix:
        return []
    limit = (seq.count_known() - 1) // limits.block_size
    keys = seq.block_hashes.extend(seq.tokens, limit * limits.block_size)
    if seq.found.version != pool.version:
        seq.found = PrefixFound(pool.version)
    hits = seq.found.blocks
    while len(hits) < limit and (block := pool.find(keys[len(hits)])) is not None:
        hits.append(block)
    return hits if pool.host is None else _with_host([*hits], keys[:limit], pool)


def _with_host(hits: list[int], keys: list[bytes], pool: BlockPool) -> list[int]:
    """Returns ``hits`` extended by the following blocks on the device or in host memory."""
    for key in keys[len(hits) :]:
        block = pool.find(key)
        if block is None:
            if not pool.on_host(key):
                break
            block = ON_HOST
        hits.append(block)
    return hits


def count_spared_blocks(seq: Sequence, hits: list[int], pool: BlockPool) -> int:
    """Returns by how many free blocks the prefix hits reduce the need of ``seq``."""
    found = seq.found
    new = [block for block in hits[found.counted :] if block != ON_HOST]
    used = found.used + len(new) - pool.idle(new)
    if pool.host is None:  # with host memory the count is not cached
        found.counted, found.used = len(hits), used
    return used


def claim(seq: Sequence, hits: list[int], size: int, pool: BlockPool, totals: EngineStats) -> None:
    """Starts ``seq`` after ``hits``, with a reference to each; ``size``: tokens of a block.

    Hits in host memory get a block, to which they are copied.
    """
    pool.share([block for block in hits if block != ON_HOST])
    absent = [seq.block_hashes.keys[i] for i, block in enumerate(hits) if block == ON_HOST]
    back = iter(pool.restore(absent) if absent else ())
    seq.blocks = [block if block != ON_HOST else next(back) for block in hits]
    seq.computed, seq.published = len(hits) * size, len(hits)
    seq.found = NOTHING_FOUND
    if not seq.outputs:
        seq.stats.cached_tokens = max(seq.stats.cached_tokens, seq.computed)
    totals.host_hits += len(absent) * size
    totals.prefix_hits += seq.computed


def publish(seq: Sequence, pool: BlockPool, size: int) -> None:
    """Adds the full blocks of ``seq`` to the prefix cache; ``size``: tokens of a block."""
    end = min(seq.computed, seq.count_known()) // size
    for i in range(seq.published, end):
        pool.publish(seq.blocks[i], seq.block_hashes.key(seq.tokens, i))
    seq.published = max(seq.published, end)


def publish_filled(filled: Iterable[Filled], limits: SchedulerLimits, pool: BlockPool) -> None:
    """Does the same as ``publish`` for sequences whose last block is full and given, avoiding list look-ups."""
    size = limits.block_size
    for seq, block in filled if limits.caching else ():
        if seq.status is not SequenceStatus.RUNNING:
            continue
        if seq.count_known() == (seq.published + 1) * size:
            pool.publish(block, seq.block_hashes.key(seq.tokens, seq.published))
            seq.published = seq.block_hashes.at  # share one int object, since each costs a memory access
        else:
            publish(seq, pool, size)
