"""Flags about several cards, machines and engines, and about parts that no model has that is served here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.core.errors import StartupError
from trencadis.server.config.foreign.row import FlagRow, free, means, refused

_LORA = "adapters are not served; merge them into the checkpoint (peft: merge_and_unload) and serve that"
_DRAFT = "each step draws one token a sequence, without a draft model; leave it out, answers are the same"
_DATA = "one server has all engines, also those that --data-parallel-backend ray has elsewhere; leave it out"
_CONTEXT = "every rank sees whole sequences; --tensor-parallel-size shares the KV heads among cards"
_EXPERTS = "no model with experts is served here"
_TUNES_EXPERTS = "it tunes experts, which no model has that is served"
_TURNS = "a step is one batch; it would change speed alone"
_STATE = "it tunes state-space and linear attention, which no model has that is served"
_TIMEOUT = "how long a collective may take follows from the measured time of a layer"


def _local(value: Any, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """All engines are on this machine, unless Ray places them.

    Raises:
        StartupError: fewer are asked for here than in all.
    """
    if own.get("data_parallel_backend") == "ray":
        return {}
    size = own.get("data_parallel_size", value)
    if size != value:
        raise StartupError(f"--data-parallel-size-local {value} is not --data-parallel-size {size}: {_DATA}.")
    return {"data_parallel_size": value}


def _on_ray(value: Any, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """An older form of the flag."""
    return {"distributed_executor_backend": "ray"} if value else {}


PARALLEL: tuple[FlagRow, ...] = (
    means("worker_use_ray", "bool", "--distributed-executor-backend ray", _on_ray, False),
    refused("engine_use_ray", "bool", "the engine is a process of the server; --distributed-executor-backend ray "
            "places its ranks"),
    free("ray_workers_use_nsight", "bool", "ranks run without a profiler"),
    free("disable_custom_all_reduce", "bool", "sums use the library of the device"),
    free("enable_batch_sharded_sampling", "bool", "every rank samples the whole batch; it would change speed alone"),
    free("max_parallel_loading_workers", "int", "weights are read one tensor at a time"),
    free("enable_shm_tensor_arena", "bool", "how pixels reach a rank changes no answer"),
    free("enable_hc_sp", "bool", "no model that is served has hyper-connections"),
    refused("device_ids", "list", "--device cuda:1 names a card; CUDA_VISIBLE_DEVICES and HABANA_VISIBLE_MODULES name "
            "several"),
    refused("numa_bind", "bool", "start the server under numactl, or with CPUAffinity= and NUMAPolicy= of its unit"),
    refused("numa_bind_nodes", "list", "start the server under numactl --cpunodebind=N --membind=N"),
    refused("numa_bind_cpus", "list", "start the server under numactl --physcpubind=CPUS"),
    free("distributed_timeout_seconds", "int", _TIMEOUT),
    free("cpu_distributed_timeout_seconds", "int", _TIMEOUT),
)  # fmt: skip

DATA: tuple[FlagRow, ...] = (
    means("data_parallel_size_local", "int", "--data-parallel-size", _local),
    refused("data_parallel_rank", "int", _DATA, 0),
    refused("data_parallel_start_rank", "int", _DATA, 0),
    refused("data_parallel_hybrid_lb", "bool", _DATA),
    refused("data_parallel_external_lb", "bool", _DATA),
    refused("data_parallel_multi_port_external_lb", "bool", _DATA),
    free("data_parallel_address", "str", _DATA),
    free("data_parallel_rpc_port", "int", _DATA, 29550),
    free("data_parallel_supervisor_port", "int", _DATA, 9256),
    free("dp_supervisor_probe_interval_s", "float", _DATA, 5.0),
    free("dp_supervisor_probe_timeout_s", "float", _DATA, 5.0),
    free("dp_supervisor_probe_failure_threshold", "int", _DATA, 3),
    free("dp_sync_interval", "int", _DATA, 16),
    free("disable_nccl_for_dp_synchronization", "bool", _DATA),
    free("prefill_schedule_interval", "int", "it aligns several engines; a server has one", 1),
    free("aggregate_engine_logging", "bool", "a server has one engine, so each line is about all"),
    refused("enable_fault_tolerance", "bool", "an engine that dies is started again (--max-engine-restarts)"),
    refused("fault_tolerance_config", "json", "an engine that dies is started again (--max-engine-restarts)"),
    refused("enable_scale_out", "bool", "one server both reads prompts and answers; /tokenize does a part"),
)  # fmt: skip

CONTEXT: tuple[FlagRow, ...] = (
    refused("decode_context_parallel_size", "int", _CONTEXT, 1),
    refused("prefill_context_parallel_size", "int", _CONTEXT, 1),
    free("cp_kv_cache_interleave_size", "int", _CONTEXT, 1),
    free("dcp_kv_cache_interleave_size", "int", _CONTEXT, 1),
    free("dcp_comm_backend", "str", _CONTEXT),
    free("dcp_q_replicate", "bool", _CONTEXT),
)

EXPERTS: tuple[FlagRow, ...] = (
    refused("enable_expert_parallel", "bool", _EXPERTS),
    refused("enable_eplb", "bool", _EXPERTS),
    refused("enable_elastic_ep", "bool", _EXPERTS),
    refused("enable_return_routed_experts", "bool", _EXPERTS),
    free("elastic_ep_max_dp_size", "int", _TUNES_EXPERTS),
    free("enable_ep_weight_filter", "bool", _TUNES_EXPERTS),
    free("eplb_config", "json", _TUNES_EXPERTS),
    free("expert_placement_strategy", "str", _TUNES_EXPERTS, "linear"),
    free("moe_backend", "str", _TUNES_EXPERTS, "auto"),
    free("all2all_backend", "str", _TUNES_EXPERTS, "allgather_reducescatter"),
    free("enable_dbo", "bool", _TURNS),
    free("ubatch_size", "int", _TURNS, 0),
    free("dbo_decode_token_threshold", "int", _TURNS, 32),
    free("dbo_prefill_token_threshold", "int", _TURNS, 512),
)

STATE_SPACE: tuple[FlagRow, ...] = (
    free("gdn_prefill_backend", "str", _STATE),
    free("kda_prefill_backend", "str", _STATE, "auto"),
    free("kda_decode_backend", "str", _STATE, "auto"),
    free("mamba_backend", "str", _STATE, "triton"),
    free("mamba_block_size", "int", _STATE),
    free("mamba_cache_dtype", "str", _STATE, "auto"),
    free("mamba_ssm_cache_dtype", "str", _STATE, "auto"),
    free("mamba_cache_mode", "str", _STATE, "none"),
    free("mamba_cache_philox_rounds", "int", _STATE, 0),
    free("mamba_ssu_algorithm", "str", _STATE),
    free("enable_mamba_cache_stochastic_rounding", "bool", _STATE),
    free("enable_mamba_shared_prefix_checkpoint", "bool", _STATE),
    free("use_replayssm", "bool", _STATE),
    free("replayssm_buffer_len", "int", _STATE, 16),
)

LORA: tuple[FlagRow, ...] = (
    refused("enable_lora", "bool", _LORA),
    refused("lora_modules", "list", _LORA),
    refused("default_mm_loras", "json", _LORA),
    refused("max_loras", "int", _LORA, 1),
    refused("max_lora_rank", "int", _LORA, 16),
    refused("max_cpu_loras", "int", _LORA),
    refused("max_lora_cls_labels", "int", _LORA),
    refused("lora_dtype", "str", _LORA, "auto"),
    refused("lora_target_modules", "list", _LORA),
    refused("lora_extra_vocab_size", "int", _LORA, 0, 256),
    refused("long_lora_scaling_factors", "list", _LORA),
    refused("qlora_adapter_name_or_path", "str", _LORA),
    refused("fully_sharded_loras", "bool", _LORA),
    refused("enable_lora_bias", "bool", _LORA),
    refused("enable_tower_connector_lora", "bool", _LORA),
    refused("specialize_active_lora", "bool", _LORA),
    refused("enable_mixed_moe_lora_format", "bool", _LORA),
    refused("enable_moe_shared_loras", "bool", _LORA),
    refused("enable_prompt_adapter", "bool", "prompt adapters are not served; put the text into --chat-template"),
    refused("max_prompt_adapters", "int", "prompt adapters are not served", 1),
    refused("max_prompt_adapter_token", "int", "prompt adapters are not served", 0),
)

DRAFTS: tuple[FlagRow, ...] = (
    refused("speculative_config", "json", _DRAFT),
    refused("spec_method", "str", _DRAFT),
    refused("spec_model", "str", _DRAFT),
    refused("spec_tokens", "int", _DRAFT, 0),
    refused("speculative_model", "str", _DRAFT),
    refused("num_speculative_tokens", "int", _DRAFT, 0),
    refused("speculative_model_quantization", "str", _DRAFT),
    refused("speculative_draft_tensor_parallel_size", "int", _DRAFT),
    refused("speculative_max_model_len", "int", _DRAFT),
    refused("speculative_disable_by_batch_size", "int", _DRAFT),
    refused("speculative_disable_mqa_scorer", "bool", _DRAFT),
    refused("ngram_prompt_lookup_max", "int", _DRAFT),
    refused("ngram_prompt_lookup_min", "int", _DRAFT),
    refused("spec_decoding_acceptance_method", "str", _DRAFT, "rejection_sampler"),
    refused("typical_acceptance_sampler_posterior_threshold", "float", _DRAFT),
    refused("typical_acceptance_sampler_posterior_alpha", "float", _DRAFT),
    refused("disable_logprobs_during_spec_decoding", "bool", _DRAFT),
    refused("per_request_spec_decode_metrics", "str", _DRAFT, "none"),
    free("num_lookahead_slots", "int", "each step draws one token a sequence", 0),
    free("use_fp64_gumbel", "bool", "tokens are drawn by inverting the cumulated distribution, without Gumbel noise"),
)

ROWS = (*PARALLEL, *DATA, *CONTEXT, *EXPERTS, *STATE_SPACE, *LORA, *DRAFTS)
