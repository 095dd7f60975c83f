"""Flags about several cards, machines and engines, about experts, and about parts that no model has that is served."""

from __future__ import annotations

from collections.abc import Mapping

from trencadis.core.errors import StartupError
from trencadis.core.flag_options import FlagValue
from trencadis.server.config.vllm_flag_row import (
    FlagRow,
    make_absent_row,
    make_free_row,
    make_means_row,
    make_refused_row,
)

EXPERT_REASON = "adapters of experts are not implemented; merge them into the checkpoint (peft: merge_and_unload)"
TOWER_REASON = "adapters of the vision tower are merged: trencadis merge-lora MODEL ADAPTER OUT"
_TEXTS = "a draft model has the format of its checkpoint and runs beside one rank"
_ACCEPTED = "a guess is accepted where it equals the token that is sampled without it, so that answers are the same"
_DATA = "one server has all engines, also those that --data-parallel-backend ray has elsewhere; leave it out"
_CONTEXT = "every rank sees whole sequences; --tensor-parallel-size shares the KV heads among cards"
_EXPERTS = "each rank of --tensor-parallel-size holds a slice of every expert, so no expert lives on one card alone"
_MICRO_BATCHES = "a step is one batch; it would change speed alone"
_KERNELS = "the device chooses its kernels; answers are the same"
_STATES = "the states of recurrent layers are float32; with fewer bits their errors add up over an answer"
_EXACT = "the states of recurrent layers are float32, and not rounded"
_TIMEOUT = "how long a collective may take follows from the measured time of a layer"


def _convert_local_size(value: FlagValue, own: Mapping[str, FlagValue]) -> Mapping[str, FlagValue]:
    """Converts the number of local engines: all engines are on this machine, unless Ray places them.

    Raises:
        StartupError: the number differs from ``--data-parallel-size``.
    """
    if own.get("data_parallel_backend") == "ray":
        return {}
    size = own.get("data_parallel_size", value)
    if size != value:
        raise StartupError(f"--data-parallel-size-local {value} is not --data-parallel-size {size}: {_DATA}.")
    return {"data_parallel_size": value}


def _convert_ray_backend(value: FlagValue, own: Mapping[str, FlagValue]) -> Mapping[str, FlagValue]:
    """Converts an older form of the flag."""
    return {"distributed_executor_backend": "ray"} if value else {}


PARALLEL: tuple[FlagRow, ...] = (
    make_means_row("worker_use_ray", "bool", "--distributed-executor-backend ray", _convert_ray_backend, False),
    make_refused_row("engine_use_ray", "bool", "the engine is a process of the server; --distributed-executor-backend "
        "ray "
            "places its ranks"),
    make_free_row("ray_workers_use_nsight", "bool", "ranks run without a profiler"),
    make_free_row("disable_custom_all_reduce", "bool", "sums use the library of the device"),
    make_free_row("enable_batch_sharded_sampling", "bool", "every rank samples the whole batch; it would change speed "
        "alone"),
    make_free_row("max_parallel_loading_workers", "int", "weights are read one tensor at a time"),
    make_free_row("enable_shm_tensor_arena", "bool", "how pixels reach a rank changes no answer"),
    make_absent_row("enable_hc_sp", "bool", "hyper-connections"),
    make_refused_row("device_ids", "list", "--device cuda:1 names a card; CUDA_VISIBLE_DEVICES and "
        "HABANA_VISIBLE_MODULES name "
            "several"),
    make_refused_row("numa_bind", "bool", "start the server under numactl, or with CPUAffinity= and NUMAPolicy= of its "
        "unit"),
    make_refused_row("numa_bind_nodes", "list", "start the server under numactl --cpunodebind=N --membind=N"),
    make_refused_row("numa_bind_cpus", "list", "start the server under numactl --physcpubind=CPUS"),
    make_free_row("distributed_timeout_seconds", "int", _TIMEOUT),
    make_free_row("cpu_distributed_timeout_seconds", "int", _TIMEOUT),
)  # fmt: skip

DATA: tuple[FlagRow, ...] = (
    make_means_row("data_parallel_size_local", "int", "--data-parallel-size", _convert_local_size),
    make_refused_row("data_parallel_rank", "int", _DATA, 0),
    make_refused_row("data_parallel_start_rank", "int", _DATA, 0),
    make_refused_row("data_parallel_hybrid_lb", "bool", _DATA),
    make_refused_row("data_parallel_external_lb", "bool", _DATA),
    make_refused_row("data_parallel_multi_port_external_lb", "bool", _DATA),
    make_free_row("data_parallel_address", "str", _DATA),
    make_free_row("data_parallel_rpc_port", "int", _DATA, 29550),
    make_free_row("data_parallel_supervisor_port", "int", _DATA, 9256),
    make_free_row("dp_supervisor_probe_interval_s", "float", _DATA, 5.0),
    make_free_row("dp_supervisor_probe_timeout_s", "float", _DATA, 5.0),
    make_free_row("dp_supervisor_probe_failure_threshold", "int", _DATA, 3),
    make_free_row("dp_sync_interval", "int", _DATA, 16),
    make_free_row("disable_nccl_for_dp_synchronization", "bool", _DATA),
    make_free_row("prefill_schedule_interval", "int", "each engine schedules for itself", 1),
    make_free_row("aggregate_engine_logging", "bool", "the line about throughput is about all engines together"),
    make_refused_row("enable_fault_tolerance", "bool", "an engine that dies is started again (--max-engine-restarts)"),
    make_refused_row("fault_tolerance_config", "json", "an engine that dies is started again (--max-engine-restarts)"),
    make_refused_row("enable_scale_out", "bool", "one server both reads prompts and answers; /tokenize does a part"),
)  # fmt: skip

CONTEXT: tuple[FlagRow, ...] = (
    make_refused_row("decode_context_parallel_size", "int", _CONTEXT, 1),
    make_refused_row("prefill_context_parallel_size", "int", _CONTEXT, 1),
    make_free_row("cp_kv_cache_interleave_size", "int", _CONTEXT, 1),
    make_free_row("dcp_kv_cache_interleave_size", "int", _CONTEXT, 1),
    make_free_row("dcp_comm_backend", "str", _CONTEXT),
    make_free_row("dcp_q_replicate", "bool", _CONTEXT),
)

EXPERTS: tuple[FlagRow, ...] = (
    make_refused_row("enable_expert_parallel", "bool", _EXPERTS),
    make_refused_row("enable_eplb", "bool", _EXPERTS),
    make_refused_row("enable_elastic_ep", "bool", _EXPERTS),
    make_refused_row("enable_return_routed_experts", "bool", "answers hold tokens, log-probabilities and text"),
    make_free_row("elastic_ep_max_dp_size", "int", _EXPERTS),
    make_free_row("enable_ep_weight_filter", "bool", _EXPERTS),
    make_free_row("eplb_config", "json", _EXPERTS),
    make_free_row("expert_placement_strategy", "str", _EXPERTS, "linear"),
    make_free_row("moe_backend", "str", _KERNELS, "auto"),
    make_free_row("all2all_backend", "str", _EXPERTS, "allgather_reducescatter"),
    make_free_row("enable_dbo", "bool", _MICRO_BATCHES),
    make_free_row("ubatch_size", "int", _MICRO_BATCHES, 0),
    make_free_row("dbo_decode_token_threshold", "int", _MICRO_BATCHES, 32),
    make_free_row("dbo_prefill_token_threshold", "int", _MICRO_BATCHES, 512),
)

RECURRENT: tuple[FlagRow, ...] = (
    make_free_row("gdn_prefill_backend", "str", _KERNELS),
    make_free_row("kda_prefill_backend", "str", _KERNELS, "auto"),
    make_free_row("kda_decode_backend", "str", _KERNELS, "auto"),
    make_free_row("mamba_backend", "str", _KERNELS, "triton"),
    make_free_row("mamba_ssu_algorithm", "str", _KERNELS),
    make_free_row("mamba_block_size", "int", "snapshots of states are apart from KV blocks, which keep their size"),
    make_refused_row("mamba_cache_dtype", "str", _STATES, "auto", "float32"),
    make_refused_row("mamba_ssm_cache_dtype", "str", _STATES, "auto", "float32"),
    make_free_row("mamba_cache_mode", "str", "prefixes are shared by snapshots (--state-snapshot-memory)", "none"),
    make_free_row("mamba_cache_philox_rounds", "int", _EXACT, 0),
    make_free_row("enable_mamba_cache_stochastic_rounding", "bool", _EXACT),
    make_free_row(
        "enable_mamba_shared_prefix_checkpoint", "bool", "every request may begin with a snapshot of another"
    ),
    make_free_row("use_replayssm", "bool", "every step stores the state"),
    make_free_row("replayssm_buffer_len", "int", "every step stores the state", 16),
)

LORA: tuple[FlagRow, ...] = (
    make_free_row("max_lora_cls_labels", "int", "adapters change no class head"),
    make_free_row("lora_dtype", "str", "adapters have the type of the model's activations", "auto"),
    make_free_row("fully_sharded_loras", "bool", "each rank holds the part of A or B that its weights need"),
    make_free_row("specialize_active_lora", "bool", "it would change speed alone"),
    make_refused_row("lora_target_modules", "list", "an adapter applies to all matrices that it was trained for"),
    make_refused_row("lora_extra_vocab_size", "int", "adapters add no tokens", 0, 256),
    make_refused_row("long_lora_scaling_factors", "list", "adapters do not change rotary tables"),
    make_refused_row("qlora_adapter_name_or_path", "str", "--lora-modules NAME=PATH names adapters"),
    make_refused_row("enable_lora_bias", "bool", "adapters have no biases; merge such a one with peft"),
    make_refused_row("enable_tower_connector_lora", "bool", TOWER_REASON),
    make_refused_row("enable_mixed_moe_lora_format", "bool", EXPERT_REASON),
    make_refused_row("enable_moe_shared_loras", "bool", EXPERT_REASON),
    make_refused_row(
        "enable_prompt_adapter", "bool", "prompt adapters are not served; put the text into --chat-template"
    ),
    make_refused_row("max_prompt_adapters", "int", "prompt adapters are not served", 1),
    make_refused_row("max_prompt_adapter_token", "int", "prompt adapters are not served", 0),
)

DRAFTS: tuple[FlagRow, ...] = (
    make_free_row("speculative_model_quantization", "str", _TEXTS),
    make_free_row("speculative_draft_tensor_parallel_size", "int", _TEXTS),
    make_free_row("speculative_max_model_len", "int", "guesses are made at any length"),
    make_free_row("speculative_disable_mqa_scorer", "bool", "one launch verifies the guesses of all rows"),
    make_refused_row("spec_decoding_acceptance_method", "str", _ACCEPTED, "rejection_sampler"),
    make_free_row("typical_acceptance_sampler_posterior_threshold", "float", _ACCEPTED),
    make_free_row("typical_acceptance_sampler_posterior_alpha", "float", _ACCEPTED),
    make_free_row("disable_logprobs_during_spec_decoding", "bool", "log-probabilities are those without guesses"),
    make_free_row(
        "per_request_spec_decode_metrics", "str", "the closing line of each request counts its guesses", "none"
    ),
    make_free_row("num_lookahead_slots", "int", "a step takes the KV blocks that its guesses need", 0),
    make_free_row(
        "use_fp64_gumbel", "bool", "tokens are drawn by inverting the cumulated distribution, without Gumbel noise"
    ),
)

ROWS = (*PARALLEL, *DATA, *CONTEXT, *EXPERTS, *RECURRENT, *LORA, *DRAFTS)
