"""Detects whether the last tokens of an answer repeat one pattern. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.masks.constraints import Repetition


def repeats(output: Sequence[int], rule: Repetition) -> bool:
    """Returns True if ``output`` ends in ``rule.count`` equal runs of ``rule.least`` to ``rule.most`` tokens."""
    end = len(output)
    for size in range(rule.least, min(rule.most, end // rule.count) + 1):
        span = size * (rule.count - 1)
        if output[end - 1] == output[end - 1 - size] and output[end - span :] == output[end - span - size : end - size]:
            return True
    return False
