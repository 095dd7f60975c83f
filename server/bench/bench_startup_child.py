"""Starts one engine and ends it: reads options and prints seconds, both as JSON. For ``bench startup``."""

from __future__ import annotations

import json
import sys
import time

from trencadis.core.errors import StartupError

COMPILES = ("warmup", "warm-up", "capture", "compile")
"""Phases of a start-up in which kernels and graphs are made."""


class PhaseClock:
    """A Progress callback that times the phases of a start-up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._since = "", time.perf_counter()

    def __call__(
        self, name: str, detail: str = "", fraction: float = 0.0, done: int = 0, total: int = 0, eta: float = 0.0
    ) -> None:
        """Called by the engine."""
        self._begin(name)

    def _begin(self, name: str) -> None:
        now = time.perf_counter()
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now

    def capture(self, bucket: str, begun: bool) -> None:
        """Called by the engine."""

    def enter(self, phase: str) -> str:
        """Called by the engine."""
        return ""

    def end(self) -> dict[str, float]:
        """Ends the last phase; returns seconds by phase."""
        self._begin("")
        return self.seconds


def main() -> int:
    """Reads options from stdin, prints seconds."""
    options = json.load(sys.stdin)
    clock, begun = PhaseClock(), time.perf_counter()
    try:
        from trencadis import LLM

        llm = LLM(options.pop("model", ""), progress=clock, **options)
    except StartupError as error:
        print(f"trencadis: {error}", file=sys.stderr)
        return 2
    seconds, phases = time.perf_counter() - begun, clock.end()
    llm.close()
    compiled = sum(took for name, took in phases.items() if name.lower().startswith(COMPILES))
    print(json.dumps({"total_startup_time": seconds, "compilation_time": compiled, "phases": phases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
