"""Checks POOL against the reference: sums by group, a class head over them, and non-finite values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trencadis.backends.conformance.op_checks import Work, error_summary, randn, vs_reference
from trencadis.backends.conformance.target import CheckTarget

GROUPS = (1, 2, 2, 2, 3, 1, 4, 0, 0)
"""Group of each of nine rows: groups of several rows, one whose rows are not adjacent, and padding."""


def pool(target: CheckTarget) -> str:
    """Rows summed by group, the class head, padding in no sum; a NaN or an infinity spoils its own group alone."""
    hidden = target.model.text.hidden
    rows, group = randn(len(GROUPS), hidden, seed=3), torch.tensor(GROUPS, dtype=torch.int32)
    errors: list[float] = []
    for classes in (0, 1, 5):
        weight = randn(classes, hidden, seed=4) / hidden**0.5 if classes else None

        def sums(ops: Any, put: Any, weight: Tensor | None = weight) -> Work:
            head = None if weight is None else put(weight).float()
            return lambda x, g: [ops.pool(x, g, head)]

        errors += vs_reference(target, sums, rows, group)
    spoiled = rows.clone()
    spoiled[2, 7], spoiled[4, 0], spoiled[8, 3] = float("nan"), float("inf"), float("nan")

    def fine(ops: Any, put: Any) -> Work:
        return lambda x, g: [(ops.pool(x, g, None).abs() <= torch.finfo(torch.float32).max).int()]

    errors += vs_reference(target, fine, spoiled, group)
    return error_summary(errors)
