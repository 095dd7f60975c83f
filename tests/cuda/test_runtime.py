"""``CudaRuntime`` over a stand-in of ``torch.cuda`` that keeps torch's rules about graphs and their pools."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.fakes import cuda as fake_cuda
from trencadis.core.backend import OutOfDeviceMemory

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.Books:
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def runtime(books: fake_cuda.Books) -> Any:
    from trencadis.backends.cuda.runtime import CudaRuntime

    return CudaRuntime(torch.device("cuda"))


def capture(runtime: Any, body: Any = lambda inputs: inputs, stage: str = "DECODE") -> Any:
    return runtime.capture(stage, f"{stage}(1)", body, None, torch.zeros(1))


def fails(error: BaseException) -> Any:
    def body(inputs: Any) -> None:
        raise error

    return body


def test_a_device_without_an_index_is_the_current_one(runtime: Any) -> None:
    assert runtime.device == torch.device("cuda", 0)


def test_graphs_of_a_stage_share_a_pool(runtime: Any, books: fake_cuda.Books) -> None:
    graphs = [capture(runtime) for _ in range(3)]
    assert books.uses == {graphs[0].memory.handle: 3}


def test_a_release_leaves_the_other_graphs_their_workspace(runtime: Any, books: fake_cuda.Books) -> None:
    """Graphs of other stages too: all are captured on one stream."""
    first, second, other = capture(runtime), capture(runtime), capture(runtime, stage="VISION")
    runtime.release(first)
    del first
    later = capture(runtime)
    for graph in (second, other, later):
        runtime.replay(graph)


@pytest.mark.parametrize("what", ["body", "invalid", "unbuilt"])
def test_a_failed_capture_leaves_the_other_graphs_their_workspace(
    runtime: Any, books: fake_cuda.Books, what: str
) -> None:
    """Whether its body fails, its end, or what is made of it."""
    first = capture(runtime)
    if what != "body":
        setattr(books, what, True)
    with pytest.raises(RuntimeError):
        capture(runtime, fails(RuntimeError("body")) if what == "body" else lambda inputs: inputs)
    gc.collect()
    runtime.replay(first)


def test_a_graph_that_nobody_releases_ends_with_the_others(runtime: Any, books: fake_cuda.Books) -> None:
    first, second = capture(runtime), capture(runtime)
    del first
    gc.collect()
    runtime.replay(second)
    assert books.uses == {second.memory.handle: 2}
    del second
    gc.collect()
    books.empty()
    assert not books.uses


def test_a_graph_that_ends_within_another_capture_leaves_it_its_workspace(runtime: Any, books: fake_cuda.Books) -> None:
    """The collector may run at any time."""
    first = [capture(runtime)]
    later = capture(runtime, lambda inputs: first.clear())
    runtime.replay(later)


def test_with_the_last_graph_all_memory_comes_back(runtime: Any, books: fake_cuda.Books) -> None:
    """Until then none does, of no stage: memory of a graph whose end would hurt others is kept."""
    graphs = [capture(runtime), capture(runtime), capture(runtime, stage="VISION")]
    with pytest.raises(ValueError, match="body"):
        capture(runtime, fails(ValueError("body")))
    held = dict(books.uses)
    assert sorted(held.values()) == [1, 3]
    for graph in graphs:
        assert books.uses == held
        runtime.release(graph)
    assert not books.uses and not books.workspaces
    runtime.replay(capture(runtime))


def test_a_failed_capture_leaves_the_pool_to_the_next(runtime: Any, books: fake_cuda.Books) -> None:
    first = capture(runtime)
    with pytest.raises(OutOfDeviceMemory):
        capture(runtime, fails(torch.OutOfMemoryError("CUDA out of memory")))
    second = capture(runtime)
    assert second.memory is first.memory and books.uses == {first.memory.handle: 3} and not books.recording


def test_a_first_capture_that_fails_leaves_no_handle(runtime: Any, books: fake_cuda.Books) -> None:
    """torch would refuse it: a tensor of the failed body still holds memory of its pool."""
    with pytest.raises(ValueError, match="body"):
        capture(runtime, fails(ValueError("body")))
    books.held.update(books.uses)
    later = capture(runtime)
    assert later.memory.graphs == 1
    assert sorted(books.uses.values()) == [0, 1]


def test_after_the_last_graph_another_pool_begins(runtime: Any, books: fake_cuda.Books) -> None:
    first, second = capture(runtime), capture(runtime)
    books.held.update(books.uses)
    runtime.release(first)
    runtime.release(second)
    third = capture(runtime)
    assert third.memory is not second.memory and books.uses[third.memory.handle] == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), None])
def test_a_capture_that_cannot_be_ended(runtime: Any, books: fake_cuda.Books, error: Any) -> None:
    """The allocator stops recording, older graphs keep their pool, later ones take another; lack of memory is told."""
    first = capture(runtime)
    books.invalid = True
    with pytest.raises(RuntimeError) as caught:
        capture(runtime, fails(error) if error else lambda inputs: inputs)
    assert isinstance(caught.value, OutOfDeviceMemory) is (error is not None)
    assert not books.recording and books.uses == {first.memory.handle: 1}
    later = capture(runtime)
    assert later.memory is not first.memory
    runtime.release(first)
    runtime.release(later)
    assert not books.uses
