"""Flags about HTTP, logs, metrics, tools and answers."""

from __future__ import annotations

from trencadis.server.config.vllm_flag_row import (
    FlagRow,
    convert_log_level,
    copy_unless_given,
    make_free_row,
    make_means_row,
    make_refused_row,
    set_opposite,
)

_PROXY = "a proxy in front of the server does that"
_COHERE = "chat is OpenAI's and Anthropic's; of Cohere's routes /v2/embed and /v2/rerank are served"
_PLUGIN = "a package offers a parser by the entry point trencadis."
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
    FlagRow("reasoning_config", "refused", "json", "--reasoning-parser '<think>,</think>' names both tags", keys=(
        make_means_row("reasoning_parser", "str", "`--reasoning-parser`", copy_unless_given("reasoning_parser")),
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

ROWS = (*HTTP, *LOGS, *METRICS, *ANSWERS)
