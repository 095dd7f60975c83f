"""One kernel launch to be timed, as the benchmark of kernels takes it, and Triton's interpreter for machines without a
card. Imports torch alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


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


def use_interpreter(asked: bool) -> None:
    """Has Triton interpret kernels, or compile them; to be called before Triton is imported.

    Triton 3.6 converts an array of one value by ``int``, which numpy refuses from 2.4 on: here ``item`` does it.
    """
    os.environ["TRITON_INTERPRET"] = "1" if asked else "0"
    if not asked:
        return
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
