"""Flags that other servers know: those without effect here, and those that a later part brings."""

from __future__ import annotations

from trencadis.core.errors import StartupError

NO_EFFECT: dict[str, int] = {
    "swap_space": 1,
    "num_scheduler_steps": 1,
    "multi_step_stream_outputs": 0,
    "task": 1,
    "runner": 1,
    "convert": 1,
    "preemption_mode": 1,
    "disable_mm_preprocessor_cache": 0,
    "use_v2_block_manager": 0,
    "disable_async_output_proc": 0,
    "async_scheduling": 0,
    "guided_decoding_backend": 1,
    "disable_custom_all_reduce": 0,
    "disable_frontend_multiprocessing": 0,
    "worker_use_ray": 0,
    "engine_use_ray": 0,
    "tokenizer_mode": 1,
    "config_format": 1,
    "model_impl": 1,
    "prefix_caching_hash_algo": 1,
    "max_seq_len_to_capture": 1,
    "cudagraph_capture_sizes": 9,
    "max_cudagraph_capture_size": 1,
    "compilation_config": 1,
    "optimization_level": 1,
    "performance_mode": 1,
    "skip_mm_profiling": 0,
    "trust_request_mm_kwargs": 0,
    "mm_processor_cache_type": 1,
    "mm_hasher_algorithm": 1,
    "mm_encoder_attn_backend": 1,
    "disable_chunked_mm_input": 0,
    "api_server_count": 1,
    "renderer_num_workers": 1,
    "max_parallel_loading_workers": 1,
    "max_model_len_to_capture": 1,
    "safetensors_load_strategy": 1,
    "use_tqdm_on_load": 0,
    "disable_sliding_window": 0,
    "disable_cascade_attn": 0,
    "enable_server_load_tracking": 0,
    "enable_ssl_refresh": 0,
    "cpu_offload_gb": 1,
    "delay_factor": 1,
    "scheduler_delay_factor": 1,
    "num_lookahead_slots": 1,
    "stream_interval": 1,
    "collect_detailed_traces": 1,
    "h11_max_header_count": 1,
    "max_log_len": 1,
    "enable_prompt_tokens_details": 0,
    "enable_request_id_headers": 0,
    "disable_log_requests": 0,
}
"""Name -> number of values (9: as many as follow)."""

SHORT: dict[str, str] = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "ep": "enable_expert_parallel",
    "q": "quantization",
    "sc": "speculative_config",
    "cc": "compilation_config",
    "O": "optimization_level",
}
"""Short options, given with one dash (or, as people do, with two)."""

NEUTRAL = ("", "none", "null", "auto", "1", "0", "false", "{}", "[]", "mp", "uni")

LATER: dict[str, tuple[str, int]] = {
    "quantization": ("quantised weights", 1),
    "enable_lora": ("LoRA adapters", 0),
    "lora_modules": ("LoRA adapters", 9),
    "speculative_config": ("speculative decoding", 1),
    "speculative_model": ("speculative decoding", 1),
    "num_speculative_tokens": ("speculative decoding", 1),
    "pipeline_parallel_size": ("pipeline parallelism", 1),
    "data_parallel_size": ("data parallelism", 1),
    "enable_expert_parallel": ("expert parallelism", 0),
    "distributed_executor_backend": ("several ranks", 1),
    "nnodes": ("several machines", 1),
    "enable_auto_tool_choice": ("tool calls", 0),
    "tool_call_parser": ("tool calls", 1),
    "tool_parser_plugin": ("tool calls", 1),
    "reasoning_parser": ("reasoning parsers", 1),
    "enable_reasoning": ("reasoning parsers", 0),
    "structured_outputs_config": ("structured output", 1),
    "jit_monitor_mode": ("warm-up of graphs", 1),
    "backend_option": ("backend options", 1),
    "hf_overrides": ("overrides of config.json", 1),
    "kv_offloading_size": ("KV offloading", 1),
    "kv_transfer_config": ("KV transfer", 1),
    "enable_sleep_mode": ("sleep mode", 0),
    "enable_prompt_embeds": ("prompt embeddings", 0),
    "enable_mm_embeds": ("media embeddings", 0),
    "language_model_only": ("serving without the vision tower", 0),
    "mm_encoder_tp_mode": ("several ranks", 1),
    "max_num_active_seqs": ("a bound of its own on active requests", 1),
    "pooler_config": ("pooling models", 1),
    "logits_processors": ("custom logits processors", 9),
    "otlp_traces_endpoint": ("traces", 1),
    "return_tokens_as_token_ids": ("token ids in logprobs", 0),
    "enable_log_outputs": ("logging of answers", 0),
    "middleware": ("middleware", 9),
    "grpc": ("gRPC", 0),
    "headless": ("several machines", 0),
}
"""Name -> (what it needs, number of values). A neutral value is accepted."""

_KV_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8_per_token_head", "nvfp4", "bfloat16", "float16")


def refuse_later(name: str, value: str | None) -> None:
    """Passes neutral values.

    Raises:
        StartupError: the value asks for something that no part does yet.
    """
    what = LATER[name][0]
    if value is not None and value.strip().lower() in NEUTRAL:
        return
    shown = "" if value is None else f" {value}"
    raise StartupError(f"--{name.replace('_', '-')}{shown} is not supported yet: {what} will come with a later part.")


def refuse_value(name: str, text: str) -> None:
    """Values of known flags that a later part brings, said before "not one of" would be."""
    if name == "kv_cache_dtype" and text.lower() in _KV_DTYPES:
        raise StartupError(f"--kv-cache-dtype {text} is not supported yet: a KV cache of another type will come later.")
