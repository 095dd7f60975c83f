"""The tables of vLLM's flags and environment variables by name, and the rows of flags that are not about the engine
alone.

These rows are about several cards, machines and engines, about experts, about parts that no model has that is served,
and about HTTP, logs, metrics, tools and answers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from trencadis.core.envs import ALWAYS, IGNORED, REFUSED, Env
from trencadis.core.errors import StartupError
from trencadis.core.flag_declaration import FlagValue
from trencadis.server.config import vllm_engine_flags
from trencadis.server.config.vllm_flag_row_and_value_conversion import (
    FlagRow,
    convert_log_level,
    copy_unless_given,
    make_absent_row,
    make_free_row,
    make_means_row,
    make_refused_row,
    set_opposite,
    set_when_on,
)

_PROXY = "a proxy in front of the server does that"
_COHERE = "chat is OpenAI's and Anthropic's; of Cohere's routes /v2/embed and /v2/rerank are served"
_PLUGIN = "a package offers a parser by the entry point trencadis."
_TAGS = "--reasoning-parser '<think>,</think>' names both tags"
_TRACES = "--otlp-traces-endpoint traces requests; /metrics has a histogram of each stage"
_LINES = "lines go to standard error; --log-level says how many, --log-format json makes objects of them"
_OUTPUTS = "--enable-log-outputs logs whole answers"

HTTP: tuple[FlagRow, ...] = (
    make_refused_row("middleware", "list", _PROXY),
    make_refused_row("grpc", "bool", "the server speaks HTTP"),
    make_refused_row("grpc_port", "int", "the server speaks HTTP (--port)"),
    make_free_row("enable_request_id_headers", "bool", "every answer has x-request-id"),
    make_free_row("enable_server_load_tracking", "bool", "/load always counts"),
    make_free_row(
        "enable_offline_docs", "bool", "/docs loads its scripts from a public host; /openapi.json needs no network"
    ),
    make_free_row("disable_frontend_multiprocessing", "bool", "the engine is always a process of its own"),
    make_free_row("json_arg", "json", "it is an example in vLLM's help", keys=()),
)

LOGS: tuple[FlagRow, ...] = (
    FlagRow("logging_config", "refused", "json", _LINES, keys=(
        make_means_row("log_level", "str", "`--log-level`", convert_log_level),
        make_means_row("formatter", "str", "`--log-format`", copy_unless_given("log_format")),
        make_refused_row("configure_logging", "bool", _LINES, True),
        make_means_row("pylogging_config_file", "str", "`--log-config-file`", copy_unless_given("log_config_file")),
    )),
    make_free_row("enable_log_deltas", "bool", _OUTPUTS, True),
    make_means_row("disable_log_requests", "bool", "`--enable-log-requests`, which is off unless given",
          set_opposite("enable_log_requests"), True),
    make_refused_row("log_error_stack", "bool", "an error of a client is one line; the log has the stack of a server's "
        "error"),
    make_refused_row("enable_logging_iteration_details", "bool",
        "/metrics counts steps, launches and tokens by bucket"),
)  # fmt: skip

METRICS: tuple[FlagRow, ...] = (
    make_free_row("collect_detailed_traces", "list", "every trace has media, queue, encode, prefill and decode"),
    make_refused_row("enable_layerwise_nvtx_tracing", "bool", _TRACES),
    make_refused_row("profiler_config", "json", "there is no profiler; /metrics has a histogram of each stage"),
    make_refused_row("custom_histogram_buckets", "json", "boundaries of histograms are vLLM's"),
    make_refused_row("kv_cache_metrics", "bool", "/metrics has use and hits of the KV cache, not the age of blocks"),
    make_refused_row("kv_cache_metrics_sample", "float", "/metrics has use and hits of the KV cache, not the age of "
        "blocks",
            0.01),
    make_free_row("cudagraph_metrics", "bool", "/metrics and /buckets always count launches, padding and graphs"),
    make_refused_row("enable_mfu_metrics", "bool", "/metrics has tokens and seconds of launches; FLOPs are not "
        "estimated"),
    make_refused_row("enable_per_request_metrics", "bool", "/metrics has histograms; usage of an answer counts its "
        "tokens"),
    make_refused_row("watchdog_config", "json", "an engine that hangs is ended and started again; no stacks are "
        "written"),
    make_refused_row("fail_on_environ_validation", "bool", "an unknown VLLM_ variable is one line at the start, and no "
        "error"),
)  # fmt: skip

ANSWERS: tuple[FlagRow, ...] = (
    make_free_row("enable_auto_tool_choice", "bool", "tools may always be chosen freely"),
    make_free_row("enable_reasoning", "bool", "--reasoning-parser says how reasoning is marked"),
    make_refused_row("tool_parser_plugin", "str", _PLUGIN + "tool_parsers"),
    make_refused_row("reasoning_parser_plugin", "str", _PLUGIN + "reasoning_parsers"),
    make_refused_row("tool_server", "str", "calls are returned to the client, which runs them"),
    FlagRow("reasoning_config", "refused", "json", _TAGS, keys=(
        make_means_row("reasoning_parser", "str", "`--reasoning-parser`", copy_unless_given("reasoning_parser")),
        make_refused_row("reasoning_start_str", "str", _TAGS, "<think>"),
        make_refused_row("reasoning_end_str", "str", _TAGS + "; a budget of thoughts ends with the second", "</think>"),
    )),
    FlagRow("structured_outputs_config", "refused", "json", "a request says how its answer is formed", keys=(
        make_free_row("backend", "str", "one library makes all grammars", "auto"),
        make_free_row("disable_fallback", "bool", "one library makes all grammars"),
        make_means_row("disable_any_whitespace", "bool", "`--disable-any-whitespace`",
            copy_unless_given("disable_any_whitespace")),
        make_means_row("disable_additional_properties", "bool", "`--disable-additional-properties`",
              copy_unless_given("disable_additional_properties")),
        make_means_row("reasoning_parser", "str", "`--reasoning-parser`", copy_unless_given("reasoning_parser")),
        make_refused_row("reasoning_parser_plugin", "str", _PLUGIN + "reasoning_parsers"),
        make_refused_row("enable_in_reasoning", "bool", "a form holds for what follows the reasoning"),
    )),
    make_free_row("guided_decoding_backend", "str", "one library makes all grammars", "auto"),
    make_free_row("trust_request_mm_kwargs", "bool", "requests may always narrow min_pixels, max_pixels and the like "
        "within the "
         "server's"),
    make_refused_row("logprobs_mode", "str", "log-probabilities are those before penalties and filters",
        "raw_logprobs"),
    make_refused_row("return_sampling_mask", "bool", "answers hold tokens, log-probabilities and text"),
    make_refused_row("anthropic_disabled_thinking_effort", "str", "thinking that is disabled sets enable_thinking to "
        "false",
            "auto"),
    make_free_row("cohere_format", "str", _COHERE, "cmd4"),
    make_free_row("cohere_is_reasoning_model", "bool", _COHERE, True),
)  # fmt: skip

SERVING_ROWS = (*HTTP, *LOGS, *METRICS, *ANSWERS)


EXPERT_REASON = "adapters of experts are not implemented; merge them into the checkpoint (peft: merge_and_unload)"
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


PARALLEL: tuple[FlagRow, ...] = (
    make_means_row("worker_use_ray", "bool", "--distributed-executor-backend ray",
        set_when_on("distributed_executor_backend", "ray"), False),
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
    make_free_row("enable_tower_connector_lora", "bool", "--enable-lora has slots for the vision tower, too"),
    make_refused_row("lora_target_modules", "list", "an adapter applies to all matrices that it was trained for"),
    make_refused_row("lora_extra_vocab_size", "int", "adapters add no tokens", 0, 256),
    make_refused_row("long_lora_scaling_factors", "list", "adapters do not change rotary tables"),
    make_refused_row("qlora_adapter_name_or_path", "str", "--lora-modules NAME=PATH names adapters"),
    make_refused_row("enable_lora_bias", "bool", "adapters have no biases; merge such a one with peft"),
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

PARALLEL_ROWS = (*PARALLEL, *DATA, *CONTEXT, *EXPERTS, *RECURRENT, *LORA, *DRAFTS)


EVERY: tuple[FlagRow, ...] = (*vllm_engine_flags.ROWS, *PARALLEL_ROWS, *SERVING_ROWS)
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

_OTHER_DEVICES = ("VLLM_ROCM_",)
"""Prefixes of variables about a device that is not supported."""

_REFUSED_VARIABLES = (
    Env("VLLM_USE_MODELSCOPE", "bool", "false", "models come from folders and the Hugging Face hub", REFUSED, "true"),
    Env("VLLM_MODEL_REDIRECT_PATH", "str", "", "a model is the folder or the hub id that is named", REFUSED, ALWAYS),
    Env("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "bool", "false", "positions beyond config.json's have no meaning; change "
        "max_position_embeddings and rope_scaling there", REFUSED, "true"),
    Env("VLLM_TORCH_PROFILER_DIR", "str", "", "there is no profiler; `/metrics` has a histogram of each stage", REFUSED,
        ALWAYS),
    Env("VLLM_ALLOW_INSECURE_SERIALIZATION", "bool", "false", "no pickle is ever read", REFUSED, "true"),
    Env("VLLM_MARLIN_INPUT_DTYPE", "str", "", "activations have the type of the model", REFUSED, ALWAYS),
    Env("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "str", "", "`--quantization` makes fp8, int8 or int4", REFUSED, ALWAYS),
    Env("VLLM_HUMMING_INPUT_QUANT_CONFIG", "str", "", "activations have the type of the model", REFUSED, ALWAYS),
)  # fmt: skip


@cache
def read_variables() -> Mapping[str, Env]:
    """Returns vLLM's environment variables other than those of flags, by name; ``core.envs`` has the plug-in's.

    Those without effect stand in ignored_vllm_env.toml, by reason.
    """
    reasons = tomllib.loads(Path(__file__).with_name("ignored_vllm_env.toml").read_text("utf-8"))
    ignored = (Env(name, "str", "", why, IGNORED) for why, names in reasons.items() for name in names)
    return {env.name: env for env in (*_REFUSED_VARIABLES, *ignored)}


def find_variable(name: str) -> Env | None:
    """Returns the row of a variable, also of one of a whole family; None if it is unknown."""
    if name.startswith(_OTHER_DEVICES):
        return Env(name, "str", "", "devices are cpu, cuda, hpu and those of installed packages", IGNORED)
    return read_variables().get(name) if name.startswith("VLLM_") else None
