"""Counter of the kernels that Triton compiles: after warm-up the number must not grow."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from triton import knobs


class CompileCounter:
    """Counts the kernels that this process compiles or loads after the first instance was made."""

    _counts: ClassVar[Counter[str]] = Counter()
    _watching = False

    def __init__(self) -> None:
        if not CompileCounter._watching:
            CompileCounter._watching = True
            before = knobs.runtime.jit_post_compile_hook

            def hook(**event: Any) -> bool | None:
                CompileCounter._counts[_name(event)] += 1
                return None if before is None else before(**event)

            knobs.runtime.jit_post_compile_hook = hook
        self._begun = self._counts.copy()

    def count(self) -> int:
        """Returns the compilations since this object was made; compiled kernels serve all backends of the process."""
        return self._counts.total() - self._begun.total()

    def names(self) -> dict[str, int]:
        """Returns compilations by kernel, for the log line that names recompiled kernels."""
        return dict(self._counts - self._begun)


def _name(event: dict[str, Any]) -> str:
    return str(getattr(event.get("fn"), "name", "") or event.get("repr", "kernel"))
