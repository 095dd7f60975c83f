# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Unit tests for the breakable cudagraph primitives."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from unittest.mock import MagicMock, patch

import pytest
import torch

from vllm.platforms import current_platform

DEVICE_TYPE = current_platform.device_type
HAS_DEVICE_GRAPH = current_platform.is_cuda_alike() or current_platform.is_xpu()

if current_platform.is_xpu():
    from vllm.v1.worker.xpu_model_runner import _torch_cuda_wrapper

    # Route torch.cuda graph/stream APIs to torch.xpu, as XPUModelRunner does.
    with _torch_cuda_wrapper():
        pass


@pytest.fixture(autouse=True)
def _enable_breakable_cudagraph(monkeypatch: pytest.MonkeyPatch):
    """Enable breakable cudagraphs for this module's tests only.

    A per-test fixture suffices. monkeypatch restores the env so other
    test files running in the same pytest process are unaffected (a
    module-level os.environ assignment used to leak into
    test_cudagraph_dispatch.py and break it).
    """
    import vllm.envs as envs

    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    envs.disable_envs_cache()


def test_piecewise_capture_builds_fresh_metadata_for_both_passes():
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import (
        BatchExecutionDescriptor,
        CudaGraphManager,
    )

    manager = CudaGraphManager.__new__(CudaGraphManager)
    desc = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 8, None)
    manager.device = torch.device("cpu")
    manager._capture_descs = {CUDAGraphMode.PIECEWISE: [desc]}
    manager._graphs_captured = False
    manager.use_breakable_cg = True
    manager.ubatch_runner = None

    create_calls = []
    forward_calls = []

    def create_forward_fn(desc_arg, warmup):
        assert desc_arg == desc
        metadata = {"layer": object()}
        create_calls.append((warmup, metadata))

        def forward_fn(cg_mode):
            assert metadata
            forward_calls.append((warmup, cg_mode, metadata))

        return forward_fn

    with (
        patch(
            "vllm.v1.worker.gpu.cudagraph_utils.graph_capture",
            return_value=nullcontext(),
        ),
        patch(
            "vllm.v1.worker.gpu.cudagraph_utils.is_global_first_rank",
            return_value=False,
        ),
    ):
        manager.capture(create_forward_fn)

    assert [warmup for warmup, _ in create_calls] == [True, False]
    assert [mode for _, mode, _ in forward_calls] == [
        CUDAGraphMode.NONE,
        CUDAGraphMode.PIECEWISE,
    ]
    assert create_calls[0][1] is not create_calls[1][1]


@pytest.fixture(autouse=True)
def _reset_breakable_tls():
    """Defensively clear thread-local capture state between tests so a
    failure in one test can't leak "nested capture" errors into the next."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    BreakableCUDAGraphCapture._tls.active = None
    yield
    BreakableCUDAGraphCapture._tls.active = None


@pytest.fixture
def cuda_capture_stream():
    """A non-default CUDA stream suitable for cudagraph capture.

    ``CUDAGraph.capture_begin`` refuses to capture from the default
    stream, so all capture-using tests need to run under
    ``torch.cuda.stream(...)`` for a separate stream.
    """
    if not HAS_DEVICE_GRAPH:
        pytest.skip("CUDA or XPU graph required")
    from vllm.utils.torch_utils import _current_stream_tls

    prev_stream = getattr(_current_stream_tls, "value", None)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)
    # Exiting torch.cuda.stream() records the default stream in vllm's
    # patched set_stream cache. A later CUDAGraphWrapper capture in the same
    # process would then run on the default stream, which cannot capture
    # (this broke test_cudagraph_dispatch.py when run in-process after this
    # file). Restore the pre-fixture value so this module leaves no trace.
    _current_stream_tls.value = prev_stream


# ---------------------------------------------------------------------------
# eager_break_during_capture: outside capture
# ---------------------------------------------------------------------------


def test_decorator_passthrough_outside_capture():
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    calls = []

    @eager_break_during_capture
    def f(x):
        calls.append(x)
        return x * 2

    assert f(3) == 6
    assert calls == [3]


@pytest.mark.parametrize("enabled", [False, True])
def test_decorator_passthrough_returns_fn_result(
    monkeypatch: pytest.MonkeyPatch, enabled: bool
):
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    if not enabled:
        monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH")
    sentinel = object()

    @eager_break_during_capture
    def f():
        return sentinel

    assert f() is sentinel


def test_decorator_breaks_when_enabled_after_decoration(
    monkeypatch: pytest.MonkeyPatch,
):
    """VllmConfig can enable breakable cudagraphs after the decorated module
    was imported (e.g. on a cold model-info cache); the op must still break."""
    from vllm.compilation.breakable_cudagraph import (
        BreakableCUDAGraphCapture,
        eager_break_during_capture,
    )

    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH")

    @eager_break_during_capture
    def op(x):
        return x + 1

    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")

    class _Capture:
        _capturing = True

        def __init__(self):
            self.eager = []

        def add_eager(self, fn):
            self.eager.append(fn)
            return fn()

    capture = _Capture()
    BreakableCUDAGraphCapture._tls.active = capture
    assert op(1) == 2
    assert len(capture.eager) == 1


def test_attention_op_breaks_when_imported_before_enable(tmp_path):
    """Importing the attention module before the flag is set must still yield
    the breakable wrapper (functools.wraps copies __name__/__wrapped__, so
    compare code objects)."""
    import os
    import subprocess
    import sys

    env = {k: v for k, v in os.environ.items() if k != "VLLM_USE_BREAKABLE_CUDAGRAPH"}
    env["VLLM_CACHE_ROOT"] = str(tmp_path)
    code = (
        "import vllm.model_executor.layers.attention.attention as a\n"
        "import vllm.compilation.breakable_cudagraph as b\n"
        "c = a.unified_attention_with_output.__code__\n"
        "w = b.eager_break_during_capture(lambda: None).__code__\n"
        "assert (c.co_filename, c.co_name) == (w.co_filename, w.co_name), c\n"
    )
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


@pytest.mark.parametrize("enabled", [False, True])
def test_decorated_op_traces_without_graph_break(
    monkeypatch: pytest.MonkeyPatch, enabled: bool
):
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    if not enabled:
        monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH")

    @eager_break_during_capture
    def op(x):
        return x * 2 + 1

    def f(x):
        return op(x).sin()

    torch._dynamo.reset()
    x = torch.randn(4)
    compiled = torch.compile(f, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), f(x))


# ---------------------------------------------------------------------------
# BreakableCUDAGraphCapture: thread-local + nested rejection
# ---------------------------------------------------------------------------


def test_current_is_none_when_inactive():
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    assert BreakableCUDAGraphCapture.current() is None
    assert BreakableCUDAGraphCapture.is_active() is False


def test_thread_local_active_during_context(cuda_capture_stream):
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    cap = BreakableCUDAGraphCapture()
    with cap:
        assert BreakableCUDAGraphCapture.current() is cap
        assert BreakableCUDAGraphCapture.is_active() is True
    assert BreakableCUDAGraphCapture.current() is None


def test_nested_capture_raises(cuda_capture_stream):
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    outer = BreakableCUDAGraphCapture()
    inner = BreakableCUDAGraphCapture()
    with outer, pytest.raises(RuntimeError, match="Nested.*not supported"), inner:
        pass


def test_active_state_isolated_across_threads(cuda_capture_stream):
    """Verify the thread-local 'active capture' slot is per-thread.

    We don't run concurrent captures here -- CUDA only supports one
    in-flight capture per stream and we keep tests cheap. We just check
    that the worker thread sees its own slot as None while the main
    thread has a capture active.
    """
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    worker_view: dict[str, BreakableCUDAGraphCapture | None] = {}

    def worker():
        worker_view["state"] = BreakableCUDAGraphCapture.current()

    main_cap = BreakableCUDAGraphCapture()
    with main_cap:
        # Main thread has a live capture.
        assert BreakableCUDAGraphCapture.current() is main_cap
        t = threading.Thread(target=worker)
        t.start()
        t.join()

    # Worker thread saw None -- thread-local separation works.
    assert worker_view["state"] is None
    # Main thread's slot is cleared on exit.
    assert BreakableCUDAGraphCapture.current() is None


# ---------------------------------------------------------------------------
# Segment list construction
# ---------------------------------------------------------------------------


def test_capture_with_no_eager_break_records_one_graph(cuda_capture_stream):
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    x = torch.zeros(4, device=DEVICE_TYPE)
    cap = BreakableCUDAGraphCapture()
    with cap:
        x.add_(1.0)
    assert len(cap.segments) == 1
    assert cap.num_graphs == 1
    assert cap.num_eager_breaks == 0


def test_add_eager_creates_alternating_graph_eager_graph(cuda_capture_stream):
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    x = torch.zeros(4, device=DEVICE_TYPE)
    counter = {"eager_calls": 0}

    def eager_step():
        counter["eager_calls"] += 1
        x.add_(10.0)

    cap = BreakableCUDAGraphCapture()
    with cap:
        x.add_(1.0)
        cap.add_eager(eager_step)
        x.add_(1.0)
        cap.add_eager(eager_step)
        x.add_(1.0)
    # 3 graph segments + 2 eager segments, interleaved as G E G E G.
    assert len(cap.segments) == 5
    assert cap.num_graphs == 3
    assert cap.num_eager_breaks == 2
    # Eager fn is stored as-is in the segment list, so we can confirm
    # the alternation pattern by identity check.
    assert cap.segments[1] is eager_step
    assert cap.segments[3] is eager_step
    assert counter["eager_calls"] == 2  # only the in-capture invocation


# ---------------------------------------------------------------------------
# Capture vs eager numerical equivalence
# ---------------------------------------------------------------------------


def test_capture_replay_matches_eager_simple(cuda_capture_stream):
    """Verify that replay reproduces the same end-state as a single eager
    forward, with an eager break in the middle.

    Note: during capture, the *captured* kernels are recorded but NOT
    executed (that's CUDA-graph semantics). Only the eager segments
    actually mutate state at capture time. So we check correctness after
    ``replay()``, not after ``with cap:`` exits.
    """
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    x = torch.zeros(8, device=DEVICE_TYPE)
    log: list[str] = []

    def eager_break_op():
        x.mul_(2.0)
        log.append("eager")

    cap = BreakableCUDAGraphCapture()
    with cap:
        x.add_(1.0)  # recorded into graph[0]
        cap.add_eager(eager_break_op)  # runs eagerly: x *= 2
        x.add_(5.0)  # recorded into graph[1]

    # Capture-time: graph kernels were recorded only; eager segment ran
    # once on x == 0, leaving x == 0.
    torch.accelerator.synchronize()
    assert torch.equal(x, torch.zeros(8, device=DEVICE_TYPE))
    assert log == ["eager"]

    # Replay with a fresh input: 10 -> 11 -> 22 -> 27.
    x.fill_(10.0)
    cap.replay()
    torch.accelerator.synchronize()
    assert torch.equal(x, torch.full((8,), 27.0, device=DEVICE_TYPE))
    assert log == ["eager", "eager"]

    # Replay again with another input: 100 -> 101 -> 202 -> 207.
    x.fill_(100.0)
    cap.replay()
    torch.accelerator.synchronize()
    assert torch.equal(x, torch.full((8,), 207.0, device=DEVICE_TYPE))
    assert log == ["eager", "eager", "eager"]


def test_decorator_breaks_when_invoked_inside_capture(cuda_capture_stream):
    """Verify @eager_break_during_capture correctly routes through
    add_eager when inside a capture context, and runs straight through
    when there's no active capture."""
    from vllm.compilation.breakable_cudagraph import (
        BreakableCUDAGraphCapture,
        eager_break_during_capture,
    )

    @eager_break_during_capture
    def attention_like(t: torch.Tensor) -> None:
        # In-place double; stands in for "real" attention work.
        t.mul_(2.0)

    x = torch.zeros(4, device=DEVICE_TYPE)

    # Outside capture: decorator should just call through.
    x.fill_(3.0)
    attention_like(x)
    torch.accelerator.synchronize()
    assert torch.equal(x, torch.full((4,), 6.0, device=DEVICE_TYPE))

    # Inside capture: decorator should split the graph. Only the eager
    # segment actually mutates state during capture.
    x.fill_(0.0)
    cap = BreakableCUDAGraphCapture()
    with cap:
        x.add_(5.0)  # recorded
        attention_like(x)  # eager: x *= 2 (on x == 0, no-op)
        x.add_(1.0)  # recorded
    torch.accelerator.synchronize()
    assert torch.equal(x, torch.zeros(4, device=DEVICE_TYPE))
    # 2 graph segments + 1 eager segment, ordered G E G; the arithmetic
    # equivalence check below verifies the ordering.
    assert len(cap.segments) == 3
    assert cap.num_graphs == 2
    assert cap.num_eager_breaks == 1

    # Replay: 2 -> 7 -> 14 -> 15.
    x.fill_(2.0)
    cap.replay()
    torch.accelerator.synchronize()
    assert torch.equal(x, torch.full((4,), 15.0, device=DEVICE_TYPE))


@pytest.mark.parametrize("keyword", [False, True])
def test_quantized_activation_replay_does_not_retain_tensors(
    cuda_capture_stream, keyword
):
    """Release the producer tensors while preserving both buffers on replay."""
    import gc
    import weakref

    from vllm.compilation.breakable_cudagraph import (
        BreakableCUDAGraphCapture,
        eager_break_during_capture,
    )
    from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic

    @eager_break_during_capture
    def consume(x, data_out, scale_out):
        data_out.copy_(x.data)
        scale_out.copy_(x.scale)

    source = torch.ones((128, 128), device=DEVICE_TYPE, dtype=torch.bfloat16)
    data_out = source.to(torch.float8_e4m3fn)
    scale_out = source[:, ::32].to(torch.uint8)
    output = torch.empty_like(source)
    cap = BreakableCUDAGraphCapture()
    with cap:
        data = source.to(torch.float8_e4m3fn)
        scale = source[:, ::32].to(torch.uint8)
        activation = QuantizedActivation(
            data, scale, source.dtype, source.shape, kMxfp8Dynamic
        )
        data_ref, scale_ref = weakref.ref(data), weakref.ref(scale)
        if keyword:
            consume(x=activation, data_out=data_out, scale_out=scale_out)
        else:
            consume(activation, data_out, scale_out)
        output.copy_(data_out)

    del data, scale, activation
    gc.collect()
    assert data_ref() is None
    assert scale_ref() is None

    for value in (1, 2, 3):
        source.fill_(value)
        cap.replay()
        cuda_capture_stream.synchronize()
        torch.testing.assert_close(output, source, rtol=0, atol=0)
        torch.testing.assert_close(scale_out, source[:, ::32].to(torch.uint8))


def test_eager_attention_inside_multistream_overlap(cuda_capture_stream):
    """Handle an eager attention break inside a multi-stream overlap region."""
    from vllm.compilation.breakable_cudagraph import (
        BreakableCUDAGraphCapture,
        eager_break_during_capture,
    )
    from vllm.utils.multi_stream_utils import maybe_execute_in_parallel

    x = torch.zeros(1024, device=DEVICE_TYPE)
    output = torch.empty_like(x)
    aux_stream = torch.cuda.Stream()
    main_event = torch.cuda.Event()
    aux_event = torch.cuda.Event()

    @eager_break_during_capture
    def attention(query: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(query, 3.0, out=out)

    def attention_frontend() -> torch.Tensor:
        query = x * 2.0
        attention_output = torch.empty_like(x)
        attention(query, attention_output)
        return attention_output

    cap = BreakableCUDAGraphCapture()
    with cap:
        attention_output, gate = maybe_execute_in_parallel(
            attention_frontend,
            lambda: x * 5.0,
            main_event,
            aux_event,
            aux_stream,
        )
        torch.add(attention_output, gate, out=output)

    assert cap.num_graphs == 2
    assert cap.num_eager_breaks == 1

    for value in (1.0, 7.0, 19.0):
        x.fill_(value)
        cap.replay()
        cuda_capture_stream.synchronize()
        torch.testing.assert_close(
            output,
            torch.full_like(output, value * 7.0 + 3.0),
        )


# ---------------------------------------------------------------------------
# Replay ordering
# ---------------------------------------------------------------------------


def test_replay_invokes_eager_segments_in_order(cuda_capture_stream):
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    log: list[str] = []
    x = torch.zeros(1, device=DEVICE_TYPE)

    def make_eager(name):
        def step():
            log.append(name)
            x.add_(1.0)

        return step

    cap = BreakableCUDAGraphCapture()
    with cap:
        x.add_(1.0)
        cap.add_eager(make_eager("A"))
        x.add_(1.0)
        cap.add_eager(make_eager("B"))
        x.add_(1.0)
        cap.add_eager(make_eager("C"))
        x.add_(1.0)

    # Capture-time invocation order
    assert log == ["A", "B", "C"]

    log.clear()
    cap.replay()
    torch.accelerator.synchronize()
    assert log == ["A", "B", "C"]


# ---------------------------------------------------------------------------
# Capture cleanup releases thread-local even if body raises
# ---------------------------------------------------------------------------


def test_exception_in_body_clears_active(cuda_capture_stream):
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    cap = BreakableCUDAGraphCapture()
    with pytest.raises(RuntimeError, match="boom"), cap:
        raise RuntimeError("boom")

    # active must be reset even after an exception inside the body
    assert BreakableCUDAGraphCapture.current() is None


# ---------------------------------------------------------------------------
# Nested decorated ops: inner op must not trigger a recursive eager break
# ---------------------------------------------------------------------------


def test_nested_decorated_op_runs_inline(cuda_capture_stream):
    """A decorated op invoked from inside another decorated op's eager
    body must execute inline -- starting a second eager break mid-flight
    corrupts the segment state and explodes ``_begin_segment``'s assert.

    This mirrors the deepseek_v4_attention case where the outer attention
    op's impl internally dispatches sparse_attn_indexer (also decorated).
    """
    from vllm.compilation.breakable_cudagraph import (
        BreakableCUDAGraphCapture,
        eager_break_during_capture,
    )

    x = torch.zeros(4, device=DEVICE_TYPE)
    inner_calls = 0

    @eager_break_during_capture
    def inner_op(t: torch.Tensor) -> None:
        nonlocal inner_calls
        inner_calls += 1
        t.add_(1.0)

    @eager_break_during_capture
    def outer_op(t: torch.Tensor) -> None:
        # outer body calls another decorated op -- this is the case that
        # used to assert in _begin_segment.
        inner_op(t)
        t.add_(10.0)

    cap = BreakableCUDAGraphCapture()
    with cap:
        x.add_(2.0)  # recorded in graph[0]
        outer_op(x)  # one eager break, inner runs inline
        x.add_(100.0)  # recorded in graph[1]

    # Exactly one eager break (the outer); inner must NOT add a second.
    assert cap.num_graphs == 2
    assert cap.num_eager_breaks == 1
    assert inner_calls == 1  # only the capture-time invocation

    x.fill_(0.0)
    cap.replay()
    torch.accelerator.synchronize()
    # 0 -> +2 -> +1 (inner) -> +10 (outer) -> +100 = 113
    assert torch.equal(x, torch.full((4,), 113.0, device=DEVICE_TYPE))
    assert inner_calls == 2  # replay invokes the outer's lambda again


# ---------------------------------------------------------------------------
# BreakableCUDAGraphWrapper: runtime_mode dispatch gating
# ---------------------------------------------------------------------------


def _mock_vllm_config():
    config = MagicMock()
    config.parallel_config.data_parallel_size = 1
    config.parallel_config.use_sequence_parallel_moe = False
    config.parallel_config.is_moe_model = False
    return config


def test_wrapper_falls_through_on_runtime_mode_mismatch():
    """A PIECEWISE-scoped wrapper runs other modes eagerly, capturing
    nothing, so an outer CUDAGraphWrapper can own them."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor, set_forward_context

    calls = []

    def model(x):
        calls.append(x)
        return x + 1

    config = _mock_vllm_config()
    wrapper = BreakableCUDAGraphWrapper(
        model, config, runtime_mode=CUDAGraphMode.PIECEWISE
    )
    desc = BatchDescriptor(num_tokens=4)

    with set_forward_context(
        None,
        config,
        cudagraph_runtime_mode=CUDAGraphMode.FULL,
        batch_descriptor=desc,
    ):
        assert wrapper(1) == 2

    assert calls == [1]
    assert not wrapper.entries


def test_wrapper_captures_on_runtime_mode_match():
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor, set_forward_context

    calls = []

    def model(x):
        calls.append(x)
        return x + 1

    config = _mock_vllm_config()
    wrapper = BreakableCUDAGraphWrapper(
        model, config, runtime_mode=CUDAGraphMode.PIECEWISE
    )
    desc = BatchDescriptor(num_tokens=4)

    sentinel = object()
    with (
        patch.object(
            BreakableCUDAGraphWrapper, "_capture", return_value=sentinel
        ) as mock_capture,
        set_forward_context(
            None,
            config,
            cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
            batch_descriptor=desc,
        ),
    ):
        assert wrapper(1) is sentinel

    mock_capture.assert_called_once()
    assert calls == []
    assert desc in wrapper.entries


def test_wrapper_default_matches_any_non_none_mode():
    """runtime_mode=None matches any non-NONE mode (MRV2 relies on this)."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor, set_forward_context

    def model(x):
        return x + 1

    config = _mock_vllm_config()
    wrapper = BreakableCUDAGraphWrapper(model, config)
    desc = BatchDescriptor(num_tokens=4)

    sentinel = object()
    with (
        patch.object(
            BreakableCUDAGraphWrapper, "_capture", return_value=sentinel
        ) as mock_capture,
        set_forward_context(
            None,
            config,
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            batch_descriptor=desc,
        ),
    ):
        assert wrapper(1) is sentinel

    mock_capture.assert_called_once()
    assert desc in wrapper.entries


def test_unwrap_recurses_through_nested_wrappers():
    """unwrap() reaches the raw model through nested wrappers."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config import CUDAGraphMode

    def model(x):
        return x + 1

    config = _mock_vllm_config()
    inner = BreakableCUDAGraphWrapper(
        model, config, runtime_mode=CUDAGraphMode.PIECEWISE
    )
    outer = CUDAGraphWrapper(inner, config, runtime_mode=CUDAGraphMode.FULL)

    assert inner.unwrap() is model
    assert outer.unwrap() is model
