"""What kernels touch before and behind their wait, and which of it is ordered where a launch may start early.

The interpreter runs the kernels themselves, as on a card of sm_90; every address that a program loads, stores or counts
by is noted, with whether its program had waited. The rules are CUDA's ("Programmatic Dependent Launch and
Synchronization"): a dependent launch starts once every program of the one before has said so or ended; its wait ends
when the one before it is complete, and what that wrote can be read. Any other launch starts when all before it are
complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from triton.runtime import interpreter as triton_interpreter

from trencadis.backends.cuda.kernels.layers import dependent_launch, skinny_gemm

Addresses = NDArray[np.uint64]
NONE: Addresses = np.zeros(0, np.uint64)


@dataclass
class Touched:
    """Bytes that one phase of a launch reads and writes."""

    reads: list[Addresses] = field(default_factory=list)
    writes: list[Addresses] = field(default_factory=list)

    def all(self, writes: bool) -> Addresses:
        held = self.writes if writes else self.reads
        return np.unique(np.concatenate(held)) if held else NONE


@dataclass
class DependentLaunch:
    """One launch: whether it may start early, and what its programs touch early and late."""

    name: str
    dependent: bool
    early: Touched = field(default_factory=Touched)  # before the wait
    late: Touched = field(default_factory=Touched)
    waits: int = 0
    tells_early: bool = False  # a program let the next launch start before its own wait
    programs: int = 0


class Recorder:
    """``with Recorder().on() as seen:`` notes launches in ``seen.launches``."""

    def __init__(self) -> None:
        self.launches: list[DependentLaunch] = []
        self._waited = False

    @contextmanager
    def on(self) -> Iterator[Recorder]:
        builder, executor = triton_interpreter.InterpreterBuilder, triton_interpreter.GridExecutor
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dependent_launch, "possible", lambda device: True)
            patch.setattr(dependent_launch, "gdc_wait", self._wait)
            patch.setattr(dependent_launch, "gdc_launch_dependents", self._tell)
            patch.setattr(skinny_gemm, "fetch", self._fetch)
            patch.setattr(executor, "__call__", self._launch(executor.__call__))
            patch.setattr(builder, "set_grid_idx", self._program(builder.set_grid_idx))
            for name, kinds in (
                ("create_masked_load", "r"), ("create_masked_store", "w"), ("create_atomic_rmw", "rw"),
            ):  # fmt: skip
                patch.setattr(builder, name, self._access(getattr(builder, name), kinds))
            yield self

    def _wait(self) -> None:
        self._waited = True
        self.launches[-1].waits += 1

    def _tell(self) -> None:
        if not self._waited:
            self.launches[-1].tells_early = True

    def _fetch(self, pointers: Any) -> None:
        self._note(pointers.handle.data, "r", 128)

    def _launch(self, original: Any) -> Any:
        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            early = bool(kwargs.pop("launch_pdl", False))
            self.launches.append(DependentLaunch(executor.fn.__name__, early))
            return original(executor, *args, **kwargs)

        return call

    def _program(self, original: Any) -> Any:
        def begin(builder: Any, *place: Any) -> Any:
            self._waited = False
            self.launches[-1].programs += 1
            return original(builder, *place)

        return begin

    def _access(self, original: Any, kinds: str) -> Any:
        def access(builder: Any, *args: Any) -> Any:
            pointers = args[1] if kinds == "rw" else args[0]
            mask = {"r": 1, "w": 2, "rw": 3}[kinds]
            taken = np.broadcast_to(args[mask].data, pointers.data.shape).astype(bool)
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            self._note(pointers.data[taken], kinds, size)
            return original(builder, *args)

        return access

    def _note(self, at: Any, kinds: str, size: int) -> None:
        now = self.launches[-1]
        phase = now.late if self._waited or not now.dependent else now.early
        places = np.asarray(at, np.uint64).ravel() // np.uint64(4) * np.uint64(4)  # words; nothing here is narrower
        if size > 4:
            places = (places[:, None] + np.arange(0, size, 4, dtype=np.uint64)[None, :]).ravel()
        for kind in kinds:
            (phase.reads if kind == "r" else phase.writes).append(np.unique(places))


def unordered(launches: list[DependentLaunch]) -> list[str]:
    """Accesses to the same memory, one of them writing, that no rule orders; dependent launches that never wait."""
    found = []
    for i, later in enumerate(launches):
        if later.dependent and later.waits < later.programs:
            found.append(f"{later.name}: {later.programs - later.waits} programs never wait")
        for phase, when, beside in (
            (later.early, "before its wait", _beside_early(launches, i)),
            (later.late, "behind its wait", _beside_late(launches, i)),
        ):
            for earlier in beside:
                found += _overlaps(launches[earlier], later, phase, when)
    return found


def _waited(launch: DependentLaunch) -> bool:
    return launch.waits >= launch.programs


def _beside_early(launches: list[DependentLaunch], i: int) -> list[int]:
    """Launches that may still run while launch ``i`` has not waited."""
    if i == 0 or not launches[i].dependent:
        return []
    last = launches[i - 1]
    told_late = _waited(last) and not last.tells_early
    return [i - 1, *(_beside_late if told_late else _beside_early)(launches, i - 1)]


def _beside_late(launches: list[DependentLaunch], i: int) -> list[int]:
    """Launches that may still run behind the wait of launch ``i``: one that did not wait may end before those ahead."""
    if i == 0 or not launches[i].dependent:
        return []
    return (_beside_late if _waited(launches[i - 1]) else _beside_early)(launches, i - 1)


def _overlaps(earlier: DependentLaunch, later: DependentLaunch, phase: Touched, when: str) -> list[str]:
    found = []
    for own, reference in ((False, True), (True, True), (True, False)):
        for part in (earlier.early, earlier.late):
            both = np.intersect1d(phase.all(own), part.all(reference), assume_unique=True)
            if both.size:
                does, did = ("writes" if writes else "reads" for writes in (own, reference))
                found.append(f"{later.name} {does} {when} what {earlier.name} {did}: {both.size} words")
    return found


def recorded(run: Callable[[], Any]) -> list[DependentLaunch]:
    """The launches of ``run()`` with all that they touch."""
    with Recorder().on() as seen:
        run()
    return seen.launches
