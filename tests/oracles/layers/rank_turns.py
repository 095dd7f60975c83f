"""Kernels of several ranks side by side in the interpreter, which knows one program at a time.

Ranks are threads, one of which runs, and the turn may pass at every access to memory. Accesses are checked by vector
clocks.

Programs of one rank's launch run in turn as well, so a schedule is one of those that a card may take. What orders: the
stream of a rank; and a word that one program released, at the scope of the system, and another acquired.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter as triton_interpreter

from tests.oracles import interpreter as ours

Clock = dict[tuple[int, int], int]
SHARE = 0.3
"""How often an access passes the turn."""


class RankTurns:
    """``RankTurns(seed).run([rank 0, rank 1, ...])``: ``races`` lists what was not ordered."""

    def __init__(self, seed: int, tensors: Sequence[torch.Tensor]) -> None:
        self.rng, self.races = random.Random(seed), set[str]()
        self._tensors = list(tensors)
        self._turn = threading.Condition()
        self._at = 0
        self._alive: list[int] = []
        self._failed: list[BaseException] = []
        self._base: list[Clock] = []
        self._ended: list[Clock] = []
        self._clock: list[Clock] = []
        self._lane: list[tuple[int, int]] = []
        self._words: dict[int, tuple[tuple[int, int], int]] = {}  # last write
        self._reads: dict[int, dict[tuple[int, int], int]] = {}
        self._released: dict[int, Clock] = {}

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Runs all bodies to their ends."""
        ranks = range(len(bodies))
        self._base, self._ended = [{} for _ in ranks], [{} for _ in ranks]
        self._clock, self._lane = [{} for _ in ranks], [(r, 0) for r in ranks]
        self._alive = list(ranks)
        builder = triton_interpreter.InterpreterBuilder
        with pytest.MonkeyPatch.context() as patch:
            of = ours._Owned.of
            patch.setattr(ours._Owned, "of", lambda given: of([*given, *self._tensors]))
            patch.setattr(builder, "set_grid_dim", self._launch(builder.set_grid_dim))
            patch.setattr(builder, "set_grid_idx", self._program(builder.set_grid_idx))
            for name, kind in (("load", "read"), ("store", "write")):
                whole = f"create_masked_{name}"
                patch.setattr(builder, whole, self._access(getattr(builder, whole), kind))
            patch.setattr(builder, "create_atomic_rmw", self._atomic(builder.create_atomic_rmw))
            language: Any = triton_interpreter._patch_lang(None)
            try:
                threads = [threading.Thread(target=self._thread, args=(r, body)) for r, body in enumerate(bodies)]
                [t.start() for t in threads]
                [t.join() for t in threads]
            finally:
                language.restore()
        if self._failed:
            raise self._failed[0]

    def _thread(self, rank: int, body: Callable[[], None]) -> None:
        threading.current_thread().rank = rank  # type: ignore[attr-defined]
        with self._turn:
            self._turn.wait_for(lambda: self._at == rank or bool(self._failed))
            try:
                if not self._failed:
                    body()
            except BaseException as error:
                self._failed.append(error)
            self._alive.remove(rank)
            self._pass_on()

    def _pass_on(self) -> None:
        if self._alive:
            self._at = self.rng.choice(self._alive)
        self._turn.notify_all()

    @property
    def _rank(self) -> int:
        return threading.current_thread().rank  # type: ignore[attr-defined, no-any-return]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Lets other ranks go on until ``condition()``; for stand-ins of collectives, which threads call."""
        while not condition():
            self._pass_turn()

    def _yield(self) -> None:
        """Another rank may go on."""
        if self.rng.random() <= SHARE:
            self._pass_turn()

    def _pass_turn(self) -> None:
        """Gives the turn to a rank; what the interpreter keeps of this one's program is put back afterwards."""
        rank, builder, owned = self._rank, triton_interpreter.interpreter_builder, ours._Owned
        kept = builder.grid_idx, builder.grid_dim, owned.starts, owned.stops, ours._Grid.permutation
        self._pass_on()
        self._turn.wait_for(lambda: self._at == rank or bool(self._failed))
        if self._failed:
            raise RuntimeError("another rank failed")
        builder.grid_idx, builder.grid_dim, owned.starts, owned.stops, ours._Grid.permutation = kept

    # Clocks

    def _launch(self, original: Any) -> Any:
        def begin(builder: Any, *size: int) -> None:
            rank = self._rank
            _merge(self._base[rank], self._ended[rank])
            _merge(self._base[rank], self._clock[rank])
            original(builder, *size)

        return begin

    def _program(self, original: Any) -> Any:
        def begin(builder: Any, x: int, y: int, z: int) -> None:
            rank = self._rank
            _merge(self._ended[rank], self._clock[rank])
            self._lane[rank] = rank, x
            self._clock[rank] = dict(self._base[rank])
            original(builder, x, y, z)

        return begin

    def _access(self, original: Any, kind: str) -> Any:
        def access(builder: Any, pointers: Any, *rest: Any) -> Any:
            mask = rest[0] if kind == "read" else rest[1]
            taken = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
            self._note(pointers.data[taken], kind)
            out = original(builder, pointers, *rest)
            self._yield()
            return out

        return access

    def _note(self, addresses: Any, kind: str) -> None:
        lane, clock = self._lane[self._rank], self._clock[self._rank]
        clock[lane] = clock.get(lane, 0) + 1
        for word in set((np.asarray(addresses, np.uint64).ravel() // np.uint64(4)).tolist()):
            before = self._words.get(word)
            if before is not None and clock.get(before[0], 0) < before[1]:
                self.races.add(f"rank {lane[0]} {kind}s what rank {before[0][0]} writes")
            if kind == "read":
                self._reads.setdefault(word, {})[lane] = clock[lane]
                continue
            for other, tick in self._reads.pop(word, {}).items():
                if clock.get(other, 0) < tick:
                    self.races.add(f"rank {lane[0]} writes what rank {other[0]} reads")
            self._words[word] = lane, clock[lane]

    def _atomic(self, original: Any) -> Any:
        """Words of flags are ordered by themselves; they order the rest where they release and acquire."""

        def access(builder: Any, op: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
            clock, lane = self._clock[self._rank], self._lane[self._rank]
            taken = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
            words = (pointers.data[taken].astype(np.uint64) // np.uint64(4)).tolist()
            whole = "SYSTEM" in str(scope)
            clock[lane] = clock.get(lane, 0) + 1
            for word in words:
                if whole and ("ACQUIRE" in str(sem) and "RELEASE" not in str(sem)):
                    _merge(clock, self._released.get(word, {}))
                elif whole and "RELEASE" in str(sem):
                    _merge(self._released.setdefault(word, {}), clock)
            out = original(builder, op, pointers, value, mask, sem, scope)
            self._yield()
            return out

        return access


def _merge(clock: Clock, other: Clock) -> None:
    for lane, tick in other.items():
        clock[lane] = max(clock.get(lane, 0), tick)
