"""``CudaRuntime`` over a stand-in of ``torch.cuda`` that keeps torch's rules about graphs and their pools."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.fakes import cuda as fake_cuda
from trencadis.core.device.backend import OutOfDeviceMemory

pytest.importorskip("triton", reason="triton is not installed")


RULES = [(threads, drops) for threads in (False, True) for drops in (True, False)]
"""Whether torch books workspaces by thread; whether it has a call that drops them."""


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> fake_cuda.PoolAccounting:
    return fake_cuda.install(monkeypatch, *getattr(request, "param", ()))


by_every_rule = pytest.mark.parametrize("books", RULES, indirect=True)
shared = pytest.mark.parametrize("books", [(False, False), (True, False)], indirect=True)


@pytest.fixture
def runtime(books: fake_cuda.PoolAccounting) -> Any:
    from trencadis.backends.cuda.cuda_runtime import CudaRuntime

    return CudaRuntime(torch.device("cuda"))


def capture(runtime: Any, body: Any = lambda inputs: inputs, stage: str = "DECODE") -> Any:
    """As a program captures: after a run on the same thread. Its body begins with a product."""
    static, books = torch.zeros(1), torch.cuda.CUDAGraph.accounting  # type: ignore[attr-defined]

    def whole(inputs: Any) -> Any:
        books.product()
        return body(inputs)

    def both() -> Any:
        runtime.launch(stage, lambda inputs: books.product(), None, static)
        return runtime.capture(stage, f"{stage}(1)", whole, None, static)

    return runtime.on_captures(both)


def fails(error: BaseException) -> Any:
    def body(inputs: Any) -> None:
        raise error

    return body


def test_a_device_without_an_index_is_the_current_one(runtime: Any) -> None:
    assert runtime.device == torch.device("cuda", 0)


def test_no_thread_makes_a_context_on_another_card(books: fake_cuda.PoolAccounting) -> None:
    """A context takes half a GiB of a card, or cannot be made there."""
    from trencadis.backends.cuda.cuda_runtime import CudaRuntime

    runtime: Any = CudaRuntime(torch.device("cuda", 2))
    here, there = torch.zeros(1), torch.zeros(1)

    def step() -> None:
        runtime.launch("DECODE", lambda inputs: None, None, here)
        runtime.upload(here, there)
        runtime.on_uploads(lambda: None, [])
        runtime.upload_weights(here, there)
        runtime.replay(capture(runtime))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert books.contexts == {2}


def test_a_thread_stays_on_a_card_that_it_works_on(books: fake_cuda.PoolAccounting) -> None:
    """Whoever calls may use another card beside this one's."""
    from trencadis.backends.cuda.cuda_runtime import CudaRuntime

    runtime: Any = CudaRuntime(torch.device("cuda", 1))
    torch.cuda.set_device(0)
    runtime.launch("DECODE", lambda inputs: None, None, torch.zeros(1))
    assert torch.cuda.current_device() == 0


def test_large_host_memory_takes_what_it_holds(runtime: Any, books: fake_cuda.PoolAccounting, monkeypatch: Any) -> None:
    """torch would lock 64 GiB where 40 are asked for."""
    monkeypatch.setattr("trencadis.backends.cuda.cuda_runtime.LARGE", 1 << 20)
    held = runtime.allocate_pinned((5, 300_000), torch.float16)
    assert held.shape == (5, 300_000) and held.dtype is torch.float16 and held.nbytes <= books.locked <= 3_100_000
    part = held[2]
    del held
    gc.collect()
    part.fill_(1)
    assert books.registered
    del part
    gc.collect()
    assert not books.registered and not books.locked
    runtime.allocate_pinned((1000,), torch.uint8)
    assert books.locked.bit_count() == 1, "torch's own"


def test_host_memory_that_the_driver_does_not_lock_comes_from_torch(
    runtime: Any, books: fake_cuda.PoolAccounting, monkeypatch: Any
) -> None:
    monkeypatch.setattr("trencadis.backends.cuda.cuda_runtime.LARGE", 1 << 20)
    books.lockable = False
    assert runtime.allocate_pinned((3 << 20,), torch.uint8).numel() == 3 << 20
    assert books.locked == 4 << 20 and not books.stale


def test_graphs_of_a_stage_share_a_pool(runtime: Any, books: fake_cuda.PoolAccounting) -> None:
    graphs = [capture(runtime) for _ in range(3)]
    assert books.uses == {graphs[0].memory.handle: 3}


@by_every_rule
def test_a_release_leaves_the_other_graphs_their_workspace(runtime: Any, books: fake_cuda.PoolAccounting) -> None:
    """Graphs of other stages too: all are captured on one stream."""
    first, second, other = capture(runtime), capture(runtime), capture(runtime, stage="VISION")
    runtime.release(first)
    del first
    later = capture(runtime)
    for graph in (second, other, later):
        runtime.replay(graph)


@by_every_rule
@pytest.mark.parametrize("what", ["body", "invalid", "unbuilt"])
def test_a_failed_capture_leaves_the_other_graphs_their_workspace(
    runtime: Any, books: fake_cuda.PoolAccounting, what: str
) -> None:
    """Whether its body fails, its end, or what is made of it."""
    first = capture(runtime)
    if what != "body":
        setattr(books, what, True)
    with pytest.raises(RuntimeError):
        capture(runtime, fails(RuntimeError("body")) if what == "body" else lambda inputs: inputs)
    gc.collect()
    runtime.replay(first)


@by_every_rule
def test_the_end_of_a_thread_that_asked_for_captures_leaves_graphs_their_workspace(
    runtime: Any, books: fake_cuda.PoolAccounting
) -> None:
    """It once captured them itself, and took its workspaces with it."""
    graphs: list[Any] = []
    asks = threading.Thread(target=lambda: graphs.append(capture(runtime)))
    asks.start()
    asks.join()
    torch.cuda.empty_cache()
    runtime.replay(graphs[0])


@by_every_rule
def test_the_thread_that_captures_lives_as_long_as_a_graph(runtime: Any, books: fake_cuda.PoolAccounting) -> None:
    """Longer than the runtime, which an engine lets go of in any order."""
    thread = runtime.on_captures(threading.current_thread)
    graphs = [capture(runtime)]
    held = [runtime]
    del runtime
    assert thread.is_alive()
    books.settle()
    held[0].replay(graphs[0])
    held.clear()
    gc.collect()


def test_the_thread_that_captures_ends_with_the_last_graph(books: fake_cuda.PoolAccounting) -> None:
    from trencadis.backends.cuda.cuda_runtime import CudaRuntime

    runtime = CudaRuntime(torch.device("cuda"))
    graph = capture(runtime)
    thread = runtime.on_captures(threading.current_thread)
    del runtime
    gc.collect()
    assert thread.is_alive()
    del graph
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_what_a_capture_raises_is_kept_by_no_thread(runtime: Any, books: fake_cuda.PoolAccounting) -> None:
    """Its frames hold the tensors of the failed launch."""

    class Kept:
        """Stands for a tensor of the launch."""

    seen: list[weakref.ref[Kept]] = []

    def body(inputs: Any) -> None:
        held = Kept()
        seen.append(weakref.ref(held))
        raise ValueError("body")

    with pytest.raises(ValueError, match="body"):
        capture(runtime, body)
    gc.collect()
    assert seen[0]() is None


def test_a_first_product_within_a_capture_is_refused(runtime: Any, books: fake_cuda.PoolAccounting) -> None:
    """What the run before a capture is for, on the very thread."""
    runtime.launch("DECODE", lambda inputs: books.product(), None, torch.zeros(1))
    with pytest.raises(RuntimeError, match="not permitted"):
        runtime.capture("DECODE", "DECODE(1)", lambda inputs: books.product(), None, torch.zeros(1))


def test_a_graph_that_nobody_releases_ends_alone(runtime: Any, books: fake_cuda.PoolAccounting) -> None:
    first, second = capture(runtime), capture(runtime)
    del first
    gc.collect()
    runtime.replay(second)
    assert books.uses == {second.memory.handle: 1}
    del second
    gc.collect()
    books.empty()
    assert not books.uses


@shared
def test_a_graph_that_nobody_releases_ends_with_those_that_share_its_workspace(
    runtime: Any, books: fake_cuda.PoolAccounting
) -> None:
    first, second = capture(runtime), capture(runtime)
    del first
    gc.collect()
    runtime.replay(second)
    assert books.uses == {second.memory.handle: 2}
    del second
    gc.collect()
    books.empty()
    assert not books.uses


@by_every_rule
def test_a_graph_that_ends_within_another_capture_leaves_it_its_workspace(
    runtime: Any, books: fake_cuda.PoolAccounting
) -> None:
    """The collector may run at any time; the graph ends after the capture."""
    first = [capture(runtime)]
    inner = first[0].graph

    def body(inputs: Any) -> None:
        first.clear()
        assert inner.ended

    later = capture(runtime, body)
    runtime.replay(later)


def test_memory_comes_back_stage_by_stage(runtime: Any, books: fake_cuda.PoolAccounting) -> None:
    """A graph's own bytes with it, what a stage shares with its last graph, whatever other stages hold."""
    decode, vision = [capture(runtime), capture(runtime)], capture(runtime, stage="VISION")
    with pytest.raises(ValueError, match="body"):
        capture(runtime, fails(ValueError("body")))
    assert sorted(books.uses.values()) == [1, 2]
    runtime.release(decode.pop())
    assert sorted(books.uses.values()) == [1, 1]
    runtime.release(decode.pop())
    assert books.uses == {vision.memory.handle: 1}
    runtime.replay(vision)
    runtime.release(vision)
    assert not books.uses
    runtime.replay(capture(runtime))


@shared
def test_with_the_last_graph_all_memory_comes_back(runtime: Any, books: fake_cuda.PoolAccounting) -> None:
    """Until then none does, of no stage: memory of a graph whose end would hurt others is kept."""
    graphs = [capture(runtime), capture(runtime), capture(runtime, stage="VISION")]
    with pytest.raises(ValueError, match="body"):
        capture(runtime, fails(ValueError("body")))
    held = dict(books.uses)
    assert sorted(held.values()) == [1, 3]
    for graph in graphs:
        assert books.uses == held
        runtime.release(graph)
    assert not books.uses
    runtime.replay(capture(runtime))


def test_what_a_launch_without_memory_held_is_free_at_once(runtime: Any) -> None:
    """It is tried again when a graph has made way: before garbage is collected, also with Python 3.12."""
    held: list[Any] = []

    def body(inputs: Any) -> None:
        large = torch.zeros(1)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory")

    gc.disable()
    try:
        with suppress(OutOfDeviceMemory):
            runtime.launch("DECODE", body, None, torch.zeros(1))
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_failed_capture_leaves_the_pool_to_the_next(runtime: Any, books: fake_cuda.PoolAccounting) -> None:
    first = capture(runtime)
    with pytest.raises(OutOfDeviceMemory):
        capture(runtime, fails(torch.OutOfMemoryError("CUDA out of memory")))
    second = capture(runtime)
    assert second.memory is first.memory and books.uses == {first.memory.handle: 2} and not books.recording


def test_a_first_capture_that_fails_leaves_no_handle(runtime: Any, books: fake_cuda.PoolAccounting) -> None:
    """torch would refuse it: a tensor of the failed body still holds memory of its pool."""
    with pytest.raises(ValueError, match="body"):
        capture(runtime, fails(ValueError("body")))
    books.held.update(books.uses)
    later = capture(runtime)
    assert later.memory.graphs == 1
    assert sorted(books.uses.values()) == [0, 1]


def test_after_the_last_graph_another_pool_begins(runtime: Any, books: fake_cuda.PoolAccounting) -> None:
    first, second = capture(runtime), capture(runtime)
    books.held.update(books.uses)
    runtime.release(first)
    runtime.release(second)
    third = capture(runtime)
    assert third.memory is not second.memory and books.uses[third.memory.handle] == 1


@pytest.mark.parametrize("books", [(False, True, (2, minor)) for minor in (11, 12, 13, 14)], indirect=True)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), None])
def test_a_capture_that_cannot_be_ended(runtime: Any, books: fake_cuda.PoolAccounting, error: Any) -> None:
    """Whatever torch does of it itself: the allocator stops recording, older graphs keep their pool, later ones take
    another; lack of memory is told."""
    first = capture(runtime)
    books.invalid = True
    with pytest.raises(RuntimeError) as caught:
        capture(runtime, fails(error) if error else lambda inputs: inputs)
    assert isinstance(caught.value, OutOfDeviceMemory) is (error is not None)
    assert not books.recording and books.uses == {first.memory.handle: 1}
    gc.collect()
    later = capture(runtime)
    assert later.memory is not first.memory
    runtime.release(first)
    runtime.release(later)
    assert not books.uses


@pytest.mark.parametrize("books", [(False, True, (2, minor)) for minor in (11, 13, 14)], indirect=True)
def test_a_capture_of_which_no_graph_can_be_made(runtime: Any, books: fake_cuda.PoolAccounting) -> None:
    """There was no memory for its nodes: the capture has ended, and its pool is released once."""
    first = capture(runtime)
    books.unbuilt = True
    with pytest.raises(RuntimeError, match="out of memory"):
        capture(runtime)
    gc.collect()
    assert not books.recording and books.uses == {first.memory.handle: 1}
    runtime.replay(first)
    runtime.replay(capture(runtime))
