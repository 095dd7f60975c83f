"""One DEBUG line for each decision of the scheduler that an operator asks about; with DEBUG off each call is a test."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trencadis.core.scheduling.sequence import Sequence
    from trencadis.core.step import StepStats

log = logging.getLogger("trencadis.engine.decisions")


def log_admission(seq: Sequence, blocks_free: int, waiting: int) -> None:
    """A sequence starts to run, the first ``computed`` tokens out of the prefix cache."""
    if log.isEnabledFor(logging.DEBUG):
        name = f"request {seq.request.id} choice {seq.index}"
        log.debug(
            "admission: %s starts with %d tokens; %d blocks are free, %d sequences wait", name, len(seq.tokens),
            blocks_free, waiting,
        )  # fmt: skip
        if seq.computed:
            log.debug("cache hit: %s reuses %d of %d tokens", name, seq.computed, len(seq.tokens))


def log_preemption(seq: Sequence, blocks_free: int) -> None:
    """A running sequence gives up its blocks, and is computed again later."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug(
            "preemption: request %s choice %d gives up %d blocks after %d tokens; %d are free", seq.request.id,
            seq.index, len(seq.blocks), seq.computed, blocks_free,
        )  # fmt: skip


class EvictionCounts:
    """The evictions that were logged so far."""

    def __init__(self) -> None:
        self._blocks = self._images = 0

    def log(self, step: int, blocks: int, images: int) -> None:
        """The caches have evicted so many ``blocks`` and ``images`` in all; logs what ``step`` added."""
        if not log.isEnabledFor(logging.DEBUG) or (blocks, images) == (self._blocks, self._images):
            return
        log.debug(
            "eviction: step %d takes %d KV blocks and %d images out of the caches", step, blocks - self._blocks,
            images - self._images,
        )  # fmt: skip
        self._blocks, self._images = blocks, images


def log_launches(step: int, launches: Iterable[StepStats]) -> None:
    """The launches of a step that has ended: shape, how they ran, real and padded sizes, seconds."""
    if log.isEnabledFor(logging.DEBUG):
        for one in launches:
            log.debug(
                "launch: step %d %s, %s, %d of %d, %.2f ms%s", step, one.bucket, one.state, one.real, one.padded,
                1000 * one.seconds, f", miss: {one.miss}" if one.miss else "",
            )  # fmt: skip
