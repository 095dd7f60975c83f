"""The table of all rows by name, and vLLM's short options."""

from __future__ import annotations

from trencadis.server.config import vllm_engine_flags, vllm_parallel_flags, vllm_serving_flags
from trencadis.server.config.vllm_flag_row import FlagRow

EVERY: tuple[FlagRow, ...] = (*vllm_engine_flags.ROWS, *vllm_parallel_flags.ROWS, *vllm_serving_flags.ROWS)
ROWS: dict[str, FlagRow] = {row.name: row for row in EVERY}

SHORT: dict[str, str] = {
    "dpa": "data_parallel_address",
    "dph": "data_parallel_hybrid_lb",
    "dpe": "data_parallel_external_lb",
    "dpm": "data_parallel_multi_port_external_lb",
    "dpl": "data_parallel_size_local",
    "dpn": "data_parallel_rank",
    "dpp": "data_parallel_rpc_port",
    "dpr": "data_parallel_start_rank",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "ep": "enable_expert_parallel",
    "ac": "attention_config",
    "dc": "diffusion_config",
    "cc": "compilation_config",
    "O": "optimization_level",
}
"""Short options, with one or two dashes -> long names."""
