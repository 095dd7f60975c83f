"""Flags of other servers: those without effect here, those that are refused, and those that a flag of ours replaces."""

from __future__ import annotations

from typing import Any, NamedTuple

from trencadis.core.errors import StartupError
from trencadis.server.config import foreign_flags
from trencadis.server.config.foreign_flags import Later

NO_EFFECT: dict[str, int] = {
    "num_scheduler_steps": 1,
    "multi_step_stream_outputs": 0,
    "use_v2_block_manager": 0,
    "disable_async_output_proc": 0,
    "async_scheduling": 0,
    "guided_decoding_backend": 1,
    "disable_custom_all_reduce": 0,
    "disable_frontend_multiprocessing": 0,
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
    "renderer_num_workers": 1,
    "max_parallel_loading_workers": 1,
    "max_model_len_to_capture": 1,
    "safetensors_load_strategy": 1,
    "use_tqdm_on_load": 0,
    "disable_sliding_window": 0,
    "disable_cascade_attn": 0,
    "delay_factor": 1,
    "scheduler_delay_factor": 1,
    "num_lookahead_slots": 1,
    "collect_detailed_traces": 1,
    "enable_request_id_headers": 0,
    "disable_log_requests": 0,
    "enable_auto_tool_choice": 0,
    "enable_reasoning": 0,
    "enable_server_load_tracking": 0,
}
"""Name -> number of values (9: as many as follow). They tune speed, or ask for what is always done: no answer and no
limit depends on them."""


class Replacement(NamedTuple):
    """The flag that took the place of a switch, and its value."""

    flag: str
    value: Any


MEANS: dict[str, Replacement] = {"disable_mm_preprocessor_cache": Replacement("mm_processor_cache_gb", 0.0)}
"""Switches of other servers that one of our flags replaces."""

SHORT: dict[str, str] = {
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "ep": "enable_expert_parallel",
    "sc": "speculative_config",
    "cc": "compilation_config",
    "O": "optimization_level",
}
"""Short options; one dash or two."""

NOTHING = ("", "none", "null", "false", "{}", "[]")

_SWAP = "swapping of KV blocks to host memory"
_SPECULATIVE = "speculative decoding"

LATER: dict[str, Later] = {
    "swap_space": Later(_SWAP, 1, ("0", "0.0")),
    "preemption_mode": Later(_SWAP, 1, ("recompute",)),
    "cpu_offload_gb": Later("weights in host memory", 1, ("0", "0.0")),
    "kv_transfer_config": Later("KV transfer"),
    "worker_use_ray": Later("ranks over Ray", 0),
    "engine_use_ray": Later("an engine under Ray", 0),
    "distributed_executor_backend": Later(
        "ranks are processes of this machine (mp), started by this server", 1, ("mp", "uni", "auto")
    ),
    "pipeline_parallel_size": Later("pipeline parallelism", 1, ("1",)),
    "data_parallel_size": Later("data parallelism", 1, ("1",)),
    "enable_expert_parallel": Later("expert parallelism", 0),
    "nnodes": Later("several machines", 1, ("1",)),
    "headless": Later("several machines", 0),
    "api_server_count": Later("several API processes", 1, ("1",)),
    "mm_encoder_tp_mode": Later(
        "images divided among ranks (here ranks share the weights of the vision tower: weights)", 1, ("weights",)
    ),
    "tokenizer_mode": Later("tokenizers other than tokenizer.json's", 1, ("auto", "hf")),
    "config_format": Later("formats other than config.json", 1, ("auto", "hf")),
    "model_impl": Later("implementations of other libraries", 1, ("auto", "vllm")),
    "enable_lora": Later(foreign_flags.LORA, 0),
    "lora_modules": Later(foreign_flags.LORA, 9),
    "speculative_config": Later(_SPECULATIVE),
    "speculative_model": Later(_SPECULATIVE),
    "num_speculative_tokens": Later(_SPECULATIVE, 1, ("0",)),
    "tool_parser_plugin": Later("a parser in a file (a package offers one by the entry point trencadis.tool_parsers)"),
    "structured_outputs_config": Later("structured output"),
    "logits_processors": Later("custom logits processors", 9),
    "jit_monitor_mode": Later("warm-up of graphs", 1, ("auto",)),
    "backend_option": Later("backend options"),
    "enable_prompt_embeds": Later("prompt embeddings", 0),
    "enable_mm_embeds": Later("media embeddings", 0),
    "language_model_only": Later("serving without the vision tower", 0),
    "max_num_active_seqs": Later("a bound of its own on active requests"),
    "middleware": Later("middleware", 9),
    "grpc": Later("gRPC", 0),
}
"""Ignoring one of these would change answers, limits or endpoints, so it is refused; a neutral value is accepted."""


def values_of(name: str) -> int:
    """The number of values that follow a flag of these tables (9: as many as there are)."""
    if name in LATER:
        return LATER[name].values
    return NO_EFFECT.get(name, 9 if name in foreign_flags.names() else 0)


def refuse_later(name: str, value: str | None) -> None:
    """Accepts neutral values and refuses others. ``value``: None if the flag came without one.

    Raises:
        StartupError: the value asks for something that this server does not do yet.
    """
    what, _, neutral = LATER[name] if name in LATER else foreign_flags.names()[name]
    if value is not None and value.strip().lower() in (*NOTHING, *neutral):
        return
    shown = "" if value is None else f" {value}"
    raise StartupError(f"--{name.replace('_', '-')}{shown} is not supported yet: {what}.")
