"""Counts the kernels that Triton compiles: after warm-up the number must not grow."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from triton import knobs


class Compilations:
    """Kernels that this process compiled or loaded for the first time, counted from its first instance on."""

    _seen: ClassVar[Counter[str]] = Counter()
    _watching = False

    def __init__(self) -> None:
        if not Compilations._watching:
            Compilations._watching = True
            before = knobs.runtime.jit_post_compile_hook

            def hook(**event: Any) -> bool | None:
                Compilations._seen[_name(event)] += 1
                return None if before is None else before(**event)

            knobs.runtime.jit_post_compile_hook = hook
        self._begun = self._seen.copy()

    def count(self) -> int:
        """Since this object was made; kernels of a process serve all backends in it."""
        return self._seen.total() - self._begun.total()

    def names(self) -> dict[str, int]:
        """Compilations by kernel, for the log line that names what was compiled again."""
        return dict(self._seen - self._begun)


def _name(event: dict[str, Any]) -> str:
    return str(getattr(event.get("fn"), "name", "") or event.get("repr", "kernel"))
