# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.utils import (
    KVConnectorOutput,
    KVOutputAggregator,
)
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import multiproc_executor as multiproc_executor_module
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.executor.uniproc_executor import (
    ExecutorWithExternalLauncher,
    UniProcExecutor,
)
from vllm.v1.outputs import ModelRunnerOutput


class Mock: ...


def test_supports_async_scheduling_base_executor():
    assert Executor.supports_async_scheduling() is False


def test_supports_async_scheduling_uniproc_executor():
    assert UniProcExecutor.supports_async_scheduling() is True


def test_supports_async_scheduling_executor_with_external_launcher():
    # ExecutorWithExternalLauncher inherits from UniProcExecutor and does not
    # override supports_async_scheduling, so it should return True.
    assert ExecutorWithExternalLauncher.supports_async_scheduling() is True


def test_supports_async_scheduling_multiproc_executor():
    assert MultiprocExecutor.supports_async_scheduling() is True


class _FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _FakeProcess:
    def __init__(self, clock: _FakeClock, exits_at: float) -> None:
        self.clock = clock
        self.exits_at = exits_at
        self.terminate_called = False

    def is_alive(self) -> bool:
        return self.clock.time() < self.exits_at

    def terminate(self) -> None:
        self.terminate_called = True


@pytest.mark.parametrize(
    ("timeout", "exits_at", "expected_terminate"),
    [
        pytest.param(6, 5, False, id="worker-exits-before-timeout"),
        pytest.param(6, 7, True, id="worker-exceeds-timeout"),
    ],
)
def test_multiproc_executor_worker_termination_timeout(
    monkeypatch, timeout, exits_at, expected_terminate
):
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(timeout))
    clock = _FakeClock()
    monkeypatch.setattr(multiproc_executor_module.time, "time", clock.time)
    monkeypatch.setattr(multiproc_executor_module.time, "sleep", clock.sleep)
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    proc = _FakeProcess(clock, exits_at=exits_at)
    executor._ensure_worker_termination([proc])  # type: ignore[list-item]
    assert proc.terminate_called is expected_terminate


class CustomMultiprocExecutor(MultiprocExecutor):
    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: KVOutputAggregator | None = None,
        ec_output_aggregator: ECOutputAggregator | None = None,
    ) -> Any | list[Any] | Future[Any | list[Any]]:
        # Drop marker to show that this was run
        with open(".marker", "w"):
            ...
        return super().collective_rpc(
            method,
            timeout,
            args,
            kwargs,
            non_block,
            unique_reply_rank,
            kv_output_aggregator,
            ec_output_aggregator,
        )


CustomMultiprocExecutorAsync = CustomMultiprocExecutor
MODEL = "Qwen/Qwen3-0.6B"


def test_custom_executor_type_checking():
    with pytest.raises(ValueError):
        engine_args = EngineArgs(
            model=MODEL,
            gpu_memory_utilization=0.2,
            max_model_len=8192,
            distributed_executor_backend=Mock,
        )
        LLMEngine.from_engine_args(engine_args)
    with pytest.raises(ValueError):
        engine_args = AsyncEngineArgs(
            model=MODEL,
            gpu_memory_utilization=0.2,
            max_model_len=8192,
            distributed_executor_backend=Mock,
        )
        AsyncLLM.from_engine_args(engine_args)


@pytest.mark.parametrize(
    "distributed_executor_backend",
    [
        CustomMultiprocExecutor,
        "tests.v1.executor.test_executor.CustomMultiprocExecutor",
    ],
)
def test_custom_executor(distributed_executor_backend, tmp_path):
    cwd = os.path.abspath(".")
    os.chdir(tmp_path)
    try:
        assert not os.path.exists(".marker")

        engine_args = EngineArgs(
            model=MODEL,
            gpu_memory_utilization=0.2,
            max_model_len=8192,
            distributed_executor_backend=distributed_executor_backend,
            enforce_eager=True,  # reduce test time
        )
        engine = LLMEngine.from_engine_args(engine_args)
        sampling_params = SamplingParams(max_tokens=1)

        engine.add_request("0", "foo", sampling_params)
        engine.step()

        assert os.path.exists(".marker")
    finally:
        os.chdir(cwd)


@pytest.mark.parametrize(
    "distributed_executor_backend",
    [
        CustomMultiprocExecutorAsync,
        "tests.v1.executor.test_executor.CustomMultiprocExecutorAsync",
    ],
)
def test_custom_executor_async(distributed_executor_backend, tmp_path):
    cwd = os.path.abspath(".")
    os.chdir(tmp_path)
    try:
        assert not os.path.exists(".marker")

        engine_args = AsyncEngineArgs(
            model=MODEL,
            gpu_memory_utilization=0.2,
            max_model_len=8192,
            distributed_executor_backend=distributed_executor_backend,
            enforce_eager=True,  # reduce test time
        )
        engine = AsyncLLM.from_engine_args(engine_args)
        sampling_params = SamplingParams(max_tokens=1)

        async def t():
            stream = engine.generate(
                request_id="0", prompt="foo", sampling_params=sampling_params
            )
            async for x in stream:
                ...

        asyncio.run(t())

        assert os.path.exists(".marker")
    finally:
        os.chdir(cwd)


class _FakeResponseMQ:
    """Stands in for a worker response MessageQueue."""

    def __init__(self, responses: list[tuple[Any, Any]]):
        self._responses = list(responses)

    def dequeue(self, timeout: float | None = None):
        return self._responses.pop(0)


def _make_failed_step_executor(enable_ft: bool) -> MultiprocExecutor:
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_fault_tolerance=enable_ft)
    )
    executor.is_failed = False
    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=lambda *_: None)
    executor.response_mqs = [
        _FakeResponseMQ(
            [
                (
                    WorkerProc.ResponseStatus.FAILURE_WITH_KV_OUTPUT,
                    KVConnectorOutput(finished_recving={"req1"}, invalid_block_ids={7}),
                )
            ]
        ),
        _FakeResponseMQ(
            [
                (
                    WorkerProc.ResponseStatus.SUCCESS,
                    ModelRunnerOutput(
                        req_ids=[],
                        req_id_to_index={},
                        kv_connector_output=KVConnectorOutput(
                            finished_recving={"req1"}
                        ),
                    ),
                )
            ]
        ),
    ]
    executor.futures_queue = deque()
    return executor


@pytest.mark.parametrize("enable_ft", [True, False])
def test_collective_rpc_worker_failure_merges_kv_output(enable_ft):
    """A worker failing with KV output must not lose KV progress (FT only)."""
    executor = _make_failed_step_executor(enable_ft)
    aggregator = KVOutputAggregator(expected_finished_count=2)

    future = executor.collective_rpc(
        "sample_tokens", non_block=True, kv_output_aggregator=aggregator
    )
    with pytest.raises(RuntimeError, match="[Ww]orker"):
        future.result()

    if enable_ft:
        assert len(aggregator._salvaged_outputs) == 2
        aggregated = aggregator.aggregate(
            [
                ModelRunnerOutput(req_ids=[], req_id_to_index={}),
                ModelRunnerOutput(req_ids=[], req_id_to_index={}),
            ]
        )
        assert aggregated is not None
        kv = aggregated.kv_connector_output
        assert kv is not None
        assert kv.finished_recving == {"req1"}
        assert kv.invalid_block_ids == {7}
    else:
        assert aggregator._salvaged_outputs == []


@pytest.mark.parametrize("non_block", [False, True])
@pytest.mark.parametrize("connector", [None, "ec", "kv"])
@pytest.mark.parametrize("second_fails", [False, True])
def test_ft_rpc_failure_keeps_next_rpc_responses_aligned(
    non_block, connector, second_fails
):
    """FT retries must consume fresh replies, including RPCs without KV output."""
    executor = _make_failed_step_executor(enable_ft=True)
    success = WorkerProc.ResponseStatus.SUCCESS
    failure = WorkerProc.ResponseStatus.FAILURE
    executor.response_mqs = [
        _FakeResponseMQ([(failure, "device error"), (success, "recovered0")]),
        _FakeResponseMQ(
            [
                (failure if second_fails else success, "previous step"),
                (success, "recovered1"),
            ]
        ),
    ]
    kwargs = {}
    if connector == "ec":
        kwargs["ec_output_aggregator"] = ECOutputAggregator()
    elif connector == "kv":
        kwargs["kv_output_aggregator"] = KVOutputAggregator(expected_finished_count=2)

    with pytest.raises(RuntimeError, match="[Ww]orker"):
        ret = executor.collective_rpc("check_health", non_block=non_block, **kwargs)
        if non_block:
            ret.result()

    assert executor.collective_rpc("handle_ft_command") == [
        "recovered0",
        "recovered1",
    ]
