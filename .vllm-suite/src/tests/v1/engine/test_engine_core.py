# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import copy
import time
import uuid
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from unittest.mock import MagicMock, PropertyMock, patch

import pytest
from transformers import AutoTokenizer

from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    ECTransferConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_num_threads
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.engine.core import (
    DPEngineCoreProc,
    EngineCore,
    EngineCoreProc,
    EngineShutdownState,
)
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

from ...utils import create_new_process_for_each_test, multi_gpu_test

if not current_platform.is_cuda():
    pytest.skip(reason="V1 currently only supported on CUDA.", allow_module_level=True)

MODEL_NAME = "hmellor/tiny-random-LlamaForCausalLM"
TOKENIZER = AutoTokenizer.from_pretrained(MODEL_NAME)
# test_engine_core_concurrent_batches assumes exactly 12 tokens per prompt.
# Adjust prompt if changing model to maintain 12-token length.
PROMPT = "I am Gyoubu Masataka Oniwa"
PROMPT_TOKENS = TOKENIZER(PROMPT).input_ids

_REQUEST_COUNTER = 0


def make_request() -> EngineCoreRequest:
    global _REQUEST_COUNTER
    _REQUEST_COUNTER += 1
    request_id = f"request-{_REQUEST_COUNTER}"
    return EngineCoreRequest(
        request_id=request_id,
        external_req_id=f"{request_id}-{uuid.uuid4()}",
        prompt_token_ids=PROMPT_TOKENS,
        mm_features=None,
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


@create_new_process_for_each_test()
def test_engine_core():
    """Setup the EngineCore."""
    engine_args = EngineArgs(model=MODEL_NAME)
    vllm_config = engine_args.create_engine_config()
    executor_class = Executor.get_class(vllm_config)

    with set_default_torch_num_threads(1):
        engine_core = EngineCore(
            vllm_config=vllm_config, executor_class=executor_class, log_stats=True
        )
    """Test basic request lifecycle."""

    # First request.
    engine_core.add_request(*engine_core.preprocess_add_request(make_request()))
    assert len(engine_core.scheduler.waiting) == 1
    assert len(engine_core.scheduler.running) == 0

    _ = engine_core.step_fn()
    assert len(engine_core.scheduler.waiting) == 0
    assert len(engine_core.scheduler.running) == 1

    # Second request.
    engine_core.add_request(*engine_core.preprocess_add_request(make_request()))
    assert len(engine_core.scheduler.waiting) == 1
    assert len(engine_core.scheduler.running) == 1

    _ = engine_core.step_fn()
    assert len(engine_core.scheduler.waiting) == 0
    assert len(engine_core.scheduler.running) == 2

    # Add two requests in a row.
    engine_core.add_request(*engine_core.preprocess_add_request(make_request()))
    engine_core.add_request(*engine_core.preprocess_add_request(make_request()))
    assert len(engine_core.scheduler.waiting) == 2
    assert len(engine_core.scheduler.running) == 2

    _ = engine_core.step_fn()
    assert len(engine_core.scheduler.waiting) == 0
    assert len(engine_core.scheduler.running) == 4

    # Loop through until they are all done.
    while (outs := engine_core.step_fn()[0].get(0)) and outs.outputs:
        pass

    assert len(engine_core.scheduler.waiting) == 0
    assert len(engine_core.scheduler.running) == 0
    """Test abort cycle."""

    # Basic abort.
    req = make_request()
    request_id = req.request_id

    engine_core.add_request(*engine_core.preprocess_add_request(req))
    assert len(engine_core.scheduler.waiting) == 1
    assert len(engine_core.scheduler.running) == 0
    assert engine_core.scheduler.has_unfinished_requests()
    assert not engine_core.scheduler.has_finished_requests()

    _ = engine_core.step_fn()
    assert len(engine_core.scheduler.waiting) == 0
    assert len(engine_core.scheduler.running) == 1
    assert engine_core.scheduler.has_unfinished_requests()
    assert not engine_core.scheduler.has_finished_requests()

    engine_core.abort_requests([request_id])
    assert len(engine_core.scheduler.waiting) == 0
    assert len(engine_core.scheduler.running) == 0
    assert not engine_core.scheduler.has_unfinished_requests()
    assert engine_core.scheduler.has_finished_requests()

    _ = engine_core.step_fn()
    assert not engine_core.scheduler.has_unfinished_requests()
    assert not engine_core.scheduler.has_finished_requests()

    # Add, step, abort 1 of the 3.
    req0 = make_request()
    req1 = make_request()
    req2 = make_request()

    engine_core.add_request(*engine_core.preprocess_add_request(req0))
    engine_core.add_request(*engine_core.preprocess_add_request(req1))
    assert len(engine_core.scheduler.waiting) == 2
    assert len(engine_core.scheduler.running) == 0

    _ = engine_core.step_fn()
    assert len(engine_core.scheduler.waiting) == 0
    assert len(engine_core.scheduler.running) == 2

    engine_core.add_request(*engine_core.preprocess_add_request(req2))
    assert len(engine_core.scheduler.waiting) == 1
    assert len(engine_core.scheduler.running) == 2

    _ = engine_core.step_fn()
    assert len(engine_core.scheduler.waiting) == 0
    assert len(engine_core.scheduler.running) == 3

    # Abort just one.
    engine_core.abort_requests([req1.request_id])
    assert len(engine_core.scheduler.waiting) == 0
    assert len(engine_core.scheduler.running) == 2

    _ = engine_core.step_fn()
    assert len(engine_core.scheduler.waiting) == 0
    assert len(engine_core.scheduler.running) == 2

    # Abort the other requests at the same time.
    engine_core.abort_requests([req2.request_id, req0.request_id])
    assert len(engine_core.scheduler.waiting) == 0
    assert len(engine_core.scheduler.running) == 0

    # Sending duplicate requests with same request_id
    req0 = make_request()
    req1 = make_request()
    req0.request_id = req1.request_id = "test"
    engine_core.add_request(*engine_core.preprocess_add_request(req0))

    while engine_core.scheduler.has_requests():
        engine_core.step_fn()

    engine_core.add_request(*engine_core.preprocess_add_request(req1))
    while engine_core.scheduler.has_requests():
        engine_core.step_fn()

    assert len(engine_core.scheduler.waiting) == 0
    assert len(engine_core.scheduler.running) == 0


@create_new_process_for_each_test()
def test_engine_core_advanced_sampling():
    """A basic end-to-end test to verify that the engine functions correctly
    when additional sampling parameters, such as top_p, min_tokens, and
    presence_penalty, are set.
    """
    """Setup the EngineCore."""
    engine_args = EngineArgs(model=MODEL_NAME)
    vllm_config = engine_args.create_engine_config()
    executor_class = Executor.get_class(vllm_config)

    with set_default_torch_num_threads(1):
        engine_core = EngineCore(
            vllm_config=vllm_config, executor_class=executor_class, log_stats=True
        )
    """Test basic request lifecycle."""
    # First request.
    request: EngineCoreRequest = make_request()
    request.sampling_params = SamplingParams(
        min_tokens=4,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        repetition_penalty=0.1,
        stop_token_ids=[1001, 1002],
    )
    engine_core.add_request(*engine_core.preprocess_add_request(request))

    def _check_engine_state():
        assert len(engine_core.scheduler.waiting) == 1
        assert len(engine_core.scheduler.running) == 0
        # Loop through until they are all done.
        while engine_core.scheduler.has_requests():
            engine_core.step_fn()
        assert len(engine_core.scheduler.waiting) == 0
        assert len(engine_core.scheduler.running) == 0

    _check_engine_state()

    # Second request.
    request2 = make_request()
    request2.sampling_params = SamplingParams(
        top_p=0.99,
        top_k=50,
    )
    engine_core.add_request(*engine_core.preprocess_add_request(request2))
    _check_engine_state()


@create_new_process_for_each_test()
def test_engine_core_concurrent_batches():
    """Test that the engine can handle multiple concurrent batches."""

    def make_request_with_max_tokens(req_id: str, max_tokens: int) -> EngineCoreRequest:
        request = make_request()
        request.request_id = req_id
        request.sampling_params.max_tokens = max_tokens
        return request

    class DummyExecutor(UniProcExecutor):
        def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
            super().initialize_from_config(kv_cache_configs)

            # Create a thread pool with a single worker
            self.thread_pool = ThreadPoolExecutor(max_workers=1)

        def execute_model(
            self,
            scheduler_output,
            non_block=False,
        ) -> Future[ModelRunnerOutput | None]:
            """Make execute_model non-blocking."""
            # DummyExecutor used only for testing async case.
            assert non_block

            def _execute():
                output = self.collective_rpc("execute_model", args=(scheduler_output,))
                # Make a copy because output[0] may be reused
                # by the next batch.
                return copy.deepcopy(output[0])

            # Use the thread pool instead of creating a new thread
            return self.thread_pool.submit(_execute)

        def sample_tokens(
            self, grammar_output, non_block=False
        ) -> Future[ModelRunnerOutput]:
            """Make sample_tokens non-blocking."""
            # DummyExecutor used only for testing async case.
            assert non_block

            def _execute():
                output = self.collective_rpc("sample_tokens", args=(grammar_output,))
                # Make a copy because output[0] may be reused
                # by the next batch.
                return copy.deepcopy(output[0])

            # Use the thread pool instead of creating a new thread
            return self.thread_pool.submit(_execute)

        def shutdown(self):
            if hasattr(self, "thread_pool"):
                self.thread_pool.shutdown(wait=False)

    engine_args = EngineArgs(
        model=MODEL_NAME,
        # To test concurrent batches.
        max_num_seqs=2,
        # Avoid all requests being scheduled once.
        enable_prefix_caching=False,
        max_num_batched_tokens=10,
        # Reduce startup time.
        enforce_eager=True,
        # Test concurrent batch behaviour independently of async scheduling.
        async_scheduling=False,
    )
    vllm_config = engine_args.create_engine_config()
    # Force two concurrent batches to exercise the batch queue independently
    # of async scheduling (which is disabled above).
    with (
        set_default_torch_num_threads(1),
        patch.object(
            VllmConfig,
            "max_concurrent_batches",
            new_callable=PropertyMock,
            return_value=2,
        ),
    ):
        engine_core = EngineCore(
            vllm_config=vllm_config, log_stats=False, executor_class=DummyExecutor
        )
    assert engine_core.batch_queue is not None

    # Add two requests in a row. Each request have 12 prompt tokens.
    req0 = make_request_with_max_tokens("0", 5)
    engine_core.add_request(*engine_core.preprocess_add_request(req0))
    req1 = make_request_with_max_tokens("1", 5)
    engine_core.add_request(*engine_core.preprocess_add_request(req1))

    # Schedule Batch 1: (10, req0)
    assert engine_core.step_with_batch_queue()[0] is None
    assert len(engine_core.batch_queue) == 1
    scheduler_output = engine_core.batch_queue[-1][1]
    assert scheduler_output.num_scheduled_tokens["0"] == 10
    # num_computed_tokens should have been updated immediately.
    assert engine_core.scheduler.requests[req0.request_id].num_computed_tokens == 10

    # Schedule Batch 2: (2, req0), (8, req1)
    assert engine_core.step_with_batch_queue()[0] == {}
    assert len(engine_core.batch_queue) == 1
    scheduler_output = engine_core.batch_queue[-1][1]
    assert scheduler_output.num_scheduled_tokens["0"] == 2
    assert scheduler_output.num_scheduled_tokens["1"] == 8
    # num_computed_tokens should have been updated immediately.
    assert engine_core.scheduler.requests["0"].num_computed_tokens == 12
    assert engine_core.scheduler.requests["1"].num_computed_tokens == 8

    assert engine_core.scheduler.get_num_unfinished_requests() == 2

    # Finish Batch 1 and schedule Batch 3: (4, req1).
    # Note that req0 cannot be scheduled
    # because it is in the decoding stage now.
    engine_core.step_with_batch_queue()
    assert len(engine_core.batch_queue) == 1
    scheduler_output = engine_core.batch_queue[-1][1]
    assert scheduler_output.num_scheduled_tokens["1"] == 4

    # Finish Batch 2. Get first token of req0.
    # Schedule Batch 4: (1, req0).
    output = engine_core.step_with_batch_queue()[0].get(0)
    assert output is not None
    assert len(output.outputs) == 1
    assert engine_core.scheduler.requests[req0.request_id].num_tokens == 13
    scheduler_output = engine_core.batch_queue[-1][1]
    assert scheduler_output.num_scheduled_tokens["0"] == 1

    # Finish Batch 3. Get first token of req1. Schedule Batch 5: (1, req1).
    output = engine_core.step_with_batch_queue()[0].get(0)
    assert output is not None
    assert len(output.outputs) == 1
    assert engine_core.scheduler.requests[req1.request_id].num_tokens == 13
    scheduler_output = engine_core.batch_queue[-1][1]
    assert scheduler_output.num_scheduled_tokens["1"] == 1

    # Loop until req0 is finished.
    req_id = 0
    expected_num_tokens = [
        engine_core.scheduler.requests["0"].num_tokens + 1,
        engine_core.scheduler.requests["1"].num_tokens + 1,
    ]
    while engine_core.scheduler.get_num_unfinished_requests() == 2:
        output = engine_core.step_with_batch_queue()[0]
        # Every step consumes an output.
        assert output is not None
        assert len(output[0].outputs) == 1
        if req_id in engine_core.scheduler.requests:
            assert (
                engine_core.scheduler.requests[req_id].num_tokens
                == expected_num_tokens[req_id]
            )
        expected_num_tokens[req_id] += 1
        req_id = (req_id + 1) % 2


@pytest.mark.parametrize("encoder_only", [True, False])
def test_async_step_skips_sampling_for_mm_encoder_only(encoder_only):
    """Encoder outputs are complete; only language-model steps need sampling."""
    core = MagicMock()
    core.batch_queue = deque()
    core.batch_queue_size = 2
    core.is_mm_encoder_only = encoder_only
    core.is_pooling_model = False
    core.scheduler.has_requests.side_effect = [True, False, False]
    scheduled = core.scheduler.schedule.return_value
    scheduled.total_num_scheduled_tokens = 16
    scheduled.pending_structured_output_tokens = False

    output = MagicMock()
    executed: Future[ModelRunnerOutput | None] = Future()
    executed.set_result(output if encoder_only else None)
    sampled: Future[ModelRunnerOutput | None] = Future()
    sampled.set_result(None if encoder_only else output)
    core.model_executor.execute_model.return_value = executed
    core.model_executor.sample_tokens.return_value = sampled

    EngineCore.step_with_batch_queue(core)
    if core.batch_queue:
        EngineCore.step_with_batch_queue(core)

    core.scheduler.update_from_output.assert_called_once_with(scheduled, output)
    if encoder_only:
        core.model_executor.sample_tokens.assert_not_called()
    else:
        core.model_executor.sample_tokens.assert_called_once()


@multi_gpu_test(num_gpus=2)
def test_engine_core_tp():
    """Test engine can initialize worker in tp properly."""
    """Setup the EngineCore."""
    engine_args = EngineArgs(
        model=MODEL_NAME,
        tensor_parallel_size=2,
        # Reduce startup time.
        enforce_eager=True,
    )
    vllm_config = engine_args.create_engine_config()
    executor_class = Executor.get_class(vllm_config)

    with set_default_torch_num_threads(1):
        engine_core = EngineCore(
            vllm_config=vllm_config, executor_class=executor_class, log_stats=True
        )

    def get_worker_cache_config_field(worker, key: str):
        return getattr(worker.cache_config, key)

    num_gpu_blocks = engine_core.collective_rpc(
        get_worker_cache_config_field, args=("num_gpu_blocks",)
    )
    num_cpu_blocks = engine_core.collective_rpc(
        get_worker_cache_config_field, args=("num_cpu_blocks",)
    )
    assert all(x is not None for x in num_gpu_blocks)
    assert all(x is not None for x in num_cpu_blocks)


@create_new_process_for_each_test()
def test_engine_core_invalid_request_id_type():
    """Test that engine raises TypeError for non-string request_id."""
    engine_args = EngineArgs(model=MODEL_NAME)
    vllm_config = engine_args.create_engine_config()
    executor_class = Executor.get_class(vllm_config)

    with set_default_torch_num_threads(1):
        engine_core = EngineCore(
            vllm_config=vllm_config, executor_class=executor_class, log_stats=True
        )

    # Test with UUID object (common mistake)
    uuid_request = make_request()
    uuid_request.request_id = uuid.uuid4()  # UUID object instead of string

    with pytest.raises(TypeError, match="request_id must be a string, got.*UUID"):
        engine_core.add_request(*engine_core.preprocess_add_request(uuid_request))

    # Test with integer
    int_request = make_request()
    int_request.request_id = 12345

    with pytest.raises(TypeError, match="request_id must be a string, got.*int"):
        engine_core.add_request(*engine_core.preprocess_add_request(int_request))

    # Test with None
    none_request = make_request()
    none_request.request_id = None

    with pytest.raises(TypeError, match="request_id must be a string, got.*NoneType"):
        engine_core.add_request(*engine_core.preprocess_add_request(none_request))

    # Verify engine is still functional after errors
    valid_request = make_request()
    engine_core.add_request(*engine_core.preprocess_add_request(valid_request))
    assert len(engine_core.scheduler.waiting) == 1
    assert len(engine_core.scheduler.running) == 0


@create_new_process_for_each_test()
@pytest.mark.parametrize(
    ("ec_role", "gpu_memory_utilization", "enable_prefix_caching"),
    [
        ("ec_producer", 0.01, False),
        # NOTE: ec_producer never allows prefix caching
        ("ec_consumer", 0.7, True),
        ("ec_consumer", 0.7, False),
    ],
)
@pytest.mark.parametrize("use_kv_connector", [False, True])
def test_encoder_instance_zero_kv_cache(
    ec_role: str,
    gpu_memory_utilization: float,
    enable_prefix_caching: bool,
    use_kv_connector: bool,
):
    """EPD (Encoder-Prefill-Decode) Encoder-cache-specific tests.

    This test verifies encoder-only instance initializes with 0 KV cache blocks.
    Under EPD disagg mode, Encoder instances (EC producer role) only execute
    vision encoder, so they don't need KV cache for text generation.
    """
    # Form vllm config
    model_config = ModelConfig(
        model="llava-hf/llava-1.5-7b-hf",  # Multimodal model
        enforce_eager=True,
        trust_remote_code=True,
        dtype="float16",
        seed=42,
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=10,
        max_num_batched_tokens=512,
        max_model_len=512,
        disable_hybrid_kv_cache_manager=True,
        is_encoder_decoder=model_config.is_encoder_decoder,
    )
    cache_config = CacheConfig(
        block_size=16,
        gpu_memory_utilization=gpu_memory_utilization,
        cache_dtype="auto",
        enable_prefix_caching=enable_prefix_caching,
    )
    kv_transfer_config = (
        KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": "local_storage"},
        )
        if use_kv_connector
        else None
    )
    ec_transfer_config = ECTransferConfig(
        ec_connector="ECExampleConnector",
        ec_role=ec_role,
        ec_connector_extra_config={"shared_storage_path": "/tmp/ec_test_encoder"},
    )

    vllm_config = VllmConfig(
        model_config=model_config,
        cache_config=cache_config,
        scheduler_config=scheduler_config,
        kv_transfer_config=kv_transfer_config,
        ec_transfer_config=ec_transfer_config,
    )

    executor_class = Executor.get_class(vllm_config)
    print(f"executor_class: {executor_class}")

    with set_default_torch_num_threads(1):
        engine_core = EngineCore(
            vllm_config=vllm_config, executor_class=executor_class, log_stats=True
        )

    # Check encoder cache manager exists
    assert engine_core.scheduler.encoder_cache_manager is not None, (
        "encoder_cache_manager should exist"
    )

    if ec_role == "ec_producer":
        # Check 1: num_blocks should be 0
        # NOTE: num_blocks=1 as BlockPool always needs a null_block.
        kv_cache_config = engine_core.scheduler.kv_cache_manager.kv_cache_config
        print(f"kv_cache_config: {kv_cache_config}")
        assert kv_cache_config.num_blocks == 1, (
            f"ec_producer should only have 1 KV blocks, "
            f"got {kv_cache_config.num_blocks}"
        )

        # Check 2: kv_cache_groups should be empty
        assert len(kv_cache_config.kv_cache_groups) == 0, (
            f"ec_producer should have 0 KV cache groups, "
            f"got {len(kv_cache_config.kv_cache_groups)}"
        )

        # Check 3: kv_cache_tensors should be empty
        assert len(kv_cache_config.kv_cache_tensors) == 0, (
            f"Encoder instance should have 0 KV cache tensors, "
            f"got {len(kv_cache_config.kv_cache_tensors)}"
        )

        # Check 4: Verify EC connector is initialized and is producer
        assert engine_core.scheduler.ec_connector is not None, (
            "Encoder instance should have EC connector"
        )
        assert engine_core.scheduler.ec_connector.is_producer, (
            "Encoder instance EC connector should be producer"
        )

        # Check 5: Verify chunked prefill is disabled
        assert not vllm_config.scheduler_config.enable_chunked_prefill, (
            "Encoder instance should disable chunked prefill (no KV cache)"
        )

    elif ec_role == "ec_consumer":
        # Check 1: num_blocks should be > 1
        kv_cache_config = engine_core.scheduler.kv_cache_manager.kv_cache_config
        print(f"kv_cache_config: {kv_cache_config}")
        assert kv_cache_config.num_blocks > 1, (
            f"ec_consumer should have >1 KV blocks, got {kv_cache_config.num_blocks}"
        )

        # Check 2: kv_cache_groups should NOT be empty
        assert len(kv_cache_config.kv_cache_groups) > 0, (
            f"ec_consumer should have KV cache groups, "
            f"got {len(kv_cache_config.kv_cache_groups)}"
        )

        # Check 3: Verify EC connector is consumer
        assert engine_core.scheduler.ec_connector is not None, (
            "Consumer instance should have EC connector"
        )
        assert not engine_core.scheduler.ec_connector.is_producer, (
            "Consumer instance EC connector should be consumer"
        )


def _cadenced_dp_engine_core(
    monkeypatch, results: list[tuple[bool, bool]], dp_sync_interval: int = 32
):
    """A bare DPEngineCoreProc whose all-reduce is scripted by `results`;
    returns the core and the step numbers at which the all-reduce ran."""
    core = object.__new__(DPEngineCoreProc)
    core.dp_group = object()
    core.vllm_config = MagicMock(parallel_config=ParallelConfig())
    core.dp_sync_interval = dp_sync_interval
    core.step_counter = 0
    core.pending_pause = False
    core.ignore_start_dp_wave = False
    synced: list[int] = []

    def scripted_sync(dp_group, has_unfinished, pending_pause):
        synced.append(core.step_counter)
        return results.pop(0)

    monkeypatch.setattr(ParallelConfig, "sync_dp_state", staticmethod(scripted_sync))
    return core, synced


def test_dp_sync_interval_default_is_16():
    """Regression pin: lowering the default narrows the mid-wave pause tail
    for async RL, where the engine is rarely idle when pause lands."""
    assert ParallelConfig.dp_sync_interval == 16


@pytest.mark.parametrize("dp_sync_interval", [32, 16])
def test_dp_sync_interval_normal_wave(monkeypatch, dp_sync_interval: int):
    """First all-reduce of a wave after one step, then every N."""
    core, synced = _cadenced_dp_engine_core(
        monkeypatch, [(True, False)] * 3, dp_sync_interval=dp_sync_interval
    )
    for _ in range(dp_sync_interval * 2 + 6):
        assert DPEngineCoreProc._has_global_unfinished_reqs(core, True)
    assert synced == [1, dp_sync_interval, dp_sync_interval * 2]


def test_dp_sync_interval_idle_pause_consensus_on_first_step(monkeypatch):
    """A pause of an idle engine arms every rank before its kick-started
    first step, so the step-1 sync reaches consensus after one dummy batch
    regardless of the configured cadence."""
    core, synced = _cadenced_dp_engine_core(
        monkeypatch, [(False, True)], dp_sync_interval=32
    )
    core.pending_pause = True
    assert DPEngineCoreProc._has_global_unfinished_reqs(core, False) is False
    assert synced == [1]
    assert core.ignore_start_dp_wave
    assert not core.pending_pause


@pytest.mark.parametrize(
    "request_wave,engines_running,pause_state,announces",
    [
        pytest.param(3, False, PauseState.UNPAUSED, True, id="current-wave"),
        pytest.param(2, False, PauseState.UNPAUSED, True, id="stale-wave"),
        pytest.param(4, False, PauseState.UNPAUSED, True, id="newer-wave"),
        pytest.param(3, True, PauseState.UNPAUSED, False, id="running"),
        pytest.param(3, False, PauseState.PAUSED_ALL, False, id="paused"),
    ],
)
def test_idle_dp_rank_announces_wave_for_new_work(
    request_wave, engines_running, pause_state, announces
):
    """An idle rank handed work announces the wave itself, since only engines
    start waves; a paused rank waits for resume."""
    core = object.__new__(DPEngineCoreProc)
    core.has_coordinator = True
    core.current_wave = 3
    core.engines_running = engines_running
    core.scheduler = MagicMock(pause_state=pause_state)
    core.output_queue = MagicMock()

    with patch.object(EngineCore, "add_request"):
        core.add_request(MagicMock(), request_wave)

    if announces:
        assert core.engines_running
        _, outputs = core.output_queue.put_nowait.call_args.args[0]
        assert outputs.start_wave == max(request_wave, 3)
    else:
        core.output_queue.put_nowait.assert_not_called()


@pytest.mark.parametrize("paused", [False, True])
def test_paused_dp_rank_ignores_start_wave(paused):
    """A START_DP_WAVE still in flight when the pause completes must not wake
    the paused rank."""
    core = object.__new__(DPEngineCoreProc)
    core.ignore_start_dp_wave = paused
    core.engine_index = 0
    core.current_wave = 3
    core.engines_running = False

    core._handle_client_request(EngineCoreRequestType.START_DP_WAVE, (3, 1))

    assert core.engines_running != paused


def _pausable_engine_core_proc() -> EngineCoreProc:
    """A bare EngineCoreProc holding just the state pause_scheduler touches."""
    core = object.__new__(EngineCoreProc)
    core.model_executor = MagicMock()
    core.scheduler = MagicMock()
    core.scheduler.has_requests.return_value = False
    core.batch_queue = None
    core.engines_running = False
    core._idle_state_callbacks = []
    return core


@pytest.mark.parametrize(
    "mode,user_pause,kind,rejected",
    [
        pytest.param("abort", True, "new", True, id="abort"),
        pytest.param("wait", True, "new", True, id="wait"),
        pytest.param("abort", True, "pd", True, id="pd-request"),
        pytest.param("keep", True, "new", False, id="keep"),
        pytest.param("abort", False, "new", False, id="sleep-or-elastic-ep"),
        pytest.param("abort", True, "cleanup", False, id="kv-cleanup-marker"),
        pytest.param("abort", True, "session", False, id="open-session-input"),
    ],
)
def test_pause_generation_rejects_new_requests(mode, user_pause, kind, rejected):
    """`pause_generation` rejects new requests with a retryable error until
    resume, even across a later internal pause; `keep` and internal pauses
    (sleep, elastic EP) queue them. KV cleanup markers and inputs to an open
    streaming session are not new work, and a rejected P/D request still reaches
    the connector as a cleanup marker."""
    core = _pausable_engine_core_proc()
    core.shutdown_state = EngineShutdownState.RUNNING
    core.reject_new_requests = False
    core.scheduler.has_request.return_value = kind == "session"
    core.add_request = MagicMock()
    core._send_finish_outputs_to_client = MagicMock()
    request = MagicMock(
        request_id="r",
        client_index=1,
        abort_immediately=kind == "cleanup",
        kv_transfer_params={"do_remote_prefill": True} if kind == "pd" else None,
    )

    pause = core.pause_generation if user_pause else core.pause_scheduler
    pause(mode=mode, clear_cache=False)
    # An internal pause on top (e.g. sleep) leaves the policy alone.
    core.pause_scheduler(mode="abort", clear_cache=False)
    core._handle_client_request(EngineCoreRequestType.ADD, (request, 0))

    if rejected:
        [(req_ids, client_index, reason, error)] = [
            call.args for call in core._send_finish_outputs_to_client.call_args_list
        ]
        assert (req_ids, client_index, reason) == (["r"], 1, FinishReason.ERROR)
        assert error.code == "engine_paused" and error.retryable
    else:
        core._send_finish_outputs_to_client.assert_not_called()
    if rejected and kind != "pd":
        core.add_request.assert_not_called()
    else:
        assert request.abort_immediately == (kind in ("cleanup", "pd"))
        core.add_request.assert_called_once()

    core.resume_scheduler()
    core.add_request.reset_mock()
    core._handle_client_request(EngineCoreRequestType.ADD, (request, 0))
    core.add_request.assert_called_once_with(request, 0)


@pytest.mark.parametrize(
    "pause_state,has_requests,has_batches",
    [
        pytest.param(PauseState.UNPAUSED, False, False, id="not-paused"),
        pytest.param(PauseState.PAUSED_ALL, True, False, id="pending-requests"),
        pytest.param(PauseState.PAUSED_ALL, False, True, id="pending-batches"),
    ],
)
def test_kv_cache_release_rejects_unsafe_state(pause_state, has_requests, has_batches):
    """Reject release before touching caches or memory if work can still use KV."""
    core = _pausable_engine_core_proc()
    core.scheduler.pause_state = pause_state
    core.scheduler.has_requests.return_value = has_requests
    core.batch_queue = [object()] if has_batches else None
    core._reset_caches = MagicMock()

    with pytest.raises(RuntimeError, match="requires a completed pause"):
        core.release_kv_cache_memory()

    core._reset_caches.assert_not_called()
    core.model_executor.discard.assert_not_called()


@pytest.mark.parametrize(
    ("tags", "republished"), [(None, True), (["kv_cache"], True), (["weights"], False)]
)
def test_wake_up_republishes_kv_connector_handshake_metadata(tags, republished):
    """Peers can load the KV cache registration only after the workers redid it."""
    core = _pausable_engine_core_proc()
    calls: list[str] = []
    core.model_executor.wake_up.side_effect = lambda tags: calls.append("wake_up")
    core.model_executor.get_kv_connector_handshake_metadata.return_value = [{}]
    kv_connector = core.scheduler.get_kv_connector.return_value
    kv_connector.set_xfer_handshake_metadata_pp_aware.side_effect = (
        lambda metadata: calls.append("publish")
    )
    EngineCore.wake_up(core, tags)
    assert calls == (["wake_up", "publish"] if republished else ["wake_up"])


@pytest.mark.parametrize("deferred", [False, True])
def test_pause_synchronizes_device_before_cache_reset(deferred: bool):
    """A resolved pause promises an idle device: the barrier must run before
    caches are cleared and before the caller is unblocked."""
    core = _pausable_engine_core_proc()
    core.engines_running = deferred
    order: list[str] = []
    core.model_executor.collective_rpc.side_effect = lambda method: order.append(method)
    core._reset_caches = lambda: order.append("reset_caches")

    result = EngineCoreProc.pause_scheduler(core, mode="keep", clear_cache=True)
    if deferred:
        assert isinstance(result, Future)
        assert not result.done() and order == []
        core.engines_running = False
        core._notify_idle_state_callbacks()
        assert result.result(timeout=0) is None
    else:
        assert result is None
    assert order == ["synchronize_device", "reset_caches"]
