"""Pages that nothing uses go back to the system, at moments when nobody waits."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.process import heap_trimmer
from trencadis.core.process.heap_trimmer import LATEST, OFTEN, QUIET, HeapTrimmer


def trimmer() -> tuple[HeapTrimmer, list[float], list[float]]:
    now, trims = [0.0], []
    return HeapTrimmer(lambda: trims.append(now[0]), lambda: now[0], lambda generation: None), now, trims


def test_nothing_ran_nothing_to_do() -> None:
    it, now, _ = trimmer()
    now[0] = 10 * LATEST
    assert it.wait() is None


def test_a_quiet_moment_after_a_while() -> None:
    it, now, trims = trimmer()
    it.after_step()
    assert it.wait() == OFTEN
    now[0] = 2 * OFTEN
    assert it.wait() == QUIET
    it.collect_and_trim()
    assert trims == [2 * OFTEN] and it.wait() is None


def test_a_process_that_is_never_quiet() -> None:
    it, now, trims = trimmer()
    for second in range(1000):
        now[0] = float(second)
        it.after_step()
    assert trims[:3] == [LATEST + 1, 2 * LATEST + 2, 3 * LATEST + 3]


def test_garbage_is_collected_between_steps_and_when_it_is_quiet() -> None:
    now, done = [0.0], list[tuple[float, int]]()
    it = HeapTrimmer(lambda: None, lambda: now[0], lambda generation: done.append((now[0], generation)))
    for second in range(int(LATEST) + 2):
        now[0] = float(second)
        it.after_step()
    assert done == [*((6.0 * i, 1) for i in range(1, 11)), (LATEST + 1, 2)], "what is young, and at last all"
    now[0] += OFTEN
    it.collect_and_trim()
    assert done[-1] == (now[0], 2)


class Knot:
    """A cycle that says when it is collected."""

    def __init__(self, gone: list[int]) -> None:
        self.itself, self.gone = self, gone

    def __del__(self) -> None:
        self.gone.append(1)


def test_a_loaded_process_collects_only_when_it_is_told_to() -> None:
    gone, it = list[int](), HeapTrimmer(lambda: None)
    try:
        it.begin()
        assert not gc.isenabled() and gc.get_freeze_count() > 1000
        Knot(gone)
        made = [[i] for i in range(200_000)]  # enough for many automatic collections
        assert not gone and len(made)
        it.collect_and_trim()
        assert gone == [1]
    finally:
        gc.enable()
        gc.unfreeze()


def test_an_event_loop_trims_beside_its_work_and_only_after_some() -> None:
    """A thread does it: clients do not wait for it."""
    trims: list[int] = []
    done = [0]

    async def life() -> None:
        loop = threading.get_ident()
        task = asyncio.create_task(
            heap_trimmer.run_trimmer(lambda: done[0], lambda: trims.append(threading.get_ident()), 0.001)
        )
        await asyncio.sleep(0.02)
        assert not trims, "nothing ran, nothing to do"
        done[0] += 1
        while not trims:
            await asyncio.sleep(0.001)
        task.cancel()
        assert trims != [loop]

    asyncio.run(asyncio.wait_for(life(), 30))


def test_an_event_loop_collects_while_few_requests_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a flood a collection walks all that waits, so it comes late; the interpreter has its own only far later."""
    monkeypatch.setattr(heap_trimmer, "YOUNG", 0.001)
    opened, collections, now = [heap_trimmer.FEW + 1], [0], [0.0]

    def collect() -> None:
        collections[0] += 1

    async def life() -> None:
        before = gc.get_threshold()
        task = asyncio.create_task(heap_trimmer.run_collector(lambda: opened[0], lambda: now[0], collect))
        try:
            await asyncio.sleep(0.02)
            assert collections == [0] and gc.get_threshold() == (*before[:2], heap_trimmer.SELDOM)
            now[0] += heap_trimmer.LATEST
            await asyncio.sleep(0.02)
            assert collections == [1], "a busy server collects too, seldom"
            opened[0] = heap_trimmer.FEW
            while collections[0] < 3:
                await asyncio.sleep(0.001)
        finally:
            task.cancel()
            gc.set_threshold(*before)

    asyncio.run(asyncio.wait_for(life(), 30))


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_trim_returns_what_lies_between_living_things() -> None:
    """Every second one of many small arrays goes: their pages stay until they are asked for."""
    if not hasattr(heap_trimmer.ctypes.CDLL(None), "malloc_trim"):  # type: ignore[attr-defined]
        pytest.skip("this C library has no malloc_trim")
    kept: list[Any] = [np.ones(12_000, np.uint8) for _ in range(8000)]
    full = resident()
    del kept[::2]
    heap_trimmer.trim()
    assert full - resident() > 25 << 20
    assert len(kept) == 4000


def test_an_engine_without_work_wakes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop sleeps as long as it may, trims once, then sleeps for good."""
    from trencadis.core.process import engine_process as proc

    monkeypatch.setattr(heap_trimmer, "QUIET", 0.01)
    monkeypatch.setattr(heap_trimmer, "OFTEN", 0.02)
    process = object.__new__(proc.EngineProcess)
    requested: SimpleQueue[float | None] = SimpleQueue()
    trims: list[float] = []

    class Inbox:
        def take(self, wait: bool, seconds: float | None = None) -> list[Any]:
            requested.put(seconds)
            if seconds is None:
                raise StopIteration
            time.sleep(seconds)
            return []

    class Engine:
        def busy(self) -> bool:
            return False

    process.draining, process.open = False, {}
    process.inbox = Inbox()  # type: ignore[assignment]
    process.heap_trimmer = HeapTrimmer(lambda: trims.append(time.monotonic()))
    process.heap_trimmer.after_step()
    with pytest.raises(StopIteration):
        process.serve(Engine())  # type: ignore[arg-type]
    first = requested.get()
    assert first is not None and 0 < first <= 0.02 and requested.get() is None and len(trims) == 1


def test_nothing_is_collected_while_modules_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's process: while torch and the factory come, not while the engine loads."""
    from trencadis.core.process.engine_process import EngineProcess

    seen: list[bool] = []

    def find(entry: str) -> Any:
        seen.append(gc.isenabled())

        def factory(config: EngineConfig, progress: Any) -> Any:
            seen.append(gc.isenabled())
            raise StartupError("enough")

        return factory

    monkeypatch.setattr("trencadis.core.process.engine_process.find_factory", find)
    process: Any = object.__new__(EngineProcess)
    process.send = lambda message: None
    with pytest.raises(StartupError):
        process.load(EngineConfig(engine="some:other"))
    assert seen == [False, True]
    with pytest.raises(StartupError), heap_trimmer.pause_gc():
        raise StartupError("an import that fails")
    assert gc.isenabled()
