"""A benchmark in parts, each in a process of its own with a deadline: what fails takes nothing with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.harness.claims import Claim, judge
from benchmarks.harness.reporting import RESULTS, ROOT, environment, machine


def ended(
    command: Sequence[str], left: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs ``command`` in the checkout, with ``variables`` in its environment; keeps what it says on stderr.

    Its own children end with it: they would hold memory of the card, and compute beside the next part. They are a group
    of processes, not a session, which some machines let run on when this command is stopped.

    Raises:
        subprocess.TimeoutExpired: it ran for ``left`` seconds.
    """
    env = environment() | {"HF_HUB_OFFLINE": "1"} | dict(variables or {})
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, process_group=0) as child:
        try:
            said = child.communicate(timeout=left)[1]
        except subprocess.TimeoutExpired as error:
            _end(child.pid)
            with suppress(subprocess.TimeoutExpired):
                error.stderr = child.communicate(timeout=10)[1]
            raise
        finally:
            _end(child.pid)
    return subprocess.CompletedProcess(command, child.returncode, stderr=said)


def _end(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@dataclass
class PartRun:
    """One run: its settings, its deadline and its figures.

    Args:
        device: the device that is measured.
        end: ``time.monotonic`` at which the run must end.
        out: folder of the results.
    """

    device: str
    smoke: bool
    end: float
    out: Path = RESULTS
    values: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    kind: ClassVar[str] = ""
    """Begins the names of the files that parts write to."""
    claims: ClassVar[Sequence[Claim]] = ()
    card: str = ""
    """The card's name; empty without one."""
    _writes: threading.Lock = field(default_factory=threading.Lock)

    def child(
        self, name: str, module: str, *args: str, out: Path | None = None, limit: float = 240.0,
        variables: Mapping[str, str] | None = None,
    ) -> Any:  # fmt: skip
        """Runs a module in its own process, with ``variables`` in its environment, and returns its JSON, or None if it
        wrote none.

        What it wrote before it failed or ran out of time counts.
        """
        left = min(limit, self.end - time.monotonic())
        if left < 5:
            self.failures.append(f"{name}: no time was left")
            return None
        begun = time.monotonic()
        command = [sys.executable, "-P", "-m", f"benchmarks.{module}", *args]
        try:
            done = ended(command, left, variables)
            if done.returncode:
                self.failures.append(f"{name}: ended with {done.returncode}: {done.stderr[-2000:]}")
        except subprocess.TimeoutExpired as error:
            said = f": {str(error.stderr)[-2000:]}" if error.stderr else ""
            self.failures.append(f"{name}: stopped after {left:.0f} s{said}")
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        try:
            found = json.loads(out.read_text()) if out is not None else None
        except (OSError, ValueError):
            found = None
        self.raw[name] = None if found is None else {k: v for k, v in found.items() if k not in ("answers", "forced")}
        if found is not None:
            self.failures += [f"{name}, {what}: {why}" for what, why in found.get("failed", {}).items()]
        return found

    def new_file(self, name: str) -> Path:
        """The file that a part writes to; deletes what an earlier run left there."""
        path = RESULTS / f"{self.kind}-{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        return path

    def claim_lines(self) -> list[str]:
        """One line per claim; a smoke run is not judged."""
        found, shown = judge(self.claims, self.values, self.notes), []
        for c in self.claims:
            if c.id not in found:
                shown.append(f"not measured  {c.text} ({c.wanted})")
                continue
            row = found[c.id]
            state = "ran         " if self.smoke else "ok          " if row["passed"] else "FAIL        "
            shown.append(f"{state}  {c.text}: {row['value']:.3g}{c.unit} ({c.wanted}) {row['note']}")
        return shown

    def write(self) -> Path:
        """Writes ``KIND.json`` with what is known so far."""
        result = {
            "kind": self.kind, "machine": machine() | {"card": self.card}, "smoke": self.smoke,
            "claims": judge(self.claims, self.values, self.notes), "failures": self.failures, "parts": self.raw,
        }  # fmt: skip
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"{self.kind}.json"
        with self._writes:
            path.write_text(json.dumps(result, indent=1) + "\n")
        return path

    def run_parts(
        self, parts: Mapping[str, Callable[[Any], None]], names: Sequence[str], together: Sequence[str] = ()
    ) -> None:
        """Runs the parts that ``names`` lists, in the order of ``parts``; writes what is known after each.

        Args:
            together: parts that time nothing, so that they run at once and before all others.
        """

        def run_part(name: str) -> None:
            print(f"{name} begins, {self.end - time.monotonic():.0f} s are left", flush=True)
            try:
                parts[name](self)
            except Exception as error:
                self.failures.append(f"{name}: {type(error).__name__}: {error}")
            self.write()

        asked = [n for n in parts if n in names]
        self.run_together([partial(run_part, n) for n in asked if n in together])
        for name in [n for n in asked if n not in together]:
            run_part(name)

    def run_together(self, calls: Sequence[Callable[[], object]]) -> None:
        """Runs ``calls`` in threads at once, each of which waits for processes of its own."""
        if calls:
            with ThreadPoolExecutor(len(calls)) as pool:
                for done in [pool.submit(call) for call in calls]:
                    done.result()

    def finish(self, docs: Path | None, *more: str) -> int:
        """Prints and writes the results, updates the pages in ``docs``, and returns the exit code.

        Args:
            more: further arguments of ``tools/hardware.py``.
        """
        print("\n".join(["", *self.claim_lines(), *(f"PART FAILED  {f}" for f in self.failures)]), flush=True)
        path = self.write()
        print(f"written to {path}")
        if docs is not None:
            tool = [sys.executable, str(ROOT / "tools" / "hardware.py"), "--measured", str(path), "--docs", str(docs)]
            subprocess.run([*tool, *more, "--write"], cwd=ROOT, env=environment(), check=True)
        held = all(c["passed"] for c in judge(self.claims, self.values).values())
        return int(bool(self.failures) or not (held or self.smoke))
