"""Random lives of graphs on a stand-in of ``torch.cuda``: no graph works in memory that is not its own, and all of it
comes back. Whether torch books cuBLAS' workspaces by process or by thread, whether it can drop them, and
whatever it does itself of a capture that fails."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fakes import cuda as fake_cuda

pytest.importorskip("triton", reason="triton is not installed")

GRAPHS, STAGES = 50, ("VISION", "PREFILL", "DECODE", "SAMPLE")
STATIC = torch.zeros(1)


class Life:
    """One engine's: it captures ``GRAPHS`` graphs, some of them in vain, and replays and releases them on the way."""

    def __init__(self, books: fake_cuda.PoolAccounting, seed: int) -> None:
        from trencadis.backends.cuda.cuda_runtime import CudaRuntime

        self.books, self.random = books, random.Random(seed)
        self.runtime: Any = CudaRuntime(torch.device("cuda"))
        self.graphs: list[Any] = []

    def body(self, inputs: Any) -> None:
        for _ in range(self.random.randrange(1, 3)):
            self.books.product()

    def failing(self, inputs: Any) -> None:
        self.body(inputs)
        raise torch.OutOfMemoryError("CUDA out of memory")

    def ending(self, inputs: Any) -> None:
        """The collector ends a graph within the capture."""
        if self.graphs:
            self.graphs.pop(self.random.randrange(len(self.graphs)))
        self.body(inputs)

    def capture(self) -> None:
        stage = self.random.choice(STAGES)
        how = self.random.random()
        self.books.invalid, self.books.unbuilt = how < 0.05, 0.05 <= how < 0.1
        fails = 0.1 <= how < 0.15
        body = self.failing if fails else self.ending if how < 0.25 else self.body

        def both() -> Any:
            self.runtime.launch(stage, self.body, None, STATIC)
            return self.runtime.capture(stage, stage, body, None, STATIC)

        try:
            self.graphs.append(self.runtime.on_captures(both))
        except RuntimeError:
            assert how < 0.15
        else:
            assert how >= 0.1 and not fails

    def run(self) -> None:
        """``GRAPHS`` captures, and between them whatever comes; then the end of all that lives."""
        for _ in range(GRAPHS):
            self._here_or_elsewhere(self.capture)
            for _ in range(self.random.randrange(4)):
                self._here_or_elsewhere(self.something)
        self.replay()
        while self.graphs:
            self.something()
        thread = self.runtime.on_captures(threading.current_thread)
        del self.runtime
        thread.join(10)
        torch.cuda.empty_cache()
        assert not thread.is_alive() and not self.books.uses and not self.books.recording

    def something(self) -> None:
        what = self.random.randrange(8)
        if what < 2 and self.graphs:
            self.runtime.release(self.graphs.pop(self.random.randrange(len(self.graphs))))
        elif what == 2 and self.graphs:
            self.graphs.pop(self.random.randrange(len(self.graphs)))  # nobody releases it
        elif what == 3:
            self.runtime.launch("PREFILL", self.body, None, STATIC)
        elif what == 4:
            torch.cuda.empty_cache()
        else:
            self.replay()

    def replay(self) -> None:
        for graph in self.graphs:
            self.runtime.replay(graph)

    def _here_or_elsewhere(self, call: Callable[[], None]) -> None:
        """Now and then on a thread that ends."""
        if self.random.random() < 0.98:
            call()
            return
        failed: list[BaseException] = []

        def guarded() -> None:
            try:
                call()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        assert not failed, failed


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("version", [(2, 11), (2, 13), (2, 14)])
@pytest.mark.parametrize("lives", [5, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_graph_loses_what_it_works_in(
    monkeypatch: pytest.MonkeyPatch, lives: int, version: tuple[int, int], threads: bool, drops: bool
) -> None:
    """Memory comes back too. Graphs here lie in no cycle, so the collector is asked once, not before each capture."""
    monkeypatch.setattr(gc, "collect", lambda *args: 0)
    started = time.process_time()
    for seed in range(lives):
        with monkeypatch.context() as patch:
            Life(fake_cuda.install(patch, threads, drops, version), seed).run()
    print(f"{lives} lives of {GRAPHS} graphs in {time.process_time() - started:.0f} s")
