"""Check of sums over peer memory at the start: they are served only where they equal the library's on every rank.

Drawn messages of several lengths are summed with and without the stream, one launch behind another with new values
each time, then from a graph. All values are small whole numbers, so that any order of additions gives the same bits,
and a sum of a message that has changed, or that was read too early, differs. The kernels are those that serve; only the
number of polls is smaller, so that a rank that never comes costs about a second a launch. After each part the ranks
agree over the host, so that all go on or all stop: a rank that meets an exception costs the others one part of waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trencadis.backends.cuda.kernels.gpu_platform import in_use
from trencadis.backends.cuda.kernels.peers import two_shot_reduce

ROUNDS, PART = 50, 10
"""Launches of each case behind each other, and of one part, after which the ranks agree."""

REPLAYS = 5
"""Replays of the graph, with new values each time."""

POLLS = 1 << 21
"""Polls of a rank's flag before a launch gives up: about a second."""

STRIDE = 64
"""Values between the messages of two rounds, which are windows of one drawn tensor; a multiple of 16 bytes."""


class CapturedSums(Protocol):
    """A graph of several sums."""

    def replay(self) -> list[Tensor]:
        """Replays the graph; returns the sums, which the next replay overwrites."""
        ...

    def release(self) -> None: ...


class Sums(Protocol):
    """Sums over peer memory (``symmetric_memory.PeerAllReduce``)."""

    def can_reduce(self, x: Tensor) -> bool: ...

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, polls: int | None = None) -> Tensor: ...


class RankCalls(NamedTuple):
    """The calls of one rank that the check makes.

    Args:
        rank, world: of this rank.
        sum_by_library: sums a tensor over ranks in place.
        agree: (reason or "") -> the reason of the lowest rank that has one, the same on all ranks.
        capture: captures a body, whose results are sums, as a graph.
    """

    rank: int
    world: int
    sum_by_library: Callable[[Tensor], None]
    agree: Callable[[str], str]
    capture: Callable[[Callable[[], list[Tensor]]], CapturedSums]


class WrongSumError(RuntimeError):
    """A sum over peer memory is not the library's."""


class _Case(NamedTuple):
    """Messages of one length, and whether the stream is added."""

    dtype: torch.dtype
    length: int
    added: bool

    def __str__(self) -> str:
        size = self.length * self.dtype.itemsize
        return f"{size} bytes{' with the stream' if self.added else ''}"


class _Values(NamedTuple):
    """Drawn values of a dtype: this rank's, the sums of all ranks', and the stream, which is the same everywhere."""

    own: Tensor
    total: Tensor
    stream: Tensor


def find_fault(sums: Sums, ranks: RankCalls, dtypes: Sequence[torch.dtype], device: torch.device) -> str:
    """Returns why sums of messages of ``dtypes`` are not to be used, the same on every rank; "" if all are right."""
    check = _Check(sums, ranks, dtypes, device)
    try:
        return next(filter(None, (ranks.agree(_reason(part)) for part in check.parts())), "")
    finally:
        check.release()


def _reason(part: Callable[[], None]) -> str:
    """Runs a part; returns its error in one line, or ""."""
    try:
        part()
    except Exception as error:  # whatever it is, the library sums instead
        return (str(error).strip().splitlines() or [""])[0][:160] or type(error).__name__
    return ""


class _Check:
    def __init__(self, sums: Sums, ranks: RankCalls, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self._sums, self._ranks, self._device = sums, ranks, device
        self._dtypes = tuple(dict.fromkeys(dtypes))
        self._values: dict[torch.dtype, _Values] = {}
        self._graph: CapturedSums | None = None
        self._cases: list[_Case] = []
        self._windows: list[Tensor] = []

    def parts(self) -> Iterator[Callable[[], None]]:
        """Yields the parts in order; every rank runs the same."""
        yield self._draw
        for dtype in self._dtypes:
            yield partial(self._sum_by_library, dtype)
        yield self._compile
        for case in self._cases:
            yield partial(self._compare, [case], [0])
        for case in self._cases:
            for first in range(1, ROUNDS, PART):
                yield partial(self._compare, [case], range(first, min(first + PART, ROUNDS)))
        for number in range(3):
            yield partial(self._compare, self._cases, [number])
        yield self._capture
        for number in range(REPLAYS):
            yield partial(self._replay, number)

    def _draw(self) -> None:
        """Draws whole numbers whose sums, the stream included, are exact in the 8 bits of a bfloat16."""
        most = 256 // (self._ranks.world + 1)
        for dtype in self._dtypes:
            lengths = [n for n in _lengths(self._ranks.world, dtype) if self._sums.can_reduce(self._zeros(n, dtype))]
            self._cases += [_Case(dtype, n, added) for n in lengths for added in (False, True)]
            size = max(lengths) + STRIDE * ROUNDS
            own, stream = (self._draw_numbers(size, dtype, most, seed) for seed in (self._ranks.rank + 1, 0))
            self._values[dtype] = _Values(own, own.clone(), stream)
        self._windows = [self._zeros(case.length, case.dtype) for case in self._cases]

    def _sum_by_library(self, dtype: torch.dtype) -> None:
        self._ranks.sum_by_library(self._values[dtype].total)

    def _zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self._device)

    def _draw_numbers(self, size: int, dtype: torch.dtype, most: int, seed: int) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(seed)
        drawn = torch.randint(-most, most + 1, (size,), generator=generator, device=self._device, dtype=torch.int32)
        return drawn.to(dtype)

    def _compile(self) -> None:
        """Launches each case once without waiting for a rank, since ranks compile at different speeds."""
        for case in self._cases:
            self._sum(case, 0, polls=0)
        self._finish()

    def _message(self, case: _Case, number: int) -> Tensor:
        return self._values[case.dtype].own[STRIDE * number :][: case.length]

    def _sum(self, case: _Case, number: int, polls: int = POLLS) -> Tensor:
        residual = self._values[case.dtype].stream[: case.length] if case.added else None
        return self._sums.all_reduce(self._message(case, number), residual, polls)

    def _expect(self, case: _Case, number: int) -> Tensor:
        values = self._values[case.dtype]
        total = values.total[STRIDE * number :][: case.length]
        return total + values.stream[: case.length] if case.added else total

    def _compare(self, cases: Sequence[_Case], rounds: Sequence[int]) -> None:
        """Launches sums behind each other, then compares all; in each round another rank comes late."""
        made = []
        for number in rounds:
            if number % self._ranks.world == self._ranks.rank:
                self._be_late()
            made += [(case, number, self._sum(case, number)) for case in cases]
        for case, number, out in made:
            self._judge(case, number, out, "")

    def _be_late(self) -> None:
        """Queues some work on the device."""
        for values in self._values.values():
            values.own.double().cumsum(0)

    def _judge(self, case: _Case, number: int, out: Tensor, where: str) -> None:
        """Raises WrongSumError unless ``out`` is the sum."""
        if torch.equal(out, self._expect(case, number)):
            return
        late = bool(out.isnan().any())
        what = "did not arrive in time" if late else "differs from the library's"
        raise WrongSumError(f"a sum of {case}{where} {what} on rank {self._ranks.rank}")

    def _capture(self) -> None:
        def body() -> list[Tensor]:
            found = []
            for case, window in zip(self._cases, self._windows, strict=True):
                residual = self._values[case.dtype].stream[: case.length] if case.added else None
                found.append(self._sums.all_reduce(window, residual, POLLS))
            return found

        self._graph = self._ranks.capture(body)

    def _replay(self, number: int) -> None:
        assert self._graph is not None
        for case, window in zip(self._cases, self._windows, strict=True):
            window.copy_(self._message(case, number))
        if number % self._ranks.world == self._ranks.rank:
            self._be_late()
        for case, out in zip(self._cases, self._graph.replay(), strict=True):
            self._judge(case, number, out, " in a graph")

    def release(self) -> None:
        """Releases the graph."""
        if self._graph is not None:
            self._graph.release()

    def _finish(self) -> None:
        if self._device.type != "cpu":
            in_use().module.synchronize(self._device)


def _lengths(world: int, dtype: torch.dtype) -> list[int]:
    """Returns numbers of values of a message: the smallest and largest of one step and of two, and some between, also
    those that fill no whole program.
    """
    once = two_shot_reduce.one_step_bytes(world)
    sizes = [8 * dtype.itemsize, once // 64, once // 8 + 3 * dtype.itemsize, once]
    if two_shot_reduce.steps(two_shot_reduce.MOST, world) == 2:
        sizes += [once + dtype.itemsize, two_shot_reduce.MOST // 3, two_shot_reduce.MOST]
    return [size // dtype.itemsize for size in dict.fromkeys(sizes)]
