"""Flags about HTTP, logs, metrics, tools and answers."""

from __future__ import annotations

from trencadis.server.config.foreign.meanings import level, opposite, unless_given
from trencadis.server.config.foreign.row import FlagRow, free, means, refused

_PROXY = "a proxy in front of the server does that"
_COHERE = "the APIs are OpenAI's and Anthropic's; Cohere's route is not served"
_PLUGIN = "a package offers a parser by the entry point trencadis."
_TRACES = "--otlp-traces-endpoint traces requests; /metrics has a histogram of each stage"
_LINES = "lines go to standard error; --log-level says how many, --log-format json makes objects of them"
_OUTPUTS = "--enable-log-outputs logs whole answers"

HTTP: tuple[FlagRow, ...] = (
    refused("middleware", "list", _PROXY),
    refused("grpc", "bool", "the server speaks HTTP"),
    refused("grpc_port", "int", "the server speaks HTTP (--port)"),
    free("enable_request_id_headers", "bool", "every answer has x-request-id"),
    free("enable_server_load_tracking", "bool", "/load always counts"),
    free("enable_offline_docs", "bool", "/docs loads its scripts from a public host; /openapi.json needs no network"),
    free("disable_frontend_multiprocessing", "bool", "the engine is always a process of its own"),
    free("json_arg", "json", "it is an example in vLLM's help", keys=()),
)

LOGS: tuple[FlagRow, ...] = (
    FlagRow("logging_config", "refused", "json", _LINES, keys=(
        means("log_level", "str", "`--log-level`", level),
        means("formatter", "str", "`--log-format`", unless_given("log_format")),
        refused("configure_logging", "bool", _LINES, True),
        refused("pylogging_config_file", "str", _LINES),
    )),
    refused("log_config_file", "str", _LINES),
    free("enable_log_deltas", "bool", _OUTPUTS, True),
    means("disable_log_requests", "bool", "`--enable-log-requests`, which is off unless given",
          opposite("enable_log_requests"), True),
    refused("log_error_stack", "bool", "an error of a client is one line; the log has the stack of a server's error"),
    refused("enable_logging_iteration_details", "bool", "/metrics counts steps, launches and tokens by bucket"),
)  # fmt: skip

METRICS: tuple[FlagRow, ...] = (
    free("collect_detailed_traces", "list", "every trace has media, queue, encode, prefill and decode"),
    refused("enable_layerwise_nvtx_tracing", "bool", _TRACES),
    refused("profiler_config", "json", "there is no profiler; /metrics has a histogram of each stage"),
    refused("custom_histogram_buckets", "json", "boundaries of histograms are vLLM's"),
    refused("kv_cache_metrics", "bool", "/metrics has use and hits of the KV cache, not the age of blocks"),
    refused("kv_cache_metrics_sample", "float", "/metrics has use and hits of the KV cache, not the age of blocks",
            0.01),
    free("cudagraph_metrics", "bool", "/metrics and /buckets always count launches, padding and graphs"),
    refused("enable_mfu_metrics", "bool", "/metrics has tokens and seconds of launches; FLOPs are not estimated"),
    refused("enable_per_request_metrics", "bool", "/metrics has histograms; usage of an answer counts its tokens"),
    refused("fail_on_environ_validation", "bool", "an unknown VLLM_ variable is one line at the start, and no error"),
)  # fmt: skip

ANSWERS: tuple[FlagRow, ...] = (
    free("enable_auto_tool_choice", "bool", "tools may always be chosen freely"),
    free("enable_reasoning", "bool", "--reasoning-parser says how reasoning is marked"),
    refused("tool_parser_plugin", "str", _PLUGIN + "tool_parsers"),
    refused("reasoning_parser_plugin", "str", _PLUGIN + "reasoning_parsers"),
    refused("tool_server", "str", "calls are returned to the client, which runs them"),
    FlagRow("reasoning_config", "refused", "json", "--reasoning-parser '<think>,</think>' names both tags", keys=(
        means("reasoning_parser", "str", "`--reasoning-parser`", unless_given("reasoning_parser")),
    )),
    FlagRow("structured_outputs_config", "refused", "json", "a request says how its answer is formed", keys=(
        free("backend", "str", "one library makes all grammars", "auto"),
        free("disable_fallback", "bool", "one library makes all grammars"),
        means("disable_any_whitespace", "bool", "`--disable-any-whitespace`", unless_given("disable_any_whitespace")),
        means("disable_additional_properties", "bool", "`--disable-additional-properties`",
              unless_given("disable_additional_properties")),
        means("reasoning_parser", "str", "`--reasoning-parser`", unless_given("reasoning_parser")),
        refused("reasoning_parser_plugin", "str", _PLUGIN + "reasoning_parsers"),
        refused("enable_in_reasoning", "bool", "a form holds for what follows the reasoning"),
    )),
    free("guided_decoding_backend", "str", "one library makes all grammars", "auto"),
    free("trust_request_mm_kwargs", "bool", "requests may always narrow min_pixels, max_pixels and the like within the "
         "server's"),
    refused("logprobs_mode", "str", "log-probabilities are those before penalties and filters", "raw_logprobs"),
    refused("return_sampling_mask", "bool", "answers hold tokens, log-probabilities and text"),
    refused("anthropic_disabled_thinking_effort", "str", "thinking that is disabled sets enable_thinking to false",
            "auto"),
    free("cohere_format", "str", _COHERE, "cmd4"),
    free("cohere_is_reasoning_model", "bool", _COHERE, True),
)  # fmt: skip

ROWS = (*HTTP, *LOGS, *METRICS, *ANSWERS)
