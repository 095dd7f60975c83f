"""One kernel launch to be timed, as the benchmark of kernels takes it. Imports torch alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Case:
    """One launch, ready to be timed.

    Args:
        kernel: which kernel, for the summary.
        run: our launch; allocates nothing.
        bytes, flops: least traffic and work of the result.
        bound: which ceiling it is measured against: ``copy`` (bytes read and written), ``read`` (bytes read) or
            ``flops``.
        baselines: torch's ways to the same result; one that a device lacks raises when it is called.
        check: largest difference between ``run`` and a baseline.
        reset: undoes what ``run`` changes beside its result; None: nothing.
    """

    name: str
    kernel: str
    run: Callable[[], object]
    bytes: int
    flops: int
    bound: str
    baselines: dict[str, Callable[[], object]] = field(default_factory=dict)
    check: Callable[[], float] | None = None
    reset: Callable[[], object] | None = None
