#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

from types import SimpleNamespace
from typing import Any

import torch

from vllm.config import CompilationConfig, CompilationMode
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker.gpu import eplb_utils as eplb
from vllm.v1.worker.gpu import model_runner as mrv2


class FakeMemoryProfiler:
    def __enter__(self):
        self.consumed_memory = 0
        return self

    def __exit__(self, exc_type, exc, tb):
        return False


class FakeEplbState:
    instances: list["FakeEplbState"] = []

    def __init__(self, parallel_config: Any, device: torch.device):
        self.parallel_config = parallel_config
        self.device = device
        self.add_model_calls: list[tuple[Any, Any, str | None]] = []
        self.step_calls: list[tuple[bool, bool, bool]] = []
        self.async_started = False
        self.is_async = True
        self.update_mapping_calls: list[tuple[Any, torch.Tensor]] = []
        FakeEplbState.instances.append(self)

    def add_model(
        self,
        model: Any,
        model_config: Any,
        *,
        model_name: str | None = None,
    ) -> None:
        self.add_model_calls.append((model, model_config, model_name))

    def step(self, is_dummy: bool, is_profile: bool, *, log_stats: bool) -> None:
        self.step_calls.append((is_dummy, is_profile, log_stats))

    def start_async_loop(self) -> None:
        self.async_started = True

    def update_mapping(self, model_config: Any, mapping: torch.Tensor) -> None:
        self.update_mapping_calls.append((model_config, mapping))


def _make_runner(**overrides: Any) -> Any:
    runner: Any = mrv2.GPUModelRunner.__new__(mrv2.GPUModelRunner)
    runner.device = torch.device("cpu")
    runner.model_config = SimpleNamespace(model="test-model", logits_processors=None)
    runner.req_states = SimpleNamespace(
        device=runner.device,
        max_num_reqs=8,
        vocab_size=0,
        all_token_ids=None,
        prompt_len=None,
        prefill_len=None,
        total_len=None,
    )
    runner.load_config = SimpleNamespace(load_format="hf")
    runner.parallel_config = SimpleNamespace(
        enable_eplb=True,
        enable_elastic_ep=False,
        enable_batch_sharded_sampling=False,
        eplb_config=SimpleNamespace(log_balancedness=True),
    )
    runner.compilation_config = CompilationConfig(mode=CompilationMode.NONE)
    runner.vllm_config = SimpleNamespace(
        compilation_config=runner.compilation_config,
        load_config=runner.load_config,
        model_config=runner.model_config,
    )
    runner.lora_config = None
    runner.use_aux_hidden_state_outputs = False
    runner.speculative_config = None
    runner.speculator = None
    runner.pcp_manager = None
    runner.num_speculative_steps = 0
    runner.encoder_cache = None
    runner.is_pooling_model = False
    runner.is_last_pp_rank = True
    runner.is_first_pp_rank = True
    runner.max_num_reqs = 8
    runner.max_num_tokens = 16
    runner.decode_query_len = 1
    runner.kv_connector = SimpleNamespace(
        set_disabled=lambda *_: None,
        post_forward=lambda *_, **__: None,
    )
    runner.eplb = eplb.EPLBController(runner.parallel_config, runner.device)
    runner.jit_warmup_registry = JitWarmupRegistry(runner.vllm_config)
    runner.pooling_runner = None
    runner.execute_model_state = None
    for key, value in overrides.items():
        setattr(runner, key, value)
    spec_config = runner.speculative_config
    runner._draft_workspace_lane = int(
        spec_config is not None
        and (
            spec_config.use_dspark()
            if hasattr(spec_config, "use_dspark")
            else getattr(spec_config, "method", None) == "dspark"
        )
    )
    return runner


def test_v2_load_model_registers_moe_with_eplb(monkeypatch):
    FakeEplbState.instances.clear()
    model = SimpleNamespace(is_moe=True)

    monkeypatch.setattr(mrv2, "DeviceMemoryProfiler", FakeMemoryProfiler)
    monkeypatch.setattr(eplb, "EplbState", FakeEplbState)
    monkeypatch.setattr(
        mrv2,
        "get_model_loader",
        lambda load_config: SimpleNamespace(load_model=lambda **_: model),
    )
    monkeypatch.setattr(
        mrv2,
        "init_model_state",
        lambda *args: SimpleNamespace(num_new_sampled_tokens_per_step=1),
    )
    monkeypatch.setattr(
        eplb,
        "get_mixture_of_experts_model",
        lambda loaded_model: (
            loaded_model if getattr(loaded_model, "is_moe", False) else None
        ),
    )

    runner = _make_runner(is_last_pp_rank=False)
    mrv2.GPUModelRunner.load_model(runner)

    assert runner.model is model
    assert runner.model_state is not None
    assert runner.eplb_state is not None
    assert runner.eplb_state.add_model_calls == [(model, runner.model_config, None)]
    assert runner.eplb_state.async_started is True


def test_v2_load_model_with_dummy_weights_defers_eplb_async_loop(monkeypatch):
    FakeEplbState.instances.clear()
    model = SimpleNamespace(is_moe=True)

    monkeypatch.setattr(mrv2, "DeviceMemoryProfiler", FakeMemoryProfiler)
    monkeypatch.setattr(eplb, "EplbState", FakeEplbState)
    monkeypatch.setattr(
        mrv2,
        "get_model_loader",
        lambda load_config: SimpleNamespace(load_model=lambda **_: model),
    )
    monkeypatch.setattr(
        mrv2,
        "init_model_state",
        lambda *args: SimpleNamespace(num_new_sampled_tokens_per_step=1),
    )
    monkeypatch.setattr(eplb, "get_mixture_of_experts_model", lambda model: model)

    runner = _make_runner(is_last_pp_rank=False)
    mrv2.GPUModelRunner.load_model(runner, load_dummy_weights=True)

    assert runner.load_config.load_format == "dummy"
    assert runner.eplb_state is not None
    # A scaling-up worker registers so it can join the EPLB communicator.
    assert runner.eplb_state.add_model_calls == [(model, runner.model_config, None)]
    assert runner.eplb_state.async_started is False


def test_v2_setup_eplb_from_mapping_updates_state_in_place():
    runner = _make_runner()
    state = FakeEplbState(runner.parallel_config, runner.device)
    runner.eplb_state = state
    mapping = torch.tensor([[0, 1, 2, 3]], dtype=torch.int64)
    mrv2.GPUModelRunner.setup_eplb_from_mapping(runner, mapping)

    assert runner.eplb_state is state
    assert state.update_mapping_calls == [(runner.model_config, mapping)]


def test_v2_load_model_registers_dspark_speculator_with_eplb(monkeypatch):
    FakeEplbState.instances.clear()
    target_model = SimpleNamespace(is_moe=True)
    draft_model = SimpleNamespace(is_moe=True)
    draft_model_config = SimpleNamespace(
        model="dspark-draft",
        hf_config=SimpleNamespace(model_type="deepseek_v4"),
    )

    class FakeDSparkSpeculator:
        def __init__(self):
            self.model = draft_model
            self.eplb_state = None

        def load_model(self, target_model):
            return None

        def set_eplb_state(self, state) -> None:
            self.eplb_state = state

    monkeypatch.setattr(mrv2, "DeviceMemoryProfiler", FakeMemoryProfiler)
    monkeypatch.setattr(eplb, "EplbState", FakeEplbState)
    monkeypatch.setattr(mrv2, "DraftModelSpeculator", FakeDSparkSpeculator)
    monkeypatch.setattr(
        mrv2,
        "get_model_loader",
        lambda load_config: SimpleNamespace(load_model=lambda **_: target_model),
    )
    monkeypatch.setattr(
        mrv2,
        "init_model_state",
        lambda *args: SimpleNamespace(num_new_sampled_tokens_per_step=1),
    )
    monkeypatch.setattr(
        eplb,
        "get_mixture_of_experts_model",
        lambda model: model if getattr(model, "is_moe", False) else None,
    )

    speculator = FakeDSparkSpeculator()
    runner = _make_runner(
        is_last_pp_rank=False,
        speculative_config=SimpleNamespace(
            method="dspark",
            draft_model_config=draft_model_config,
        ),
        speculator=speculator,
    )
    mrv2.GPUModelRunner.load_model(runner)

    assert runner.eplb_state is not None
    assert runner.eplb_state.add_model_calls == [
        (draft_model, draft_model_config, "dspark-draft (draft)"),
        (target_model, runner.model_config, None),
    ]
    assert speculator.eplb_state is runner.eplb_state


def test_v2_sample_tokens_runs_eplb_on_non_last_pp_rank(monkeypatch):
    events = []
    runner = _make_runner(is_last_pp_rank=False, num_speculative_steps=0)
    runner.execute_model_state = SimpleNamespace(
        input_batch=SimpleNamespace(
            num_reqs=2, idx_mapping=torch.zeros(2, dtype=torch.int32)
        ),
        attn_metadata=None,
        slot_mappings_by_layer=None,
        hidden_states=None,
        aux_hidden_states=None,
        dp_sync_state=None,
        finished_req_ids=set(),
        ec_connector_output=None,
        routed_experts=None,
        cudagraph_stats=None,
        num_spec_tokens_to_schedule=0,
    )
    runner.req_states = SimpleNamespace()

    def fake_receive(*args, **kwargs):
        events.append("receive")
        # all_decode_next=True, so model_state.postprocess_state is skipped.
        return True

    runner.pp_handler = SimpleNamespace(receive=fake_receive)
    runner.postprocess_num_computed_tokens = lambda *args, **kwargs: events.append(
        "postprocess_num_computed_tokens"
    )
    runner.eplb.step = lambda *args, **kwargs: events.append("eplb")

    output = mrv2.GPUModelRunner.sample_tokens(runner, None)
    assert output in (EMPTY_MODEL_RUNNER_OUTPUT, None)
    assert events == ["receive", "postprocess_num_computed_tokens", "eplb"]
