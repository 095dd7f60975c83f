"""vLLM's other flags, by the feature that they need, so that none passes for a misspelling of one of ours."""

from __future__ import annotations

import functools
from typing import NamedTuple

LORA = "LoRA adapters"


class Later(NamedTuple):
    """A flag that is refused, because it would change what happens.

    Args:
        what: the part that it needs.
        values: number of values that follow it (9: as many as there are).
        neutral: values that describe what happens anyway, beside ``legacy.NOTHING``.
    """

    what: str
    values: int = 1
    neutral: tuple[str, ...] = ()


ELSEWHERE: dict[str, str] = {
    LORA: "default_mm_loras enable_lora_bias enable_mixed_moe_lora_format enable_moe_shared_loras "
    "enable_tower_connector_lora fully_sharded_loras long_lora_scaling_factors lora_dtype lora_extra_vocab_size "
    "lora_target_modules max_cpu_loras max_lora_cls_labels max_lora_rank max_loras qlora_adapter_name_or_path "
    "specialize_active_lora",
    "prompt adapters": "enable_prompt_adapter max_prompt_adapter_token max_prompt_adapters",
    "speculative decoding": "disable_logprobs_during_spec_decoding ngram_prompt_lookup_max ngram_prompt_lookup_min "
    "per_request_spec_decode_metrics spec_decoding_acceptance_method spec_method spec_model spec_tokens "
    "speculative_disable_by_batch_size speculative_disable_mqa_scorer speculative_draft_tensor_parallel_size "
    "speculative_max_model_len speculative_model_quantization typical_acceptance_sampler_posterior_alpha "
    "typical_acceptance_sampler_posterior_threshold",
    "data parallelism": "data_parallel_address data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb "
    "data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port data_parallel_size_local=1 "
    "data_parallel_start_rank data_parallel_supervisor_port disable_nccl_for_dp_synchronization "
    "dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
    "dp_sync_interval elastic_ep_max_dp_size enable_scale_out",
    "context parallelism": "cp_kv_cache_interleave_size=1 dcp_comm_backend dcp_kv_cache_interleave_size=1 "
    "dcp_q_replicate decode_context_parallel_size=1 enable_hc_sp prefill_context_parallel_size=1",
    "several machines": "cpu_distributed_timeout_seconds distributed_timeout_seconds enable_nccl_comm_suspend "
    "master_addr master_port node_rank=0",
    "mixtures of experts": "all2all_backend enable_elastic_ep enable_ep_weight_filter enable_eplb eplb_config "
    "enable_return_routed_experts expert_placement_strategy moe_backend",
    "two batches in turns": "dbo_decode_token_threshold dbo_prefill_token_threshold enable_dbo ubatch_size=0",
    "state-space and linear attention": "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint "
    "gdn_prefill_backend kda_decode_backend kda_prefill_backend mamba_backend mamba_block_size mamba_cache_dtype "
    "mamba_cache_mode mamba_cache_philox_rounds mamba_ssm_cache_dtype mamba_ssu_algorithm replayssm_buffer_len "
    "use_replayssm",
    "transfer and offloading of KV blocks and weights": "cpu_offload_params ec_manager_config ec_transfer_config "
    "kv_events_config kv_offloading_backend offload_backend offload_group_size offload_num_in_group offload_params "
    "offload_prefetch_step weight_transfer_config",
    "a KV cache of another form": "calculate_kv_scales disable_hybrid_kv_cache_manager kv_cache_dtype_skip_layers "
    "kv_sharing_fast_prefill prefix_cache_retention_interval prefix_match_unit swa_bounded_replay",
    "statistics of KV blocks": "kv_cache_metrics kv_cache_metrics_sample",
    "sleep mode": "enable_cumem_allocator sleep_mode_offload_cudagraph sleep_preserve_parameter_names",
    "quantised weights": "allow_deprecated_quantization quantization_config mm_encoder_fp8_scale_path "
    "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_attn_dtype",
    "a choice of kernels": "attention_backend attention_config diffusion_config enable_flash_late_interaction "
    "enable_flashinfer_autotune ir_op_priority kernel_config linear_backend sparse_indexer_topk_backend "
    "use_fp64_gumbel enable_batch_sharded_sampling",
    "another scheduler": "scheduler_cls scheduler_reserve_full_isl prefill_schedule_interval max_num_scheduled_tokens "
    "long_prefill_token_threshold=0 long_prefill_token_threshold_adaptive max_long_partial_prefills=1 "
    "max_num_partial_prefills=1 watermark watermark_config",
    "code of other packages": "io_processor_plugin reasoning_parser_plugin model_class_overrides worker_cls "
    "worker_extension_cls tool_server additional_config override_neuron_config logits_processor_pattern",
    "tools and reasoning": "anthropic_disabled_thinking_effort cohere_format cohere_is_reasoning_model "
    "exclude_tools_when_tool_choice_none reasoning_config tool_strict_level",
    "overrides of config.json": "hf_config_path rope_scaling rope_theta code_revision engram_config",
    "other ways of loading": "ignore_patterns model_loader_extra_config pt_load_map_location "
    "safetensors_prefetch_block_size safetensors_prefetch_num_threads",
    "other tokenizers, or none": "skip_tokenizer_init tokenizer_pool_size=0 tokenizer_pool_type tokenizer_revision "
    "tokens_only",
    "the tower in another place": "mm_encoder_only mm_device_do_normalize mm_processor_device mm_ipc_gpu_memory_gb "
    "mm_shm_cache_max_object_size_mb mm_tensor_ipc enable_shm_tensor_arena",
    "other ways of reading media": "interleave_mm_strings media_io_kwargs video_pruning_method video_pruning_rate",
    "other log-probabilities": "logprobs_mode return_sampling_mask",
    "logging and tracing of that kind": "aggregate_engine_logging cudagraph_metrics custom_histogram_buckets "
    "enable_layerwise_nvtx_tracing enable_log_deltas enable_logging_iteration_details enable_mfu_metrics "
    "enable_per_request_metrics enable_trace_replay jit_monitor_verbose log_config_file log_error_stack "
    "logging_config profiler_config ray_workers_use_nsight aux_output_config",
    "binding to cards and memory nodes": "device_ids numa_bind numa_bind_cpus numa_bind_nodes",
    "recovery of that kind": "enable_fault_tolerance fault_tolerance_config fail_on_environ_validation",
    "fingerprints of its own": "fingerprint_mode fingerprint_value",
    "other interfaces": "grpc_port enable_offline_docs json_arg",
}
"""Feature -> names; ``name=value`` where that value describes what happens anyway."""


@functools.cache
def names() -> dict[str, Later]:
    """The flags of ``ELSEWHERE`` by name; any number of values may follow each."""
    every = ((what, word.partition("=")) for what, some in ELSEWHERE.items() for word in some.split())
    return {name: Later(what, 9, (neutral,) if neutral else ()) for what, (name, _, neutral) in every}
