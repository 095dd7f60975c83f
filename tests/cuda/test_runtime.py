"""``CudaRuntime`` over a stand-in of ``torch.cuda`` that keeps torch's rules about graphs and their pools."""

from __future__ import annotations

from typing import Any

import fake_cuda
import pytest
import torch

from trencadis.core.backend import OutOfDeviceMemory

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.Books:
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def runtime(books: fake_cuda.Books) -> Any:
    from trencadis.backends.cuda.runtime import CudaRuntime

    return CudaRuntime(torch.device("cuda"))


def capture(runtime: Any, body: Any = lambda inputs: inputs) -> Any:
    return runtime.capture("DECODE", "DECODE(1)", body, None, torch.zeros(1))


def fails(error: BaseException) -> Any:
    def body(inputs: Any) -> None:
        raise error

    return body


def test_a_device_without_an_index_is_the_current_one(runtime: Any) -> None:
    assert runtime.device == torch.device("cuda", 0)


def test_graphs_of_a_stage_share_a_pool(runtime: Any, books: fake_cuda.Books) -> None:
    graphs = [capture(runtime) for _ in range(3)]
    assert books.uses == {graphs[0].memory.handle: 3}


def test_a_failed_capture_leaves_the_pool_to_the_next(runtime: Any, books: fake_cuda.Books) -> None:
    first = capture(runtime)
    with pytest.raises(OutOfDeviceMemory):
        capture(runtime, fails(torch.OutOfMemoryError("CUDA out of memory")))
    second = capture(runtime)
    assert second.memory is first.memory and books.uses == {first.memory.handle: 2} and not books.recording


def test_a_first_capture_that_fails_leaves_no_handle(runtime: Any, books: fake_cuda.Books) -> None:
    """torch would refuse it: a tensor of the failed body still holds memory of its pool."""
    with pytest.raises(ValueError, match="body"):
        capture(runtime, fails(ValueError("body")))
    books.held.update(books.uses)
    capture(runtime)
    assert sorted(books.uses.values()) == [0, 1]


def test_after_the_last_graph_another_pool_begins(runtime: Any, books: fake_cuda.Books) -> None:
    first, second = capture(runtime), capture(runtime)
    books.held.update(books.uses)
    runtime.release(first)
    assert books.uses == {second.memory.handle: 1}
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
    assert books.uses == {later.memory.handle: 1}
