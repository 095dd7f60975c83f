"""Counts the kernels that Triton compiles: after warm-up the number must not grow."""

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
        """Since this object was made; kernels of a process serve all backends in it."""
        return self._counts.total() - self._begun.total()

    def names(self) -> dict[str, int]:
        """Compilations by kernel, for the log line that names what was compiled again."""
        return dict(self._counts - self._begun)


def _name(event: dict[str, Any]) -> str:
    return str(getattr(event.get("fn"), "name", "") or event.get("repr", "kernel"))
