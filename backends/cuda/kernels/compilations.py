"""How many kernels were compiled in this process: after warm-up the number must stay as it is."""

from __future__ import annotations

from typing import Any

from triton import knobs


class Counter:
    """Counts what Triton compiles or loads from its cache on disk, and passes each on to a hook set before it."""

    def __init__(self) -> None:
        self.count = 0
        self.last = ""
        self._next: Any = None

    def install(self) -> None:
        """Once is enough."""
        current: Any = knobs.runtime.jit_post_compile_hook
        if current != self.hook:
            self._next = current
            knobs.runtime.jit_post_compile_hook = self.hook

    def hook(self, **event: Any) -> Any:
        """``knobs.runtime.jit_post_compile_hook``; what it returns is not looked at."""
        self.count += 1
        self.last = str(event.get("repr", ""))
        return self._next(**event) if self._next is not None else None


COUNTER = Counter()


def compilations() -> int:
    """Kernels compiled since the first call; counting begins there."""
    COUNTER.install()
    return COUNTER.count
